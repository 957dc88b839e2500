"""`gapo_megatron.train` on ranks that kill themselves at a moment of a step, whatever the clock.

Of the environment: DEATHS, a list of `Death` as JSON; MOMENTS_LOG, a file to which rank 0 writes
when it begins each stage and the others when they die.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gapo_megatron.train
from gapo_megatron import rewards
from gapo_megatron.rollout import calls, transfer
from gapo_megatron.rollout.progress import Heartbeat
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.run import generation_side
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.mailbox import Mailbox


@dataclass(frozen=True)
class Death:
    """A rank kills itself at a moment of the run."""

    rank: int
    """Of the job."""
    moment: str
    """A key of `MOMENTS`."""
    count: int = 2
    """How often that moment comes before."""


def always(*_: Any) -> bool:
    return True


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "builds its engine": (Replicas, "create", always),
    "idle": (Mailbox, "look", lambda _, name: name.startswith("order/")),
    "begins to sample": (GenerationSide, "_sample", always),
    "decodes": (RolloutEngine, "poll", always),
    "calls": (calls, "split_answer", always),
    "waits for the other engines": (Heartbeat, "wait_for_all", always),
    "judges": (rewards, "score", always),
    "sends tokens": (GenerationSide, "_send", always),
    "answers": (GenerationSide, "_post", lambda _, name, value: name.startswith("answer/")),
    "begins to receive weights": (Bridge, "receive_whole", always),
    "receives weights": (transfer, "_exchange", always),
    "has received weights": (transfer, "_end", always),
    "verifies": (generation_side, "verify_weights", always),
    "begins again": (Bridge, "regroup", always),
    "ends": (Bridge, "close", always),
    "trains": (GenerationRanks, "bring_tokens", always),
}


def dying(call: Callable[..., Any], death: Death, *, when: Callable[..., bool] = always) -> Any:
    """`call`, which at one of its calls kills the process before it does anything."""
    numbers = itertools.count()

    def instead(*args: Any, **kwargs: Any) -> Any:
        if when(*args) and next(numbers) == death.count:
            note("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return instead


def note(what: str) -> None:
    """A line with the time, for those who measure."""
    if path := os.environ.get("MOMENTS_LOG"):
        with open(path, "a") as file:
            file.write(f"{time.time():.3f}\t{what}\n")


def arm(deaths: Sequence[Death], *, rank: int) -> None:
    """Let this process die at its moment, if it has one."""
    for death in deaths:
        if death.rank == rank:
            where, name, when = MOMENTS[death.moment]
            setattr(where, name, dying(getattr(where, name), death, when=when))


def _enter(self: Attempt, stage: str) -> None:
    if self.leads:
        note(stage)
    entered(self, stage)


if __name__ == "__main__":
    entered, Attempt.enter = Attempt.enter, _enter  # type: ignore[method-assign]
    told = [Death(**one) for one in json.loads(os.environ.get("DEATHS", "[]"))]
    arm(told, rank=int(os.environ.get("RANK", "0")))
    gapo_megatron.train.main()
