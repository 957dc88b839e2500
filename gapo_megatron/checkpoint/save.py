"""Write a checkpoint: every rank its shards, rank 0 the manifest, one rename at the end.

    begin_save   all ranks together: what each of them writes is planned, and copied or serialised
    (writing)    every rank by itself: shards, files and their digests; training may go on
    finish       all ranks together: manifest, rename
    (removal)    rank 0: earlier checkpoints that are no longer kept; training may go on

`save` does all of it before it returns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from transformers import PretrainedConfig

from gapo_megatron.checkpoint import files, rng, shards
from gapo_megatron.checkpoint.owner import Owner
from gapo_megatron.checkpoint.shards import Room, Shards
from gapo_megatron.checkpoint.state import State
from gapo_megatron.compat.megatron_optimizer import no_garbage_collection
from gapo_megatron.compat.megatron_version import version
from gapo_megatron.config import CheckpointConfig, Config
from gapo_megatron.errors import CheckpointError
from gapo_megatron.formats import manifest
from gapo_megatron.formats.manifest import FileEntry, Manifest
from gapo_megatron.io.files import flush
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.models import architecture_of
from gapo_megatron.policy import ParallelGroups, Policy

logger = logging.getLogger(__name__)


def save(
    run_dir: str | Path, state: State, *, policy: Policy, config: Config, attempt: Owner
) -> Path:
    """Write a checkpoint; once this returns, a kill cannot lose it.

    Args, collectives, raises: those of `begin_save`, without copies, and of `Saving.finish`.

    Returns:
        The checkpoint's folder, on every rank.
    """
    return begin_save(
        run_dir, state, policy=policy, config=config, attempt=attempt, in_background=False
    ).finish()


def begin_save(
    run_dir: str | Path,
    state: State,
    *,
    policy: Policy,
    config: Config,
    attempt: Owner,
    in_background: bool,
    room: Room | None = None,
) -> Saving:
    """Begin a checkpoint; only `Saving.finish` publishes it.

    Until then previous checkpoints are unchanged and a resume ignores this one. Finish it before
    the next one begins.

    Args:
        run_dir: the run's output folder, on a file system all ranks share.
        state: state of the run, with its tokens and open groups on rank 0.
        policy: model, optimizer and update count are saved, each rank its own shards.
        config: stored in the manifest for comparison at resume; sets which checkpoints to keep.
        attempt: the checkpoint is published only while this attempt owns the run.
        in_background: copy what each rank writes, and write it in a thread: policy and state may
            change afterwards. Logs a warning, and does neither, where a node lacks memory.
        room: host memory of the copies, kept for later saves; copies are made for it even if
            training waits. None: fresh memory, freed when the files are written.

    Collectives, over all ranks: a barrier; those of Megatron-core's save; with copies a gather of
    sizes; those of `Policy.gather_optimizer_state`.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints are unchanged.
        FencedError: when a newer attempt has taken the run. Rank 0 looks at the beginning, every
            rank after an error.
    """
    start, rank = time.perf_counter(), dist.get_rank()
    folder = checkpoints_dir(run_dir)
    open_updates = None if state.is_ahead else state.num_open_updates
    final = manifest.step_dir(folder, state.step, open_updates)
    temporary = _temporary(final, attempt)
    with _write_errors(final, attempt):
        if rank == 0:
            attempt.require_ownership()  # unfinished checkpoints may be the new owner's
            # Before writing: these may be what fills a full disk.
            manifest.remove_half_written(folder)
            temporary.mkdir(parents=True)
        dist.barrier()
        base_sha256 = policy.base_sha256()
        with no_garbage_collection():
            held = shards.hold(
                *(policy.sharded_state_dict(), temporary, policy.groups),
                gather=policy.gather_optimizer_state,
                copied=in_background or room is not None,
                room=room or Room(),
            )
    if in_background and held.lack and rank == 0:
        logger.warning(
            "checkpoint.background (true): training waits until %s is written, because %s",
            final, held.lack,
        )  # fmt: skip
    document = Manifest(
        step=state.step,
        model=model_identity(policy.hf_config),
        config=config.model_dump(mode="json"),
        layout=layout(policy.groups),
        megatron_version=version(),
        files={},
        open_updates=open_updates,
        branch=state.branch,
        base_sha256=base_sha256,
        implementation=policy.implementation,
    )
    serialised = _serialised(state, rank)
    saving = Saving(final, document, attempt, config.checkpoint, held, serialised, start)
    if in_background and held.is_copied:
        saving.write_in_background()
    saving.work_s = time.perf_counter() - start
    return saving


@dataclass
class Saving:
    """A checkpoint that is being written, hidden until `finish`; made by `begin_save`."""

    final: Path
    """Its folder, once it is whole."""
    document: Manifest
    """Its manifest, without files."""
    attempt: Owner
    settings: CheckpointConfig
    """Which earlier checkpoints to keep."""
    shards: Shards
    serialised: dict[str, bytes]
    """Content of this rank's other files, by name."""
    start: float
    """When it began, by `time.perf_counter`."""
    work_s: float = 0.0
    """Seconds of work so far, in this thread or the other one; on rank 0 the slowest rank's."""
    whole_s: float = 0.0
    """Seconds from the beginning until the checkpoint had its name; 0 until then."""
    _written: Future[_Written] | None = None

    @property
    def temporary(self) -> Path:
        """Its folder until it is whole."""
        return _temporary(self.final, self.attempt)

    @property
    def in_background(self) -> bool:
        """Whether a thread writes the files: otherwise `finish` does."""
        return self._written is not None

    def write_in_background(self) -> None:
        """Write this rank's files in a thread, which calls no collective."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = executor.submit(self._write, dist.get_rank())
        executor.shutdown(wait=False)

    def is_written(self) -> bool:
        """Whether all ranks have written their files. Collective: a gather over all ranks."""
        mine = self._written is not None and self._written.done()
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        return all(ranks)

    def finish(self) -> Path:
        """Wait for the files of all ranks, and publish; then a kill cannot lose the checkpoint.

        Returns:
            The checkpoint's folder, on every rank.

        Collectives, over all ranks: a gather of file digests; a broadcast.

        Raises:
            CheckpointError: on every rank, when the disk of one is full or fails; earlier
                checkpoints are unchanged.
            FencedError: when a newer attempt has taken the run; nothing is published. Rank 0 looks
                before it publishes, every rank after an error.
        """
        rank = dist.get_rank()
        mine = self._written.result() if self._written else self._write(rank)
        ranks: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(mine, ranks)
        start = time.perf_counter()
        failures: list[dict[int, OSError]] = [{}]
        if ranks is not None:
            failures = [{i: one.error for i, one in enumerate(ranks) if one.error is not None}]
            if not failures[0]:
                try:
                    self._publish(ranks)
                except OSError as error:
                    failures = [{0: error}]
        # No rank may continue, and perhaps exit, before the checkpoint has its name.
        dist.broadcast_object_list(failures)
        if failures[0]:
            cause = next(iter(failures[0].values()))
            raise _failure(self.final, self.attempt, failures[0]) from cause
        end = time.perf_counter()
        self.work_s += max(one.seconds for one in ranks or [mine]) + end - start
        self.whole_s = end - self.start
        return self.final

    def _write(self, rank: int) -> _Written:
        """Write the files of this rank, durably. No collective: a thread may run it."""
        start = time.perf_counter()
        try:
            results = self.shards.write()
            for name, content in self.serialised.items():
                files.write(self.temporary / name, content)
            names = [path.name for path in self.temporary.glob(f"__{rank}_*")]
            entries = manifest.describe_files(self.temporary, [*names, *self.serialised])
        except OSError as error:
            return _Written(error=error)
        return _Written(results, entries, seconds=time.perf_counter() - start)

    def _publish(self, ranks: list[_Written]) -> None:
        """Write the files that need those of all ranks, and rename the folder. Only on rank 0."""
        folder = self.final.parent
        self.shards.write_metadata([one.results for one in ranks])
        entries = {name: entry for one in ranks for name, entry in one.files.items()}
        others = [name for name in manifest.list_files(self.temporary) if name not in entries]
        entries |= manifest.describe_files(self.temporary, others)
        manifest.write_manifest(self.temporary, replace(self.document, files=entries))
        flush(self.temporary)
        # At the end: an unreachable disk may have delayed this node for long.
        self.attempt.require_ownership()
        manifest.publish(self.temporary, self.final)
        try:
            hidden = manifest.prune(folder, self.settings)
        except (OSError, CheckpointError) as error:  # this one is whole; the next save tries again
            logger.warning("cannot remove checkpoints that are no longer kept: %s", error)
            return
        if self.in_background:
            threading.Thread(target=_remove, args=(hidden,), name="checkpoint-removal").start()
        else:
            _remove(hidden)


@dataclass(frozen=True)
class _Written:
    """The files that a rank has written."""

    results: list[WriteResult] = field(default_factory=list)
    """Where its data lie, for the metadata of the shards."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    error: OSError | None = None
    """Why it could not write them."""
    seconds: float = 0.0


