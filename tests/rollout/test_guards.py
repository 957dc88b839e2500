"""What vLLM changes in the trainer's thread. Streams are a stand-in for torch's; vLLM is itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from vllm import platforms
from vllm.utils import torch_utils

from gapo_megatron.compat import vllm
from gapo_megatron.rollout.engine import AdapterEngine
from gapo_megatron.rollout.vllm import engine as engine_module
from gapo_megatron.rollout.vllm.engine import RolloutEngine
from gapo_megatron.rollout.vllm.guards import Guards
from gapo_megatron.rollout.vllm.schedule import Phase, Schedule

METHODS = [*(name for name in dir(AdapterEngine) if name[0] != "_" and name != "needs"), "close"]
ARGUMENTS = {"add": [None], "score": [()], "update_weights": [()], "update_adapter": [()]}
KEYWORDS = {
    "update_weights": {"policy_version": 1},
    "update_adapter": {"policy_version": 1, "scale": 1.0},
}


class Reached(Exception):
    """vLLM was called."""


class Streams:
    """The stream of each thread, and who waited for whom, as `torch.cuda` keeps them on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thread, self.waits = threading.local(), []
        self.thread.current = self.default = self.new("default")
        generator = torch.Generator()
        for name, value in {
            "Stream": lambda _device=None: self.new("vLLM's"),
            "current_stream": lambda _device=None: self.thread.current,
            "set_stream": torch_utils._patched_set_stream,
            "get_rng_state": lambda _device: generator.get_state(),
            "set_rng_state": lambda state, _device: generator.set_state(state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch_utils, "prev_set_stream", lambda one: setattr(self.thread, "current", one)
        )
        monkeypatch.setattr(torch_utils, "_current_stream_tls", threading.local())
        on_cuda = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True)
        monkeypatch.setattr(platforms, "current_platform", on_cuda)

    def new(self, name: str) -> SimpleNamespace:
        stream = SimpleNamespace(name=name)
        stream.wait_stream = lambda other: self.waits.append((stream, other))
        return stream


class SwitchingVllm:
    """Takes vLLM's stream whatever is asked of it, as NCCL in a replica and shared experts do."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._used: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> None:
        assert torch_utils.current_stream() is self._streams.thread.current
        self._used.append(self._streams.thread.current)
        torch.set_float32_matmul_precision("high")  # as its worker does, from its environment
        torch.rand(1)
        raise Reached(name)


@pytest.fixture
def streams(monkeypatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def engine(streams, monkeypatch) -> RolloutEngine:
    """An engine on a GPU, but for what its constructor builds."""
    engine = RolloutEngine.__new__(RolloutEngine)
    engine.device = torch.device("cuda")
    engine.guards = Guards(engine.device)
    engine.llm = SwitchingVllm(streams)
    engine.schedule = Schedule(engine.llm, engine.device)
    engine.slots, engine._has_base = object(), True
    engine._is_new_generation, engine._requests = True, {}
    engine.config = engine.hf_config = SimpleNamespace(adapter=None)
    engine.replicas = None
    monkeypatch.setattr(vllm, "_alive", [engine.llm])
    monkeypatch.setattr(engine_module, "factor_shapes", lambda *_: None)
    for name in ("load_factors", "reload_weights"):
        monkeypatch.setattr(engine_module, name, lambda llm, *_, **__: llm.collective_rpc)
    return engine


def call(engine: RolloutEngine, name: str) -> None:
    engine.schedule.phase = Phase.SLEEPING if name == "wake" else Phase.GENERATING
    with pytest.raises(Reached):
        getattr(engine, name)(*ARGUMENTS.get(name, ()), **KEYWORDS.get(name, {}))


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_keeps_its_stream_and_precision(name, engine, streams):
    """Also where vLLM fails. Otherwise gradient hooks and what they wait for are on two streams."""
    before = torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()
    call(engine, name)
    assert streams.thread.current is streams.default
    assert (torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()) == before
    vllms = engine.llm._used[0]
    assert vllms is not streams.default
    assert streams.waits == [(vllms, streams.default), (streams.default, vllms)]


def test_vllm_has_one_stream_and_its_precision_in_all_calls(engine, streams):
    """It keeps the stream of its first step, and copies what it samples after that one's work."""
    for name in METHODS:
        call(engine, name)
    assert len({id(one) for one in engine.llm._used}) == 1
    assert torch.get_float32_matmul_precision() == "highest"
    with engine.guards.in_vllm():
        assert torch.get_float32_matmul_precision() == "high"
