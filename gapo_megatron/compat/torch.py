"""Private parts of torch in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.utils import _create_file_view
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "allocator_settings",
    "deterministic_algorithms",
    "fake_store",
    "finished_work",
    "flash_attention",
    "flash_attention_backward",
    "is_in_place",
    "operator_name",
    "pickle_in",
    "pin_memory",
    "process_group",
    "reads_metadata_by",
    "reads_one_number",
    "returns_work_alone",
    "set_allocator_settings",
    "storage_id",
    "storage_info",
    "tree_leaves",
    "unpin_memory",
]

# Re-exports (tensors without data): FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
# Uses: torch._subclasses.fake_tensor, torch.utils._python_dispatch, torch.utils._pytree
# Versions: torch 2.13.0
# Upstream: pytorch/pytorch#113456 (open), #65761 (open), #175082 (open pull request)


# --- memory --------------------------------------------------------------------------------------


def allocator_settings() -> str | None:
    """All settings of the device allocator; None if this torch cannot report them."""
    # Uses: torch._C._accelerator_getAllocatorSettings
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#156175 (closed: not public on purpose), #165291
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return read() if read else None


def set_allocator_settings(settings: str) -> None:
    """Replace all settings of the device allocator; those not named return to their defaults."""
    # Uses: torch._C._accelerator_setAllocatorSettings
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#156175 (closed: not public on purpose), #165291
    torch._C._accelerator_setAllocatorSettings(settings)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identity of a storage, also if it is empty and has no address."""
    # Uses: UntypedStorage._cdata
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#65950 (open)
    return storage._cdata


def pin_memory(address: int, num_bytes: int) -> None:
    """Pin existing host memory, so that a GPU can copy asynchronously."""
    # Uses: torch.cuda._pin_memory_utils.pin_memory
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#32167 (open: in place), #150517 (open: sizes are rounded up)
    from torch.cuda import _pin_memory_utils

    _pin_memory_utils.pin_memory(address, num_bytes)


def unpin_memory(address: int) -> None:
    """Undo `pin_memory`, before the memory is freed."""
    # Uses: torch.cuda._pin_memory_utils.unpin_memory
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#32167 (open), #195818 (open)
    from torch.cuda import _pin_memory_utils

    _pin_memory_utils.unpin_memory(address)


# --- kernels -------------------------------------------------------------------------------------


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: tuple[Any, ...],
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, ...]:
    """Causal attention of packed sequences.

    Args:
        query: [T, heads, head_dim].
        key: [T, key heads, head_dim].
        value: [T, key heads, head_dim].
        layout: boundaries of queries [S + 1] int32, of keys, longest query, longest key.
        scale: factor of the attention scores.
        window: keys that a query sees, its own included; 0: all before it.

    Returns:
        Output [T, heads, head_dim], log-sum-exp, and two tensors of random state for the backward
        pass.
    """
    # Uses: torch.ops.aten._flash_attention_forward
    # Versions: torch 2.13.0
    # Upstream: none found that asks `nn.attention.varlen`, which calls it, for a deterministic one
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *layout, 0.0, True, False, scale=scale, **_window(window)
    )[:-1]


