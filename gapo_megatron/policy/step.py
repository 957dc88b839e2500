"""The two passes over micro-batches: log-probs alone, and one optimizer update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gapo_megatron import cpu
from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import token_log_probs
from gapo_megatron.policy import optimizer as optim
from gapo_megatron.policy.context import cut, join_rows
from gapo_megatron.policy.policy import Policy
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.types import Microbatch

Outputs = dict[str, Tensor]
Loss = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Outputs]]
Head = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Any]]


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step reports."""

    grad_norm: float
    """Of the whole gradient, before clipping; the same on every rank. 0: nothing moved."""
    learning_rate: float
    outputs: list[Outputs]
    """What `loss` returned for each micro-batch, and `active_rows`: how many of its log-probs have
    a gradient. Empty except on the last pipeline stage."""


def log_probs(
    policy: Policy, microbatches: Sequence[Microbatch], *, temperature: float | None = None
) -> list[Tensor | None]:
    """Log-probs of the response tokens at the current weights, without gradient.

    The same kernels in the same order as the forward pass of `update`: at equal weights and equal
    micro-batches the bits are equal.

    Args:
        policy: unchanged.
        microbatches: this data-parallel rank's; as many as on every other rank.
        temperature: of the distribution; None for `rollout.temperature`.

    Returns:
        Per micro-batch [R] float32 on the last pipeline stage (all tensor and context parallel
        ranks), None elsewhere.

    Collectives: those of the forward pass over the tensor, context and pipeline parallel groups;
    under context parallelism, on the last stage, one all-reduce per micro-batch.
    """

    def keep(_: int, values: Tensor, __: Tensor | None) -> tuple[Tensor, Tensor]:
        return values.sum(), values

    with torch.no_grad():
        values = _run(policy, microbatches, keep, forward_only=True, temperature=temperature)
    return values if policy.groups.is_last_stage else [None] * len(microbatches)


def update(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    loss: Loss,
    *,
    learning_rate: float | None = None,
) -> UpdateResult:
    """One optimizer step on the sum of the losses of all micro-batches of all data-parallel ranks.

    What cannot change the weights is left out: rows without gradient in the head's backward pass,
    the model's whole backward pass of a micro-batch in which no row has one (of the last stage:
    the others propagate zeros, because the pipeline waits for them; ranks that share experts go
    back together), and the optimizer step if the gradient's norm is zero (AdamW would follow old
    momenta and decay).

    Args:
        policy: moved by one step.
        microbatches: this data-parallel rank's; as many as on every other rank. One of padding
            only (R = 0) is fine.
        loss: called on the last pipeline stage with the index of the micro-batch, its log-probs
            [R] float32 and, when `objective.entropy_coef` > 0, entropy [R] (else None), both with
            autograd. Returns the scalar loss, every (global) denominator in it, and what to report.
        learning_rate: instead of the configured schedule.

    Collectives: those of forward and backward; with expert parallelism, on the last stage, one flag
    per micro-batch over the expert parallel group; the gradient reduction over data and context
    parallel ranks (begun in the last backward pass with `parallel.overlap_grad_reduce`); one flag
    over all ranks; the gradient norm; the parameter all-gather.

    Raises:
        DivergenceError: a loss or the gradient is not finite, on every rank alike; weights,
            optimizer state and `num_updates` are what they were. Hidden states that are not
            finite raise it in the forward pass already, on the ranks that hold them: there the
            launcher ends the others.
    """
    config = policy.config.optimizer
    if learning_rate is None:
        learning_rate = optim.learning_rate(config, policy.num_updates)
    losses: list[Tensor] = []

    def record(index: int, values: Tensor, entropy: Tensor | None) -> tuple[Tensor, Outputs]:
        value, outputs = loss(index, values, entropy)
        losses.append(value.detach())
        num_active = _num_active(value, values, entropy)
        if not _goes_back(policy, num_active):
            value = _without_backward(policy, value)
        active_rows = torch.tensor(float(num_active), dtype=torch.float64)
        return value, outputs | {"active_rows": active_rows}

    with cpu.device_scope():
        policy.begin_update()
        outputs = _run(policy, microbatches, record, forward_only=False)
        policy.optimizer.prepare_grads()
        grad_norm = float(policy.optimizer.get_grad_norm())
        _check_finite(policy, losses, grad_norm)
        if grad_norm > 0:
            optim.set_learning_rate(policy.optimizer, learning_rate)
            optim.step(policy.optimizer, grad_norm=grad_norm, clip_grad=config.clip_grad)
            policy.num_updates += 1
    return UpdateResult(grad_norm, learning_rate, outputs)


def _num_active(loss: Tensor, log_probs: Tensor, entropy: Tensor | None) -> int:
    """Rows of the whole micro-batch whose log-prob or entropy has a gradient.

    The same on every tensor and context parallel rank: they go back together or not at all.
    """
    inputs = [log_probs] if entropy is None else [log_probs, entropy]
    if not loss.requires_grad:
        return 0
    gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    is_active = torch.zeros_like(log_probs, dtype=torch.bool)
    for gradient in gradients:
        if gradient is not None:
            # NaN != 0: it reaches the gradient, where it is reported.
            is_active |= gradient != 0
    return int(is_active.sum())


