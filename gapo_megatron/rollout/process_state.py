"""State of the whole process that an environment's code may change for everybody."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from gapo_megatron.user_code import process_restored


@contextlib.contextmanager
def trainer_restored() -> Iterator[None]:
    """Restore what an environment has changed for the whole process, once a generation has ended.

    Beside what `process_restored` restores: the random generators of Python, NumPy and torch, and
    torch's default dtype, gradient mode and number of threads. Until then a change holds for the
    engine as well.
    """
    python, numpy = random.getstate(), np.random.get_state()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with (
            process_restored(),
            torch.random.fork_rng(devices),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


__all__ = ["trainer_restored"]
