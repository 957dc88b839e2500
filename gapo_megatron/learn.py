"""From one batch of rollouts to updated weights: old log-probs, then one update per mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.batching import pack
from gapo_megatron.config import Config
from gapo_megatron.objective import diagnostics, kl_penalty, policy_loss
from gapo_megatron.metrics import Stopwatch
from gapo_megatron.policy import Policy, log_probs, update
from gapo_megatron.types import Batch, Microbatch, Minibatch, Plan

Sums = dict[str, torch.Tensor]


def learn(
    policy: Policy, batch: Batch, plan: Plan, config: Config, stopwatch: Stopwatch
) -> dict[str, float]:
    """Take one optimizer step per mini-batch of `plan`.

    The old log-probs of mini-batch 1 are its own forward pass, detached: no weight has moved yet. The
    others come from one pass at the rollout weights, packed exactly as their update will be, so
    that a ratio differs from 1 only because weights do.

    Args:
        policy: at the weights that generated `batch`; moved by `len(plan.minibatches)` updates.
        batch: the same on every rank.
        plan: the same on every rank; this rank computes its data-parallel share.
        config: method, clip widths, temperature.
        stopwatch: counts the stages `old_log_probs` and `update`.

    Returns:
        Metrics of the step, the same on every rank.

    Collectives: those of the forward and backward passes, then one gather of metrics over all ranks.

    Raises:
        DivergenceError: a loss or gradient is not finite; the weights are those before that update.
    """
    groups = policy.groups
    with stopwatch("old_log_probs"):
        packed = [
            [
                pack(batch, indices, align=policy.sequence_multiple, device=policy.device)
                for indices in minibatch.microbatches[groups.dp_rank]
            ]
            for minibatch in plan.minibatches
        ]
        old = [None, *(log_probs(policy, microbatches) for microbatches in packed[1:])]
        reference: list[list[torch.Tensor | None] | None] = [None] * len(packed)
        if config.objective.kl_coef > 0:
            with policy.reference_weights():
                reference = [log_probs(policy, microbatches) for microbatches in packed]

    totals: Sums = {}
    grad_norms = []
    with stopwatch("update"):
        for minibatch, microbatches, old_log_probs, ref_log_probs in zip(
            plan.minibatches, packed, old, reference, strict=True
        ):
            loss = _MinibatchLoss(
                batch, minibatch, microbatches, old_log_probs, ref_log_probs, config
            )
            result = update(policy, microbatches, loss)
            grad_norms.append(result.grad_norm)
            for sums in result.outputs:
                _add(totals, sums)
        contributes = groups.is_last_stage and groups.tp_rank == 0
        totals = _add_over_ranks(totals if contributes else {})
    return _summarize(totals, plan, grad_norms, result.learning_rate)


class _MinibatchLoss:
    """The loss of micro-batch i of one mini-batch, with every denominator in it: ranks only add."""

    def __init__(
        self,
        batch: Batch,
        minibatch: Minibatch,
        microbatches: Sequence[Microbatch],
        old_log_probs: Sequence[torch.Tensor | None] | None,
        ref_log_probs: Sequence[torch.Tensor | None] | None,
        config: Config,
    ) -> None:
        self.batch = batch
        self.minibatch = minibatch
        self.microbatches = microbatches
        self.old_log_probs = old_log_probs
        self.ref_log_probs = ref_log_probs
        self.config = config
        self.method = config.objective.resolve()

    def __call__(
        self, i: int, log_probs: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sums]:
        """Loss (scalar) and additive metric sums of micro-batch i; `log_probs`, `entropy` are [R]."""
        microbatch, objective = self.microbatches[i], self.config.objective
        old = log_probs.detach() if self.old_log_probs is None else self.old_log_probs[i]
        index = torch.tensor(microbatch.indices, dtype=torch.int64)
        device = log_probs.device
        advantages = self.batch.advantages[index].to(device)
        num_correct = self.batch.num_correct[index].to(device)
        result = policy_loss(
            log_probs,
            old,
            sequence_ids=microbatch.sequence_ids,
            advantages=advantages,
            num_correct=num_correct,
            group_size=self.batch.group_size[index].to(device),
            num_tokens_global=self.minibatch.num_tokens_global,
            num_sequences_global=self.minibatch.num_sequences_global,
            max_response_tokens=self.config.rollout.max_response_tokens,
            method=self.method,
        )
        loss = result.loss
        sums = diagnostics.per_correct_sums(
            result,
            sequence_ids=microbatch.sequence_ids,
            advantages=advantages,
            num_correct=num_correct,
            group_size=self.config.batch.rollouts_per_prompt,
            num_response_tokens=self.batch.num_response_tokens[index].to(device),
        )
        denominator = max(self.minibatch.num_tokens_global, 1)
        if self.ref_log_probs is not None:
            kl = kl_penalty(log_probs, self.ref_log_probs[i]).sum()
            loss = loss + objective.kl_coef * kl / denominator
            sums["kl"] = kl.detach().double()
        if entropy is not None:
            loss = loss - objective.entropy_coef * entropy.sum() / denominator
            sums["entropy"] = entropy.detach().double().sum()
        sums["loss"] = loss.detach().double()
        sums["tokens"] = torch.tensor(float(len(log_probs)), dtype=torch.float64)
        if len(log_probs):
            rollout = np.concatenate([self.batch.rollout_log_probs[j] for j in microbatch.indices])
            mismatch = (old - torch.from_numpy(rollout).to(device)).abs().double()
            sums["mismatch"] = mismatch.sum()
            sums["mismatch_max"] = mismatch.max()
        return loss, sums


def _add(totals: Sums, sums: Mapping[str, torch.Tensor]) -> None:
    for key, value in sums.items():
        value = value.detach().cpu()
        if key not in totals:
            totals[key] = value.clone()
        elif key.endswith("_max"):
            totals[key] = torch.maximum(totals[key], value)
        else:
            totals[key] = totals[key] + value


def _add_over_ranks(totals: Sums) -> Sums:
    """Sum over ranks in rank order, so that every rank holds the same bits. Collective."""
    gathered: list[Sums] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, totals)
    summed: Sums = {}
    for part in gathered:
        _add(summed, part)
    return summed


def _summarize(
    totals: Sums, plan: Plan, grad_norms: list[float], learning_rate: float
) -> dict[str, float]:
    num_updates = len(plan.minibatches)
    tokens = max(float(totals.get("tokens", 0.0)), 1.0)
    metrics = {
        "loss/policy": float(totals.get("loss", 0.0)) / num_updates,
        "optim/grad_norm": sum(grad_norms) / num_updates,
        "optim/learning_rate": learning_rate,
        "mismatch/mean_abs_log_prob_diff": float(totals.get("mismatch", 0.0)) / tokens,
        "mismatch/max_abs_log_prob_diff": float(totals.get("mismatch_max", 0.0)),
        "skip/token_share": plan.num_tokens_skipped
        / max(plan.num_tokens_skipped + plan.num_tokens_computed, 1),
    }
    if "kl" in totals:
        metrics["loss/kl"] = float(totals["kl"]) / tokens
    if "entropy" in totals:
        metrics["loss/entropy"] = float(totals["entropy"]) / tokens
    return metrics | diagnostics.summarize(totals)
