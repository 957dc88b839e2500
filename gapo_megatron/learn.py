"""From one batch of rollouts to updated weights: old log-probs, then one update per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.batching import sequence_lengths
from gapo_megatron.config import Config
from gapo_megatron.metrics import Stopwatch
from gapo_megatron.objective import diagnostics, importance_weights, kl_penalty, policy_loss
from gapo_megatron.policy import Policy, log_probs, update
from gapo_megatron.types import Batch, Microbatch, Minibatch, Plan

Sums = dict[str, torch.Tensor]
"""Metrics on their way: name -> sum over sequences or tokens; a name in `_max` is a maximum."""


@dataclass
class Progress:
    """How far this rank has come with a batch: what a stop must save beside weights and batch."""

    old_log_probs: list[list[torch.Tensor | None] | None] = field(default_factory=list)
    """Per mini-batch and micro-batch [R] float32, at the rollout weights; empty before the pass."""
    sums: Sums = field(default_factory=dict)
    """Metrics of the updates done."""
    grad_norms: list[float] = field(default_factory=list)
    """One for each update done."""
    learning_rate: float = 0.0
    """Of the last update done."""

    @property
    def num_updates(self) -> int:
        return len(self.grad_norms)


def learn(
    policy: Policy,
    batch: Batch,
    plan: Plan,
    config: Config,
    stopwatch: Stopwatch,
    *,
    progress: Progress | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Take one optimizer step per mini-batch of `plan`.

    The old log-probs of mini-batch 1 are its own forward pass, detached: no weight has moved yet.
    The others come from one pass at the rollout weights, packed exactly as their update will be, so
    that a ratio differs from 1 only because weights do. Tokens that earlier steps sampled keep
    those of the weights that sampled them (`Batch.carried_log_probs`), in every mini-batch.

    Args:
        policy: at the weights that generated the last tokens of `batch`, moved by the updates of
            `progress`; the others follow.
        batch: the same on every rank.
        plan: the same on every rank; this rank computes its data-parallel share.
        config: of the run: method, coefficients, rollouts per prompt, response limit.
        stopwatch: counts the stages `old_log_probs` and `update`.
        progress: of an earlier call that had to stop; goes on where it was, to the same bits.
            Updated in place.
        must_stop: asked before every mini-batch, on every rank; the answer must be the same on all.

    Returns:
        Metrics of the step, the same bits on every rank; None if it had to stop (`progress` says
        where). Means over mini-batches: `loss/policy`, the clipped surrogate alone, and
        `optim/grad_norm`, of the whole loss, before clipping. Means over computed response tokens:
        `mismatch/*_log_prob_diff` (trainer to rollout engine at equal weights), `loss/kl` and
        `loss/entropy` (without their coefficients; where these are not 0). Means over computed
        sequences: `mismatch/importance_weight*`, where there are such weights. `skip/*`: what was
        not computed because it could not change the weights, as shares of all prompt and response
        tokens (`forward`, `old_pass`, `backward`) or of the valid response tokens
        (`head_backward`), and as a number of optimizer steps (`updates`). The rest:
        `diagnostics.summarize`.

    Collectives: per mini-batch those of `policy.step.log_probs` (all mini-batches first), then
    those of `policy.step.update`; at the end one all-gather of metrics over all ranks.

    Raises:
        DivergenceError: a loss or gradient is not finite; the weights are those before that update.
    """
    groups, progress = policy.groups, progress or Progress()
    if must_stop():
        return None
    with stopwatch("old_log_probs"):
        packed = [
            [policy.pack(batch, indices) for indices in minibatch.microbatches[groups.dp_rank]]
            for minibatch in plan.minibatches
        ]
        if not progress.old_log_probs:
            progress.old_log_probs = [None, *(log_probs(policy, one) for one in packed[1:])]
        reference: list[list[torch.Tensor | None] | None] = [None] * len(packed)
        if config.objective.kl_coef > 0:
            with policy.reference_weights():
                reference = [log_probs(policy, microbatches) for microbatches in packed]

    lengths = sequence_lengths(batch)
    for i in range(progress.num_updates, len(packed)):
        if i and must_stop():
            return None
        with stopwatch("update"):
            loss = _MinibatchLoss(
                batch,
                plan.minibatches[i],
                packed[i],
                progress.old_log_probs[i],
                reference[i],
                config,
            )
            result = update(policy, packed[i], loss)
            # One for each micro-batch on the last pipeline stage, none elsewhere.
            scored = packed[i] if groups.is_last_stage else []
            for microbatch, sums in zip(scored, result.outputs, strict=True):
                _add(progress.sums, sums)
                if sums["active_rows"] > 0:
                    num_tokens = lengths[list(microbatch.indices)].sum().double()
                    _add(progress.sums, {"tokens_backward": num_tokens})
            progress.grad_norms.append(result.grad_norm)
            progress.learning_rate = result.learning_rate
    sums = progress.sums if groups.is_first_copy else {}
    totals = _add_over_ranks(
        sums, group_size=config.batch.rollouts_per_prompt, device=policy.device
    )
    return _summarize(totals, lengths, plan, progress, config)


