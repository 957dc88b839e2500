"""Packing plans, of a step or of a pass that only scores, and the tokens that a rank then needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.batching import plan
from gapo_megatron.config import VERIFIED_SEQUENCES, BatchConfig
from gapo_megatron.exchange import Channel, deal_tokens
from gapo_megatron.policy import ParallelGroups
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Plan

ROUNDING_SEQUENCES = 16
"""Number of sequences that measure a step's rounding, with at least two on each data-parallel rank:
enough for a correlation."""

_TAG = 2
"""Tag of messages with tokens."""

_EXACT_COST = {"fp32": 4, "bf16": 15, "fp16": 15, "fp8": 15}
"""Cost of a pass in the higher precision, in passes of the run's: float64 products, and logits that
the fused head does not make; float32 products, 67 against 989 TFLOP/s on an H100."""


def rounding_share(precision: str) -> float:
    """Largest share of a step's tokens that measure its rounding: half of what the updates cost.

    A token costs an update three passes, and the measurement two in either precision. Counted, not
    timed: a clock must not decide what is measured.
    """
    return 0.5 * 3 / (2 * (1 + _EXACT_COST[precision]))


def plan_step(
    batch: Batch,
    settings: BatchConfig,
    *,
    needs_every_sequence: bool,
    data_parallel_size: int,
    measured_share: float = 1.0,
) -> Plan:
    """Plan a step's mini-batches, without the sequences that cannot change the weights (A = 0).

    A pure function of its arguments, which are the same on every rank.

    Args:
        batch: table, c, k and A; no tokens are read.
        settings: section `batch`.
        needs_every_sequence: also compute sequences with A = 0
            (`ObjectiveConfig.needs_every_sequence`).
        data_parallel_size: number of data-parallel ranks.
        measured_share: `rounding_share`; with few sequences perhaps too small for one.

    Raises:
        ConfigError: see `batching.plan`.
    """
    steps = plan(
        batch.num_fed_tokens,
        batch.advantages,
        num_response_tokens=batch.num_sampled_tokens,
        valid=batch.valid,
        num_minibatches=settings.num_minibatches,
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        keep_zero_advantage=needs_every_sequence,
    )
    # Evenly spaced, hence from different prompts, among sequences that the clip affects (A != 0).
    active = (batch.valid & (batch.advantages != 0)).numpy().nonzero()[0]
    lengths = batch.num_fed_tokens.numpy()[active]
    budget = measured_share * steps.num_tokens_computed
    chosen = torch.zeros_like(batch.valid)
    # Of thousands of ranks thousands of counts are tried: none may read the whole batch.
    for count in range(min(max(ROUNDING_SEQUENCES, 2 * data_parallel_size), len(active)), 0, -1):
        spaced = np.arange(count) * len(active) // count
        if int(lengths[spaced].sum()) <= budget:
            chosen[active[spaced]] = True
            break
    rounding = plan_scoring(
        batch,
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        chosen=chosen,
    )
    return Plan(steps.minibatches, steps.num_tokens_skipped, steps.num_tokens_computed, rounding)


def plan_scoring(
    rollouts: Rollouts,
    *,
    max_tokens_per_microbatch: int,
    data_parallel_size: int,
    chosen: torch.Tensor | None = None,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Assign sequences to ranks and micro-batches as for an update, regardless of advantages.

    Args:
        rollouts: table, the same on every rank; no tokens are read.
        max_tokens_per_microbatch: token budget of a micro-batch, before alignment.
        data_parallel_size: number of data-parallel ranks.
        chosen: [B] bool, sequences to score; None: all.

    Returns:
        Like `Minibatch.microbatches`: [data_parallel_size][num_microbatches] tuples of row numbers.

    Raises:
        ConfigError: a sequence exceeds the budget (named).
    """
    (packing,) = plan(
        rollouts.num_fed_tokens,
        torch.zeros(len(rollouts), dtype=torch.float64),
        valid=chosen,
        num_minibatches=1,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_size=data_parallel_size,
        keep_zero_advantage=True,
    ).minibatches
    return packing.microbatches


@dataclass(frozen=True, slots=True)
class DataParallelRanks:
    """Data-parallel rank of every rank, and the ranks that report log-probs."""

    dp_ranks: tuple[int, ...]
    """Data-parallel rank of every rank; ranks with the same value compute the same sequences."""
    scorers: tuple[int, ...]
    """The rank that reports log-probs for each data-parallel rank: last stage, first copy."""

    @classmethod
    def gather(
        cls, groups: ParallelGroups, gloo_group: dist.ProcessGroup | None
    ) -> DataParallelRanks:
        """Gather from all ranks. Collectives: one all-gather of two integers; call it once."""
        reports = groups.is_last_stage and groups.is_first_copy
        own = torch.tensor([groups.dp_rank, int(reports)])
        parts = [torch.empty_like(own) for _ in range(groups.world_size)]
        dist.all_gather(parts, own, group=gloo_group)
        pairs = [part.tolist() for part in parts]
        scorers = {dp_rank: rank for rank, (dp_rank, reports) in enumerate(pairs) if reports}
        return cls(
            tuple(dp_rank for dp_rank, _ in pairs),
            tuple(scorers[dp_rank] for dp_rank in range(groups.dp_size)),
        )

    def wanted(self, batch: Batch, *, every: bool) -> list[Sequence[int]]:
        """Rows whose tokens every rank must have, ascending.

        These are the sequences of its updates, those that measure rounding, and the first sequences
        of the batch, with which every rank verifies its engine's weights. A pure function of the
        table: sender and receiver derive the content of messages from it.

        Args:
            batch: planned.
            every: also assign the sequences that no rank computes (A = 0). For a batch sampled by
                ranks that only generate: a checkpoint gathers the whole batch from the trainers.
        """
        assert batch.plan is not None, "the batch is not planned"
        everything, wanted = {*range(len(batch))}, []
        for rank, rounding in enumerate(batch.plan.rounding):
            shares = [one.microbatches[rank] for one in batch.plan.minibatches] + [rounding]
            found = {i for microbatches in shares for indices in microbatches for i in indices}
            wanted.append(found | {*range(min(VERIFIED_SEQUENCES, len(batch)))})
        for i in everything - set().union(*wanted) if every else ():
            wanted[i % len(wanted)].add(i)
        return self.by_rank([sorted(one) for one in wanted])

    def by_rank(self, by_dp_rank: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Sequences of every rank, from those of every data-parallel rank."""
        return [by_dp_rank[dp_rank] for dp_rank in self.dp_ranks]


def bring_tokens(batch: Batch, *, ranks: DataParallelRanks, channel: Channel) -> Batch:
    """Send every rank the tokens of its share; tokens that it already holds are kept.

    Args:
        batch: planned; the same on every rank except for the tokens.
        ranks: data-parallel rank of every rank.
        channel: channel of all ranks.

    Collectives: at most one message between any two ranks.
    """
    brought = deal_tokens(batch, ranks.wanted(batch, every=False), channel=channel, tag=_TAG)
    both = {name: {**held, **brought.tokens[name]} for name, held in batch.tokens.items()}
    return batch.with_tokens(both)
