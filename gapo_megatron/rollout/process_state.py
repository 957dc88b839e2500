"""Random generators of the process, which an environment's code and vLLM share with the trainer."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch


@contextlib.contextmanager
def generators_restored(devices: Sequence[torch.device] | None = None) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch after others' code has drawn.

    `devices`: whose generators too; None: the current one's, if CUDA is in use.
    """
    python, numpy = random.getstate(), np.random.get_state()
    if devices is None:
        current = torch.cuda.is_initialized()
        devices = [torch.device("cuda", torch.cuda.current_device())] if current else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