def _goes_back(policy: Policy, num_active: int) -> bool:
    """A row has a gradient here, or on a rank that holds experts of this one's tokens. Collective.

    Experts send gradients back where the tokens came from: a rank alone that left its backward pass
    out would keep the others waiting.
    """
    groups = policy.groups
    if groups.ep_size == 1:
        return num_active > 0
    most = torch.tensor(num_active, device=policy.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep_group)
    return bool(most > 0)


def _without_backward(policy: Policy, loss: Tensor) -> Tensor:
    """`loss` cut off from the model; the stage before still gets its gradient, of zeros."""
    if policy.groups.pp_size == 1:
        return loss.detach()
    return _ZeroGradient.apply(loss.detach(), policy.stages[-1].decoder.input_tensor)


class _ZeroGradient(torch.autograd.Function):
    """A value whose gradient at `received` is zero whatever that holds."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, received: Tensor) -> Tensor:
        ctx.save_for_backward(received)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        (received,) = ctx.saved_tensors
        return None, torch.zeros_like(received)


def _check_finite(policy: Policy, losses: list[Tensor], grad_norm: float) -> None:
    """Raise DivergenceError on every rank if any rank's loss, or the gradient, is not finite."""
    is_bad = torch.zeros(1, device=policy.device)
    if losses:
        is_bad += (~torch.stack(losses).isfinite()).any()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad.item() or not math.isfinite(grad_norm):
        shown = ", ".join(f"{value.item():g}" for value in losses)
        raise DivergenceError(
            f"rank {policy.groups.rank}, update {policy.num_updates}: gradient norm {grad_norm}, "
            f"losses of this rank's micro-batches [{shown}] (not finite here or on another rank); "
            "the weights have not been changed"
        )


def _run(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    head: Head,
    *,
    forward_only: bool,
    temperature: float | None = None,
) -> list[Any]:
    """Forward (and backward) over the micro-batches; what `head` reported, on the last stage."""
    policy.begin_pass()
    groups, num_given = policy.groups, len(microbatches)
    if groups.vpp_size > 1:  # Megatron-core deals micro-batches to virtual stages in such groups
        fillers = [policy.pack_nothing()] * (-num_given % groups.pp_size)
        microbatches = [*microbatches, *fillers]

    def forward(iterator: Iterator[tuple[int, Microbatch]], model: Any) -> tuple[Tensor, Any]:
        index, whole = next(iterator)
        microbatch, rows = cut(whole, groups)
        hidden = model(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=policy.stages[0].packing(microbatch),
        )

        def score(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            values, entropy = _score(policy, hidden, microbatch, temperature)
            if rows is not None:
                num_rows = len(whole.labels)
                values = join_rows(values, rows, num_rows, groups)
                if entropy is not None:
                    entropy = join_rows(entropy, rows, num_rows, groups)
            if index >= num_given:
                return _without_backward(policy, values.sum()), _NO_TOKENS, None
            loss, report = head(index, values, entropy)
            # Three values: Megatron-core then neither averages nor divides.
            return loss, _NO_TOKENS, report

        return hidden, score

    config = policy.stages[0].config
    config.no_sync_func = None
    if policy.reduction is not None and not forward_only:
        config.no_sync_func = policy.reduction.not_last
    config.finalize_model_grads_func = functools.partial(_sum_gradients, policy.reduction)
    with cpu.device_scope():
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(enumerate(microbatches)) for _ in policy.model],
            model=policy.model,
            num_microbatches=len(microbatches),
            seq_length=max(m.tokens.shape[1] for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return reports[:num_given]


_NO_TOKENS = torch.zeros([], dtype=torch.int)


def _sum_gradients(
    reduction: GradientReduction | None,
    model: Any,
    num_tokens: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Megatron-core's reduction without its division by the number of tokens."""
    if reduction is not None:
        reduction.begin_rest()
    finalize_model_grads(model, None, **kwargs)


def _score(
    policy: Policy, hidden: Tensor, microbatch: Microbatch, temperature: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [R] and entropy [R] (if wanted) from hidden states [T (/ tp), 1, H]."""
    groups = policy.groups
    weight: Any = policy.stages[-1].head_weight
    with_entropy = policy.config.objective.entropy_coef > 0
    result: Any = token_log_probs(
        hidden[:, 0],
        weight,
        microbatch.labels,
        row_index=microbatch.row_index,
        temperature=policy.config.rollout.temperature if temperature is None else temperature,
        vocab_start=groups.tp_rank * weight.shape[0],
        vocab_size=policy.hf_config.vocab_size,
        tp_group=groups.tp_group if groups.tp_size > 1 else None,
        sequence_parallel=policy.stages[-1].config.sequence_parallel,
        # Megatron-core's float32 buffer: no copy of the weight's size, and no rounding between
        # micro-batches. The hook then finds no gradient of the head to add.
        main_grad=weight.main_grad,
        return_entropy=with_entropy,
        implementation=policy.config.model.head,
    )
    return result if with_entropy else (result, None)
