"""An optimizer update: forward, loss, backward for rows with a gradient, optimizer step."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_optimizer import clip_and_step
from gapo_megatron.device import Flags, to_host
from gapo_megatron.errors import DivergenceError
from gapo_megatron.learn.score import Scored, run_pass, without_backward
from gapo_megatron.policy.optimizer import learning_rate as scheduled_rate
from gapo_megatron.policy.pipeline import WithGradients
from gapo_megatron.policy.policy import Policy
from gapo_megatron.types import Microbatch

logger = logging.getLogger(__name__)

Outputs = dict[str, Tensor]
Loss = Callable[[Scored], tuple[Tensor, Outputs]]


@dataclass(frozen=True)
class UpdateResult:
    """Report of one optimizer step."""

    grad_norm: float
    """Norm of the whole gradient, before clipping; the same on every rank. 0: no step was taken."""
    learning_rate: float
    outputs: list[Outputs]
    """Results of `loss` for each micro-batch, on the CPU, and `active_rows`: the number of its
    log-probs with a gradient. Empty except on the last pipeline stage."""


def update(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    loss: Loss,
    *,
    learning_rate: float | None = None,
    skip_inactive: bool = False,
    with_entropy: bool = False,
) -> UpdateResult:
    """One optimizer step on the sum of the losses of all micro-batches of all data-parallel ranks.

    The host runs ahead of the device and waits after the last micro-batch: for the checks of finite
    values, for the gradient norm and for the results of `loss`. There is no optimizer step if the
    gradient norm is zero (AdamW would apply old momenta and weight decay).

    In fp16 the loss is scaled (`policy.loss_scale`). If the gradient overflows, there is no step
    either: the scale is halved, and the pass is repeated, so that no mini-batch is lost.

    Args:
        policy: updated by one step.
        microbatches: this data-parallel rank's micro-batches, equally many on every rank. Padding
            only (R = 0) is allowed.
        loss: called on the last pipeline stage for each micro-batch of each pass; must have no
            side effects, and depend on the model only through `scored.log_probs` and
            `scored.entropy`. Returns the scalar loss, divided by global denominators, and outputs
            to report, all on the policy's device. Reports values that are not finite in
            `Scored.flags`.
        learning_rate: replaces the configured schedule.
        skip_inactive: skip work that cannot change the weights (`_cut_backward`); worthwhile if
            many rows may have no gradient.
        with_entropy: also compute the entropy that `loss` reads (`Scored.entropy`).

    Collectives: for each pass those of `score.run_pass`; with `skip_inactive` and expert
    parallelism, on the last stage, one flag per micro-batch over the expert parallel group; the
    gradient reduction over data and context parallel ranks (begun in the last backward pass with
    `parallel.overlap_grad_reduce`); the gradient norm; one flag over all ranks. At the end the
    parameter all-gather.

    Raises:
        DivergenceError: a log-prob, a loss or the gradient is not finite (in fp16: at a scale of
            1, after halvings), or a flag is raised; raised on every rank. Weights, optimizer state
            and `num_updates` are unchanged.
    """
    settings, scale = policy.optimizer_settings, policy.loss_scale
    if learning_rate is None:
        learning_rate = scheduled_rate(settings, policy.num_updates)
    losses: list[Tensor] = []

    def head(scored: Scored) -> tuple[Tensor, Outputs]:
        value, outputs = loss(scored)
        losses.append(value.detach())
        value, num_active = _cut_backward(policy, value, scored, skip_inactive=skip_inactive)
        if scale is not None:
            value = value * scale.value
        return value, outputs | {"active_rows": num_active}

    with cpu.device_scope():
        while True:
            flags = Flags()
            losses.clear()
            policy.begin_update()
            outputs = run_pass(
                policy, microbatches, head, flags, forward_only=False, with_entropy=with_entropy
            )
            if scale is not None:
                policy.unscale_gradients()
            policy.optimizer.prepare_grads()
            grad_norm = float(policy.optimizer.get_grad_norm())
            _check_finite(policy, losses, grad_norm, flags)
            if math.isfinite(grad_norm):
                break
            assert scale is not None  # otherwise the check has raised
            scale.overflowed()
            if policy.groups.rank == 0:
                logger.info(
                    "update %d: the gradient overflowed in fp16; repeated at loss scale %g",
                    policy.num_updates,
                    scale.value,
                )
        if grad_norm > 0:
            if scale is not None:
                scale.updated()
            for group in policy.optimizer.param_groups:
                group["lr"] = learning_rate
            clip_and_step(policy.optimizer, grad_norm=grad_norm, max_norm=settings.clip_grad)
            policy.num_updates += 1
    values = iter(to_host([value for output in outputs for value in output.values()]))
    outputs = [{name: next(values) for name in output} for output in outputs]
    return UpdateResult(grad_norm, learning_rate, outputs)


def _cut_backward(
    policy: Policy, loss: Tensor, scored: Scored, *, skip_inactive: bool
) -> tuple[Tensor, Tensor]:
    """Skip rows without gradient in the backward pass of a micro-batch.

    With `skip_inactive` the host waits for the loss once, and omits rows without gradient from the
    head's backward pass. If no row has a gradient, it omits the model's backward pass (on the last
    stage: other stages propagate zeros, because the pipeline waits for them; ranks that share
    experts run a backward pass if any of them does). In any case a micro-batch without rows has no
    backward pass, unless ranks share experts.

    Returns:
        The loss from which the backward pass starts, and the number of rows with a gradient
        (float64 scalar on the device).
    """
    # The log-probs and entropy [R] that the loss depends on, and its gradients at them: the same on
    # every tensor and context parallel rank, which must run or skip the backward pass together.
    inputs: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    if loss.requires_grad:
        given = [one for one in (scored.log_probs, scored.entropy) if one is not None]
        found = torch.autograd.grad(loss, given, allow_unused=True)
        pairs = [(x, g) for x, g in zip(given, found, strict=True) if g is not None]
        inputs, gradients = zip(*pairs, strict=True) if pairs else ((), ())
    # NaN != 0: it reaches the gradient and is reported there.
    is_active = torch.zeros_like(scored.log_probs, dtype=torch.bool)
    for gradient in gradients:
        is_active = is_active | (gradient != 0)
    # Upper bound that the host knows without reading the device.
    num_active = len(is_active) if gradients else 0
    if skip_inactive:
        num_active = _read_active(policy, is_active, scored)
    if not _has_backward(policy, num_active, read=skip_inactive):
        loss = without_backward(policy, loss)
    elif not gradients:
        # A zero backward pass, so that expert-parallel peers do not hang.
        loss = WithGradients.apply(loss.detach(), [None], scored.log_probs)
    else:
        loss = WithGradients.apply(loss.detach(), gradients, *inputs)
    return loss, is_active.sum().double()


def _read_active(policy: Policy, is_active: Tensor, scored: Scored) -> int:
    """Number of rows with a gradient: the maximum over the expert parallel group.

    Also sets this rank's number for the head's backward pass (`RowPlan.num_active`).

    Waits for the device once. Collective over the expert parallel group.
    """
    groups, row_plan = policy.groups, scored.row_plan
    local = is_active if scored.rows is None else is_active[scored.rows]
    parts = [local[begin:end].sum() for begin, end in itertools.pairwise(row_plan.row_edges)]
    most = is_active.sum()
    if groups.ep_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep_group)
    num_active, *row_plan.num_active = torch.stack([most, *parts]).tolist()
    return int(num_active)


def _has_backward(policy: Policy, num_active: int, *, read: bool) -> bool:
    """Whether a micro-batch has a backward pass.

    Experts exchange gradients in an all-to-all: a single rank that skipped its backward pass would
    block the others. They agree because `num_active` is the maximum over all of them.
    """
    return num_active > 0 or (policy.groups.ep_size > 1 and not read)


def _check_finite(policy: Policy, losses: list[Tensor], grad_norm: float, flags: Flags) -> None:
    """Raise DivergenceError on every rank if any rank's loss, flag or gradient is not finite.

    A gradient that a smaller loss scale may make finite is not an error.
    """
    is_bad = flags.any(policy.device).float()
    if losses:
        is_bad += (~torch.stack(losses).isfinite()).any()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    may_be_smaller = policy.loss_scale is not None and policy.loss_scale.may_halve
    if is_bad.item() or not (math.isfinite(grad_norm) or may_be_smaller):
        shown = ", ".join(f"{value:g}" for value in torch.stack(losses).tolist()) if losses else ""
        culprit = flags.error()
        found = "not finite here or on another rank" if culprit is None else str(culprit)
        raise DivergenceError(
            f"rank {policy.groups.rank}, update {policy.num_updates}: gradient norm {grad_norm}, "
            f"losses of this rank's micro-batches [{shown}] ({found}); "
            "the weights have not been changed"
        )
