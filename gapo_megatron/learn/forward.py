"""A pass over micro-batches: forward through model and head, and backward unless it only scores.

`score` (forward only) and `update` both run it, so at equal weights and equal micro-batches their
log-probs have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron import main_grad, received
from gapo_megatron.device.flags import Flags
from gapo_megatron.logprob import RowPlan, Sequences, token_log_probs
from gapo_megatron.policy.context import join_rows
from gapo_megatron.policy.parallel import schedule_groups
from gapo_megatron.policy.pipeline import PlannedCommunicator, WithGradients
from gapo_megatron.policy.policy import Policy
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.types import Microbatch

_NO_TOKENS = torch.zeros([], dtype=torch.int)


@dataclass(frozen=True)
class Scored:
    """A micro-batch after the head, with the inputs of its backward pass."""

    index: int
    """Number of the micro-batch in the pass."""
    log_probs: Tensor
    """[R] float32, with autograd unless the pass is forward only."""
    entropy: Tensor | None
    """[R] float32, likewise; None unless the pass was asked for it."""
    flags: Flags
    """Checks of the pass on the device, read after the last micro-batch."""
    rows: Tensor | None
    """[R_local] int64, the rows of R that this rank computes; None: all."""
    row_plan: RowPlan
    sequences: Sequences
    """The rows of each sequence, for the loss's sums over them."""


Head = Callable[[Scored], tuple[Tensor, Any]]
"""Scalar from which the backward pass starts, and outputs to report for the micro-batch."""


def run_pass(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    head: Head,
    flags: Flags,
    *,
    forward_only: bool,
    temperature: float | None = None,
    with_entropy: bool = False,
) -> list[Any]:
    """Forward (and backward) over the micro-batches, in Megatron-core's pipeline schedule.

    Does not wait for the device: read errors from `flags` afterwards.

    Args:
        policy: its gradients are added to unless `forward_only`.
        microbatches: this data-parallel rank's micro-batches, equally many on every rank.
        head: called on the last pipeline stage, once for each micro-batch.
        flags: set by the head operator and by `head`.
        forward_only: no backward pass.
        temperature: sampling temperature; None: `rollout.temperature`.
        with_entropy: also compute the entropy of every row's distribution (`Scored.entropy`).

    Returns:
        Outputs of `head` for each micro-batch, on the last pipeline stage; empty on other stages.

    Collectives: those of forward and backward pass over the tensor, context, expert and pipeline
    parallel groups; after the last backward pass those of the gradient reduction.
    """
    # The memory of the weights may have been released between steps.
    policy.begin_pass()
    groups, num_given = policy.groups, len(microbatches)
    if groups.vpp_size > 1:  # Megatron-core assigns micro-batches to virtual stages in such groups
        fillers = [policy.pack_nothing()] * (-num_given % groups.pp_size)
        microbatches = [*microbatches, *fillers]

    def forward(iterator: Iterator[tuple[int, Microbatch]], model: Any) -> tuple[Tensor, Any]:
        index, microbatch = next(iterator)
        hidden = model(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=policy.stages[0].packing(microbatch),
        )

        def after(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            flags.where = f"micro-batch {index}"
            row_plan = _plan_rows(microbatch, flags)
            values = _log_probs(
                policy,
                hidden,
                microbatch,
                row_plan,
                temperature=policy.temperature if temperature is None else temperature,
                with_entropy=with_entropy,
            )
            log_probs, entropy = _join(policy, values, microbatch)
            if index >= num_given:
                return without_backward(policy, log_probs.sum()), _NO_TOKENS, None
            sequences = Sequences(
                microbatch.sequence_ids, microbatch.row_offsets, implementation=policy.head
            )
            loss, report = head(
                Scored(index, log_probs, entropy, flags, microbatch.rows, row_plan, sequences)
            )
            # With three values Megatron-core neither averages nor divides the loss.
            return loss, _NO_TOKENS, report

        return hidden, after

    # Megatron-core's schedule calls these around and after the backward passes.
    config, reduction = policy.stages[0].config, policy.reduction
    config.no_sync_func = None if reduction is None or forward_only else reduction.not_last
    config.finalize_model_grads_func = functools.partial(_sum_gradients, reduction)
    communication = _communication(policy, microbatches, forward_only=forward_only)
    with cpu.device_scope():
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(enumerate(microbatches)) for _ in policy.model],
            model=policy.model,
            num_microbatches=len(microbatches),
            seq_length=max(m.tokens.shape[1] for m in microbatches) * groups.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
            **communication,
        )
    if communication:
        communication["p2p_communicator"].check_finished()
    return reports[:num_given]


