"""What is watched while responses are generated: a bar, and how full the engines are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.2
_ASK_EVERY_S = 0.05
_NO_LIMIT = timedelta(days=365)


def wait_for_all(group: dist.ProcessGroup, on_wait: Callable[[], object]) -> None:
    """Wait until every rank is here, however long that takes, and call `on_wait` again and again.

    One engine may generate for long after another has ended: longer than a collective may wait, and
    than a rank may be silent before it counts as hung. A rank that does hang is ended by its own
    watch, and the others by the loss of its connection.

    Args:
        group: of gloo.
        on_wait: says that this rank is well (`Attempt.alive`).

    Collectives: a barrier over the group.
    """
    arrival = dist.barrier(group=group, async_op=True, timeout=_NO_LIMIT)
    while not arrival.is_completed():
        on_wait()
        time.sleep(_ASK_EVERY_S)
    arrival.wait()


@dataclass
class Occupancy:
    """How full the engines are, over the calls of `RolloutEngine.generate` that it is given to.

    While a request waits, for a place or for room in the KV cache, an engine is full. Else it has
    as many places as it ever had requests running at a time.
    """

    num_places: int = 0
    """Of this rank's engine, as far as known."""
    taken_s: float = 0.0
    """Share of its places that an engine's requests took x seconds, over all ranks."""
    there_s: float = 0.0
    """Seconds until the last engine ended x ranks."""

    def share_taken(self, num_running: int, num_waiting: int) -> float:
        """Of the places of this rank's engine, in one decoding step."""
        self.num_places = max(self.num_places, num_running)
        return 1.0 if num_waiting else num_running / max(self.num_places, 1)

    @property
    def idle_share(self) -> float:
        """Of the places; 0 where all that was wanted had been there before."""
        return 1 - self.taken_s / self.there_s if self.there_s else 0.0


@dataclass(frozen=True, slots=True)
class End:
    """What ranks tell each other of how their engine ended."""

    broken_off: bool
    """Whether it was told to."""
    taken_s: float
    """As in `Occupancy`, of this call alone."""
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
