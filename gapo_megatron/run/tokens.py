"""A step's samples token by token: what was sampled, joined with what the updates made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gapo_megatron.config import Config, ObjectiveConfig
from gapo_megatron.exchange import Channel
from gapo_megatron.learn import records
from gapo_megatron.learn.records import Record
from gapo_megatron.learn.step import Progress
from gapo_megatron.rollout.pieces import Pieces
from gapo_megatron.rollout.samples import kept_rows
from gapo_megatron.rollouts import Batch
from gapo_megatron.run.generation import Generation
from gapo_megatron.run.inputs import Inputs
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.types import Prompt, Sample, SampleTokens


class TokenRecords:
    """Chooses what is recorded of a step, and writes it at the step's end (rank 0)."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        generation: Generation,
        channel: Channel,
        writer: MetricsWriter,
    ) -> None:
        """`channel`: of all ranks of the trainer. No collective."""
        self._config = config
        self._inputs = inputs
        self._generation = generation
        self._channel = channel
        self._writer = writer

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._inputs.tokenizer.decode)

    def rows(self, batch: Batch, step: int) -> list[int]:
        """Rows of the step's batch that are recorded, the same on every rank."""
        number = self._config.metrics.samples_per_step
        return kept_rows(batch, number, step=step) if number else []

    def log(self, step: int, batch: Batch, progress: Progress) -> None:
        """Write the step's samples token by token.

        Args:
            step: index of the step.
            batch: its batch, after all updates.
            progress: of all updates; what was recorded before a stop is what was chosen then.

        Collectives: that of `records.gather`, if samples are kept.

        Raises:
            MachineError: the disk is full or fails.
        """
        objective, rows = self._config.objective, progress.recorded
        if not rows:
            return
        found = records.gather(
            batch,
            rows,
            progress.records,
            is_per_token=objective.resolve().ratio == "token",
            ranks=self._generation.dp_ranks,
            channel=self._channel,
        )
        if self._channel.rank == 0:
            tokens = describe(
                batch,
                found,
                self._writer.samples_of(step),
                objective=objective,
                problems=self._inputs.source.problems,
                pieces=self._pieces,
            )
            self._writer.log_tokens(step, tokens)


def describe(
    batch: Batch,
    records: Sequence[Record],
    samples: Sequence[Sample],
    *,
    objective: ObjectiveConfig,
    problems: Sequence[Prompt],
    pieces: Pieces,
) -> list[SampleTokens]:
    """Join records and samples of a step, in the order of the samples.

    Args:
        batch: the step's.
        records: of some of its rows.
        samples: of the same responses; what is in only one of the two is left out.
        objective: section `objective`.
        problems: problems of the data, by the table's numbers.
        pieces: of the policy's tokenizer.
    """
    table = batch.table
    of_row = {
        (problems[table["problem"][one.row]].id, int(table["sample"][one.row])): one
        for one in records
    }
    found = [(one, of_row.get((one.problem, one.sample))) for one in samples]
    return [
        _described(batch, record, sample, objective, pieces)
        for sample, record in found
        if record is not None
    ]


def _described(
    batch: Batch, record: Record, sample: Sample, objective: ObjectiveConfig, pieces: Pieces
) -> SampleTokens:
    learned = _learned(record, objective) if record.learned else {}
    return SampleTokens(
        sample=sample,
        token_ids=record.token_ids,
        pieces=pieces.split(record.token_ids.tolist(), sample.response),
        response_mask=record.is_sampled,
        conversations=record.conversations,
        policy_versions=record.versions,
        rollout_log_probs=np.where(record.is_sampled, record.rollout_log_probs, np.nan),
        advantage=float(batch.advantages[record.row]),
        update=record.minibatch,
        **learned,
    )


def _learned(record: Record, objective: ObjectiveConfig) -> Mapping[str, Any]:
    """Fields of a computed response from `update` on."""
    method, found = objective.resolve(), record.learned
    ratio, lower, upper = found["facts"].tolist()
    log_probs, old = _spread(record, found["log_probs"]), _spread(record, found["old_log_probs"])
    has_old = not np.isnan(found["old_log_probs"]).any()
    base = old if objective.old_log_probs == "trainer" else record.rollout_log_probs
    log_ratio = log_probs.astype(np.float64) - base
    is_per_token = method.ratio == "token"
    clipped = found["clipped"].astype(np.float32)
    deviation = log_ratio[record.is_sampled] if is_per_token else np.array([ratio - 1])
    sides = deviation[clipped > 0]
    is_high, is_low = bool((sides > 0).any()), bool((sides <= 0).any())
    fields: dict[str, Any] = {
        "ratio": None if is_per_token else ratio,
        "clipped": float(clipped.mean()) if len(clipped) else 0.0,
        "clip_side": {(1, 1): "both", (1, 0): "high", (0, 1): "low"}.get((is_high, is_low), ""),
        "token_clipped": _spread(record, clipped) if is_per_token else None,
        "old_log_probs": old if has_old else None,
        "log_probs": log_probs,
        "log_ratio": log_ratio.astype(np.float32),
    }
    if method.is_band or method.bounds != "fixed":
        fields |= {"clip_low": 1 - lower, "clip_high": 1 + upper}
    return fields


def _spread(record: Record, values: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens at their places; NaN at the others."""
    every = np.full(len(record.token_ids), np.nan, dtype=np.float32)
    every[record.is_sampled] = values
    return every
