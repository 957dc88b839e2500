"""Read and write Megatron folders: megatron-core checkpoints of the format `torch_dist`.

Tensors are in the format of torch.distributed.checkpoint, which cuts a tensor into chunks and
records their slots in `.metadata`. Megatron-core adds its keys (`disk_keys.py`), common.pt with
everything that is not a tensor, and metadata.json, written last. No process group is needed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import WriteResult
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from transformers import PretrainedConfig

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats import disk_keys
from gapo_megatron.formats.chunks import Chunks
from gapo_megatron.formats.manifest import MANIFEST_NAME, Manifest
from gapo_megatron.formats.megatron_args import to_args
from gapo_megatron.formats.megatron_record import Found, find_megatron
from gapo_megatron.formats.weights import Entry, in_model_order
from gapo_megatron.formats.workers import Read, worker_pool
from gapo_megatron.models.rules import Place, Rule

_PART_BYTES = 4 * 2**30


def _saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


# One shard in Megatron-core's list, empty: Transformer Engine's state without fp8.
_EXTRA_STATE = _saved([torch.empty(0, dtype=torch.uint8)])


class MegatronFolder:
    """A Megatron folder, open for reading.

    Attributes:
        root: the folder that holds `.metadata`.
        entries: every tensor of the model by its key on disk.
        slots: keys of every parameter, by (`Rule.megatron`, place); see `disk_keys.find_slots`.
        hf_dir, records, manifest: see `Found`.
    """

    def __init__(self, path: str | Path | Found, rules: Sequence[Rule]) -> None:
        """Find the checkpoint, and check that it holds the model; reads no tensor.

        Args:
            path: a path for `find_megatron`, or its result.
            rules: the model's rules.

        Raises:
            ConfigError: there is no complete checkpoint of this format.
            ConversionError: a key is missing, extra or misshapen, or a file is missing or cut;
                names key and file.
        """
        found = path if isinstance(path, Found) else find_megatron(path)
        self.root, self.hf_dir, self.records = found.root, found.hf_dir, found.records
        self.manifest, metadata = found.manifest, found.metadata
        tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not disk_keys.is_optimizer(key)
        }
        if adapter := sorted(key for key in tensors if key.startswith("adapter.")):
            raise ConversionError(
                f"{self.root} holds the factors of an adapter ({adapter[0]}), not a model's "
                "weights: give tools/convert_megatron_to_hf.py --adapter"
            )
        shapes = {key: tuple(entry.size) for key, entry in tensors.items()}
        self.slots = disk_keys.find_slots(rules, shapes, source=str(self.root))
        num_stacked = {slot.key: len(slot.lead) for at in self.slots.values() for slot in at}
        self._chunks = {
            key: Chunks(self.root, key, entry, metadata.storage_data, num_stacked[key])
            for key, entry in tensors.items()
        }
        self.entries = {
            key: Entry(shapes[key], entry.properties.dtype, self._chunks[key].first_file)
            for key, entry in tensors.items()
        }
        _check_files(self.root, self._chunks)
        if self.manifest is not None:
            _check_listed(self.root, self._chunks, self.manifest)

    def read(self, rule: Rule, place: Place) -> Tensor:
        """Read one whole parameter to the CPU, without vocabulary padding, in the dtype on disk.

        Thread-safe.

        Raises:
            ConversionError: a file cannot be read; names file and key.
        """
        slots = self.slots[rule.megatron, place]
        if len(slots) == 1:
            return self._chunks[slots[0].key].read(slots[0].lead, rule.full_shape)
        return torch.cat(
            [self._chunks[slot.key].read(slot.lead, rule.half_shape) for slot in slots]
        )

    def files(self, rule: Rule, place: Place) -> set[str]:
        """Names of the files that hold a parameter."""
        slots = self.slots[rule.megatron, place]
        return {file for slot in slots for file in self._chunks[slot.key].files(slot.lead)}


def write_megatron(
    read: Read,
    rules: Sequence[Rule],
    *,
    hf_config: PretrainedConfig,
    dtypes: Mapping[str, torch.dtype],
    output_dir: Path,
    num_threads: int = 2,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a checkpoint that megatron-core loads in any parallel layout, and flush it to disk.

    A thread holds one parameter of every kind, because torch's writer keeps the last one under each
    key until the file is complete.

    Args:
        read: returns a whole Megatron parameter in its dtype; called from several threads.
        rules: the model's rules.
        hf_config: the model's config; parts of it become Megatron-LM's `args`.
        dtypes: dtype of every parameter, by `Rule.megatron`.
        output_dir: an existing, empty folder; see `new_folder`.
        num_threads: number of files written at a time.
        on_bytes: called with the bytes of each parameter written, from several threads.

    Raises:
        ConversionError: a parameter has another shape or dtype than in `rules` and `dtypes`, or the
            disk fails; names file and parameter.
    """
    writer = FileSystemWriter(output_dir, sync_files=True, per_thread_copy_ahead=0)
    order = in_model_order(rules)
    items = [_write_item(rule, place, dtypes[rule.megatron]) for rule, place in order]
    sizes = [math.prod(rule.full_shape) * dtypes[rule.megatron].itemsize for rule, _ in order]
    places = dict(zip((item.index for item in items), order, strict=True))
    parts = _cut(items, sizes, num_threads)
    parts[0] = [*_extra_state_items(rules), *parts[0]]
    plans, metadata = create_default_global_save_plan([SavePlan(part) for part in parts])
    # Each part is written as if by a rank of its own: torch's own threads hide their errors.
    with worker_pool(num_threads, read) as (pool, read):
        futures = [
            pool.submit(_write_part, writer, plan, _LazyPlanner(read, places, on_bytes))
            for plan in writer.prepare_global_plan(plans)
        ]
        results = [future.result() for future in as_completed(futures)]
    writer.finish(metadata, results)
    common = {
        "args": to_args(hf_config),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "non_homogeneous_layers": disk_keys.are_numbered(rules),
            "singleton_local_shards": False,
        },
    }
    # Not by torch.save, which reports a full disk as an unexpected position.
    (output_dir / "common.pt").write_bytes(_saved(common).getbuffer())
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (output_dir / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")


# --- reading -------------------------------------------------------------------------------------


def _check_files(root: Path, chunks: Mapping[str, Chunks]) -> None:
    for key, parts in chunks.items():
        for file, end in parts.ends.items():
            path = root / file
            if not path.is_file():
                raise ConversionError(f"{path} is missing; it holds {key}")
            if (size := path.stat().st_size) < end:
                raise ConversionError(f"{path} has {size} bytes; {key} ends at {end}")


def _check_listed(root: Path, chunks: Mapping[str, Chunks], manifest: Manifest) -> None:
    """Check that the manifest has a digest of every file that is read."""
    used = {file for parts in chunks.values() for file in parts.ends}
    used |= {".metadata", "metadata.json"}
    if (root / "common.pt").exists():
        used.add("common.pt")
    if unlisted := sorted(used - manifest.files.keys()):
        raise ConversionError(f"{root / MANIFEST_NAME} does not list {unlisted[0]}")


# --- writing -------------------------------------------------------------------------------------


def _write_item(rule: Rule, place: Place, dtype: torch.dtype) -> WriteItem:
    """Describe a parameter as a chunk of the tensor in which it is stacked."""
    slot = disk_keys.written_slot(rule, place)
    offsets = torch.Size([*slot.lead, *(0 for _ in rule.full_shape)])
    chunk = ChunkStorageMetadata(offsets, torch.Size([*(1 for _ in slot.lead), *rule.full_shape]))
    size = torch.Size(disk_keys.written_shape(rule))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(slot.key, offsets), WriteItemType.SHARD, tensor_data=data)


