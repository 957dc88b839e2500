"""Run Megatron-core on a machine without a GPU, by emulating one.

Megatron-core names the device in the code: `torch.zeros(1, device="cuda")`,
`torch.cuda.current_device()`. While `emulation` is active, the loaded `megatron.core` modules see a
stand-in for the module `torch` in which that device is the CPU. `torch` itself is not changed, so
vLLM, Inductor and the rest of the process are not affected, except by four methods (`Tensor.cuda`,
`Tensor.type`, `Tensor.matmul`, `Module.cuda`), which are replaced for every caller. No operator but
`matmul` has overhead; entering the outermost level takes a few hundred attribute assignments.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gapo_megatron.compat import onednn
from gapo_megatron.errors import GapoError

logger = logging.getLogger(__name__)

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "randint", "randn", "tensor", "zeros", "zeros_like",
)
# fmt: on
_CPU = torch.device("cpu")

_depth = 0
_announced = False


@contextlib.contextmanager
def emulation() -> Iterator[None]:
    """Let `device="cuda"` mean the CPU inside Megatron-core; restores everything on exit.

    Re-entrant: only the outermost level patches and restores, also after an exception. A
    `megatron.core` module that is imported meanwhile is patched at the next outermost entry. Not
    thread-safe.

    Raises:
        GapoError: CUDA is available, so the real device must be used.
    """
    global _depth, _announced
    if torch.cuda.is_available():
        raise GapoError("CPU emulation of CUDA was requested, but CUDA is available: use the GPU")
    if not _announced:
        _announced = True
        logger.warning(
            "no GPU: Megatron-core runs on the CPU through an emulated device (slow; for tests, "
            "demos and debugging)"
        )
    with contextlib.ExitStack() as undo:
        if _depth == 0:
            for owner, name, value in _replacements():
                if name in vars(owner):
                    undo.callback(setattr, owner, name, getattr(owner, name))
                else:  # inherited
                    undo.callback(delattr, owner, name)
                setattr(owner, name, value)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


def device_scope() -> contextlib.AbstractContextManager[None]:
    """Context for all Megatron-core calls: emulates a GPU if there is none."""
    return contextlib.nullcontext() if torch.cuda.is_available() else emulation()


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    for module in _megatron_modules(len(sys.modules)):
        if module.__dict__.get("torch") is torch:
            yield module, "torch", _TORCH
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is not None:
        yield random, "_get_cuda_rng_state", _CudaStandIn.get_rng_state
        yield random, "_set_cuda_rng_state", _CudaStandIn.set_rng_state
    dispatcher = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is not None:
        yield dispatcher, "maybe_move_tensor_to_cpu", _moved_to_cpu
    yield torch.Tensor, "cuda", lambda tensor, *_, **__: tensor
    yield torch.Tensor, "type", _tensor_type(torch.Tensor.type)
    yield torch.Tensor, "matmul", _multiply
    yield torch.nn.Module, "cuda", lambda module, *_, **__: module


@functools.lru_cache(maxsize=1)
def _megatron_modules(_num_modules: int) -> list[types.ModuleType]:
    """Loaded Megatron-core modules; looked up again after an import."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core") and isinstance(module, types.ModuleType)
    ]


def _tensor_type(real: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, but with the emulated device in its name, which the optimizer checks."""

    @functools.wraps(real)
    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_of


def is_slow(dtype: torch.dtype) -> bool:
    """Whether the CPU has no instructions for this 16-bit dtype; False for float32.

    PyTorch's products of it then take 10 to 200 times as long.
    """
    # Uses: torch.cpu._is_avx512_bf16_supported
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#146508
    return dtype == torch.float16 or (
        dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
    )


def _rounds_once(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product of slow 16-bit tensors in float32, as on a GPU: exact products, rounded once."""

    @functools.wraps(product)
    def multiply(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        dtypes = {one.dtype for one in tensors}
        if len(dtypes) == 1 and is_slow(*dtypes):
            return product(*(one.float() for one in tensors), **kwargs).to(*dtypes)
        return product(*tensors, **kwargs)

    return multiply


@_rounds_once
def _multiply(left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`matmul` by the faster library."""
    product = None if kwargs else onednn.mm(left, right)
    return torch.matmul(left, right, **kwargs) if product is None else product


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        # Without a GPU, torch refuses pinned memory.
        return factory(*args, device=_CPU if _is_cuda(device) else device, **kwargs)

    return build


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts for the experts' all-to-all as NumPy, which it requires."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Idle:
    """A stream or event of a synchronous device: nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> _Idle:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Properties:
    """GPU properties without any feature that depends on the GPU generation."""

    name = "cpu"
    major, minor = 0, 0
    total_memory = 0
    multi_processor_count = 1


class _CudaStandIn(types.ModuleType):
    """`torch.cuda` of one emulated device, with a random generator separate from the CPU's."""

    Stream = Event = _Idle
    _generator = torch.Generator()

    @classmethod
    def get_rng_state(cls, *_: Any, **__: Any) -> torch.Tensor:
        return cls._generator.get_state()

    @classmethod
    def set_rng_state(cls, new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        cls._generator.set_state(new_state)

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls._generator.manual_seed(seed)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_properties(*_: Any) -> type[_Properties]:
        return _Properties

    @staticmethod
    def get_device_capability(*_: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def current_stream(*_: Any) -> _Idle:
        return _Idle()

    default_stream = stream = current_stream

    @staticmethod
    def set_device(*_: Any) -> None: ...

    synchronize = empty_cache = reset_peak_memory_stats = set_device

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    @property
    def random(self) -> _CudaStandIn:
        """`torch.cuda.random` has the same functions for the random state."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchStandIn(types.ModuleType):
    """`torch` as Megatron-core sees it: factories build on the CPU, `cuda` is the stand-in."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))
        self.cuda, self.matmul = _CudaStandIn("torch.cuda"), _multiply
        self.bmm, self.baddbmm = _rounds_once(torch.bmm), _rounds_once(torch.baddbmm)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _TorchStandIn()
