"""Packing plans from `batching.plan`: for a step's updates, or for a pass that only scores."""

from __future__ import annotations

import torch

from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
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


ROUNDING_SEQUENCES = 16
"""So many at least measure a step's rounding, and two of each data-parallel rank: enough for a
correlation, few beside the hundreds of a step."""


def plan_rounding(
    batch: Batch, config: Config, *, data_parallel_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal out the sequences that measure a step's rounding (`learn.rounding`).

    Evenly spaced, so of different prompts, among those whose ratio is clipped or not (A != 0).

    Returns:
        As `plan_scoring`.
    """
    active = (batch.valid & (batch.advantages != 0)).nonzero().flatten()
    count = min(max(ROUNDING_SEQUENCES, 2 * data_parallel_size), len(active))
    chosen = torch.zeros_like(batch.valid)
    chosen[active[torch.arange(count) * len(active) // max(count, 1)]] = True
    return plan_scoring(
        batch,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        chosen=chosen,
    )


def wanted_sequences(
    batch: Batch, config: Config, *, data_parallel_size: int, every: bool = False
) -> list[list[int]]:
    """Sequences whose tokens each data-parallel rank must have: a pure function of the facts.

    They are those that its updates compute, those that measure rounding, and the first ones, which
    every rank checks its engine's weights with.

    Args:
        batch: facts, c, k and A; no tokens are looked at.
        config: the run's settings.
        data_parallel_size: number of ranks to deal to.
        every: also deal out the sequences that no rank computes (A = 0). For a batch that ranks of
            the generation side sampled: a checkpoint gathers all of it from the trainers.

    Returns:
        [data_parallel_size] lists of positions, ascending.

    Raises:
        ConfigError: as `batching.plan`.
    """
    updates = plan_updates(batch, config, data_parallel_size=data_parallel_size)
    rounding = plan_rounding(batch, config, data_parallel_size=data_parallel_size)
    wanted = []
    for rank in range(data_parallel_size):
        shares = [one.microbatches[rank] for one in updates.minibatches] + [rounding[rank]]
        found = {i for microbatches in shares for indices in microbatches for i in indices}
        wanted.append(found | {*range(min(VERIFIED_SEQUENCES, len(batch.facts)))})
    if every:
        for i in {*range(len(batch.facts))} - set().union(*wanted):
            wanted[i % data_parallel_size].add(i)
    return [sorted(one) for one in wanted]


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
    return deal_lengths(
        sequence_lengths(sequences),
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        chosen=chosen,
    )


def deal_lengths(
    lengths: torch.Tensor,
    *,
    max_tokens_per_microbatch: int,
    data_parallel_size: int,
    chosen: torch.Tensor | None = None,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`plan_scoring` of sequences whose tokens are elsewhere, from their lengths [B] int64."""
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
