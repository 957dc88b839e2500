"""Seconds per stage of a step, and expected times of later stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

# Number of recent blocks of a stage used for expectations; bounds the effect of an outlier.
_NUM_RECENT = 5


class Expectation(NamedTuple):
    """Expected seconds of a piece of work."""

    shortest_s: float
    longest_s: float


class Patient(Protocol):
    """Object that knows whether a stop was asked for (`run.attempt.Attempt`)."""

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """Return when to abort work of this length, given its elapsed seconds."""


class Stopwatch:
    """Seconds per stage: `with stopwatch("rollout"): ...`; repeated stages are summed.

    Stages must not overlap. It measures host time: a stage that ends without waiting for the GPU
    passes its remaining GPU time to the next stage.

    Attributes:
        seconds: seconds per stage since the last lap.
        notes: name -> value, added to the step's timings.
        recent: seconds of the last blocks of each stage, newest last.
    """

    def __init__(self, on_enter: Callable[[str], None] = lambda stage: None) -> None:
        """`on_enter` is called with the name of every stage that begins; it may be replaced."""
        self.seconds: dict[str, float] = {}
        self.notes: dict[str, float] = {}
        self.recent: dict[str, list[float]] = {}
        self.on_enter = on_enter
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str, *, is_part: bool = False) -> Iterator[None]:
        """Count the block's seconds towards `stage`, even if it raises.

        Args:
            stage: its name.
            is_part: the block is only a part of the stage's work; `remember` is told of the whole.
        """
        self.on_enter(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            if not is_part:
                self.remember(stage, seconds)

    def remember(self, stage: str, seconds: float) -> None:
        """Let `expect` know how long the whole work of a stage took."""
        self.recent[stage] = [*self.recent.get(stage, []), seconds][-_NUM_RECENT:]

    def expect(self, *stages: str) -> Expectation:
        """Expected sum of a block of each stage, by recent blocks; 0 for stages not seen yet."""
        recent = [self.recent.get(stage, [0.0]) for stage in stages]
        return Expectation(sum(map(min, recent)), sum(map(max, recent)))

    def lap(self, *, num_tokens: int) -> dict[str, float]:
        """End a step and return its timings; the next step starts at zero.

        Args:
            num_tokens: tokens learned from in the step, over all ranks, carried tokens included.

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
