"""From one batch of rollouts to updated weights: old log-probs, then one update per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.batching import sequence_lengths
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.device.flags import Flags
from gapo_megatron.device.transfer import to_device
from gapo_megatron.learn.update import log_probs, update
from gapo_megatron.objective import diagnostics, importance_weights, kl_penalty, policy_loss
from gapo_megatron.policy import Policy
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

    Collectives: per mini-batch those of `learn.update.log_probs` (all mini-batches first), then
    those of `learn.update.update`; at the end one all-gather of metrics over all ranks.

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

    lengths = sequence_lengths(batch).numpy()
    for i in range(progress.num_updates, len(packed)):
        if i and must_stop():
            return None
        with stopwatch("update"):
            # One for each micro-batch on the last pipeline stage, none elsewhere.
            scored = packed[i] if groups.is_last_stage else []
            flags = Flags()
            loss = _MinibatchLoss(
                batch,
                plan.minibatches[i],
                [_on_device(batch, microbatch, policy.device) for microbatch in scored],
                progress.old_log_probs[i],
                reference[i],
                config,
                flags,
            )
            result = update(
                policy, packed[i], loss, skip_inactive=loss.may_lose_gradients, flags=flags
            )
            for microbatch, sums in zip(scored, result.outputs, strict=True):
                num_tokens = float(lengths[list(microbatch.indices)].sum())
                tokens_backward = (sums["active_rows"] > 0).double() * num_tokens
                _add(progress.sums, sums | {"tokens_backward": tokens_backward})
            progress.grad_norms.append(result.grad_norm)
            progress.learning_rate = result.learning_rate
    sums = progress.sums if groups.is_first_copy else {}
    totals = _add_over_ranks(
        sums, group_size=config.batch.rollouts_per_prompt, device=policy.device
    )
    return _summarize(totals, lengths, plan, progress, config)


@dataclass(frozen=True)
class _Sequences:
    """What the loss of one micro-batch needs of its B sequences and R rows, on the device."""

    sequence_ids: torch.Tensor
    """[R] int64 in 0..B-1."""
    advantages: torch.Tensor
    """[B] float64."""
    num_correct: torch.Tensor
    """[B] int64, like the two that follow."""
    group_size: torch.Tensor
    num_response_tokens: torch.Tensor
    is_carried: torch.Tensor
    """[B] bool: earlier steps sampled the sequence's first tokens."""
    rollout_log_probs: torch.Tensor
    """[R] float32: the rollout engine's own."""
    carried_log_probs: torch.Tensor | None = None
    """[R] float32: of the tokens that earlier steps sampled, what they had then; None: no batch of
    several steps."""
    is_carried_row: torch.Tensor | None = None
    """[R] bool: which tokens those are."""


def _on_device(batch: Batch, microbatch: Microbatch, device: torch.device) -> _Sequences:
    """Copy what the loss needs of one micro-batch, once, before the schedule starts."""
    index = list(microbatch.indices)
    responses = [batch.response_ids[i] for i in index]
    none = np.zeros(0, np.float32)
    carried = [batch.carried_log_probs[i] if batch.carried_log_probs else none for i in index]
    arrays = {
        "advantages": batch.advantages.numpy()[index],
        "num_correct": batch.num_correct.numpy()[index],
        "group_size": batch.group_size.numpy()[index],
        "num_response_tokens": np.array([len(ids) for ids in responses], dtype=np.int64),
        "is_carried": np.array([len(values) > 0 for values in carried], dtype=bool),
        "rollout_log_probs": np.concatenate([none, *(batch.rollout_log_probs[i] for i in index)]),
    }
    if batch.carried_log_probs:
        stored = [np.zeros(len(ids), np.float32) for ids in responses]
        is_stored = [np.arange(len(r)) < len(c) for r, c in zip(responses, carried, strict=True)]
        for values, first in zip(stored, carried, strict=True):
            values[: len(first)] = first
        arrays["carried_log_probs"] = np.concatenate([none, *stored])
        arrays["is_carried_row"] = np.concatenate([np.empty(0, bool), *is_stored])
    placed: dict[str, Any] = dict(zip(arrays, to_device([*arrays.values()], device), strict=True))
    return _Sequences(microbatch.sequence_ids, **placed)


