"""Find the newest whole checkpoint and load it; all ranks decide together."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import dist_checkpointing
from transformers import PretrainedConfig

from gapo_megatron import cpu, manifest
from gapo_megatron.checkpoint import rng
from gapo_megatron.checkpoint.open_groups import load_open_groups, require_same_sampling
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.checkpoint.save import (
    TRAINER_STATE_NAME,
    layout,
    model_identity,
)
from gapo_megatron.config import Config
from gapo_megatron.errors import CheckpointError
from gapo_megatron.launch.run_folder import checkpoints_dir, is_finished
from gapo_megatron.manifest import Branch, Manifest
from gapo_megatron.policy import Policy
from gapo_megatron.settings import changes
from gapo_megatron.types import OpenGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a resumed run continues from; the policy has been loaded already."""

    step: int
    """Steps finished: the index of the next one."""
    trainer_state: dict[str, Any]
    """As given to `save`."""
    path: Path
    branch: Branch | None = None
    """Where the run left another one; None for one that began by itself."""
    open_step: OpenStep | None = None
    """The step that was under way; None between steps."""
    changes_objective: bool = False
    """Whether the steps before were under another objective: in a branch, or by the user's will."""
    open_groups: list[OpenGroup] = field(default_factory=list)
    """What the next step goes on with; the same on every rank."""

    @property
    def num_open_updates(self) -> int | None:
        return None if self.open_step is None else self.open_step.progress.num_updates


def check_resume(run_dir: str | Path, hf_config: PretrainedConfig, config: Config) -> None:
    """Refuse a run folder whose newest checkpoint the run cannot go on from; reads one small file.

    For use before any model is built. A damaged manifest passes: `load_latest` deals with it.

    Raises:
        CheckpointError: it is another model's; names the fields that differ.
        ConfigError: it has open groups, and the run would go on with them otherwise.
    """
    if newest := manifest.newest_manifest(checkpoints_dir(run_dir)):
        folder, found = newest
        require_same_model(folder, found.model, model_identity(hf_config))
        if not is_finished(run_dir, num_steps=config.run.num_steps):
            require_same_sampling(folder, found, config)


def load_latest(run_dir: str | Path, *, policy: Policy, config: Config) -> LoadedState | None:
    """Load the newest whole checkpoint into `policy`, whatever parallel layout wrote it.

    A damaged checkpoint is skipped with a warning that names the file, and set aside once an older
    whole one is found, so that a later resume cannot jump ahead to it. A half-written one has no
    final name and is never considered. Random state is restored when the layout is the same. A
    checkpoint within a step needs the layout and the settings it was written with: with others it
    counts as damaged.

    Args:
        run_dir: the run's output folder, on a file system all ranks share.
        policy: as built for this run; receives model, optimizer and update count.
        config: compared with the checkpoint's; differences are logged, not refused.

    Returns:
        Step and trainer state, the same on every rank; None when there is no checkpoint.

    Collectives, over all ranks: a broadcast of the candidates; per candidate a broadcast of its
    manifest and a gather of damage reports (every rank reads its share of the files); then those of
    Megatron-core's load; a barrier.

    Raises:
        CheckpointError: the checkpoint is another model's (names the fields), or there are
            checkpoints and none is whole.
        ConfigError: as of `check_resume`, of a checkpoint that is not the newest.
    """
    path, found, damaged = _newest_usable(checkpoints_dir(run_dir), layout(policy.groups), config)
    if found is None:
        return None
    require_same_model(path, found.model, model_identity(policy.hf_config))
    require_same_sampling(path, found, config)
    if dist.get_rank() == 0:
        for other in damaged:
            logger.warning("set aside as %s; the next save removes it", manifest.set_aside(other))
        _log_changes(found, config)
    return _load(path, found, policy, config)


