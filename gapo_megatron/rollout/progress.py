"""Progress of generation: a bar, heartbeats, and the occupancy of engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.2
_BEAT_EVERY_S = 1.0
"""Seconds between beats of a rank that still generates; ranks that have ended wait for these."""
_LOOK_EVERY_S, _PAUSE_S = 0.02, 0.001


class Heartbeat:
    """Lets ranks that generate for different times end together, and detects frozen ranks.

    An engine may generate long after another has ended: longer than the timeout of a collective,
    and than the hang timeout of a rank. So all ranks exchange beats, also those that have ended. A
    frozen process or node cannot be ended by its own watch: without its beats the other ranks
    report no more progress, and their watches end the job.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """No collective. `group` is a gloo group, used for nothing else until `all_ended`."""
        self.all_ended = False
        self._group = group
        self._num_generating = torch.zeros((), dtype=torch.int64)
        self._beat: dist.Work | None = None
        self._next_s = 0.0

    def beat(self, *, ended: bool) -> bool:
        """Take part in the exchange; never waits. Call it until `all_ended`.

        Args:
            ended: whether this rank has nothing left to generate; must stay True once True.

        Returns:
            Whether a beat of all ranks has completed: then none of them is frozen.

        Collectives: periodically an asynchronous sum of one integer over the group, equally often
            on every rank; the same sum makes `all_ended` True on all of them.
        """
        arrived = self._beat is not None and self._beat.is_completed()
        if self._beat is not None and arrived:
            self._beat.wait()  # raises an error of the collective
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
        """Exchange beats until all ranks have ended; call it when this rank has ended.

        Args:
            on_beat: called after each completed beat (`Attempt.alive`).
            meanwhile: called repeatedly.

        Collectives: those of `beat`.
        """
        while not self.all_ended:
            if self.beat(ended=True):
                on_beat()
            meanwhile()
            time.sleep(_LOOK_EVERY_S)


class Tally:
    """Lets engines end together, once they have enough finished groups between them.

    Every rank reports at the same numbers of its decoding steps, and learns the sum at its next
    report, so that no engine waits for another unless it is a whole interval ahead. So the step at
    which all of them stop follows from what each has sampled, never from the clock.

    Attributes:
        is_aborted: whether they end because a replica was asked to abort.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, wanted: int) -> None:
        """No collective.

        Args:
            group: a gloo group of all ranks, used for nothing else until `is_over`.
            wanted: finished groups of all replicas.
        """
        self.is_aborted = False
        self._group = group
        self._wanted = wanted
        self._sums: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def is_over(self, num_whole: int, *, must_abort: bool, meanwhile: Callable[[], object]) -> bool:
        """Report, and return whether all engines end now, by the reports of an interval ago.

        Args:
            num_whole: finished groups of this rank's replica; 0 except on its first rank.
            must_abort: whether this replica was asked to abort: all then end at the next report.
            meanwhile: called repeatedly while the slowest engine is an interval behind.

        Collectives: a sum of two integers over all ranks, asynchronous; none in the last call.
        """
        if self._sums is not None:
            sum_whole, num_aborts = self._finish(meanwhile)
            self.is_aborted = num_aborts > 0
            if self.is_aborted or sum_whole >= self._wanted:
                return True
        self._sums = torch.tensor([num_whole, int(must_abort)])
        self._begin(self._sums)
        return False

    def _begin(self, sums: torch.Tensor) -> None:
        self._work = dist.all_reduce(sums, group=self._group, async_op=True)

    def _finish(self, meanwhile: Callable[[], object]) -> tuple[int, int]:
        """The sums of the last report. Frozen ranks end this wait: no watch is restarted here."""
        assert self._sums is not None and self._work is not None
        while not self._work.is_completed():
            meanwhile()
            time.sleep(_PAUSE_S)
        self._work.wait()  # raises an error of the collective
        sum_whole, num_aborts = self._sums.tolist()
        return sum_whole, num_aborts


@dataclass
class Occupancy:
    """Occupancy of the engines, summed over calls of `rollout.generate`.

    An engine is full while a request waits for a slot or for KV cache. Otherwise its number of
    slots is the largest number of requests it has ever run at a time.
    """

    num_places: int = 0
    """Largest number of requests run at a time by this rank's engine."""
    taken_s: float = 0.0
    """Sum over ranks and decoding steps of share of slots in use x seconds."""
    capacity_s: float = 0.0
    """Number of ranks x seconds until the slowest engine ended."""

    def share_taken(self, num_running: int, num_waiting: int) -> float:
        """Share of this engine's slots in use during a decoding step."""
        self.num_places = max(self.num_places, num_running)
        return 1.0 if num_waiting else num_running / max(self.num_places, 1)

    @property
    def idle_share(self) -> float:
        """Share of slots and time without a request; 0 if nothing had to be generated."""
        return 1 - self.taken_s / self.capacity_s if self.capacity_s else 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended on one rank."""

    aborted: bool
    """Whether it was aborted before enough prompts were complete."""
    taken_s: float
    """Seconds as in `Occupancy.taken_s`, of this call and rank only."""
    seconds: float


@contextlib.contextmanager
def progress_bar(num_requests: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Finished responses and tokens/s. Runs without a thread: vLLM needs the interpreter.

    Yields:
        A function that counts responses that have just ended, and tokens just sampled.
    """
    console = Console(stderr=True, markup=False)
    progress = Progress(
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
    task = progress.add_task("rollout", total=num_requests, tokens_per_s=0.0)
    sum_tokens, start_s = 0, time.monotonic()
    refreshed_s = start_s

    def advance(num_ended: int, num_tokens: int) -> None:
        nonlocal sum_tokens, refreshed_s
        sum_tokens += num_tokens
        now_s = time.monotonic()
        rate = sum_tokens / max(now_s - start_s, 1e-9)
        progress.update(task, advance=num_ended, tokens_per_s=rate)
        if now_s - refreshed_s > _REFRESH_S:
            refreshed_s = now_s
            progress.refresh()

    with progress:
        yield advance
