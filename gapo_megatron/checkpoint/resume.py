"""Find the newest complete checkpoint and load it; all ranks decide together."""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig

from gapo_megatron.checkpoint import rng
from gapo_megatron.checkpoint.changes import record_changes, require_allowed
from gapo_megatron.checkpoint.open_groups import (
    OPEN_GROUPS_NAME,
    load_open_groups,
    require_same_sampling,
)
from gapo_megatron.checkpoint.open_step import BATCH_NAME, OpenStep, progress_name
from gapo_megatron.checkpoint.save import layout, model_identity
from gapo_megatron.checkpoint.state import AHEAD_NAME, TRAINER_STATE_NAME, State
from gapo_megatron.compat.megatron_version import version
from gapo_megatron.config import Config
from gapo_megatron.config.roles import changed_layout, changes
from gapo_megatron.errors import CheckpointError, ConfigError, ConversionError, said
from gapo_megatron.formats import manifest
from gapo_megatron.formats.manifest import Manifest
from gapo_megatron.formats.unpickle import read_common, read_metadata
from gapo_megatron.io.run_folder import checkpoints_dir, is_finished
from gapo_megatron.objective.diagnostics import CorrelationWindow
from gapo_megatron.policy import Policy
from gapo_megatron.policy.load import find_damage_together, first_problem, load_sharded

logger = logging.getLogger(__name__)


def check_resume(run_dir: str | Path, hf_config: PretrainedConfig, config: Config) -> None:
    """Refuse a run folder whose newest checkpoint cannot be resumed; reads one small file.

    Call it before any model is built. A damaged manifest passes if an older checkpoint has a whole
    one: `load_latest` handles it.

    Raises:
        CheckpointError: it belongs to another model (names the fields that differ); or no manifest
            can be read, as of another format version.
        ConfigError: it has open groups, and settings of their sampling have changed; or settings
            that change what is learned have changed, and `run.allow_changes` does not name them.
    """
    finished = is_finished(run_dir, num_steps=config.run.num_steps)
    if newest := manifest.newest_manifest(checkpoints_dir(run_dir)):
        folder, found = newest
        require_same_model(folder, found.model, model_identity(hf_config))
        if not finished:
            require_same_sampling(folder, found, config)
            require_allowed(folder, found, config)
    elif not finished and (steps := manifest.list_steps(checkpoints_dir(run_dir))):
        manifest.read_manifest(steps[0])  # says why


def newest_source(run_dir: str | Path) -> Mapping[str, Any] | None:
    """Data position in the newest checkpoint of a run; None if there is none, or it is damaged."""
    if newest := manifest.newest_manifest(checkpoints_dir(run_dir)):
        with contextlib.suppress(CheckpointError):  # `load_latest` handles it
            return State.load_whole(*newest).source
    return None


