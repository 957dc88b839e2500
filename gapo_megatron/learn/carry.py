"""Old log-probs of what a step has sampled and does not learn from: its groups are still open.

A ratio compares with the policy that sampled: the trainer, at the weights of each token's step.
Once they have moved nobody can ask them, so tokens that wait for the rest of their group are scored
in the step that samples them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from gapo_megatron.config import Config
from gapo_megatron.learn.score import score_on_every_rank
from gapo_megatron.policy import Policy
from gapo_megatron.types import Carried, OpenGroup, Rollout, Sequences


def carry(
    policy: Policy,
    groups: Sequence[OpenGroup],
    config: Config,
    *,
    policy_version: int,
    gloo_group: dist.ProcessGroup | None,
) -> list[OpenGroup]:
    """Make every token of `groups` `carried`: those that are not have been sampled just now.

    Args:
        policy: at the weights that sampled those tokens; unchanged.
        groups: the same on every rank.
        config: the run's settings: token budget of a micro-batch.
        policy_version: version of these weights.
        gloo_group: all ranks, for Python objects.

    Returns:
        The groups with the same bits on every rank. Responses without a new token are as they were.

    Collectives: those of `learn.score.score_on_every_rank`, where a token is new.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    new = [
        (group, rollout)
        for group in groups
        for rollout in group.rollouts
        if len(rollout.token_ids) > _num_carried(rollout)
    ]
    if not new:
        return list(groups)
    has_mask = any(rollout.response_mask is not None for _, rollout in new)
    sequences = Sequences(
        prompt_ids=[np.array(group.prompt.token_ids, dtype=np.int32) for group, _ in new],
        response_ids=[rollout.token_ids for _, rollout in new],
        response_masks=[rollout.is_sampled for _, rollout in new] if has_mask else [],
    )
    scored = iter(
        score_on_every_rank(
            policy,
            sequences,
            max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
            gloo_group=gloo_group,
        )
    )
    return [
        replace(
            group,
            rollouts=tuple(
                _extend(rollout, next(scored), policy_version)
                if len(rollout.token_ids) > _num_carried(rollout)
                else rollout
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def _num_carried(rollout: Rollout) -> int:
    return len(rollout.carried.old_log_probs) if rollout.carried else 0


def _extend(rollout: Rollout, log_probs: np.ndarray, policy_version: int) -> Rollout:
    """`log_probs` are those of the sampled tokens at `policy_version`; carried ones keep their own.

    A token that the environment gave has 0.
    """
    if rollout.response_mask is not None:
        sampled, log_probs = log_probs, np.zeros(len(rollout.token_ids), dtype=np.float32)
        log_probs[rollout.response_mask] = sampled
    if (before := rollout.carried) is None:
        return replace(rollout, carried=Carried(policy_version, log_probs))
    new = log_probs[len(before.old_log_probs) :]
    extended = np.concatenate([before.old_log_probs, new])
    return replace(rollout, carried=replace(before, old_log_probs=extended))
