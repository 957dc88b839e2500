"""Seconds per stage of a step, and what the next one will take by them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

# Blocks of a stage that tell what the next one takes: a single outlier is forgotten after so many.
_NUM_RECENT = 5


class Expectation(NamedTuple):
    """Seconds that something will take."""

    shortest_s: float
    longest_s: float


class Patient(Protocol):
    """What knows whether a stop was asked for (`run.attempt.Attempt`)."""

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """When to abort work of that length: a function of its elapsed seconds."""


class Stopwatch:
    """Seconds per stage: `with stopwatch("rollout"): ...`; the same stage adds up.

    Stages follow one another. The clock is the host's: a stage that ends without waiting for the
    GPU leaves its rest to the next.

    Attributes:
        seconds: per stage, since the last lap.
        notes: name -> value; what else the clock tells of the step, for its timings.
        recent: per stage, the seconds of its last blocks, newest last.
    """

    def __init__(self, on_enter: Callable[[str], None] = lambda stage: None) -> None:
        """`on_enter` is told the name of every stage that begins; it may be replaced."""
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, float] = {}
        self.recent: dict[str, list[float]] = {}
        self.on_enter = on_enter
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's seconds towards `stage`, also when it raises."""
        self.on_enter(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            self.recent[stage] = [*self.recent.get(stage, []), seconds][-_NUM_RECENT:]

    def expect(self, *stages: str) -> Expectation:
        """What one block of each stage takes, together, by the last ones; 0 for one never seen."""
        recent = [self.recent.get(stage, [0.0]) for stage in stages]
        return Expectation(sum(map(min, recent)), sum(map(max, recent)))

    def lap(self, *, num_tokens: int) -> dict[str, float]:
        """End a step: its timings; the next step starts at zero.

        Args:
            num_tokens: learned from in the step, over all ranks; also what earlier steps sampled.

        Returns:
            `time/<stage>_s`, `time/step_s` (all since the last lap), `perf/tokens_per_s` and notes.
        """
        now = time.perf_counter()
        elapsed = now - self._start
        timings: dict[str, float] = {f"time/{name}_s": s for name, s in self.seconds.items()}
        timings["time/step_s"] = elapsed
        timings["perf/tokens_per_s"] = num_tokens / elapsed
        timings |= self.notes
        self.seconds, self.notes, self._start = {}, {}, now
        return timings