def _extra_state_items(rules: Sequence[Rule]) -> list[WriteItem]:
    data = BytesIOWriteData(len(_EXTRA_STATE.getbuffer()))
    return [
        WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=data)
        for key in disk_keys.extra_states(rules)
    ]


def _cut(
    items: Sequence[WriteItem], sizes: Sequence[int], num_threads: int
) -> list[list[WriteItem]]:
    """Cut into consecutive parts of about equal size: at least one per thread, none very large."""
    total = sum(sizes)
    number = max(num_threads, -(-total // _PART_BYTES))
    parts: list[list[WriteItem]] = [[]]
    done = 0
    for item, size in zip(items, sizes, strict=True):
        if parts[-1] and done * number >= total * len(parts):
            parts.append([])
        parts[-1].append(item)
        done += size
    return parts


class _LazyPlanner(DefaultSavePlanner):
    """Reads each chunk when the writer asks for it."""

    def __init__(
        self,
        read: Read,
        places: Mapping[MetadataIndex, tuple[Rule, Place]],
        on_bytes: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._read, self._places, self._on_bytes = read, places, on_bytes
        self.current = "the file's beginning"

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read the parameter of a write item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return _EXTRA_STATE
        rule, place = self._places[write_item.index]
        self.current = rule.megatron_name(place)
        tensor = self._read(rule, place)
        assert write_item.tensor_data is not None
        dtype = write_item.tensor_data.properties.dtype
        if (tuple(tensor.shape), tensor.dtype) != (rule.full_shape, dtype):
            raise ConversionError(
                f"{self.current} is {list(tensor.shape)} {tensor.dtype}; "
                f"it should be {list(rule.full_shape)} {dtype}"
            )
        self._on_bytes(tensor.nbytes)
        return tensor.contiguous().view(write_item.tensor_data.chunk.sizes)


def _write_part(
    writer: FileSystemWriter, plan: SavePlan, planner: _LazyPlanner
) -> list[WriteResult]:
    try:
        return writer.write_data(plan, planner).wait()
    except (OSError, RuntimeError) as error:
        raise ConversionError(
            f"cannot write {planner.current} to {writer.path}/{plan.storage_data.prefix}0.distcp: "
            f"{error}"
        ) from None
