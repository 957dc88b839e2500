"""Selection of informative groups, and metrics of a step's rollouts, from the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gapo_megatron.config import BatchConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.objective.groups import rewards_differ
from gapo_megatron.rollout.requests import request_seed
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Outcome


def informative(rollouts: Rollouts, *, virtual_correct: int = 0) -> np.ndarray:
    """[G] bool: groups whose valid rollouts differ in reward; in the others every A is 0.

    Args:
        rollouts: whole groups; only the table is read.
        virtual_correct: `Method.virtual_correct`.
    """
    rewards = torch.from_numpy(rollouts.rewards)
    differ: np.ndarray = rewards_differ(
        rewards.view(-1, max(rollouts.rollouts_per_prompt, 1)), virtual_correct=virtual_correct
    ).numpy()
    return differ


def choose(rollouts: Rollouts, wanted: int, *, virtual_correct: int = 0) -> list[int]:
    """Numbers of `wanted` groups, ascending; prefers informative groups, then earlier groups."""
    is_informative = informative(rollouts, virtual_correct=virtual_correct)
    by_worth = sorted(range(len(is_informative)), key=lambda i: not is_informative[i])
    return sorted(by_worth[:wanted])


def shuffled(ids: Sequence[str], step: int, *, seed: int) -> list[int]:
    """Numbers of groups in a random order that depends on seed and step, not on the layout.

    Groups arrive by engine, resumed groups first: in that order some mini-batches would have only
    resumed groups, others only new groups.

    Args:
        ids: problem of each group.
        step: index of the step.
        seed: the run's seed.
    """
    return sorted(range(len(ids)), key=lambda i: request_seed(seed, step, ids[i], 0))


def observe(rollouts: Rollouts, source: PromptSource, step: int) -> dict[str, float]:
    """Show the verdicts of a step to its source; returns metrics (`PromptSource.observe`).

    Args:
        rollouts: all groups of the step, those that dynamic sampling replaced included: those that
            are left would say that every stratum teaches.
        source: the source that drew them; it has the problems given back already.
        step: index of the step.
    """
    shape = (rollouts.num_groups, rollouts.rollouts_per_prompt)
    return source.observe(
        rollouts.problems,
        rollouts.rewards.reshape(shape),
        (rollouts.table["outcome"] == Outcome.CORRECT.code).reshape(shape),
        step=step,
    )


def rollout_metrics(
    rollouts: Rollouts, step: int, batch: BatchConfig, *, num_rounds: int, num_lost_tokens: int
) -> dict[str, float]:
    """Mean reward, response length and share of truncated responses; cost of sampling them.

    Without a known verdict there is no mean reward.

    Args:
        rollouts: all groups of the step, those that dynamic sampling replaced included.
        step: index of the step.
        batch: section `batch`; its options add further metrics (docs/metrics.md).
        num_rounds: rounds of dynamic sampling.
        num_lost_tokens: tokens sampled for aborted groups that do not stay open.
    """
    rewards_known = [r for r in rollouts.rewards.tolist() if r == r]
    num_tokens, num_rollouts = rollouts.num_sampled, len(rollouts)
    metrics = {"reward/mean": sum(rewards_known) / len(rewards_known)} if rewards_known else {}
    metrics |= {
        "rollout/response_length/mean": num_tokens / num_rollouts,
        "rollout/truncated": int(rollouts.table["is_truncated"].sum()) / num_rollouts,
    }
    if batch.dynamic_sampling_rounds:
        metrics["rollout/sampling_rounds"] = float(num_rounds)
        metrics["rollout/replaced_group_share"] = 1 - batch.rollout_prompts / rollouts.num_groups
    if batch.partial_rollouts:
        num_carried = int(rollouts.table["num_carried_sampled"].sum(dtype=np.int64))
        metrics["rollout/carried_token_share"] = num_carried / max(num_tokens, 1)
        metrics["rollout/oldest_version_gap"] = float(
            step - int(rollouts.table["oldest_version"].min())
        )
    elif batch.oversampling > 1:
        lost_share = num_lost_tokens / (num_lost_tokens + num_tokens)
        metrics["rollout/lost_token_share"] = lost_share
    return metrics


def source_metrics(
    rollouts: Rollouts, batch: Rollouts, has_gradient: np.ndarray, *, source: PromptSource
) -> dict[str, float]:
    """Metrics of each data source, `data/<name>/...`, of those that the step has drawn from.

    There are none for a single source.

    Args:
        rollouts: all groups of the step, those that dynamic sampling replaced included.
        batch: the groups that are learned from.
        has_gradient: [G] bool, those of all groups that are `informative`.
        source: has the names of the sources, and the problems.
    """
    names = source.names
    if len(names) == 1:
        return {}
    source_of = np.array([names.index(one.source) for one in source.problems])
    metrics: dict[str, float] = {}
    of_group = source_of[rollouts.problems]
    of_row, of_batch = source_of[rollouts.table["problem"]], source_of[batch.problems]
    for number, name in enumerate(names):
        if not (here := of_row == number).any():
            continue
        rewards = rollouts.rewards[here]
        known, lengths = ~np.isnan(rewards), rollouts.table["num_sampled_tokens"][here]
        metrics |= {
            f"data/{name}/batch_share": float((of_batch == number).mean()),
            f"data/{name}/informative_share": float(has_gradient[of_group == number].mean()),
            f"data/{name}/response_length": float(lengths.mean()),
        }
        if known.any():
            metrics[f"data/{name}/reward"] = float(rewards[known].sum() / known.sum())
    return metrics
