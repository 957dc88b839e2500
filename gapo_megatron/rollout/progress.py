"""The bar shown while responses are generated."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.2


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