def load_latest(
    run_dir: str | Path,
    *,
    policy: Policy,
    config: Config,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> State | None:
    """Load the newest complete checkpoint into `policy`, written by any parallel layout.

    A damaged or unreadable checkpoint is skipped with a warning that names the file, and set aside
    once an older complete checkpoint is loaded, so that a later resume cannot jump ahead to it. An
    unfinished checkpoint has no final name and is ignored. Random state is restored if the layout
    is the same. A checkpoint within a step needs the same settings and, after an update within the
    step, the same layout; otherwise it is treated as damaged.

    Args:
        run_dir: the run's output folder, on a file system all ranks share.
        policy: the policy as built for this run; receives model, optimizer and update count.
        config: compared with the checkpoint's; differences are logged, and refused if they change
            what is learned (`run.allow_changes`).
        on_bytes: called with the number of bytes verified since the last call.

    Returns:
        State of the run, the same on every rank; None if there is no checkpoint.

    Collectives, over all ranks: those of `Policy.base_sha256`; a broadcast of the candidates; per
    candidate a broadcast of its manifest and gathers of damage reports (every rank reads its share
    of the files); for the first complete candidate those of Megatron-core's load; a barrier.

    Raises:
        CheckpointError: the checkpoint belongs to another model (names the fields), or there are
            checkpoints and none is complete.
        ConfigError: an adapter was trained on other frozen weights; or see `check_resume`, here
            also for a checkpoint that is not the newest.
    """
    folder = checkpoints_dir(run_dir)
    policy.base_sha256()  # while the weights are on the device
    refused: dict[Path, str] = {}
    for path in _from_rank_0(manifest.list_steps(folder)):
        found, state, reason = _try(path, policy, config, on_bytes)
        if found is not None and state is not None:
            break
        refused[path] = reason
        if dist.get_rank() == 0:
            logger.warning("skipping %s: %s", path.name, reason)
    else:
        if refused:
            path, reason = refused.popitem()
            raise CheckpointError(
                f"none of the {len(refused) + 1} checkpoints in {folder} can be used ({path.name}: "
                f"{reason}); to start over, move {run_dir} away"
            )
        return None
    if dist.get_rank() == 0:
        for skipped in refused:
            aside = manifest.set_aside(skipped)
            logger.warning("set aside as %s until the run reaches that step again", aside)
        _log_changes(found, policy, config)
        record_changes(Path(run_dir), found, config)
    # No rank may train, and prune checkpoints, while a peer still reads.
    dist.barrier()
    if dist.get_rank() == 0:
        logger.info("resumed from %s", path)
        if AHEAD_NAME in found.files and state.open_step is None:
            logger.warning(
                "discarded the batch of step %d, sampled ahead with other settings", found.step
            )
    return state


def _try(
    path: Path, policy: Policy, config: Config, on_bytes: Callable[[int], None]
) -> tuple[Manifest | None, State | None, str]:
    """Load a candidate; return manifest and state, or the reason why not, the same on every rank.

    Collective.

    Raises:
        CheckpointError, ConfigError: it is complete, but this run must not resume it.
    """
    found, reason = _inspect(path, policy, config, on_bytes)
    if found is None or reason is not None:
        return None, None, reason or ""
    require_same_model(path, found.model, model_identity(policy.hf_config))
    require_same_sampling(path, found, config)
    require_allowed(path, found, config)
    _require_same_base(path, found, policy.base_sha256(), config)
    state, reason = _load(path, found, policy, config)
    return found, state, reason or ""


def _why_not_go_on_within(found: Manifest, policy: Policy, config: Config) -> str | None:
    """Why an open step cannot be finished here: its files depend on rank and packing plan.

    None for a checkpoint between steps.
    """
    if found.open_updates is None:
        return None
    if found.open_updates and found.layout != layout(policy.groups):
        return f"it is within a step of another parallel layout ({_shown(found.layout)})"
    changed = [*changes(found.config, config)]
    if found.implementation != policy.implementation:
        changed.append("optimizer.implementation")
    if found.open_updates:
        changed += changed_layout(found.config, config)
    if changed:
        return f"it is within a step with other settings ({', '.join(changed)})"
    return None


def _load(
    path: Path, found: Manifest, policy: Policy, config: Config
) -> tuple[State | None, str | None]:
    """Load a candidate, or return an error, the same on every rank. Collective.

    Everything but the tensors is read before any state changes. After a failure among the tensors,
    the next candidate's tensors replace those already read.
    """
    branch, changed = found.branch, {*changes(found.config, config)}
    if branch is not None and branch.step == found.step:
        changed |= {*branch.changes}
    random_state, state, problem = None, None, None
    try:
        is_same_layout = found.layout == layout(policy.groups)
        _check_contents(path, found, is_same_layout=is_same_layout)
        if is_same_layout:
            random_state = rng.read(path / rng.file_name(dist.get_rank()))
        state = State.load(path, step=found.step)
        state.branch = branch
        if found.open_updates is not None:
            state.open_step = OpenStep.load(path, policy.device, num_updates=found.open_updates)
        if OPEN_GROUPS_NAME in found.files:
            state.open_groups = load_open_groups(path)
        if AHEAD_NAME in found.files and not changed:
            state.load_ahead(path)
        if any(name.startswith("objective.") for name in changed):
            state.window = CorrelationWindow()  # the window must not mix objectives
    except (CheckpointError, ConversionError) as error:
        problem = str(error)
    if problem := first_problem(problem):
        return None, problem
    try:
        loaded = load_sharded(policy.sharded_state_dict(is_loading=True), path)
    except ConversionError as error:
        problem = str(error)
    if problem := first_problem(problem):
        return None, problem
    try:
        policy.load_state_dict(loaded)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # Optimizer settings in common.pt, which Megatron-core uses unchecked.
        problem = f"{path} does not fit this run: {said(error)}"
        logger.debug("%s", problem, exc_info=True)
    if problem := first_problem(problem):
        return None, problem
    if random_state is not None:
        rng.restore(random_state)
    elif dist.get_rank() == 0:
        logger.warning(
            "%s was written on another parallel layout (%s): weights and optimizer are the same, "
            "random state is seeded again",
            path,
            _shown(found.layout),
        )
    return state, None


def _check_contents(path: Path, found: Manifest, *, is_same_layout: bool) -> None:
    """Refuse pickled code that Megatron-core would run, and files without a digest.

    Raises:
        CheckpointError, ConversionError: names the file.
    """
    rank, metadata = dist.get_rank(), read_metadata(path)
    needed = {TRAINER_STATE_NAME, ".metadata", "metadata.json"}
    needed |= {info.relative_path for info in metadata.storage_data.values()}
    if (path / "common.pt").exists():
        needed.add("common.pt")
    if is_same_layout:
        needed.add(rng.file_name(rank))
    if found.open_updates is not None:
        needed |= {BATCH_NAME, *([progress_name(rank)] if found.open_updates else [])}
    if unlisted := sorted(needed - found.files.keys()):
        raise CheckpointError(f"{path / manifest.MANIFEST_NAME} does not list {unlisted[0]}")
    num_updates = read_common(path, metadata).get("num_updates")
    if type(num_updates) is not int or num_updates < 0:
        raise CheckpointError(
            f"{path}: num_updates ({reprlib.repr(num_updates)}) must be an integer of at least 0"
        )


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _inspect(
    path: Path, policy: Policy, config: Config, on_bytes: Callable[[int], None]
) -> tuple[Manifest | None, str | None]:
    """Manifest of a candidate, and why it cannot be used, the same on every rank. Collective."""
    found, damage = _from_rank_0(_try_manifest(path))
    if found is not None:
        damage = find_damage_together(path, found, on_bytes=on_bytes)
        damage = damage or _why_not_go_on_within(found, policy, config)
    return found, damage


def _try_manifest(path: Path) -> tuple[Manifest | None, str | None]:
    if dist.get_rank() != 0:
        return None, None
    try:
        return manifest.read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)


