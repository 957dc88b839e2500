"""Random state of a rank: every generator that the process draws from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from gapo_megatron.checkpoint import files
from gapo_megatron.compat import cpu


def file_name(rank: int) -> str:
    """Name of a rank's file in a checkpoint folder."""
    return f"rng_{rank:05d}.pt"


def current() -> dict[str, Any]:
    """State of Python's, NumPy's, torch's and Megatron-core's generators."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": keys}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": _tracker_states(),
    }


def read(path: Path) -> dict[str, Any]:
    """Read the file of a `current` state, and check it by setting fresh generators to it.

    Raises:
        CheckpointError: the file is missing, damaged, or has other content; names it.
    """
    with files.reading(path) as state:
        random.Random().setstate(state["python"])
        numpy_state = state["numpy"]
        numpy_state["state"]["key"] = numpy_state["state"]["key"].numpy().astype(np.uint32)
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(state["torch"])
        return state


def restore(state: dict[str, Any]) -> None:
    """Restore a state from `read`; afterwards every generator continues its sequence."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    with cpu.device_scope():
        get_cuda_rng_tracker().set_states(state["megatron"])


def _tracker_states() -> dict[str, torch.Tensor]:
    with cpu.device_scope():
        states: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
        return states
