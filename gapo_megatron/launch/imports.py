"""What a program spares itself while it imports. The standard library alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports of torch, transformers, Megatron-core and vLLM: they take a fifth less.

    Modules make hundreds of thousands of objects that stay. Python searches them for cyclic garbage
    again and again, and there is none; what is there afterwards is left out of later searches, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
