"""Metrics of a step: sums over micro-batches, then over ranks, then means under their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.config import ObjectiveConfig
from gapo_megatron.objective import diagnostics
from gapo_megatron.types import Plan

Sums = dict[str, torch.Tensor]
"""Partial metrics: name -> sum over sequences or tokens; names in `_max` hold a maximum."""

_SCALARS = (
    *("loss", "tokens", "active_rows", "tokens_backward", "kl", "entropy"),
    *("mismatch", "mismatch_max", "mismatch_tokens"),
    *("outside_clip", "outside_clip_sequences"),
    *("importance_weights", "importance_weights_cut", "importance_weights_count"),
    *("bound_low", "bound_high", "bound_count"),
)


def add(totals: Sums, sums: Mapping[str, torch.Tensor]) -> None:
    """Add the sums of a micro-batch, update or rank to `totals`."""
    for key, value in sums.items():
        if key not in totals:
            totals[key] = value.clone()
        elif key.endswith("_max"):
            totals[key] = torch.maximum(totals[key], value)
        else:
            totals[key] = totals[key] + value


def add_over_ranks(
    sums: Sums, *, group_size: int, device: torch.device, has_own: bool = False
) -> Sums:
    """Sum over ranks in rank order, for the same bits on every rank; missing names become 0.

    Args:
        sums: this rank's.
        group_size: configured rollouts per prompt.
        device: where the gathered vectors are.
        has_own: whether ranks may have metrics of a user's family, whose names only they know.

    Collectives: one all-gather over all ranks, of one float64 vector; with `has_own` before it one
    of the names.
    """
    shapes = dict.fromkeys(_SCALARS, ()) | diagnostics.sum_shapes(group_size)
    if has_own:
        own: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(own, sorted(sums.keys() - shapes.keys()))
        shapes |= dict.fromkeys(sorted(set().union(*own)), ())
    assert sums.keys() <= shapes.keys(), f"unknown metrics: {sums.keys() - shapes.keys()}"
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = [sums.get(name, torch.zeros(shape)).double() for name, shape in shapes.items()]
    local = torch.cat([part.flatten() for part in parts]).to(device)
    gathered = local.new_empty(dist.get_world_size(), len(local))
    dist.all_gather(list(gathered), local)
    # Whole vectors: thousands of ranks have a hundred thousand names between them.
    summed, *others = gathered.cpu()
    largest = summed.clone()
    for vector in others:
        summed += vector
        torch.maximum(largest, vector, out=largest)
    return {
        name: (high if name.endswith("_max") else total).view(shape)
        for (name, shape), total, high in zip(
            shapes.items(), summed.split(sizes), largest.split(sizes), strict=True
        )
    }


def summarize(
    totals: Sums,
    plan: Plan,
    objective: ObjectiveConfig,
    *,
    lengths: np.ndarray,
    grad_norms: Sequence[float],
    learning_rate: float,
) -> dict[str, float]:
    """Turn a step's sums over all ranks into metrics.

    Args:
        totals: the result of `add_over_ranks`.
        plan: the step's packing plan.
        objective: section `objective`.
        lengths: [B] int64 tokens fed to the model per sequence.
        grad_norms: gradient norm of every update, before clipping.
        learning_rate: learning rate of the last update.

    Returns:
        Means over mini-batches: `loss/policy`, the policy loss alone, and `optim/grad_norm`, the
        gradient norm of the whole loss before clipping. Means over computed response tokens:
        `mismatch/*_log_prob_diff` (trainer before any update against rollout engine; of the first
        mini-batch only if the others are unknown), `loss/kl` and `loss/entropy` (without their
        coefficients, if these are not 0). Means over computed sequences:
        `mismatch/importance_weight*`, if such weights are used, and `mismatch/outside_clip`, if
        older weights may have sampled (`MinibatchLoss.measures_staleness`). Means over the
        mini-batches that computed their own bounds (`Method.bounds`): `clip/bound_{low,high}`.
        Means over their elements: `method/*`, the metrics of a user's family.
        `skip/*`: work that was skipped because it could not change the weights, as shares of all
        prompt and response tokens (`forward`, `old_pass`, `backward`) or of the valid response
        tokens (`head_backward`), and as a number of optimizer steps (`updates`). The rest:
        `diagnostics.summarize`.
    """
    num_updates, num_tokens = len(grad_norms), max(float(totals["tokens"]), 1.0)
    metrics = {
        "loss/policy": float(totals["loss"]) / num_updates,
        "optim/grad_norm": sum(grad_norms) / num_updates,
        "optim/learning_rate": learning_rate,
    }
    metrics |= _compared(totals, objective)
    metrics |= _skipped(totals, plan, objective, lengths)
    metrics["skip/updates"] = float(list(grad_norms).count(0.0))
    if objective.kl_coef > 0:
        metrics["loss/kl"] = float(totals["kl"]) / num_tokens
    if objective.entropy_coef > 0:
        metrics["loss/entropy"] = float(totals["entropy"]) / num_tokens
    if objective.importance_weights != "none":
        count = max(float(totals["importance_weights_count"]), 1.0)
        metrics["mismatch/importance_weight"] = float(totals["importance_weights"]) / count
        metrics["mismatch/importance_weight_cut"] = float(totals["importance_weights_cut"]) / count
    if count := float(totals["bound_count"]):
        metrics["clip/bound_low"] = float(totals["bound_low"]) / count
        metrics["clip/bound_high"] = float(totals["bound_high"]) / count
    for key in totals:
        if key.startswith("method/") and key.endswith("/sum"):
            name = key.removesuffix("/sum")
            metrics[name] = float(totals[key]) / max(float(totals[f"{name}/count"]), 1.0)
    return metrics | diagnostics.summarize(totals)


def _compared(totals: Sums, objective: ObjectiveConfig) -> dict[str, float]:
    """Differences of the engine's log-probs from the trainer's at the start of the step."""
    metrics = {}
    is_partial = objective.old_log_probs == "rollout"
    num_tokens = float(totals["mismatch_tokens" if is_partial else "tokens"])
    if num_tokens or not is_partial:
        mean = float(totals["mismatch"]) / max(num_tokens, 1.0)
        metrics["mismatch/mean_abs_log_prob_diff"] = mean
        metrics["mismatch/max_abs_log_prob_diff"] = float(totals["mismatch_max"])
    if num_sequences := float(totals["outside_clip_sequences"]):
        metrics["mismatch/outside_clip"] = float(totals["outside_clip"]) / num_sequences
    return metrics


def _skipped(
    totals: Sums, plan: Plan, objective: ObjectiveConfig, lengths: np.ndarray
) -> dict[str, float]:
    fed = max(plan.num_tokens_skipped + plan.num_tokens_computed, 1)
    num_old = sum(
        int(lengths[list(indices)].sum())
        for minibatch in plan.minibatches[1:]
        if objective.old_log_probs == "trainer"
        for rank in minibatch.microbatches
        for indices in rank
    )
    num_backward = float(totals["tokens_backward"])
    num_response = max(sum(minibatch.num_tokens_global for minibatch in plan.minibatches), 1)
    return {
        "skip/forward_token_share": plan.num_tokens_skipped / fed,
        "skip/old_pass_token_share": 1 - num_old / fed,
        "skip/backward_token_share": 1 - num_backward / fed,
        "skip/head_backward_token_share": 1 - float(totals["active_rows"]) / num_response,
    }
