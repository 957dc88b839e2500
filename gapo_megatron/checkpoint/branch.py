"""Begin a run at a checkpoint of another run: the same state, another objective.

The branch point becomes the new run's own first checkpoint, by hard links; from then on a branch
resumes like any other run. The other run may continue, and remove its checkpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
from transformers import PretrainedConfig

from gapo_megatron.checkpoint.owner import Owner
from gapo_megatron.checkpoint.resume import require_same_model
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.checkpoint.state import State
from gapo_megatron.config import Config
from gapo_megatron.config.roles import broken_rules, changes
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.formats import manifest
from gapo_megatron.formats.manifest import Branch, Manifest
from gapo_megatron.io.files import flush, fsync, real, write_atomically
from gapo_megatron.io.metric_files import METRICS_NAME
from gapo_megatron.io.run_folder import BRANCH_NAME, checkpoints_dir, is_finished

logger = logging.getLogger(__name__)

# Hard links fail: another file system, no support for links, or too many links to this file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Checkpoint of another run at which this run begins; its files are not checked yet."""

    path: Path
    manifest: Manifest
    branch: Branch

    def state(self) -> State:
        """State of the other run at the branch point.

        Raises:
            CheckpointError: the file is damaged or missing.
        """
        try:
            return State.load_whole(self.path, self.manifest)
        except CheckpointError as error:
            raise CheckpointError(f"cannot branch from {self.path}: {error}") from None


def check_branch(config: Config, hf_config: PretrainedConfig | None) -> BranchPoint | None:
    """Check `checkpoint.branch_from`; reads only manifests. Call it before any model is built.

    Args:
        config: the new run's settings.
        hf_config: its model; None: not compared.

    Returns:
        The branch point; None for a run that does not branch, has its own checkpoints, or is
        finished.

    Raises:
        ConfigError: names field, value and rule; or both values of settings that a branch must not
            change.
        CheckpointError: the branch point's manifest is damaged or belongs to another model; or the
            run has checkpoints, but none with a readable manifest.
    """
    run_dir, given = Path(config.run.output_dir), config.checkpoint.branch_from
    folder = checkpoints_dir(run_dir)
    if own := manifest.newest_manifest(folder):
        _require_same_origin(run_dir, own[1], given)
        return None
    if not given or is_finished(run_dir, num_steps=config.run.num_steps):
        return None
    if damaged := manifest.list_steps(folder):
        raise CheckpointError(
            f"{damaged[0] / manifest.MANIFEST_NAME} cannot be read, nor an older checkpoint's; "
            f"remove {run_dir} to start the branch over"
        )
    if (run_dir / METRICS_NAME).exists():
        raise ConfigError(
            f"run.output_dir ({run_dir}) must be a new folder for a run that branches: it has "
            f"{METRICS_NAME}, and no checkpoint to resume"
        )
    path = _find(given)
    found = manifest.read_manifest(path)
    if hf_config is not None:
        require_same_model(path, found.model, model_identity(hf_config))
    if lines := broken_rules(found.config, config):
        raise ConfigError(
            f"checkpoint.branch_from ({given}): a branch changes the objective, and must keep "
            "these settings:\n  " + "\n  ".join(lines)
        )
    if config.run.num_steps <= found.step:
        raise ConfigError(
            f"run.num_steps ({config.run.num_steps}) must be more than the {found.step} steps "
            f"done at checkpoint.branch_from ({given})"
        )
    branch = Branch(
        run=str(path.parents[1]),
        checkpoint=path.name,
        step=found.step,
        manifest_sha256=manifest.stored_sha256(path),
        changes={name: list(pair) for name, pair in changes(found.config, config).items()},
        parent=found.branch,
    )
    return BranchPoint(path, found, branch)


