"""When the prefix cache of vLLM is emptied: with a stand-in for vLLM's engine, and with vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from gapo_megatron.rollout.calls import Calls, in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.vllm import engine as module
from gapo_megatron.rollout.vllm.engine import RolloutEngine
from gapo_megatron.rollout.vllm.guards import Guards
from gapo_megatron.types import Episode
from tests.acting import calls_of
from tests.rollout_setup import (
    EOS,
    build_engine,
    generate,
    make_config,
    make_model,
    make_prompts,
    process_group,
    tokens_of,
)
from tests.two_turn import TwoTurn
from tests.waiting import HANG_S

BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU: only whole blocks are found again."""


class Llm:
    """The names of its requests, and how often the cache was emptied."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_resets = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.names)

    def reset_prefix_cache(self) -> bool:
        assert not self.names
        self.num_resets += 1
        return True

    def abort_request(self, names: list[str]) -> None:
        self.names = [one for one in self.names if one not in names]


def test_a_generation_keeps_its_prefixes_while_every_episode_waits_for_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is cached must depend neither on earlier generations nor on how fast a tool is."""
    engine: Any = object.__new__(RolloutEngine)
    engine.guards = Guards(torch.device("cpu"))
    engine.llm = llm = Llm()
    engine.eos_token_ids, engine.routed, engine._num_routed = (), None, {}
    engine.schedule = type("Awake", (), {"require": lambda *_: None})()
    engine._is_new_generation, engine._adapter = True, None
    monkeypatch.setattr(module.vllm, "add_tokens", lambda llm, name, *_: llm.names.append(name))
    monkeypatch.setattr(module.vllm, "request_names", lambda llm: list(llm.names))
    monkeypatch.setattr(module.vllm, "unfinished", lambda llm: {})
    monkeypatch.setattr(module, "finish_steps", lambda llm: None)
    for generation in range(2):
        for turn in range(3):
            said = np.zeros(turn, np.int32)
            engine.add(
                Request(
                    "0/0", (5,), said, max_tokens=9, seed=7,
                    temperature=1.0, top_p=1.0,
                )
            )  # fmt: skip
            assert llm.num_resets == generation + 1
            if turn < 2:
                llm.names.clear()  # its turn has ended; nothing else is in the engine
        assert engine.abort() == [] and not llm.names


def _answers_when_idle(environment: TwoTurn) -> Calls:
    """Calls that are answered once the engine has nothing left to decode."""
    is_idle = threading.Event()

    def respond(episode: Episode) -> Any:
        assert is_idle.wait(HANG_S)
        return environment.respond(episode)

    calls = calls_of(
        respond, run=in_thread, eos_token_ids=[EOS], max_response_tokens=100, call_timeout_s=1000
    )
    replies = calls.replies
    calls.replies = lambda *, wait: (wait and is_idle.set(), replies(wait=wait))[1]  # type: ignore[method-assign]
    return calls


@pytest.mark.system
def test_vllm_finds_a_continued_request_and_nothing_of_an_earlier_generation(
    tmp_path: Path,
) -> None:
    """By what vLLM says of each request; the prompts alone fill a block."""
    make_model(tied=True).save_pretrained(tmp_path)
    prompts = make_prompts(12, length=BLOCK + 2)
    config = make_config(tmp_path, max_response_tokens=100)
    with process_group():
        engine = build_engine(config, load_weights=True)
        step, ended = engine.llm.step, list[tuple[str, int]]()

        def watched() -> Any:
            outputs = step()
            ended.extend((o.request_id, o.num_cached_tokens) for o in outputs if o.finished)
            return outputs

        engine.llm.step = watched
        tokens = []
        for _ in range(2):
            ended.clear()
            calls = _answers_when_idle(TwoTurn((5, 6)))
            settings = {"num_samples": 1, "max_response_tokens": 100}
            tokens.append(tokens_of(generate(engine, prompts, calls=calls, **settings)))
            first = dict(reversed(ended))
            continued = ended[:]
            for one in first.items():
                continued.remove(one)
            assert len(first) == len(prompts) and {*first.values()} == {0}
            assert len(continued) > 3 and min(cached for _, cached in continued) >= BLOCK
        engine.close()
    assert tokens[0] == tokens[1]
