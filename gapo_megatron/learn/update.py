"""The two passes over micro-batches: log-probs alone, and one optimizer update."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron import main_grad, received
from gapo_megatron.device.flags import Flags
from gapo_megatron.device.transfer import to_host
from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import Ahead, token_log_probs
from gapo_megatron.policy import optimizer as optim
from gapo_megatron.policy.context import join_rows
from gapo_megatron.policy.parallel import schedule_groups
from gapo_megatron.policy.pipeline import PlannedCommunicator, ZeroGradient
from gapo_megatron.policy.policy import Policy
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.types import Microbatch, Share

Outputs = dict[str, Tensor]
Loss = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Outputs]]


@dataclass(frozen=True)
class _Scored:
    """What the head made of one micro-batch, and what is open about its backward pass."""

    log_probs: Tensor
    """[R] float32 with autograd."""
    entropy: Tensor | None
    """[R] likewise, if wanted."""
    rows: Tensor | None
    """[R_local] of them that this rank computes; None: all."""
    ahead: Ahead


Head = Callable[[int, _Scored], tuple[Tensor, Any]]


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step reports."""

    grad_norm: float
    """Of the whole gradient, before clipping; the same on every rank. 0: nothing moved."""
    learning_rate: float
    outputs: list[Outputs]
    """What `loss` returned for each micro-batch, on the CPU, and `active_rows`: how many of its
    log-probs have a gradient. Empty except on the last pipeline stage."""


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

    Waits for the device once, after the last micro-batch.

    Raises:
        DivergenceError: a log-prob is not finite, on the ranks that hold it: the launcher ends the
            others.
    """

    def keep(_: int, scored: _Scored) -> tuple[Tensor, Tensor]:
        return scored.log_probs.sum(), scored.log_probs

    flags = Flags()
    with torch.no_grad():
        values = _run(policy, microbatches, keep, flags, forward_only=True, temperature=temperature)
    flags.check()
    return values if policy.groups.is_last_stage else [None] * len(microbatches)


def update(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    loss: Loss,
    *,
    learning_rate: float | None = None,
    skip_inactive: bool = False,
    flags: Flags | None = None,
) -> UpdateResult:
    """One optimizer step on the sum of the losses of all micro-batches of all data-parallel ranks.

    The host runs ahead of the device: it waits when all micro-batches are over, to see whether
    everything was finite, for the gradient's norm and for what `loss` reported.

    With `skip_inactive` it also waits for each micro-batch's loss, once, and leaves out what cannot
    change the weights: rows without gradient in the head's backward pass, and the model's whole
    backward pass of a micro-batch in which no row has one (of the last stage: the others propagate
    zeros, because the pipeline waits for them; ranks that share experts have one together). Either
    way a micro-batch without rows has no backward pass (except beside ranks that share experts),
    and there is no optimizer step if the gradient's norm is zero (AdamW would follow old momenta
    and decay).

    Args:
        policy: moved by one step.
        microbatches: this data-parallel rank's; as many as on every other rank. One of padding
            only (R = 0) is fine.
        loss: called on the last pipeline stage with the index of the micro-batch, its log-probs
            [R] float32 and, when `objective.entropy_coef` > 0, entropy [R] (else None), both with
            autograd. Returns the scalar loss, every (global) denominator in it, and what to report;
            all on the policy's device.
        learning_rate: instead of the configured schedule.
        skip_inactive: worth it where a good part of the rows may be without gradient.
        flags: those that `loss` keeps; read, and explained, with the update's own.

    Collectives: those of forward and backward; with `skip_inactive` and expert parallelism, on the
    last stage, one flag per micro-batch over the expert parallel group; the gradient reduction over
    data and context parallel ranks (begun in the last backward pass with
    `parallel.overlap_grad_reduce`); one flag over all ranks; the gradient norm; the parameter
    all-gather.

    Raises:
        DivergenceError: a log-prob, a loss or the gradient is not finite, or one of `flags` is
            raised, on every rank alike; weights, optimizer state and `num_updates` are what they
            were.
    """
    config = policy.config.optimizer
    flags = Flags() if flags is None else flags
    if learning_rate is None:
        learning_rate = optim.learning_rate(config, policy.num_updates)
    losses: list[Tensor] = []

    def record(index: int, scored: _Scored) -> tuple[Tensor, Outputs]:
        value, outputs = loss(index, scored.log_probs, scored.entropy)
        losses.append(value.detach())
        is_active = _active_rows(value, scored)
        has_gradient = is_active is not None
        if is_active is None:
            is_active = torch.zeros_like(scored.log_probs, dtype=torch.bool)
        # At most so many: what the host knows without reading.
        num_active = len(is_active) if has_gradient else 0
        if skip_inactive:
            num_active = _read_active(policy, is_active, scored)
        if not _has_backward(policy, num_active, read=skip_inactive):
            value = _without_backward(policy, value)
        elif not has_gradient:
            # For the ranks whose tokens its experts serve: all the way, with zeros.
            value = ZeroGradient.apply(value.detach(), scored.log_probs)
        return value, outputs | {"active_rows": is_active.sum().double()}

    with cpu.device_scope():
        policy.begin_update()
        outputs = _run(policy, microbatches, record, flags, forward_only=False)
        policy.optimizer.prepare_grads()
        grad_norm = float(policy.optimizer.get_grad_norm())
        _check_finite(policy, losses, grad_norm, flags)
        if grad_norm > 0:
            optim.set_learning_rate(policy.optimizer, learning_rate)
            optim.step(policy.optimizer, grad_norm=grad_norm, clip_grad=config.clip_grad)
            policy.num_updates += 1
    values = iter(to_host([value for output in outputs for value in output.values()]))
    outputs = [{name: next(values) for name in output} for output in outputs]
    return UpdateResult(grad_norm, learning_rate, outputs)


def _active_rows(loss: Tensor, scored: _Scored) -> Tensor | None:
    """[R] bool: rows of the whole micro-batch whose log-prob or entropy has a gradient.

    None: the loss depends on none of them. The same on every tensor and context parallel rank: they
    have a backward pass together or not at all.
    """
    if not loss.requires_grad:
        return None
    inputs = [scored.log_probs] if scored.entropy is None else [scored.log_probs, scored.entropy]
    gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    # NaN != 0: it reaches the gradient, where it is reported.
    active = [gradient != 0 for gradient in gradients if gradient is not None]
    return functools.reduce(torch.logical_or, active) if active else None


def _read_active(policy: Policy, is_active: Tensor, scored: _Scored) -> int:
    """How many rows have a gradient, on the rank of the expert parallel group with most of them.

    Tells the head's backward pass, too, how many there are of this rank's (`Ahead.num_active`).

    Waits for the device, once. Collective over the expert parallel group.
    """
    groups, ahead = policy.groups, scored.ahead
    local = is_active if scored.rows is None else is_active[scored.rows]
    parts = [local[begin:end].sum() for begin, end in itertools.pairwise(ahead.row_edges)]
    most = is_active.sum()
    if groups.ep_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.ep_group)
    num_active, *ahead.num_active = torch.stack([most, *parts]).tolist()
    return int(num_active)


def _has_backward(policy: Policy, num_active: int, *, read: bool) -> bool:
    """Whether a micro-batch has a backward pass.

    Experts send gradients back where the tokens came from: a rank alone that left its backward pass
    out would keep the others waiting. They agree where `num_active` was read from all of them.
    """
    return num_active > 0 or (policy.groups.ep_size > 1 and not read)


def _without_backward(policy: Policy, loss: Tensor) -> Tensor:
    """`loss` cut off from the model; the stage before still gets its gradient, of zeros."""
    if policy.groups.pp_size == 1:
        return loss.detach()
    return ZeroGradient.apply(loss.detach(), received(policy.stages[-1]))


def _check_finite(policy: Policy, losses: list[Tensor], grad_norm: float, flags: Flags) -> None:
    """Raise DivergenceError on every rank if any rank's loss, flag or gradient says so."""
    is_bad = flags.any(policy.device).float()
    if losses:
        is_bad += (~torch.stack(losses).isfinite()).any()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad.item() or not math.isfinite(grad_norm):
        shown = ", ".join(f"{value:g}" for value in torch.stack(losses).tolist()) if losses else ""
        culprit = flags.error()
        found = "not finite here or on another rank" if culprit is None else str(culprit)
        raise DivergenceError(
            f"rank {policy.groups.rank}, update {policy.num_updates}: gradient norm {grad_norm}, "
            f"losses of this rank's micro-batches [{shown}] ({found}); "
            "the weights have not been changed"
        )


