"""Idle share of an engine whose 64 episodes each call a slow tool once: off the loop, and blocking.

A decoding step of the scripted engine takes 20 ms, as a large model's; vLLM is the real one with a
tiny model on a CPU. Blocking is what `Environment.respond` did before it ran in threads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gapo_megatron.rollout.calls import in_thread
from gapo_megatron.rollout.engine import Engine, Request
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Prompt
from tests.acting import EOS, at_once, calls_of
from tests.scripted_engine import ScriptedEngine

NUM_PROMPTS, NUM_SAMPLES = 16, 4
STEP_S = 0.02
GIVEN = (20, 21, 22)


def tokens(request: Request) -> list[int]:
    """A turn of 20 to 149 tokens."""
    length = np.random.default_rng(request.seed).integers(20, 150)
    return [5] * int(length) + [EOS]


@contextmanager
def engines(kind: str) -> Iterator[tuple[Engine, list[int]]]:
    """The engine, and its EOS tokens."""
    if kind == "scripted":
        yield ScriptedEngine(tokens, before_step=lambda: time.sleep(STEP_S)), [EOS]
        return
    from tests.rollout_setup import build_engine, make_config, make_model, process_group

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, process_group():
        model = make_model(tied=True)
        model.save_pretrained(folder)
        engine = build_engine(make_config(Path(folder), max_response_tokens=100))
        yield engine, engine.eos_token_ids
        engine.close()


def measure(engine: Any, eos: list[int], *, tool_s: float, blocks: bool) -> tuple[float, float]:
    """Seconds of a generation, and the share of them in which the engine takes no decoding step."""

    def respond(episode: Episode) -> Any:
        if episode.response_mask is not None:
            return None
        time.sleep(tool_s)
        return GIVEN

    run = at_once if blocks else in_thread
    calls = calls_of(respond, run=run, eos_token_ids=eos, call_timeout_s=100)
    poll, decoded = engine.poll, [0.0]

    def timed() -> Any:
        start = time.monotonic()
        try:
            return poll()
        finally:
            decoded[0] += time.monotonic() - start

    engine.poll = timed
    longest = min(400, engine.max_sequence_tokens - 20)
    settings = SamplingSettings(num_samples=NUM_SAMPLES, max_response_tokens=longest, seed=7)
    prompts = [Prompt(str(i), (10 + i, 11), answer="") for i in range(NUM_PROMPTS)]
    start = time.monotonic()
    generate(engine, prompts, settings, calls=calls)
    seconds = time.monotonic() - start
    engine.poll = poll
    return seconds, 1 - decoded[0] / seconds


def main() -> None:
    """Measure every tool, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--tool-s", type=float, nargs="+", default=[0.0, 1.0, 10.0])
    parser.add_argument("--blocks", action="store_true", help="call the tool between two steps")
    arguments = parser.parse_args()
    with engines(arguments.engine) as (engine, eos):
        for tool_s in arguments.tool_s:
            seconds, idle = measure(engine, eos, tool_s=tool_s, blocks=arguments.blocks)
            how = "blocking" if arguments.blocks else "off the loop"
            print(
                f"{arguments.engine}, tool of {tool_s:g} s, {how}: {seconds:.2f} s, idle {idle:.1%}"
            )


if __name__ == "__main__":
    main()
