"""Write a checkpoint: every rank its shards, rank 0 the manifest, one rename at the end."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from transformers import PretrainedConfig

from gapo_megatron.checkpoint import rng
from gapo_megatron.checkpoint.open_groups import save_open_groups
from gapo_megatron.checkpoint.owner import Owner
from gapo_megatron.checkpoint.state import State
from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_checkpoint import save_sharded
from gapo_megatron.config import Config
from gapo_megatron.errors import CheckpointError
from gapo_megatron.hf import manifest
from gapo_megatron.io.files import flush
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.models import architecture_of
from gapo_megatron.policy import ParallelGroups, Policy

logger = logging.getLogger(__name__)

_PROBE_BYTES = 2**20


def save(
    run_dir: str | Path, state: State, *, policy: Policy, config: Config, attempt: Owner
) -> Path:
    """Write a checkpoint; once this returns, a kill cannot lose it.

    Until the rename at the end, previous checkpoints are unchanged and a resume ignores this one.

    Args:
        run_dir: the run's output folder, on a file system all ranks share.
        state: state of the run, with its tokens and open groups on rank 0.
        policy: model, optimizer and update count are saved, each rank its own shards.
        config: stored in the manifest for comparison at resume; sets which checkpoints to keep.
        attempt: the checkpoint is published only while this attempt owns the run.

    Returns:
        The checkpoint's folder, on every rank.

    Collectives, over all ranks: a barrier; those of the optimizer's and Megatron-core's save; a
    gather of file digests; a barrier.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints are unchanged.
        FencedError: on rank 0, when a newer attempt has taken the run; nothing is published.
    """
    folder = checkpoints_dir(run_dir)
    open_updates = None if state.is_ahead else state.num_open_updates
    final = manifest.step_dir(folder, state.step, open_updates)
    # An attempt that lost the run may still be writing: attempts must not share a folder.
    temporary = final.with_name(f".tmp_{final.name}.{attempt.name}")
    with _write_errors(final):
        if dist.get_rank() == 0:
            attempt.require_ownership()  # unfinished checkpoints may be the new owner's
            # Before writing: these may be what fills a full disk.
            manifest.remove_half_written(folder)
            temporary.mkdir(parents=True)
        dist.barrier()
        base_sha256 = policy.base_sha256()
        _write(temporary, state, policy)
        files = _describe_files(temporary)
        if dist.get_rank() == 0:
            document = manifest.Manifest(
                step=state.step,
                model=model_identity(policy.hf_config),
                config=config.model_dump(mode="json"),
                layout=layout(policy.groups),
                megatron_version=megatron_version,
                files=files,
                open_updates=open_updates,
                branch=state.branch,
                base_sha256=base_sha256,
            )
            manifest.write_manifest(temporary, document)
            flush(temporary)
            # At the end: an unreachable disk may have delayed this node for long.
            attempt.require_ownership()
            manifest.publish(temporary, final)
            for removed in manifest.prune(folder, config.checkpoint):
                logger.info("removed %s", removed)
    # No rank may continue, and perhaps exit, before the checkpoint has its name.
    dist.barrier()
    return final


@contextlib.contextmanager
def _write_errors(final: Path) -> Iterator[None]:
    """Turn any write error into a CheckpointError.

    Raises:
        CheckpointError: names the folder, and the failed rank if it is another.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        reason = str(error)
        if isinstance(error, CheckpointException):
            causes = ((rank, cause) for rank, (cause, _) in error.failures.items())
            reason = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes)
        raise CheckpointError(
            f"cannot write {final}: {reason}; earlier checkpoints are unchanged"
        ) from error


def model_identity(hf_config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a Hugging Face config that must agree between a checkpoint and its resume."""
    fields = hf_config.to_dict()
    names = ("architectures", *architecture_of(hf_config).model_fields, "rope_parameters")
    # Converted as by JSON, so that both sides compare equal.
    identity: dict[str, Any] = json.loads(json.dumps({key: fields.get(key) for key in names}))
    return identity


def layout(groups: ParallelGroups) -> dict[str, int]:
    """Parallel sizes, as recorded in the manifest."""
    return {
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "context_parallel_size": groups.cp_size,
        "expert_model_parallel_size": groups.ep_size,
        "data_parallel_size": groups.dp_size,
    }


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


class _Writer(torch_checkpoint.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data; raises the disk's own error, which torch would drop."""
        with _disk_errors(Path(self.path)):
            return super().write_data(plan, planner)


def write_state(state: dict[str, Any], folder: Path, groups: ParallelGroups) -> None:
    """Write a sharded state dict into an existing, empty folder: Megatron-core's `torch_dist`.

    Collectives, over all ranks: those of Megatron-core's save.
    """
    with cpu.device_scope(), _disk_errors(folder):
        save_sharded(state, folder, groups.dp_cp_group, _make_writer)


def _make_writer(folder: Path) -> _Writer:
    return _Writer(folder, sync_files=True)


def _write(folder: Path, state: State, policy: Policy) -> None:
    """Write every file but the manifest. Collective."""
    write_state(policy.sharded_state_dict(), folder, policy.groups)
    rng.save(folder / rng.file_name(dist.get_rank()))
    if state.open_step is not None and not state.is_ahead:
        state.open_step.save(folder)
    if dist.get_rank() == 0:
        state.write_shared(folder)
        save_open_groups(folder, state.open_groups)


def _describe_files(folder: Path) -> dict[str, manifest.FileEntry]:
    """Sizes and digests of all files, on every rank; each rank reads its own files. Collective."""
    rank = dist.get_rank()
    written = [name for name in manifest.list_files(folder) if _writer(name) == rank]
    parts: list[dict[str, manifest.FileEntry]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, manifest.describe_files(folder, written))
    return {name: entry for part in parts for name, entry in part.items()}


def _writer(name: str) -> int:
    """Rank that wrote a file: in the names of shards and states; rank 0 for all others."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", name) or re.fullmatch(
        r"(?:rng|progress)_(\d+)\.pt", name
    )
    return int(match[1]) if match else 0