def _run(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    head: Head,
    flags: Flags,
    *,
    forward_only: bool,
    temperature: float | None = None,
) -> list[Any]:
    """Forward (and backward) over the micro-batches; what `head` reported, on the last stage.

    Nothing in it waits for the device: `flags` says afterwards what went wrong.
    """
    policy.begin_pass()
    groups, num_given = policy.groups, len(microbatches)
    if groups.vpp_size > 1:  # Megatron-core deals micro-batches to virtual stages in such groups
        fillers = [policy.pack_nothing()] * (-num_given % groups.pp_size)
        microbatches = [*microbatches, *fillers]

    def forward(iterator: Iterator[tuple[int, Microbatch]], model: Any) -> tuple[Tensor, Any]:
        index, whole = next(iterator)
        share = _share(policy, whole)
        microbatch = share.microbatch
        hidden = model(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=policy.stages[0].packing(microbatch),
        )

        def score(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            flags.where = f"micro-batch {index}"
            scored = _score(policy, hidden, share, len(whole.labels), flags, temperature)
            if index >= num_given:
                return _without_backward(policy, scored.log_probs.sum()), _NO_TOKENS, None
            loss, report = head(index, scored)
            # Three values: Megatron-core then neither averages nor divides.
            return loss, _NO_TOKENS, report

        return hidden, score

    config = policy.stages[0].config
    reduction = policy.reduction
    config.no_sync_func = None if reduction is None or forward_only else reduction.not_last
    config.finalize_model_grads_func = functools.partial(_sum_gradients, reduction)
    communication = _communication(policy, microbatches, forward_only=forward_only)
    with cpu.device_scope():
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(enumerate(microbatches)) for _ in policy.model],
            model=policy.model,
            num_microbatches=len(microbatches),
            seq_length=max(m.tokens.shape[1] for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            **communication,
        )
    if communication:
        communication["p2p_communicator"].check_finished()
    return reports[:num_given]