def _remove(hidden: Mapping[Path, Path]) -> None:
    """Remove checkpoints by their former paths. No collective: a thread may run it."""
    for path, there in hidden.items():
        if manifest.remove(there):
            logger.info("removed %s", path)
        else:  # the next save tries again
            logger.warning("cannot remove %s, which was %s", there, path)


@contextlib.contextmanager
def _write_errors(final: Path, attempt: Owner) -> Iterator[None]:
    """Turn any write error into that of `_failure`."""
    try:
        yield
    except CheckpointException as error:
        causes = {i: cause for i, (cause, _) in error.failures.items()}
        raise _failure(final, attempt, causes) from error
    except OSError as error:
        raise _failure(final, attempt, {dist.get_rank(): error}) from error


def _temporary(final: Path, attempt: Owner) -> Path:
    """Folder of an unfinished checkpoint."""
    # An attempt that lost the run may still be writing: attempts must not share a folder.
    return final.with_name(f".tmp_{final.name}.{attempt.name}")


def _failure(final: Path, attempt: Owner, errors: Mapping[int, BaseException]) -> CheckpointError:
    """The error of a write that failed on some ranks.

    Raises:
        FencedError: a newer attempt has taken the run, and may have removed what was written.
    """
    with contextlib.suppress(OSError):  # the disk that failed
        attempt.require_ownership()
    reasons = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
    return CheckpointError(f"cannot write {final}: {reasons}; earlier checkpoints are unchanged")


def _serialised(state: State, rank: int) -> dict[str, bytes]:
    """Content of this rank's files beside the shards, by name."""
    content = {rng.file_name(rank): files.serialise(rng.current())}
    if state.open_step is not None and not state.is_ahead:
        content |= state.open_step.serialised()
    if rank == 0:
        content |= state.serialised()
    return content


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
