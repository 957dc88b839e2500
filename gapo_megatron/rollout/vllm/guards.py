"""Guards for state of the trainer, or of another run on the machine, that vLLM would change."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.compat.vllm import shared_memory_named


@contextlib.contextmanager
def trainer_random_state() -> Iterator[None]:
    """Restore all of the trainer's random generators: vLLM seeds them and draws from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with trainer_torch_generators():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def trainer_torch_generators() -> Iterator[None]:
    """Restore torch's random generators; cheap enough for every decoding step.

    vLLM's sampler draws from them even if every request has a seed.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextlib.contextmanager
def trainer_num_threads() -> Iterator[None]:
    """Restore the number of torch's threads: on a CPU vLLM replaces `torch.set_num_threads`."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


@contextlib.contextmanager
def own_shared_memory(gloo_group: dist.ProcessGroup) -> Iterator[None]:
    """Give a replica's shared memory on a CPU a name that no other run uses.

    Collectives: one broadcast over all ranks (gloo).
    """
    names = [f"gapo_megatron-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, group=gloo_group)

    with shared_memory_named(
        lambda communicator, ranks: f"{names[0]}-{communicator}-{'-'.join(map(str, ranks))}"
    ):
        yield