def begin_branch(point: BranchPoint, config: Config, attempt: Owner) -> None:
    """Make the branch point the run's first checkpoint, atomically.

    Files are linked first and then read, so that the other run may remove its checkpoint meanwhile;
    on another file system they are copied.

    Args:
        point: from `check_branch`, the same on every rank.
        config: the new run's settings, stored in the checkpoint.
        attempt: the checkpoint is published only while this attempt owns the run.

    Collectives, over all ranks: a barrier; a gather of problems (every rank links and reads its
    share of the files); a barrier.

    Raises:
        CheckpointError: the branch point is damaged, changed or missing, or the disk is full or
            fails; nothing is published.
        FencedError: on rank 0, when a newer attempt has taken the run.
    """
    run_dir, branch = Path(config.run.output_dir), point.branch
    final = manifest.step_dir(checkpoints_dir(run_dir), branch.step)
    temporary = final.with_name(f".tmp_{final.name}.{attempt.name}")
    try:
        if dist.get_rank() == 0:
            attempt.require_ownership()  # unfinished checkpoints may be the new owner's
            manifest.remove_half_written(final.parent)
            for name in point.manifest.files:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, _take_share(point, temporary, attempt))
        if problem := next(filter(None, problems), None):
            raise CheckpointError(f"cannot branch from {point.path}: {problem}")
        if dist.get_rank() == 0:
            own = replace(point.manifest, config=config.model_dump(mode="json"), branch=branch)
            manifest.write_manifest(temporary, own)
            flush(temporary)
            attempt.require_ownership()
            manifest.publish(temporary, final)
            logger.info("branched from %s", point.path)
    except OSError as error:
        raise CheckpointError(f"cannot branch from {point.path}: {error}") from error
    dist.barrier()


def record_branch(run_dir: str | Path, branch: Branch | None) -> None:
    """Write the branch record of the checkpoints' manifests to the run's folder, for reports.

    Called on rank 0, at every start.

    Args:
        run_dir: the run's output folder.
        branch: branch record of the checkpoint to resume from; None: no branch; removes the file.
    """
    path = Path(run_dir) / BRANCH_NAME
    if branch is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, json.dumps(asdict(branch), indent=1))


def same_branch_point(one: str, other: str) -> bool:
    """Whether two `checkpoint.branch_from` name the same checkpoint, in any spelling.

    Raises:
        ConfigError: the two differ, neither is empty, and one does not name a checkpoint.
    """
    both = bool(one and other)
    return one == other or (both and real(_place(one)) == real(_place(other)))


def _require_same_origin(run_dir: Path, own: Manifest, given: str) -> None:
    """Refuse another `checkpoint.branch_from` than the run's first; its spelling may differ.

    An identical string passes too: both runs may have been moved together.
    """
    began, branch = (own.config.get("checkpoint") or {}).get("branch_from", ""), own.branch
    if given == began:
        return
    if branch is not None:
        origin = Path(branch.run) / "checkpoints" / branch.checkpoint
        if same_branch_point(given, str(origin)):
            return
    raise ConfigError(
        f"checkpoint.branch_from ({given!r}) must stay what it was when {run_dir} began "
        f"({began!r}): its checkpoints continue from there; give a new run its own run.output_dir"
    )


def _place(given: str) -> Path:
    """Absolute path of `checkpoint.branch_from`; leading zeros of the step may be omitted."""
    path = Path(os.path.abspath(given))
    match = re.fullmatch(r"step_(\d+)", path.name)
    if match is None or path.parent.name != "checkpoints":
        raise ConfigError(
            f"checkpoint.branch_from ({given!r}) must name a checkpoint between two steps: "
            "RUN/checkpoints/step_N"
        )
    return manifest.step_dir(path.parent, int(match[1]))


def _find(given: str) -> Path:
    """The branch point's folder; raises ConfigError if it does not exist."""
    found = _place(given)
    if not found.is_dir():
        there = [step.name for step in manifest.list_steps(found.parent)]
        raise ConfigError(
            f"checkpoint.branch_from ({given!r}) does not exist; checkpoints of that run: "
            f"{', '.join(there) or 'none'}"
        )
    return found


def _take_share(point: BranchPoint, temporary: Path, attempt: Owner) -> str | None:
    """Link and verify this rank's share of the files; returns an error, if any."""
    files = point.manifest.files
    share = {name: files[name] for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]}
    try:
        for name in share:
            _link(point.path / name, temporary / name)
        return manifest.find_damage(temporary, share, on_bytes=lambda _: attempt.alive())
    except FileNotFoundError as error:
        return (
            f"{error}. If its run has removed it, use a later checkpoint, and name the next in "
            "checkpoint.keep_steps there"
        )
    except OSError as error:
        return str(error)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)
        fsync(target)  # another node could not flush this node's writes
