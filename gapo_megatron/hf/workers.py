"""Threads that do one small thing after the other, and stop when one of them has failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from torch import Tensor

from gapo_megatron.models.rules import Place, Rule

Read = Callable[[Rule, Place], Tensor]
"""Gives a whole Megatron parameter."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextlib.contextmanager
def worker_pool(
    num_threads: int, step: Callable[_P, _T]
) -> Iterator[tuple[ThreadPoolExecutor, Callable[_P, _T]]]:
    """Threads that work on files, and the `step` they are to call again and again.

    A file takes long. When the block ends by an exception (a thread's, or an interrupt) the next
    `step` of every thread raises CancelledError, so that nobody waits for files that go nowhere.
    """
    stopping = threading.Event()

    def step_on(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if stopping.is_set():
            raise CancelledError
        return step(*args, **kwargs)

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            yield pool, step_on
        except BaseException:
            stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
