"""Which trainer gets the tokens of which sequences that generation ranks have sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gapo_megatron.config import Config
from gapo_megatron.learn.plan import DataParallelRanks, plan_step, rounding_share
from gapo_megatron.objective import make_batch
from gapo_megatron.rollouts import Rollouts


def rows_by_trainer(
    rollouts: Rollouts, config: Config, ranks: DataParallelRanks
) -> list[Sequence[int]]:
    """Rows whose tokens each trainer receives, ascending: those that it computes, and more.

    Both sides find them by the plan of the step, which follows from the table. No collective.

    Args:
        rollouts: a judged batch; the table is the same on every rank of both sides.
        config: the run's settings.
        ranks: the trainers' data-parallel ranks.
    """
    batch = make_batch(rollouts, config.objective.resolve())
    plan = plan_step(
        batch,
        config.batch,
        needs_every_sequence=config.objective.needs_every_sequence,
        data_parallel_size=len(ranks.scorers),
        measured_share=rounding_share(config.model.precision),
    )
    return ranks.wanted(replace(batch, plan=plan), every=True)
