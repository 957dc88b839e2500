"""A step interrupted by a stop: its rollouts are kept, and finished updates are not repeated.

The weights have changed within the step, so a checkpoint also holds the batch, its old log-probs,
its routes of tokens to experts and the metrics summed so far: the remaining updates then give the
same bits as without the stop.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
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
_TORCH_TYPES = {np.int32: torch.int32, np.float32: torch.float32, np.bool_: torch.bool}
_PER_SEQUENCE = {
    "advantages": torch.float64,
    "num_correct": torch.int64,
    "group_size": torch.int64,
    "valid": torch.bool,
}


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
        """A step before its first update, with all tokens on this rank.

        Raises:
            LookupError, TypeError, ValueError: `shared` is not a result of `OpenStep.shared`.
        """
        return cls(
            _to_batch(shared["batch"], shared["facts"]),
            files.numbers(shared["metrics"]),
            files.numbers(shared["evaluated"]),
        )

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, num_updates: int) -> Self:
        """Read what `serialised` gave on this rank of the same parallel layout. No collective.

        A step before its first update can be read on any rank of any layout.

        Args:
            folder: the checkpoint's folder.
            device: device of log-probs.
            num_updates: number of updates in the checkpoint's manifest.

        Raises:
            CheckpointError: a file is missing, damaged or misshapen; names it.
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


def _to_batch(fields: dict[str, Any], table: Any) -> Batch:
    """The batch with all its tokens."""
    fields = {**fields}
    routes = [
        files.matrix(one, torch.uint8).numpy()
        for one in files.plain(fields.pop("routes", []), list)  # only of a batch with routes
    ]
    prompts, responses, log_probs, scored, masks, versions = (
        [
            files.column(one, _TORCH_TYPES[dtype]).numpy()
            for one in files.plain(fields.pop(name), list)
        ]
        for name, dtype in COLUMNS.items()
        if name != "routes"
    )
    columns: dict[str, Any] = {
        name: files.column(one, _PER_SEQUENCE[name], length=len(responses))
        for name, one in fields.items()
    }
    lengths = [*map(len, responses)]
    if len(prompts) != len(lengths) or [*map(len, log_probs)] != lengths:
        raise ValueError("prompts, responses and log-probs differ in number or length")
    if not lengths or not all(map(len, [*prompts, *responses])):
        raise ValueError("no sequences, or an empty prompt or response")
    if masks and ([*map(len, masks)] != lengths or not all(mask.any() for mask in masks)):
        raise ValueError("response masks that do not match the responses")
    counts = [[*map(len, arrays)] for arrays in (scored, versions, responses) if arrays]
    for fewer, more in itertools.pairwise(counts):
        if any(a > b for a, b in zip(fewer, more, strict=True)):
            raise ValueError("more carried tokens than response tokens, or log-probs than these")
    fed = [len(a) + len(b) - 1 for a, b in zip(prompts, responses, strict=True)]
    if routes and (len(routes) != len(fed) or any(map(operator.gt, map(len, routes), fed))):
        raise ValueError("routes of more tokens than a sequence has")
    rollouts = Rollouts.of(
        prompts,
        responses,
        log_probs,
        carried_log_probs=scored,
        carried_versions=versions,
        response_masks=masks,
        routes=routes,
    )
    rollouts = replace(rollouts, table=_to_table(table, rollouts.table))
    # Every rank has all tokens now: assign their holders round-robin.
    rollouts = rollouts.changed(holder=np.arange(len(rollouts)) % dist.get_world_size())
    return Batch(rollouts.table, rollouts.tokens, **columns)


def _to_table(words: Any, found: np.ndarray) -> np.ndarray:
    """The table of a file of int32 words, if its lengths match `found`."""
    num_words, count = ROW.itemsize // 4, len(found)
    if (
        not isinstance(words, torch.Tensor)
        or words.dtype != torch.int32
        or words.shape != (count, num_words)
    ):
        raise ValueError(f"{words!r:.40} instead of the facts of {count} sequences")
    table = np.ascontiguousarray(words.numpy()).view(ROW)[:, 0]
    kinds = ("prompt", "response", "sampled", "carried", "scored", "routed")
    for name in (*(f"num_{kind}_tokens" for kind in kinds), "num_routes"):
        if (table[name] != found[name]).any():
            raise ValueError(f"facts whose {name} do not match the tokens")
    return table


def _to_fields(progress: Progress) -> dict[str, Any]:
    # Not `asdict`, which would copy the routes on the device.
    scores, routes = progress.scores and vars(progress.scores), vars(progress.routes)
    return vars(progress) | {"scores": scores, "routes": routes}


def _to_progress(fields: dict[str, Any], device: torch.device) -> Progress:
    if missing := {one.name for one in dataclasses.fields(Progress)} - fields.keys():
        raise ValueError(f"without {', '.join(sorted(missing))}")
    progress = Progress(**fields)
    progress.scores = fields["scores"] and _to_scores(fields["scores"])
    progress.routes = _to_recorded(fields["routes"], device)
    progress.old_log_probs = [
        [
            values if values is None else files.column(values, torch.float32).to(device)
            for values in files.plain(one, list)  # None off the last pipeline stage
        ]
        for one in files.plain(progress.old_log_probs, list)
    ]
    for name, total in files.plain(progress.sums, dict).items():
        if not isinstance(total, torch.Tensor):
            raise ValueError(f"{total!r:.40} instead of the sum {name}")
    for number in (*files.plain(progress.grad_norms, list), progress.learning_rate):
        files.plain(number, float, int)
    return progress


def _to_recorded(fields: Any, device: torch.device) -> Recorded:
    counts = files.plain(fields, dict)["counts"]
    routes = {
        files.plain(number, int): [
            {
                files.plain(layer, int): files.matrix(experts, torch.uint8, torch.int16).to(device)
                for layer, experts in files.plain(one, dict).items()
            }
            for one in files.plain(microbatches, list)
        ]
        for number, microbatches in files.plain(fields["routes"], dict).items()
    }
    if counts is not None:
        counts = files.matrix(counts, torch.int64).to(device)
    return Recorded(routes, counts)


def _to_scores(fields: Any) -> Scores:
    """Log-probs that measure a step's rounding, on the CPU."""
    dtypes = {"in_run": (torch.float32,), "exact": (torch.float32, torch.float64)}
    if files.plain(fields, dict).keys() != dtypes.keys():
        raise ValueError(f"{', '.join(map(str, fields))} instead of {', '.join(dtypes)}")
    for name, kinds in dtypes.items():
        for i, values in files.plain(fields[name], dict).items():
            files.plain(i, int)
            dtype = kinds[-1] if getattr(values, "dtype", None) == kinds[-1] else kinds[0]
            files.column(values, dtype)
    if fields["in_run"].keys() != fields["exact"].keys():
        raise ValueError("log-probs with and without rounding belong to different sequences")
    return Scores(**fields)
