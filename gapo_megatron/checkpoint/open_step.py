"""A step that a stop has cut in two: its rollouts are kept, and the updates done are not repeated.

Beside the weights, which have moved, this takes the batch, the log-probs at the weights that
generated it, and the metrics summed so far; then the other updates give the bits they would have
given.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from gapo_megatron.learn import Progress
from gapo_megatron.types import Batch

BATCH_NAME = "batch.pt"
_ARRAYS = ("prompt_ids", "response_ids", "rollout_log_probs", "carried_log_probs")


@dataclass(frozen=True)
class OpenStep:
    """What a step has produced before its last update."""

    batch: Batch
    """The same on every rank."""
    metrics: dict[str, float]
    """Of rollouts and groups, the same on every rank."""
    evaluated: dict[str, float]
    """Metrics of the evaluation before the step; empty without one."""
    progress: Progress = field(default_factory=Progress)
    """This rank's."""

    def save(self, folder: Path) -> None:
        """Write this rank's progress; rank 0 the rest. No collective."""
        write(folder / progress_name(dist.get_rank()), asdict(self.progress))
        if dist.get_rank() == 0:
            fields = {name: getattr(self.batch, name) for name in Batch.__slots__}
            for name in _ARRAYS:
                fields[name] = [torch.from_numpy(array) for array in fields[name]]
            write(
                folder / BATCH_NAME,
                {"batch": fields, "metrics": self.metrics, "evaluated": self.evaluated},
            )

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """Read what `save` wrote on this rank of the same parallel layout. No collective."""
        shared: dict[str, Any] = torch.load(folder / BATCH_NAME, weights_only=True)
        fields = shared["batch"]
        for name in _ARRAYS:
            # One written before there were carried tokens has none.
            fields[name] = [tensor.numpy() for tensor in fields.get(name, [])]
        progress: dict[str, Any] = torch.load(
            folder / progress_name(dist.get_rank()), weights_only=True
        )
        progress["old_log_probs"] = [
            one and [values if values is None else values.to(device) for values in one]
            for one in progress["old_log_probs"]
        ]
        return cls(
            batch=Batch(**fields),
            metrics=shared["metrics"],
            evaluated=shared["evaluated"],
            progress=Progress(**progress),
        )


def progress_name(rank: int) -> str:
    """Name of a rank's file in a checkpoint folder."""
    return f"progress_{rank:05d}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values; they are on disk when it returns."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # another node could not flush what this one wrote
