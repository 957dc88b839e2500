"""When the prefix cache of vLLM is emptied: with a stand-in for vLLM's engine, and with vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from gapo_megatron.rollout.calls import Calls, in_thread
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
