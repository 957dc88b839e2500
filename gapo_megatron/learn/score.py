"""One pass over micro-batches: forward through model and head, and backward unless it only scores.

All scoring uses this module: the old pass of `learn`, rollouts carried to the next step, the
measurement of rounding and the check after a weight sync. `score` takes sequences, `log_probs`
micro-batches that the caller has packed and uses again. `update` runs the same `run_pass`, so at
equal weights and equal micro-batches all of them have the same bits.
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

from gapo_megatron.batching import unpack
from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron import main_grad, received
from gapo_megatron.device import Flags
from gapo_megatron.logprob import RowPlan, Sequences, token_log_probs
from gapo_megatron.policy.context import join_rows
from gapo_megatron.policy.parallel import schedule_groups
from gapo_megatron.policy.pipeline import PlannedCommunicator, WithGradients
from gapo_megatron.policy.policy import Policy
from gapo_megatron.policy.reduction import GradientReduction
from gapo_megatron.rollouts import Rollouts
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

            def sequence_of(row: int) -> int:  # for messages
                whole_row = row if microbatch.rows is None else int(microbatch.rows[row])
                return microbatch.indices[int(microbatch.sequence_ids[whole_row])]

            row_plan = RowPlan(flags, microbatch.row_edges, sequence_of=sequence_of)
            log_probs, entropy = _score_rows(
                policy,
                hidden,
                microbatch,
                row_plan,
                temperature=policy.temperature if temperature is None else temperature,
                with_entropy=with_entropy,
            )
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
    communication = {}
    if groups.pp_size > 1:
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


def _score_rows(
    policy: Policy,
    hidden: Tensor,
    microbatch: Microbatch,
    row_plan: RowPlan,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy (if wanted) [R] from hidden states [T / cp (/ tp), 1, H].

    Context parallel ranks each score some rows, and gather all of them.
    """
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
    log_probs, entropy = result if with_entropy else (result, None)
    if microbatch.rows is not None:
        num_rows = len(microbatch.sequence_ids)
        log_probs = join_rows(log_probs, microbatch.rows, num_rows, groups)
        if entropy is not None:
            entropy = join_rows(entropy, microbatch.rows, num_rows, groups)
    return log_probs, entropy


def _communication(
    policy: Policy, microbatches: Sequence[Microbatch], *, forward_only: bool
) -> dict[str, Any]:
    """Communication arguments of the pipeline schedule, for more than one stage."""
    groups, config = policy.groups, policy.stages[0].config
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


def score(
    policy: Policy,
    rollouts: Rollouts,
    microbatches: Sequence[Sequence[int]],
    *,
    temperature: float | None = None,
    mark: Callable[[list[Microbatch]], list[Microbatch]] = list,
) -> dict[int, Tensor]:
    """Log-probs of the sampled response tokens of `rollouts`, packed as in `microbatches`.

    Args:
        policy: unchanged.
        rollouts: with these tokens; the same on every rank of a tensor, context or pipeline
            parallel group.
        microbatches: this data-parallel rank's rows of `rollouts`; equally many micro-batches on
            every rank, `()` for an empty micro-batch.
        temperature: sampling temperature; None: `rollout.temperature`.
        mark: sets what chooses the experts of the packed micro-batches (`learn.checks.routes`).

    Returns:
        Row of `rollouts` -> [num sampled tokens] float32 on the CPU, in the order of
        `microbatches`; empty except on the last pipeline stage.

    Collectives: those of `log_probs`.

    Raises:
        DivergenceError: a log-prob is not finite.
        DataError: a token is outside the model's vocabulary.
    """
    if not microbatches:
        return {}
    packed = mark([policy.pack(rollouts, indices) for indices in microbatches])
    values = log_probs(policy, packed, temperature=temperature)
    return unpack(rollouts, microbatches, values)


def log_probs(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    temperature: float | None = None,
    with_entropy: bool = False,
) -> list[Tensor | None]:
    """Log-probs of packed micro-batches, left on the device.

    The same kernels in the same order as the forward pass of `learn.update.update`: at equal
    weights and equal micro-batches the bits are equal.

    Args:
        policy: unchanged.
        microbatches: this data-parallel rank's micro-batches, equally many on every rank.
        temperature: sampling temperature; None: `rollout.temperature`.
        with_entropy: as in the update, whose kernels then are the same; the entropy is dropped.

    Returns:
        Per micro-batch [R] float32 on the last pipeline stage (all tensor and context parallel
        ranks), None elsewhere.

    Collectives: those of the forward pass over the tensor, context and pipeline parallel groups;
    under context parallelism, on the last stage, one all-reduce per micro-batch.

    Waits for the device once, after the last micro-batch.

    Raises:
        DivergenceError: a log-prob is not finite; raised on the ranks that hold it, and the
            launcher ends the others.
    """

    def keep(scored: Scored) -> tuple[Tensor, Tensor]:
        return scored.log_probs.sum(), scored.log_probs

    flags = Flags()
    with torch.no_grad():
        values = run_pass(
            policy,
            microbatches,
            keep,
            flags,
            forward_only=True,
            temperature=temperature,
            with_entropy=with_entropy,
        )
    flags.check()
    return values if policy.groups.is_last_stage else [None] * len(microbatches)
