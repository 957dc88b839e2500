"""How a test waits: for an event, with one limit for everything that hangs."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_DAY_S = 24 * 3600.0

HANG_S = 0.9 * (float(os.environ.get("PYTEST_TIMEOUT") or 120) or _DAY_S)
"""Seconds after which whatever a test waits for counts as hung. Less than the test's own limit
(`PYTEST_TIMEOUT`, which the Makefile sets), so that the wait can say what it waited for. A limit of
0 is none: whoever sits in a debugger has a day."""


def wait_until(happened: Callable[[], T], what: str) -> T:
    """Return the first true value of `happened()`, asked 20 times a second.

    Raises:
        AssertionError: `what` has not happened after HANG_S.
    """
    end = time.monotonic() + HANG_S
    while not (value := happened()):
        assert time.monotonic() < end, f"waited {HANG_S:.0f} s in vain for: {what}"
        time.sleep(0.05)
    return value


def wait_for(stream: Any, event: int) -> None:
    """Wait until a descriptor of any number has an event of `selectors`."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, event)
        assert selector.select(HANG_S), "nothing happened"
