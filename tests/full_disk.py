"""A disk on which files cannot grow, for this process, as far as a test wants it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """No file may get longer than `num_bytes`: a write beyond it is an OSError without a name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