def without_backward(policy: Policy, loss: Tensor) -> Tensor:
    """`loss` detached from the model; the previous stage still receives a gradient of zeros."""
    if policy.groups.pp_size == 1:
        return loss.detach()
    return WithGradients.apply(loss.detach(), [None], received(policy.stages[-1]))


def _plan_rows(microbatch: Microbatch, flags: Flags) -> RowPlan:
    """Row counts for the head operator, which would otherwise wait for the device to get them."""

    def sequence_of(row: int) -> int:
        rows = microbatch.rows
        whole_row = row if rows is None else int(rows[row])
        return microbatch.indices[int(microbatch.sequence_ids[whole_row])]

    return RowPlan(flags, microbatch.row_edges, sequence_of=sequence_of)


def _log_probs(
    policy: Policy,
    hidden: Tensor,
    microbatch: Microbatch,
    row_plan: RowPlan,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy (if wanted) [R_local] from hidden states [T / cp (/ tp), 1, H]."""
    groups = policy.groups
    weight: Any = policy.stages[-1].head_weight
    result: Any = token_log_probs(
        hidden[:, 0],
        weight,
        microbatch.labels,
        row_index=microbatch.row_index,
        temperature=temperature,
        vocab_start=groups.tp_rank * weight.shape[0],
        vocab_size=policy.hf_config.vocab_size,
        tp_group=groups.tp_group if groups.tp_size > 1 else None,
        sequence_parallel=policy.stages[-1].config.sequence_parallel,
        # Accumulate into Megatron-core's float32 buffer: no copy of the weight's size, and no
        # rounding between micro-batches. The hook then finds no gradient of the head to add.
        main_grad=main_grad(weight) if weight.requires_grad else None,
        return_entropy=with_entropy,
        implementation=policy.head,
        row_plan=row_plan,
    )
    values, entropy = result if with_entropy else (result, None)
    return values, entropy


def _join(
    policy: Policy, values: tuple[Tensor, Tensor | None], microbatch: Microbatch
) -> tuple[Tensor, Tensor | None]:
    """Gather log-probs and entropy [R] of all rows from the context parallel ranks."""
    log_probs, entropy = values
    rows, num_rows = microbatch.rows, len(microbatch.sequence_ids)
    if rows is not None:
        log_probs = join_rows(log_probs, rows, num_rows, policy.groups)
        if entropy is not None:
            entropy = join_rows(entropy, rows, num_rows, policy.groups)
    return log_probs, entropy


def _communication(
    policy: Policy, microbatches: Sequence[Microbatch], *, forward_only: bool
) -> dict[str, Any]:
    """Communication arguments of the pipeline schedule; empty with a single stage."""
    groups, config = policy.groups, policy.stages[0].config
    if groups.pp_size == 1:
        return {}
    num_shards = groups.tp_size if config.sequence_parallel else 1
    shapes = [(m.tokens.shape[1] // num_shards, 1, config.hidden_size) for m in microbatches]
    return {
        "p2p_communicator": PlannedCommunicator(
            groups.pp_group, config, shapes, forward_only=forward_only
        ),
        "pg_collection": schedule_groups(),
    }


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