@dataclass(frozen=True)
class _MinibatchLoss:
    """The loss of micro-batch i of one mini-batch, with every denominator in it: ranks only add."""

    batch: Batch
    minibatch: Minibatch
    microbatches: Sequence[Microbatch]
    old_log_probs: Sequence[torch.Tensor | None] | None
    """Per micro-batch [R] float32; None as a whole: the current ones, detached."""
    ref_log_probs: Sequence[torch.Tensor | None] | None
    """Per micro-batch [R] float32; None as a whole: no KL term."""
    config: Config

    def __call__(
        self, i: int, log_probs: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sums]:
        """Scalar float64 loss and additive metrics; `log_probs` and `entropy` are [R] float32."""
        microbatch, objective = self.microbatches[i], self.config.objective
        old = log_probs.detach() if self.old_log_probs is None else self.old_log_probs[i]
        assert old is not None  # losses, like log-probs, exist on the last pipeline stage only
        if self.batch.carried_log_probs:
            old = self._with_carried(old, microbatch)
        index = torch.tensor(microbatch.indices, dtype=torch.int64)
        device = log_probs.device
        advantages = self.batch.advantages[index].to(device)
        num_correct = self.batch.num_correct[index].to(device)
        rollout = self._rollout_log_probs(microbatch).to(device)
        sums = _mismatch(old, rollout)
        weighted = advantages
        if (largest := objective.importance_weight_max) is not None:
            weights = importance_weights(
                old,
                rollout,
                sequence_ids=microbatch.sequence_ids,
                num_sequences=len(index),
                largest=largest,
            )
            weighted = advantages * weights
            sums["importance_weights"] = weights.sum()
            sums["importance_weights_cut"] = (weights == largest).sum()
            sums["importance_weights_count"] = torch.tensor(float(len(index)))
        result = policy_loss(
            log_probs,
            old,
            sequence_ids=microbatch.sequence_ids,
            advantages=weighted,
            num_correct=num_correct,
            group_size=self.batch.group_size[index].to(device),
            num_tokens_global=self.minibatch.num_tokens_global,
            num_sequences_global=self.minibatch.num_sequences_global,
            max_response_tokens=self.config.rollout.max_response_tokens,
            method=objective.resolve(),
        )
        sums |= diagnostics.per_correct_sums(
            result,
            sequence_ids=microbatch.sequence_ids,
            advantages=advantages,
            num_correct=num_correct,
            group_size=self.config.batch.rollouts_per_prompt,
            num_response_tokens=self.batch.num_response_tokens[index].to(device),
            is_carried=self._is_carried(microbatch).to(device),
        )
        sums["loss"] = result.loss.detach()
        sums["tokens"] = torch.tensor(float(len(log_probs)), dtype=torch.float64)

        loss = result.loss
        denominator = max(self.minibatch.num_tokens_global, 1)
        if self.ref_log_probs is not None:
            reference = self.ref_log_probs[i]
            assert reference is not None
            kl = kl_penalty(log_probs, reference).sum()
            loss = loss + objective.kl_coef * kl / denominator
            sums["kl"] = kl.detach()
        if entropy is not None:
            total = entropy.double().sum()
            loss = loss - objective.entropy_coef * total / denominator
            sums["entropy"] = total.detach()
        return loss, sums

    def _with_carried(self, old: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """[R] float32: `old`, but of the tokens that earlier steps sampled what they had then."""
        stored, is_stored = np.zeros(len(old), np.float32), np.zeros(len(old), bool)
        first = 0
        for i in microbatch.indices:
            carried = slice(first, first + len(self.batch.carried_log_probs[i]))
            stored[carried], is_stored[carried] = self.batch.carried_log_probs[i], True
            first += len(self.batch.response_ids[i])
        where = torch.from_numpy(is_stored).to(old.device)
        return torch.where(where, torch.from_numpy(stored).to(old.device), old)

    def _is_carried(self, microbatch: Microbatch) -> torch.Tensor:
        """[B] bool: whether earlier steps sampled the sequence's first tokens."""
        carried = self.batch.carried_log_probs
        flags = [bool(carried) and len(carried[i]) > 0 for i in microbatch.indices]
        return torch.tensor(flags, dtype=torch.bool)

    def _rollout_log_probs(self, microbatch: Microbatch) -> torch.Tensor:
        """[R] float32: the rollout engine's own."""
        parts = [self.batch.rollout_log_probs[i] for i in microbatch.indices]
        return torch.from_numpy(np.concatenate(parts or [np.empty(0, np.float32)]))


def _mismatch(old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> Sums:
    """How far the rollout engine's log-probs are from the trainer's at the same weights."""
    if not len(old_log_probs):
        return {}
    mismatch = (old_log_probs - rollout_log_probs).abs().double()
    return {"mismatch": mismatch.sum(), "mismatch_max": mismatch.max()}


def _add(totals: Sums, sums: Mapping[str, torch.Tensor]) -> None:
    for key, value in sums.items():
        value = value.detach().cpu()
        if key not in totals:
            totals[key] = value.clone()
        elif key.endswith("_max"):
            totals[key] = torch.maximum(totals[key], value)
        else:
            totals[key] = totals[key] + value


_SCALARS = (
    *("loss", "tokens", "active_rows", "tokens_backward", "kl", "entropy"),
    *("mismatch", "mismatch_max"),
    *("importance_weights", "importance_weights_cut", "importance_weights_count"),
)


def _add_over_ranks(sums: Sums, *, group_size: int, device: torch.device) -> Sums:
    """Sum over ranks in rank order, so that every rank holds the same bits; all names, 0 for none.

    Collectives: one all-gather over all ranks, of one float64 vector.
    """
    shapes = dict.fromkeys(_SCALARS, ()) | diagnostics.sum_shapes(group_size)
    assert sums.keys() <= shapes.keys(), f"no place for {sums.keys() - shapes.keys()}"
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = [sums.get(name, torch.zeros(shape)).double() for name, shape in shapes.items()]
    local = torch.cat([part.flatten() for part in parts]).to(device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    summed: Sums = {}
    for vector in gathered:
        named = zip(shapes.items(), vector.cpu().split(sizes), strict=True)
        _add(summed, {name: part.view(shape) for (name, shape), part in named})
    return summed


def _summarize(
    totals: Sums, lengths: torch.Tensor, plan: Plan, progress: Progress, config: Config
) -> dict[str, float]:
    num_tokens = max(float(totals["tokens"]), 1.0)
    metrics = {
        "loss/policy": float(totals["loss"]) / progress.num_updates,
        "optim/grad_norm": sum(progress.grad_norms) / progress.num_updates,
        "optim/learning_rate": progress.learning_rate,
        "mismatch/mean_abs_log_prob_diff": float(totals["mismatch"]) / num_tokens,
        "mismatch/max_abs_log_prob_diff": float(totals["mismatch_max"]),
    }
    metrics |= _skipped(totals, lengths, plan, progress)
    if config.objective.kl_coef > 0:
        metrics["loss/kl"] = float(totals["kl"]) / num_tokens
    if config.objective.entropy_coef > 0:
        metrics["loss/entropy"] = float(totals["entropy"]) / num_tokens
    if config.objective.importance_weight_max is not None:
        count = max(float(totals["importance_weights_count"]), 1.0)
        metrics["mismatch/importance_weight"] = float(totals["importance_weights"]) / count
        metrics["mismatch/importance_weight_cut"] = float(totals["importance_weights_cut"]) / count
    return metrics | diagnostics.summarize(totals)


def _skipped(
    totals: Sums, lengths: torch.Tensor, plan: Plan, progress: Progress
) -> dict[str, float]:
    fed = max(plan.num_tokens_skipped + plan.num_tokens_computed, 1)
    num_old = sum(
        int(lengths[list(indices)].sum())
        for minibatch in plan.minibatches[1:]
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
        "skip/updates": float(progress.grad_norms.count(0.0)),
    }
