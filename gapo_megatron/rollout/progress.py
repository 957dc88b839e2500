"""Progress of generation: a bar, and how full the engines are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.2
_BEAT_EVERY_S = 1.0
"""Seconds between beats of a rank that still generates; ranks that have ended wait for them."""
_LOOK_EVERY_S = 0.02


class Heartbeat:
    """Ranks that generate for different times end together, and see each other make progress.

    One engine may generate for long after another has ended: longer than a collective may wait, and
    than a rank may be silent before it counts as hung. So all ranks exchange beats, those that have
    ended too. A rank that is frozen as a whole (a stopped process, a node that no longer answers)
    cannot be ended by its own watch: its beat fails to come, the others are silent from then on,
    and their watches end the job.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """No collective. `group` is gloo's, and used for nothing else until `all_ended`."""
        self.all_ended = False
        self._group = group
        self._num_generating = torch.zeros((), dtype=torch.int64)
        self._beat: dist.Work | None = None
        self._next_s = 0.0

    def beat(self, *, ended: bool) -> bool:
        """Take part in the exchange; never waits. To be called until `all_ended`.

        Args:
            ended: whether this rank has nothing left to generate; once True, it stays so.

        Returns:
            Whether a beat of all ranks has come to its end: then none of them is frozen.

        Collectives: now and then an asynchronous sum of one integer over the group, as often on
            every rank; the one that makes `all_ended` True is the same on all of them.
        """
        arrived = self._beat is not None and self._beat.is_completed()
        if self._beat is not None and arrived:
            self._beat.wait()  # raises what has gone wrong
            self._beat = None
            self.all_ended = int(self._num_generating) == 0
        now = time.monotonic()
        if self._beat is None and not self.all_ended and (ended or now >= self._next_s):
            self._next_s = now + _BEAT_EVERY_S
            self._num_generating.fill_(not ended)
            self._beat = dist.all_reduce(self._num_generating, group=self._group, async_op=True)
        return arrived

    def wait_for_all(
        self, *, on_beat: Callable[[], object], meanwhile: Callable[[], object]
    ) -> None:
        """Beat, having ended, until all ranks have; however long that takes.

        Args:
            on_beat: says that this rank is well (`Attempt.alive`): after each beat of all ranks.
            meanwhile: called again and again.

        Collectives: those of `beat`.
        """
        while not self.all_ended:
            if self.beat(ended=True):
                on_beat()
            meanwhile()
            time.sleep(_LOOK_EVERY_S)


@dataclass
class Occupancy:
    """How full the engines are, over the calls of `rollout.generate` that it is given to.

    While a request waits, for a place or for room in the KV cache, an engine is full. Else it has
    as many places as it ever had requests running at a time.
    """

    num_places: int = 0
    """Most requests seen running at a time in this rank's engine."""
    taken_s: float = 0.0
    """Sum over ranks and decoding steps of the share of places that were taken x seconds."""
    capacity_s: float = 0.0
    """Number of ranks x seconds until the slowest engine ended."""

    def share_taken(self, num_running: int, num_waiting: int) -> float:
        """Share of this engine's places in use during one decoding step."""
        self.num_places = max(self.num_places, num_running)
        return 1.0 if num_waiting else num_running / max(self.num_places, 1)

    @property
    def idle_share(self) -> float:
        """Share of places and time without a request; 0 where nothing had to be generated."""
        return 1 - self.taken_s / self.capacity_s if self.capacity_s else 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended on one rank."""

    aborted: bool
    """Whether it was aborted before enough prompts were complete."""
    taken_s: float
    """As `Occupancy.taken_s`, of this call and rank alone."""
    seconds: float


class GenerationProgress:
    """Finished responses and tokens/s. It has no thread of its own: vLLM needs the interpreter."""

    def __init__(self, num_requests: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens_per_s]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._progress.add_task("rollout", total=num_requests, tokens_per_s=0.0)
        self._num_tokens = 0
        self._start = self._refreshed = time.monotonic()

    def advance(self, num_requests: int, num_tokens: int) -> None:
        """Count responses that have just ended, and the tokens in them."""
        self._num_tokens += num_tokens
        now = time.monotonic()
        rate = self._num_tokens / max(now - self._start, 1e-9)
        self._progress.update(self._task, advance=num_requests, tokens_per_s=rate)
        if now - self._refreshed > _REFRESH_S:
            self._refreshed = now
            self._progress.refresh()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
