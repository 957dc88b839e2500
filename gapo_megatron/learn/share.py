"""This rank's share of a batch: the tokens that it computes, brought from where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gapo_megatron.config import Config
from gapo_megatron.exchange import Channel, deal
from gapo_megatron.facts import Tokens
from gapo_megatron.learn.plan import wanted_sequences
from gapo_megatron.policy import ParallelGroups
from gapo_megatron.types import Batch

_TAG = 2


@dataclass(frozen=True, slots=True)
class Places:
    """Which rank computes which data-parallel share."""

    dp_ranks: tuple[int, ...]
    """Data-parallel rank of every rank: those of one compute the same sequences."""
    scorers: tuple[int, ...]
    """Per data-parallel rank the rank that reports its log-probs: last stage, first copy."""

    @classmethod
    def gather(cls, groups: ParallelGroups, gloo_group: dist.ProcessGroup | None) -> Places:
        """Collectives: one all-gather of two integers over all ranks; call it once."""
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

    def wanted(self, batch: Batch, config: Config) -> list[Sequence[int]]:
        """What every rank gets of a batch that other ranks have sampled: together all of it.

        A pure function of the facts, by which sender and receiver know what is in a message.
        """
        by_dp_rank = wanted_sequences(
            batch, config, data_parallel_size=len(self.scorers), every=True
        )
        return self.by_rank(by_dp_rank)

    def by_rank(self, by_dp_rank: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """What every rank wants, from what every data-parallel rank wants."""
        return [by_dp_rank[dp_rank] for dp_rank in self.dp_ranks]


def bring_tokens(
    batch: Batch, held: Mapping[int, Tokens], config: Config, *, places: Places, channel: Channel
) -> Batch:
    """Give every rank the tokens of its share; what it has itself sampled stays as well.

    Args:
        batch: facts alone, the same on every rank.
        held: by number what this rank has.
        config: the run's settings, which make the plan.
        places: which rank computes what.
        channel: joins all ranks.

    Collectives: one message at most between any two ranks.

    Raises:
        ConfigError: as of `wanted_sequences`.
    """
    wanted = wanted_sequences(batch, config, data_parallel_size=len(places.scorers))
    tokens = deal(held, batch.facts, places.by_rank(wanted), channel=channel, tag=_TAG)
    return batch.with_tokens({**held, **tokens})