@dataclass(frozen=True)
class _MinibatchLoss:
    """The loss of micro-batch i of one mini-batch, with every denominator in it: ranks only add."""

    batch: Batch
    minibatch: Minibatch
    microbatches: Sequence[_Sequences]
    old_log_probs: Sequence[torch.Tensor | None] | None
    """Per micro-batch [R] float32; None as a whole: the current ones, detached."""
    ref_log_probs: Sequence[torch.Tensor | None] | None
    """Per micro-batch [R] float32; None as a whole: no KL term."""
    config: Config
    flags: Flags
    """Where inputs that are not finite are kept."""

    @property
    def may_lose_gradients(self) -> bool:
        """Whether some rows may have no gradient; the host knows without asking the device.

        At the weights that sampled it no ratio is clipped; a weight alone that is bounded takes no
        gradient away, and an entropy term gives every row one. With a KL term sequences with A = 0
        are computed, which have none while the policy is its reference.
        """
        objective = self.config.objective
        if objective.entropy_coef > 0:
            return False
        if objective.kl_coef > 0:
            return True
        has_moved = self.old_log_probs is not None or bool(self.batch.carried_log_probs)
        return has_moved and not objective.resolve().stop_gradient_ratio

    def __call__(
        self, i: int, log_probs: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sums]:
        """Scalar float64 loss and additive metrics; `log_probs` and `entropy` are [R] float32.

        Nothing waits for the device.
        """
        given, objective = self.microbatches[i], self.config.objective
        old = log_probs.detach() if self.old_log_probs is None else self.old_log_probs[i]
        assert old is not None  # losses, like log-probs, exist on the last pipeline stage only
        if given.is_carried_row is not None and given.carried_log_probs is not None:
            old = torch.where(given.is_carried_row, given.carried_log_probs, old)
        sums = _mismatch(old, given.rollout_log_probs)
        weighted = given.advantages
        if (largest := objective.importance_weight_max) is not None:
            weights = importance_weights(
                old,
                given.rollout_log_probs,
                sequence_ids=given.sequence_ids,
                num_sequences=len(given.advantages),
                largest=largest,
            )
            weighted = given.advantages * weights
            sums["importance_weights"] = weights.sum()
            sums["importance_weights_cut"] = (weights == largest).sum()
            sums["importance_weights_count"] = torch.full_like(weights.sum(), len(weights))
        result = policy_loss(
            log_probs,
            old,
            sequence_ids=given.sequence_ids,
            advantages=weighted,
            num_correct=given.num_correct,
            group_size=given.group_size,
            num_tokens_global=self.minibatch.num_tokens_global,
            num_sequences_global=self.minibatch.num_sequences_global,
            max_response_tokens=self.config.rollout.max_response_tokens,
            method=objective.resolve(),
            flags=self.flags,
        )
        sums |= diagnostics.per_correct_sums(
            result,
            sequence_ids=given.sequence_ids,
            advantages=given.advantages,
            num_correct=given.num_correct,
            group_size=self.config.batch.rollouts_per_prompt,
            num_response_tokens=given.num_response_tokens,
            is_carried=given.is_carried,
        )
        sums["loss"] = result.loss.detach()
        sums["tokens"] = torch.full_like(sums["loss"], len(log_probs))

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


def _mismatch(old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> Sums:
    """How far the rollout engine's log-probs are from the trainer's at the same weights."""
    if not len(old_log_probs):
        return {}
    mismatch = (old_log_probs - rollout_log_probs).abs().double()
    return {"mismatch": mismatch.sum(), "mismatch_max": mismatch.max()}


def _add(totals: Sums, sums: Mapping[str, torch.Tensor]) -> None:
    for key, value in sums.items():
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
    for vector in torch.stack(gathered).cpu():
        named = zip(shapes.items(), vector.split(sizes), strict=True)
        _add(summed, {name: part.view(shape) for (name, shape), part in named})
    return summed


def _summarize(
    totals: Sums, lengths: np.ndarray, plan: Plan, progress: Progress, config: Config
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


def _skipped(totals: Sums, lengths: np.ndarray, plan: Plan, progress: Progress) -> dict[str, float]:
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