def _newest_usable(
    folder: Path, sizes: Mapping[str, int], config: Config
) -> tuple[Path, Manifest | None, list[Path]]:
    """Newest whole checkpoint, its manifest (None: there is none), and the newer ones refused.

    `sizes` are this run's parallel sizes. The same on every rank. Collective.
    """
    refused: list[Path] = []
    for path in _from_rank_0(manifest.list_steps(folder)):
        found, reason = _inspect(path)
        if found is not None and reason is None:
            reason = _why_not_go_on_within(found, sizes, config)
        if reason is None:
            return path, found, refused
        refused.append(path)
        if dist.get_rank() == 0:
            logger.warning("skipping %s: %s", path.name, reason)
    if refused:
        raise CheckpointError(
            f"none of the {len(refused)} checkpoints in {folder} can be used ({path.name}: "
            f"{reason}); remove the folder to start over"
        )
    return folder, None, []


def _why_not_go_on_within(found: Manifest, sizes: Mapping[str, int], config: Config) -> str | None:
    """Why a step under way cannot be finished here: what is kept of it is one rank's, of one plan.

    None for a checkpoint between steps.
    """
    if found.open_updates is None:
        return None
    if found.layout != sizes:
        return f"it lies within a step of another parallel layout ({_shown(found.layout)})"
    if changed := changes(found.config, config):
        return f"it lies within a step of other settings ({', '.join(changed)})"
    return None


def _load(path: Path, found: Manifest, policy: Policy, config: Config) -> LoadedState:
    state = policy.sharded_state_dict(is_loading=True)
    with cpu.device_scope():
        loaded = dist_checkpointing.load(state, str(path))
    policy.load_state_dict(loaded)
    if found.layout == layout(policy.groups):
        rng.load(path / rng.file_name(dist.get_rank()))
    elif dist.get_rank() == 0:
        logger.warning(
            "%s was written on another parallel layout (%s): weights and optimizer are the same, "
            "random state starts anew",
            path,
            _shown(found.layout),
        )
    open_step = None if found.open_updates is None else OpenStep.load(path, policy.device)
    open_groups = load_open_groups(path)
    trainer_state = json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    branch, changed = found.branch, {*changes(found.config, config)}
    if branch is not None and branch.step == found.step:
        changed |= {*branch.changes}
    changes_objective = any(name.startswith("objective.") for name in changed)
    # Nobody trains on, and prunes, while a peer still reads.
    dist.barrier()
    if dist.get_rank() == 0:
        logger.info("resumed from %s", path)
    return LoadedState(
        step=found.step,
        trainer_state=trainer_state,
        path=path,
        branch=branch,
        open_step=open_step,
        changes_objective=changes_objective,
        open_groups=open_groups,
    )


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _inspect(path: Path) -> tuple[Manifest | None, str | None]:
    """Manifest and first damage of one candidate, the same on every rank. Collective."""
    found, damage = _from_rank_0(_try_manifest(path))
    if found is None:
        return None, damage
    # Largest first, dealt out in turn: about the same number of bytes for every rank.
    by_size = sorted(found.files, key=lambda name: (-found.files[name].num_bytes, name))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(
        reports, manifest.find_damage(path, {name: found.files[name] for name in share})
    )
    return found, next((report for report in reports if report is not None), None)


def _try_manifest(path: Path) -> tuple[Manifest | None, str | None]:
    if dist.get_rank() != 0:
        return None, None
    try:
        return manifest.read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)


def _from_rank_0(value: Any) -> Any:
    """Rank 0's value on every rank. Collective."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def require_same_model(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse the checkpoint in `path` if it is not this model's.

    Raises:
        CheckpointError: names the fields that differ.
    """
    names = dict.fromkeys([*saved, *ours])
    differences = [
        f"{name} is {saved.get(name)!r} there and {ours.get(name)!r} here"
        for name in names
        if saved.get(name) != ours.get(name)
    ]
    if differences:
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(differences)}")


def _log_changes(found: Manifest, config: Config) -> None:
    """Say what is not as it was; a changed setting is the user's right, a silent one is not."""
    for name, (before, now) in changes(found.config, config).items():
        logger.warning("resuming with %s = %r (was %r)", name, now, before)
    if found.megatron_version != megatron_version:
        logger.warning(
            "the checkpoint was written by megatron-core %s, this is %s",
            found.megatron_version,
            megatron_version,
        )
