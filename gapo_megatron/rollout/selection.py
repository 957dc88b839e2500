"""Which groups of a batch teach, and what is measured of them: from facts alone."""

from __future__ import annotations

import numpy as np

from gapo_megatron.config import BatchConfig
from gapo_megatron.facts import Facts


def informative(facts: Facts, group_size: int) -> np.ndarray:
    """[G] bool: groups whose valid rollouts differ in their reward; in others A = 0 for all."""
    rewards = facts.rewards.reshape(-1, group_size)
    has_both: np.ndarray = (rewards == 0).any(axis=1) & (rewards == 1).any(axis=1)
    return has_both


def choose(facts: Facts, group_size: int, wanted: int) -> list[int]:
    """Numbers of `wanted` groups in their order: the first informative ones, then others."""
    teaches = informative(facts, group_size)
    by_worth = sorted(range(len(teaches)), key=lambda i: not teaches[i])
    return sorted(by_worth[:wanted])


def num_tokens(facts: Facts) -> int:
    """Number of tokens that the model sampled."""
    return int(facts.num_sampled_tokens.sum(dtype=np.int64))


def rollout_metrics(
    facts: Facts, step: int, batch: BatchConfig, *, num_rounds: int, num_lost_tokens: int
) -> dict[str, float]:
    """Mean reward, response length and share of truncated responses; what sampling them took.

    Args:
        facts: all groups of the step, those that dynamic sampling replaced included.
        step: index of the step.
        batch: says what else there is to tell, see docs/metrics.md.
        num_rounds: of dynamic sampling.
        num_lost_tokens: sampled for groups that were broken off and do not stay open.
    """
    rewards_known = [r for r in facts.rewards.tolist() if r == r]
    metrics = {
        "reward/mean": sum(rewards_known) / max(len(rewards_known), 1),
        "rollout/response_length/mean": num_tokens(facts) / len(facts),
        "rollout/truncated": int(facts.is_truncated.sum()) / len(facts),
    }
    if batch.dynamic_sampling_rounds:
        num_groups = len(facts) // batch.rollouts_per_prompt
        metrics["rollout/sampling_rounds"] = float(num_rounds)
        metrics["rollout/replaced_group_share"] = 1 - batch.rollout_prompts / num_groups
    if batch.partial_rollouts:
        metrics |= _carried_metrics(facts, step)
    elif batch.oversampling > 1:
        lost_share = num_lost_tokens / (num_lost_tokens + num_tokens(facts))
        metrics["rollout/lost_token_share"] = lost_share
    return metrics


def _carried_metrics(facts: Facts, step: int) -> dict[str, float]:
    """How much of the batch earlier steps have sampled, and how long ago."""
    num_carried = int(facts.num_carried_sampled.sum(dtype=np.int64))
    versions = facts.oldest_version[facts.num_carried_tokens > 0]
    oldest = int(versions.min()) if len(versions) else step
    return {
        "rollout/carried_token_share": num_carried / num_tokens(facts),
        "rollout/oldest_version_gap": float(step - oldest),
    }
