"""How long one verdict may take, in seconds of the processor: a busy machine changes no verdict."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class TooMuchWorkError(BaseException):
    """The limit was reached. No Exception: parsers and solvers catch these, and would go on."""


@contextlib.contextmanager
def limited(cpu_s: float) -> Iterator[None]:
    """Raise TooMuchWorkError in the body once it has used so much of the processor.

    Signals reach the main thread alone; in another one the body runs without a limit, as a single
    long instruction does (what such instructions compute is bounded by its size, in `sizes`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    # Again after a while, in case a callback without a caller had to swallow the first one.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooMuchWorkError


__all__ = ["TooMuchWorkError", "limited"]
