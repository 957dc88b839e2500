"""A rank's part of a sharded state dict: planned by all ranks together, held, written by itself."""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_checkpoint import save_sharded, sharded_tensors
from gapo_megatron.io.host_memory import available_bytes
from gapo_megatron.io.huge_pages import empty
from gapo_megatron.policy import ParallelGroups

_PROBE_BYTES = 2**20
_ALIGNMENT = 64
"""Alignment in bytes of copies in one memory."""
_HOST_SHARE = 0.9
"""Share of a node's available memory that copies may take: training needs some meanwhile."""


class Room:
    """Host memory for what a rank writes, kept from save to save.

    Filling fresh memory takes 5 to 14 times as long as filling it again, so only the first save
    waits for that. A save takes the memory away, and puts it back when its files are written: no
    other save can overwrite what is still being written.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the next save finds here."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, num_bytes: int) -> Tensor:
        """Bytes with undefined content, at least so many, which are no longer here."""
        memory, self._memory = self._memory, None
        if memory is not None and memory.nbytes >= num_bytes:
            return memory
        del memory  # before there is more
        return empty((num_bytes,), torch.uint8)

    def put_back(self, memory: Tensor) -> None:
        """Keep memory that `take` gave, and that nobody uses any longer."""
        self._memory = memory


Gather = Callable[[list[tuple[Tensor, Tensor]]], None]
"""Brings the content of tensors that have none; see `Policy.gather_optimizer_state`."""


class Shards(torch_checkpoint.FileSystemWriter):
    """What this rank writes of a sharded state dict, in Megatron-core's format `torch_dist`.

    Torch plans the save with all ranks, and asks for data to be written: they are only held. After
    `bring`, `write` needs no other rank and, of copies, neither a device nor the state dict: a
    thread may run it while the state changes.

    Attributes:
        lack: why the data are not copied though that was wished; the same on every rank.
        is_copied: whether the data are copies in host memory, which no update changes.
    """

    def __init__(self, folder: Path, *, copied: bool) -> None:
        """Write into `folder`.

        Args:
            folder: existing and empty.
            copied: copy the data, if the nodes' memory suffices.
        """
        super().__init__(folder, sync_files=True)
        if copied:  # a thread that copies ahead would use device 0, whatever this rank's device
            self.per_thread_copy_ahead = 0
        self.lack = ""
        self.is_copied = copied
        self._plan: SavePlan | None = None
        self._held = _Held()
        self._release: Callable[[], None] = lambda: None
        self._metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by torch once there is a plan."""
        self._plan = plan
        self._held.data = {item.index: planner.resolve_data(item) for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by torch on rank 0; see `write_metadata`."""
        self._metadata = metadata

    def bring(self, empty_ones: Set[int], gather: Gather, room: Room) -> None:
        """Copy to host memory what has no content yet, and with `copied` all other tensors.

        Args:
            empty_ones: addresses of storages without content.
            gather: brings it.
            room: memory of the copies.

        Collectives: those of `gather`; before it, with `copied`, a gather of sizes.
        """
        tensors = {i: one for i, one in self._held.data.items() if isinstance(one, Tensor)}
        wanted = {i: one for i, one in tensors.items() if _address(one) in empty_ones}
        changing = {i: one for i, one in tensors.items() if i not in wanted}
        # A copy that Megatron-core made of a tensor without content would be written as it is.
        lost = [i.fqn for i in changing if i.fqn.startswith("optimizer.")]
        assert not lost, f"{lost[0]} has no content"
        if self.is_copied:
            num_bytes = sum(map(_padded, tensors.values()))
            self.lack = _find_lack(max(0, num_bytes - room.num_bytes))
            self.is_copied = not self.lack
        copied = wanted | changing if self.is_copied else wanted
        memory = room.take(sum(map(_padded, copied.values())))
        copies = dict(zip(copied, _apart(memory, copied.values()), strict=True))
        gather([(one, copies[i]) for i, one in wanted.items()])
        for i in copied.keys() - wanted.keys():
            copies[i].copy_(changing[i].detach())
        self._held.data |= copies
        if self.is_copied:  # a node that lacks memory gets it back
            self._release = functools.partial(room.put_back, memory)

    def write(self) -> list[WriteResult]:
        """Write this rank's data durably, and release them; returns where they lie.

        Raises:
            OSError: the disk's own error, which torch would drop.
        """
        assert self._plan is not None, "no plan"
        with _disk_errors(Path(self.path)):
            results = super().write_data(self._plan, self._held).value()
        self._held.data = {}
        self._release()
        return results

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """Write where the data of all ranks lie, by rank. Only on rank 0."""
        assert self._metadata is not None, "only rank 0 has the metadata"
        super().finish(self._metadata, results)


def hold(
    state: dict[str, Any],
    folder: Path,
    groups: ParallelGroups,
    *,
    gather: Gather,
    copied: bool,
    room: Room,
) -> Shards:
    """Plan the save of a sharded state dict, and hold what this rank writes.

    Args:
        state: the same keys on every rank that holds them. The tensors of its `optimizer`, if any,
            have no content yet (`Policy.sharded_state_dict`).
        folder: existing and empty, on a file system that all ranks share. Gets the plain values.
        groups: ranks with equal weights each write a part of them.
        gather: brings the content of the optimizer's tensors that this rank writes.
        copied: copy the other tensors, too, if the nodes' memory suffices (`Shards.is_copied`).
        room: host memory for all of these.

    Collectives, over all ranks: those of Megatron-core's save; a gather of sizes with `copied`;
    those of `gather`.

    Raises:
        CheckpointException, OSError: the disk is full or fails.
    """
    empty_ones = {_address(one.data) for one in sharded_tensors(state.get("optimizer", {}))}
    shards = Shards(folder, copied=copied)
    with cpu.device_scope(), _disk_errors(folder):
        save_sharded(state, groups.dp_cp_group, shards)
    shards.bring(empty_ones - {0}, gather, room)
    return shards


class _Held(DefaultSavePlanner):
    """Tensors and serialised objects by their index in the plan."""

    data: dict[Any, Any]

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item."""
        return self.data[write_item.index]


def _address(tensor: Tensor) -> int:
    """Where the storage of a tensor begins; 0 for empty ones."""
    return tensor.untyped_storage().data_ptr()


def _padded(tensor: Tensor) -> int:
    """Bytes of a copy, in a room with others."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _apart(memory: Tensor, like: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors in memory like these, contiguous, each with a storage that holds no others.

    Torch would copy any other tensor when it writes, and keep all these copies to the end.
    """
    start, array = 0, memory.numpy()
    for one in like:
        if one.numel():
            part = torch.frombuffer(array[start : start + one.nbytes], dtype=one.dtype)
            yield part.view(one.shape)
        else:
            yield torch.empty(one.shape, dtype=one.dtype)
        start += _padded(one)


def _find_lack(num_bytes: int) -> str:
    """Which node lacks memory for copies; "" if none. Collective: a gather over all ranks.

    Args:
        num_bytes: that this rank's copies need beside the room they have.
    """
    mine = (socket.gethostname(), num_bytes, available_bytes())
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for host in dict.fromkeys(host for host, _, _ in ranks):
        needed = sum(size for name, size, _ in ranks if name == host)
        available = min(free for name, _, free in ranks if name == host)
        if needed > _HOST_SHARE * available:
            return (
                f"{host} has {available / 2**30:.1f} GiB of memory available, and copies of what "
                f"its ranks write need {needed / 2**30:.1f} more"
            )
    return ""


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise the system's error for failed writes of torch's own file streams.

    These report a full disk only as an unexpected position.

    Raises:
        OSError: the system's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not re.search("iostream|inline_container|PytorchStreamWriter", str(error)):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:  # C++ opened the file
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
            free_mib = shutil.disk_usage(folder).free / 2**20
            cause = OSError(errno.EIO, f"{error}; {free_mib:.0f} MiB are free there")
        raise cause from error
