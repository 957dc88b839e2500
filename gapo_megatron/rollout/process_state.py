"""Random generators of the process, which an environment's code shares with the trainer."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after user code has drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


__all__ = ["generators_restored"]
