"""Packing plans from `batching.plan`: for a step's updates, or for a pass that only scores."""

from __future__ import annotations

import torch

from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.config import Config
from gapo_megatron.types import Batch, Plan, Sequences


def plan_updates(batch: Batch, config: Config, *, data_parallel_size: int) -> Plan:
    """Plan the mini-batches of a step: A = 0 leaves here unless every sequence is needed.

    A pure function of its arguments, which are the same on every rank.

    Raises:
        ConfigError: as `batching.plan`.
    """
    return plan(
        sequence_lengths(batch),
        batch.advantages,
        num_response_tokens=batch.num_response_tokens,
        valid=batch.valid,
        num_minibatches=config.batch.num_minibatches,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        keep_zero_advantage=config.objective.needs_every_sequence,
    )


def plan_scoring(
    sequences: Sequences,
    *,
    max_tokens_per_microbatch: int,
    data_parallel_size: int,
    chosen: torch.Tensor | None = None,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal sequences to ranks and micro-batches, as an update would, whatever their advantages.

    Args:
        sequences: the same on every rank.
        max_tokens_per_microbatch: token budget of one micro-batch, before alignment.
        data_parallel_size: number of ranks to deal to.
        chosen: [B] bool, which to score; None: all.

    Returns:
        As `Minibatch.microbatches`: [data_parallel_size][num_microbatches] tuples of positions.

    Raises:
        ConfigError: a sequence exceeds the budget (named).
    """
    lengths = sequence_lengths(sequences)
    (packing,) = plan(
        lengths,
        torch.zeros(len(lengths), dtype=torch.float64),
        valid=chosen,
        num_minibatches=1,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        keep_zero_advantage=True,
    ).minibatches
    return packing.microbatches