def _share(policy: Policy, whole: Microbatch) -> Share:
    """This rank's share; one that `batching.pack` alone has made is the whole."""
    if whole.share is not None:
        return whole.share
    assert policy.groups.cp_size == 1 and not policy.config.parallel.sequence_parallel, (
        "ranks share this micro-batch: it must come from Policy.pack"
    )
    return Share(whole, None, (0, len(whole.labels)))


def _communication(
    policy: Policy, microbatches: Sequence[Microbatch], *, forward_only: bool
) -> dict[str, Any]:
    """How the schedule's stages talk to each other; nothing where there is one."""
    groups, config = policy.groups, policy.stages[0].config
    if groups.pp_size == 1:
        return {}
    num_shards = groups.cp_size * (groups.tp_size if config.sequence_parallel else 1)
    shapes = [(m.tokens.shape[1] // num_shards, 1, config.hidden_size) for m in microbatches]
    return {
        "p2p_communicator": PlannedCommunicator(
            groups.pp_group, config, shapes, forward_only=forward_only
        ),
        "pg_collection": schedule_groups(),
    }


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
    policy: Policy,
    hidden: Tensor,
    share: Share,
    num_rows: int,
    flags: Flags,
    temperature: float | None,
) -> _Scored:
    """Log-probs [R] and entropy [R] (if wanted) from hidden states [T / cp (/ tp), 1, H]."""
    groups = policy.groups
    weight: Any = policy.stages[-1].head_weight
    with_entropy = policy.config.objective.entropy_coef > 0
    indices, sequence_ids = share.microbatch.indices, share.microbatch.sequence_ids
    ahead = Ahead(flags, share.row_edges, sequence_of=lambda row: indices[int(sequence_ids[row])])
    result: Any = token_log_probs(
        hidden[:, 0],
        weight,
        share.microbatch.labels,
        row_index=share.microbatch.row_index,
        temperature=policy.config.rollout.temperature if temperature is None else temperature,
        vocab_start=groups.tp_rank * weight.shape[0],
        vocab_size=policy.hf_config.vocab_size,
        tp_group=groups.tp_group if groups.tp_size > 1 else None,
        sequence_parallel=policy.stages[-1].config.sequence_parallel,
        # Megatron-core's float32 buffer: no copy of the weight's size, and no rounding between
        # micro-batches. The hook then finds no gradient of the head to add.
        main_grad=main_grad(weight) if weight.requires_grad else None,
        return_entropy=with_entropy,
        implementation=policy.head,
        ahead=ahead,
    )
    values, entropy = result if with_entropy else (result, None)
    if share.rows is not None:
        values = join_rows(values, share.rows, num_rows, groups)
        if entropy is not None:
            entropy = join_rows(entropy, share.rows, num_rows, groups)
    return _Scored(values, entropy, share.rows, ahead)
