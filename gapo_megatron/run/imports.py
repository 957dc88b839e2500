"""What a program spares itself while it imports. The standard library alone."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports of torch, transformers, Megatron-core and vLLM: they take a fifth less.

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
        if was_enabled:
            gc.enable()
