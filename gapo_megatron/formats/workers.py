"""A pool of threads that all stop soon after one of them fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from torch import Tensor

from gapo_megatron.models.rules import Place, Rule

Read = Callable[[Rule, Place], Tensor]
"""Returns a whole Megatron parameter."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextlib.contextmanager
def worker_pool(
    num_threads: int, step: Callable[_P, _T]
) -> Iterator[tuple[ThreadPoolExecutor, Callable[_P, _T]]]:
    """A pool of threads, and a version of `step` for them to call many times per file.

    When the block ends with an exception (of a thread, or an interrupt), the next call of `step` in
    every thread raises CancelledError, so that unfinished files are abandoned at once.
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
