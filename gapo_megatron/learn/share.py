"""This rank's share of a batch: the tokens that it computes, fetched from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gapo_megatron.exchange import Channel, deal_tokens
from gapo_megatron.learn.plan import wanted_sequences
from gapo_megatron.policy import ParallelGroups
from gapo_megatron.rollouts import Batch

_TAG = 2


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
        """Sequences that every rank must have (`wanted_sequences`).

        A pure function of the table: sender and receiver derive the content of messages from it.
        """
        assert batch.plan is not None, "the batch is not planned"
        return self.by_rank(wanted_sequences(batch.plan, num_sequences=len(batch), every=every))

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
