"""A step interrupted by a stop: its rollouts are kept, and finished updates are not repeated.

The weights have changed within the step, so a checkpoint also holds the batch, its old log-probs,
its routes of tokens to experts and the metrics summed so far: the remaining updates then give the
same bits as without the stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.checkpoint import files
from gapo_megatron.exchange import Channel, gather_tokens
from gapo_megatron.learn.checks.rounding import Scores
from gapo_megatron.learn.checks.routes import Recorded
from gapo_megatron.learn.step import Progress
from gapo_megatron.rollouts import COLUMNS, ROW, Batch, Rollouts

_TAG = 5
BATCH_NAME = "batch.pt"
_PER_SEQUENCE = ("advantages", "num_correct", "group_size", "valid")


@dataclass(frozen=True)
class OpenStep:
    """State of an unfinished step: its batch, and the progress of its updates."""

    batch: Batch
    """The step's batch. All tokens are on rank 0 for a save (`gathered`), on every rank after a
    load."""
    metrics: dict[str, float]
    """Metrics of rollouts and groups; the same on every rank."""
    evaluated: dict[str, float]
    """Metrics of the evaluation before the step; empty without one."""
    progress: Progress = field(default_factory=Progress)
    """This rank's progress with the updates."""
    is_ahead: bool = False
    """Whether the batch was sampled ahead: before its first update it is saved as a separate file
    of a checkpoint between steps."""

    def gathered(self, channel: Channel) -> Self:
        """A copy with all tokens of the batch on rank 0 of the channel, which saves them.

        Collectives: messages from all ranks to rank 0.
        """
        gathered = gather_tokens(self.batch, channel=channel, tag=_TAG)
        return replace(self, batch=gathered) if channel.rank == 0 else self

    def serialised(self) -> dict[str, bytes]:
        """Content of this rank's files by name: its progress, on rank 0 also the rest."""
        rank = dist.get_rank()
        content = {progress_name(rank): files.serialise(_to_fields(self.progress))}
        if rank == 0:
            content[BATCH_NAME] = files.serialise(self.shared())
        return content

    def shared(self) -> dict[str, Any]:
        """Content of the file without the progress, with all tokens; see `from_shared`."""
        batch, rows = self.batch, range(len(self.batch))
        masks = [batch.is_sampled(i) for i in rows] if batch.response_masks else []
        held = {
            "prompt_ids": [batch.prompt_ids[i] for i in rows],
            "response_ids": [batch.response_ids[i] for i in rows],
            "rollout_log_probs": [batch.rollout_log_probs[i] for i in rows],
            "carried_log_probs": [batch.carried_log_probs[i] for i in rows if batch.has_scored],
            "response_masks": masks,
            "conversations": [batch.conversations_of(i) for i in rows if batch.conversations],
            "carried_versions": [batch.carried_versions[i] for i in rows if batch.has_carried],
        }
        if batch.has_routes:
            nothing = np.empty((0, 0), np.uint8)
            held["routes"] = [nothing if (one := batch.routes_of(i)) is None else one for i in rows]
        fields: dict[str, Any] = {name: getattr(batch, name) for name in _PER_SEQUENCE}
        fields |= {name: [*map(torch.from_numpy, arrays)] for name, arrays in held.items()}
        return {
            "batch": fields,
            "facts": torch.from_numpy(batch.table.view(np.int32).reshape(len(batch), -1)),
            "metrics": self.metrics,
            "evaluated": self.evaluated,
        }

    @classmethod
    def from_shared(cls, shared: dict[str, Any]) -> Self:
        """A step before its first update, with all tokens on this rank."""
        batch = _to_batch(shared["batch"], shared["facts"])
        return cls(batch, shared["metrics"], shared["evaluated"])

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, num_updates: int) -> Self:
        """Read what `serialised` gave on this rank of the same parallel layout. No collective.

        A step before its first update can be read on any rank of any layout.

        Args:
            folder: the checkpoint's folder.
            device: device of log-probs.
            num_updates: number of updates in the checkpoint's manifest.

        Raises:
            CheckpointError: a file is missing or damaged; names it.
        """
        with files.reading(folder / BATCH_NAME) as shared:
            step = cls.from_shared(shared)
        if num_updates == 0:
            return step
        with files.reading(folder / progress_name(dist.get_rank())) as fields:
            progress = _to_progress(fields, device)
            if progress.num_updates != num_updates:
                raise ValueError(f"{progress.num_updates} updates instead of {num_updates}")
        return replace(step, progress=progress)


def progress_name(rank: int) -> str:
    """Name of a rank's file in a checkpoint folder."""
    return f"progress_{rank:05d}.pt"


def _to_batch(fields: dict[str, Any], facts: torch.Tensor) -> Batch:
    """The batch with all its tokens."""
    fields = {**fields}
    # Routes are there only if the batch has some.
    arrays = {name: [one.numpy() for one in fields.pop(name, [])] for name in COLUMNS}
    table = facts.numpy().view(ROW)[:, 0]
    # Every rank has all tokens now: assign their holders round-robin.
    holder = np.arange(len(table)) % dist.get_world_size()
    rollouts = replace(Rollouts.of(**arrays), table=table).changed(holder=holder)
    return Batch(rollouts.table, rollouts.tokens, **fields)


def _to_fields(progress: Progress) -> dict[str, Any]:
    # Not `asdict`, which would copy the routes on the device.
    scores, routes = progress.scores and vars(progress.scores), vars(progress.routes)
    return vars(progress) | {"scores": scores, "routes": routes}


def _to_progress(fields: dict[str, Any], device: torch.device) -> Progress:
    scores, recorded = fields["scores"], fields["routes"]
    progress = Progress(**fields)
    progress.scores = scores and Scores(**scores)
    progress.routes = Recorded(
        {
            number: [{layer: ids.to(device) for layer, ids in one.items()} for one in microbatches]
            for number, microbatches in recorded["routes"].items()
        },
        None if recorded["counts"] is None else recorded["counts"].to(device),
    )
    progress.old_log_probs = [
        [values if values is None else values.to(device) for values in one]
        for one in progress.old_log_probs  # None off the last pipeline stage
    ]
    return progress
