"""Clip widths computed from a mini-batch's own ratios (`Method.bounds`), before its update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.learn.loss import MinibatchLoss
from gapo_megatron.learn.score import log_probs
from gapo_megatron.objective.minibatch_bounds import find_bounds
from gapo_megatron.policy import Policy
from gapo_megatron.types import Microbatch


def find_widths(
    policy: Policy, microbatches: Sequence[Microbatch], loss: MinibatchLoss
) -> tuple[float, float] | None:
    """Score a mini-batch at the current weights, and compute its widths over all of its tokens.

    Runs the update's forward pass an extra time, with the same bits. Data-parallel ranks gather 24
    bytes per token with A != 0 from each other. Tensor and context parallel ranks each hold all
    log-probs of their sequences, so each gathers within its own data-parallel group, and no token
    counts twice.

    Args:
        policy: unchanged.
        microbatches: this data-parallel rank's micro-batches, as in the update.
        loss: loss of this mini-batch, with its old log-probs.

    Returns:
        Lower and upper width, the same bits on every rank of the last pipeline stage; None: the
        method's fixed widths apply. None on other stages, which compute no loss.

    Collectives: those of `score.log_probs`; on the last stage two all-gathers over the
    data-parallel group.

    Raises:
        DivergenceError: see `score.log_probs`.
    """
    with_entropy = loss.objective.entropy_coef > 0
    scores = log_probs(policy, microbatches, with_entropy=with_entropy)
    if not policy.groups.is_last_stage:
        return None
    tokens = [torch.empty(0, 3, dtype=torch.float64, device=policy.device)]
    for index, now in enumerate(scores):
        assert now is not None  # present on the last stage
        given = loss.microbatches[index]
        old = loss.find_old_log_probs(index, now)[1].double()
        advantages = given.advantages[given.sequence_ids]
        rows = torch.stack([now.double() - old, advantages, old], dim=1)
        tokens.append(rows[advantages != 0])
    log_ratio, advantages, old_log_probs = _gather(torch.cat(tokens), policy.groups.dp_group).T
    return find_bounds(log_ratio, advantages, old_log_probs, loss.method)


def _gather(rows: torch.Tensor, group: dist.ProcessGroup) -> np.ndarray:
    """Gather [n, columns] of each rank to [sum of n, columns] on the host. Waits for the device."""
    own = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counts, own, group=group)
    lengths = torch.cat(counts).tolist()
    if not any(lengths):
        return np.empty((0, rows.shape[1]))
    padded = rows.new_zeros(max(lengths), rows.shape[1])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole.cpu().numpy()
