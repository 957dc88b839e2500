"""Old log-probs of what a step has sampled and does not learn from: its groups are still open.

A ratio compares with the policy that sampled: the trainer, at the weights of each token's step.
Once they have moved nobody can ask them, so tokens that wait for the rest of their group are scored
in the step that samples them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.batching import plan, sequence_lengths, unpack
from gapo_megatron.config import Config
from gapo_megatron.learn.update import log_probs
from gapo_megatron.policy import Policy
from gapo_megatron.types import Batch, Carried, OpenGroup, Rollout


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
        config: of the run: temperature, token budget of a micro-batch.
        policy_version: of these weights.
        gloo_group: all ranks, for Python objects.

    Returns:
        The groups with the same bits on every rank. Responses without a new token are as they were.

    Collectives: where a token is new, those of `learn.update.log_probs` and a gather of objects
    over all ranks.

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
    scored = iter(_score(policy, _as_batch(new), config, gloo_group))
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
    """`log_probs` are those of all tokens at `policy_version`; the carried ones keep their own."""
    if (before := rollout.carried) is None:
        return replace(rollout, carried=Carried(policy_version, log_probs))
    new = log_probs[len(before.old_log_probs) :]
    extended = np.concatenate([before.old_log_probs, new])
    return replace(rollout, carried=replace(before, old_log_probs=extended))


def _as_batch(new: Sequence[tuple[OpenGroup, Rollout]]) -> Batch:
    count = len(new)
    return Batch(
        prompt_ids=[np.array(group.prompt.token_ids, dtype=np.int32) for group, _ in new],
        response_ids=[rollout.token_ids for _, rollout in new],
        rollout_log_probs=[rollout.log_probs for _, rollout in new],
        advantages=torch.zeros(count, dtype=torch.float64),
        num_correct=torch.zeros(count, dtype=torch.int64),
        group_size=torch.zeros(count, dtype=torch.int64),
        valid=torch.zeros(count, dtype=torch.bool),
    )


def _score(
    policy: Policy, batch: Batch, config: Config, gloo_group: dist.ProcessGroup | None
) -> list[np.ndarray]:
    """Log-probs of every response, in order, on every rank. Collective."""
    groups = policy.groups
    packing = plan(
        sequence_lengths(batch),
        batch.advantages,
        num_minibatches=1,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=groups.dp_size,
        keep_zero_advantage=True,  # whether they have one nobody knows yet
    ).minibatches[0]
    mine = packing.microbatches[groups.dp_rank]
    scored = unpack(batch, mine, log_probs(policy, [policy.pack(batch, one) for one in mine]))
    own = {i: values.numpy() for i, values in scored.items()} if groups.is_first_copy else {}
    parts: list[dict[int, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own, group=gloo_group)
    merged = {i: values for part in parts for i, values in part.items()}
    return [merged[i] for i in range(len(batch))]
