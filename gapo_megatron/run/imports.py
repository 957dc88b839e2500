"""Faster imports, without garbage collection. Needs only the standard library."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import torch, transformers, Megatron-core and vLLM in this block: a fifth less time.

    Imports create hundreds of thousands of permanent objects. Python would scan them repeatedly for
    cyclic garbage and find none; later collections skip them too (`gc.freeze`).
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # a second run in this process imports nothing
            gc.freeze()
            # Unfrozen at exit, as vLLM does: cycles inside libraries would never be collected, and
            # Triton would report each of their objects as leaked.
            atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
