"""When the prefix cache of vLLM is emptied, with a stand-in for vLLM's engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.vllm import engine as module
from gapo_megatron.rollout.vllm.engine import RolloutEngine


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
    engine.llm = llm = Llm()
    engine.eos_token_ids = ()
    engine.schedule = type("Awake", (), {"require": lambda *_: None})()
    engine._is_new_generation = True
    monkeypatch.setattr(module.vllm, "add_tokens", lambda llm, name, *_: llm.names.append(name))
    monkeypatch.setattr(module.vllm, "request_names", lambda llm: list(llm.names))
    monkeypatch.setattr(module.vllm, "unfinished", lambda llm: {})
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
