"""Guards for state of the trainer, or of another run on the machine, that vLLM would change."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gapo_megatron.compat.vllm import shared_memory_named
from gapo_megatron.rollout.process_state import generators_restored

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guards:
    """State of the process and the thread that is switched between trainer and vLLM.

    Random generators and the number of threads are restored: vLLM seeds and draws from the
    generators, even if every request has a seed, and on a CPU replaces `torch.set_num_threads`. The
    precision of float32 products, which vLLM sets for the process when it starts, and the CUDA
    stream are switched: vLLM's `current_stream` (NCCL within a replica, shared experts) makes a
    stream of its own the thread's for good, while Megatron-core's gradient hooks stay where the
    model was built: a reduce-scatter could start before its gradients are there. vLLM also keeps
    the stream of its first step (`main_stream` of its model runner) and copies samples after that
    one's work, so it gets the same stream in each call.
    """

    def __init__(self, device: torch.device) -> None:
        """Create vLLM's stream on a GPU; the calling thread is the one that calls vLLM."""
        self._devices = [device] if device.type == "cuda" else []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._precision = torch.get_float32_matmul_precision()

    @contextlib.contextmanager
    def in_vllm(self) -> Iterator[None]:
        """Be in vLLM within the block, and in the trainer afterwards, also after an exception.

        What one side has given to the device is done before what the other gives to it afterwards.
        The host does not wait. Cheap enough for every decoding step.
        """
        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._precision)
        try:
            with generators_restored(self._devices), self._on_its_stream():
                yield
        finally:
            self._precision = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)

    @contextlib.contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        trainers = torch.cuda.current_stream()
        self._stream.wait_stream(trainers)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            trainers.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(trainers)


def guarded(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run a method of an object with `guards` in vLLM (`Guards.in_vllm`)."""

    @functools.wraps(method)
    def call(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.guards.in_vllm():
            return method(self, *args, **kwargs)

    return call


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
