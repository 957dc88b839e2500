"""Faster imports: no garbage collection meanwhile. Needs only the standard library."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import torch, transformers, Megatron-core and vLLM in here: it takes a fifth less time.

    Modules make hundreds of thousands of objects that stay. Python searches them for cyclic garbage
    again and again, and there is none; what is there afterwards is left out of later searches, too.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # a second training in this process imports nothing
            gc.freeze()
            # At the end all is searched once more: what libraries have in cycles would be left, and
            # Triton says of every object that it has leaked. A vLLM that ends does the same.
            atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