def _from_rank_0(value: Any) -> Any:
    """Broadcast rank 0's value. Collective."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def require_same_model(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse the checkpoint in `path` if it belongs to another model.

    Raises:
        CheckpointError: names the fields that differ.
    """
    differences = [
        f"{name} is {saved.get(name)!r} there and {ours.get(name)!r} here"
        for name in dict.fromkeys([*saved, *ours])
        if saved.get(name) != ours.get(name)
    ]
    if differences:
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(differences)}")


def _require_same_base(path: Path, found: Manifest, ours: str | None, config: Config) -> None:
    """Refuse the checkpoint in `path` if its adapter was trained on other frozen weights.

    Raises:
        ConfigError: names the setting and both digests.
    """
    if found.base_sha256 != ours:
        there, here = (digest and digest[:12] for digest in (found.base_sha256, ours))
        field = "megatron_dir" if config.model.megatron_dir else "hf_dir"
        raise ConfigError(
            f"model.{field} ({getattr(config.model, field)}) in model.precision "
            f"{config.model.precision!r} holds other weights (SHA-256 {here}...) than the frozen "
            f"ones on which the adapter in {path} was trained ({there}...)"
        )


def _log_changes(found: Manifest, policy: Policy, config: Config) -> None:
    """Log what has changed: it is allowed, but must not be silent.

    The optimizer of another implementation has the same moments, and rounds otherwise.
    """
    changed = {
        "optimizer.implementation": (found.implementation, policy.implementation),
        "megatron-core": (found.megatron_version, version()),
        **changes(found.config, config),
    }
    for name, (before, now) in changed.items():
        if now != before:
            logger.warning("resuming with %s = %r (was %r)", name, now, before)