def _window(window: int) -> dict[str, int]:
    """The kernels' arguments: keys to the left and right of the query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def flash_attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    layout: tuple[Any, ...],
    *,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; deterministic within `deterministic_algorithms`.

    Args:
        grad: gradient of the output.
        saved: query, key, value, and what `flash_attention` returned.
        layout: see `flash_attention`.
        scale: see `flash_attention`.
        window: see `flash_attention`.
    """
    # Uses: torch.ops.aten._flash_attention_backward
    # Versions: torch 2.13.0
    # Upstream: none found (neighbours pytorch/pytorch#179390, #182551, closed)
    *inputs, seed, offset = saved
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, *inputs, *layout, 0.0, True, seed, offset, scale=scale, **_window(window)
    )
    return gradients


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Set torch's flag for deterministic kernels within the block.

    Without filling uninitialised memory, which serves debugging only.
    """
    # Uses: torch.utils.deterministic.fill_uninitialized_memory, set and put back
    # Versions: torch 2.13.0
    # Upstream: none found
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


# --- files ---------------------------------------------------------------------------------------


def storage_info(file: str, offset: int, length: int) -> Any:
    """Location of a part of a tensor, for `Metadata.storage_data`."""
    # Uses: torch.distributed.checkpoint.filesystem._StorageInfo
    # Versions: torch 2.13.0
    # Upstream: none found
    return _StorageInfo(file, offset, length)


def file_view(file: Any, offset: int, length: int) -> Any:
    """A section of a file, as a file."""
    # Uses: torch.distributed.checkpoint.utils._create_file_view
    # Versions: torch 2.13.0
    # Upstream: none found
    return _create_file_view(file, offset, length)


def pickle_in(file: BinaryIO | Any) -> bytes:
    """The pickle inside a file of `torch.save`.

    Raises:
        RuntimeError: it is no such file.
    """
    # Uses: torch.serialization._open_zipfile_reader
    # Versions: torch 2.13.0
    # Upstream: none found
    with torch.serialization._open_zipfile_reader(file) as reader:
        content: bytes = reader.get_record("data.pkl")
    return content


@contextlib.contextmanager
def reads_metadata_by(read: Callable[[Path], Any]) -> Iterator[None]:
    """Let torch.distributed.checkpoint read `.metadata` with our function.

    Args:
        read: takes the folder, returns `Metadata`.
    """
    # Uses: FileSystemReader.read_metadata, replaced
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#189308 (open), #191326 (closed pull request: restricted unpickler)
    reader: Any = FileSystemReader
    replaced = reader.read_metadata

    def read_metadata(self: Any, *_: Any, **__: Any) -> Any:
        metadata = read(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    reader.read_metadata = read_metadata
    try:
        yield
    finally:
        reader.read_metadata = replaced


# --- a world of one process, and tensors without data --------------------------------------------


def fake_store() -> dist.Store:
    """A store for the backend "fake", whose ranks do not communicate."""
    # Uses: torch.testing._internal.distributed.fake_pg.FakeStore
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#102180 (closed: a HashStore would do), #194545 (closed)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def operator_name(func: Any) -> str:
    """Name of an operator that a `TorchDispatchMode` sees, without its namespace."""
    # Uses: OpOverload._schema
    # Versions: torch 2.13.0
    # Upstream: none found
    return str(func._schema.name).rpartition("::")[2]


def is_in_place(func: Any) -> bool:
    """Whether an operator changes its first argument."""
    # Uses: OpOverload._schema
    # Versions: torch 2.13.0
    # Upstream: none found
    return operator_name(func).endswith("_")


def reads_one_number(func: Any) -> bool:
    """Whether an operator is `Tensor.item`, which waits for the device."""
    # Uses: torch.ops.aten._local_scalar_dense
    # Versions: torch 2.13.0
    # Upstream: none found
    return func is torch.ops.aten._local_scalar_dense.default


def returns_work_alone(func: Any) -> bool:
    """Whether a collective returns only a work object, without tensors."""
    # Uses: OpOverload._schema
    # Versions: torch 2.13.0
    # Upstream: none found
    return len(func._schema.returns) == 1


def process_group(argument: Any) -> dist.ProcessGroup | None:
    """The process group in an argument of a collective's operator; None if it is none."""
    # Uses: ProcessGroup.unbox, torch.ScriptObject
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#111997 (closed as landed)
    is_boxed = isinstance(argument, torch.ScriptObject)
    return dist.ProcessGroup.unbox(argument) if is_boxed else None


def finished_work() -> Any:
    """A work object of a completed collective."""
    # Uses: torch._C._distributed_c10d.FakeWork, its `boxed`
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#111997 (closed as landed)
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()
