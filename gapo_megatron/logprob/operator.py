"""Log-probabilities of given tokens under a vocabulary-parallel output layer, without full logits.

The forward pass keeps two numbers per row (maximum and sum of exponentials), and on a CPU what
fits of the logits. The backward pass recomputes the others, only of rows whose log-probability has
a non-zero gradient.
docs/numerics.md says why logits are float32, with measurements.

Shapes: T positions, R <= T of them scored (rows), H hidden size, V_local rows of the output layer
on this rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gapo_megatron.device import Flags
from gapo_megatron.logprob import tiles
from gapo_megatron.logprob.block import BlockRows, block_gradient, pad
from gapo_megatron.logprob.implementation import Name, choose_implementation
from gapo_megatron.logprob.rows import (
    RowPlan,
    active_rows,
    check_labels,
    check_rows,
    check_tensors,
    flag_not_finite,
)
from gapo_megatron.logprob.tiles import MAXIMUM, SUM_EXP, TARGET, WEIGHTED, merge_stats


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: torch.Tensor | None = None,
    return_entropy: bool = False,
    implementation: Name = "auto",
    row_plan: RowPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each row's label: log_softmax(hidden @ weight.T / temperature)[label].

    Accumulates in float32 (float64 for float64 inputs) and holds one tile of logits at a time; on a
    CPU, each call keeps up to 256 MiB of them until its backward pass (`tiles.KEPT_BYTES`). A row's
    value does not depend on other rows, if the platform's matrix product allows it
    (docs/numerics.md).

    Args:
        hidden: [T, H] float32, bfloat16, float16 or float64, the same on every tensor-parallel
            rank; with `sequence_parallel` this rank's positions [T / tp, H], in rank order.
        weight: [V_local, H] like `hidden`: this rank's rows of the output layer.
        labels: [R] int64 token ids in 0..vocab_size-1, the same on every tensor-parallel rank.
            R = response tokens; may be 0.
        row_index: [R] int64 positions in 0..T-1 to score, increasing; None: all of them, R = T.
        temperature: divisor of the logits.
        vocab_start: token id of the first row of `weight`: tp_rank * V_local.
        vocab_size: real tokens over all ranks; later rows of `weight` are padding, which is ignored
            and gets no gradient. None: no padding.
        tp_group: ranks that hold the shards of the vocabulary; None: `weight` is whole.
        sequence_parallel: whether `hidden` is sharded over `tp_group` by positions.
        main_grad: [V_local, H] in the accumulation dtype: the gradient of `weight` is added to it
            (Megatron-core's gradient buffer) and `weight.grad` stays empty. None: usual autograd.
        return_entropy: also return the entropy of each row's distribution, in nats, with gradient.
        implementation: "torch" or "triton"; "auto": by device (`choose_implementation`).
        row_plan: avoids synchronisation with the device. None: the forward pass synchronises for
            its checks, the backward pass for the number of rows with a gradient.

    Returns:
        [R] float32 (float64 for float64 inputs), bitwise the same on every rank of `tp_group`; with
        `return_entropy` (log-probs, entropy). The gradient of `hidden` is complete on every rank
        (of its own positions under sequence parallelism), that of `weight` is of the local shard;
        both are accumulated in the accumulation dtype and returned in the dtype of their input.

    Collectives, over `tp_group`: forward, an all-gather of `hidden` if `sequence_parallel`, then an
        all-gather of 3 or 4 numbers per row if R > 0. Backward, if any row has a gradient: the
        all-gather of `hidden` again; then per block of rows, overlapped with the next block, an
        all-reduce, or with sequence parallelism a reduce to the rank that owns the block.
        The upstream gradients must be the same on every rank, because they decide the blocks.

    Raises:
        ValueError: shape, dtype, device, label, row or vocabulary range; names argument and row.
        DivergenceError: a result is not finite; names the row and the cause. With `row_plan` it is
            only flagged.
    """
    # Checks; with a row plan the caller has checked labels and rows.
    tp_size = 1 if tp_group is None else tp_group.size()
    tp_rank = 0 if tp_group is None else tp_group.rank()
    check_tensors(hidden, weight, labels, row_index, main_grad)
    if vocab_size is None:
        vocab_size = len(weight) * tp_size
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature ({temperature}) must be positive and finite")
    if vocab_start != tp_rank * len(weight):
        raise ValueError(
            f"vocab_start ({vocab_start}) must be tp_rank * len(weight) = {tp_rank} * {len(weight)}"
        )
    if not 0 < vocab_size <= tp_size * len(weight):
        raise ValueError(
            f"vocab_size ({vocab_size}) must be in 1..{tp_size * len(weight)}, all shards' rows"
        )
    if row_plan is None:
        check_labels(labels, vocab_size)
        check_rows(labels, row_index, len(hidden) * (tp_size if sequence_parallel else 1))
    code: Any = tiles
    if implementation != "torch":
        code = choose_implementation(hidden.device, hidden.dtype, implementation)
    options = _Options(
        inverse_temperature=1 / temperature,
        vocab_start=vocab_start,
        num_columns=min(max(vocab_size - vocab_start, 0), len(weight)),
        tp_group=tp_group if tp_size > 1 else None,
        sequence_parallel=sequence_parallel and tp_size > 1,
        main_grad=main_grad,
        with_entropy=return_entropy,
        code=code,
        keeps_logits=code is tiles
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad),
        row_plan=row_plan,
    )
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, labels, row_index, options)
    return (log_probs, entropy) if return_entropy else log_probs


@dataclass(frozen=True)
class _Options:
    """Arguments of `token_log_probs` without a gradient."""

    inverse_temperature: float
    vocab_start: int
    num_columns: int
    """Rows of this rank's weight that are tokens, not padding."""
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    main_grad: torch.Tensor | None
    with_entropy: bool
    code: Any
    """The module `tiles` or `triton_kernels`."""
    keeps_logits: bool
    row_plan: RowPlan | None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        row_index: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Statistics of this shard's logits, then of all shards.
        columns = labels - options.vocab_start
        whole = _gather_positions(hidden, options)
        rows = whole if row_index is None else whole.index_select(0, row_index)
        tokens = weight[: options.num_columns]
        multiple = options.code.row_multiple(rows)
        padded, kept, softmax_stats = pad(rows, multiple), None, options.code.softmax_stats
        if options.keeps_logits:
            kept = tiles.room_for_logits(padded, tokens)
            softmax_stats = functools.partial(softmax_stats, kept=kept)
        stats = softmax_stats(
            padded,
            tokens,
            pad(columns, multiple),
            inverse_temperature=options.inverse_temperature,
            with_entropy=options.with_entropy,
        )[:, : len(rows)].contiguous()
        if options.tp_group is not None and len(rows):
            shards = [torch.empty_like(stats) for _ in range(options.tp_group.size())]
            dist.all_gather(shards, stats, group=options.tp_group)
            # In rank order, for the same bits on every rank.
            stats = functools.reduce(merge_stats, shards)
        maximum, sum_exp = stats[MAXIMUM], stats[SUM_EXP]
        log_sum = sum_exp.log()
        # target - maximum first: exact if they are close, even if both are large.
        log_probs = (stats[TARGET] - maximum) - log_sum
        entropy = log_sum - stats[WEIGHTED] / sum_exp if options.with_entropy else None
        row_plan = options.row_plan or RowPlan(Flags(), (0, len(rows)))
        flag_not_finite(row_plan, log_probs, entropy, rows, row_index, tokens, options.vocab_start)
        if options.row_plan is None:
            row_plan.flags.check()

        # The input `hidden`: gathered positions and scored rows are not kept.
        ctx.save_for_backward(hidden, weight, columns, row_index, maximum, sum_exp, entropy, kept)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Rows with a gradient, in blocks that are the same on every rank.
        hidden, weight, columns, row_index, maximum, sum_exp, entropy, kept = ctx.saved_tensors
        options: _Options = ctx.options
        hidden_needs_grad, weight_needs_grad, *others = ctx.needs_input_grad
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(maximum)
        active, edges = active_rows(grad_log_probs, grad_entropy, options.row_plan)
        positions = active if row_index is None else row_index[active]
        group = options.tp_group if options.sequence_parallel else None
        if edges is None:  # rows before the positions of each rank, and the total
            edges = [0, len(positions)]
            if group is not None:
                starts = torch.arange(group.size() + 1, device=positions.device) * len(hidden)
                edges = torch.searchsorted(positions, starts).tolist()
        # By the shape of the whole shard, the same on every rank, because ranks must agree on the
        # blocks; the last shards may hold fewer tokens. Rows of a block are of one rank.
        step, _ = options.code.block_shape(weight)
        blocks = [
            (owner, slice(start, min(start + step, end)))
            for owner, (begin, end) in enumerate(itertools.pairwise(edges))
            for start in range(begin, end, step)
        ]

        # Where dW and dX are added.
        total = None
        if weight_needs_grad:
            total = options.main_grad
            if total is None:
                # With one block each sum is rounded once in any dtype; several need more digits.
                dtype = weight.dtype if len(blocks) <= 1 else maximum.dtype
                total = torch.empty_like(weight, dtype=dtype)
                total[options.num_columns if blocks else 0 :].zero_()
        grad_hidden = torch.zeros_like(hidden) if hidden_needs_grad else None
        # Block by block.
        whole = _gather_positions(hidden, options) if blocks else hidden
        summing: _Summing | None = None
        for number, (owner, block) in enumerate(blocks):
            rows, kept_rows = active[block], None
            if kept is not None:  # the first ones, because rows increase
                whole_is_kept = len(kept) >= len(maximum)
                kept_rows = (kept, rows if whole_is_kept else rows[rows < len(kept)])
            grad_block = block_gradient(
                whole.index_select(0, positions[block]),
                weight[: options.num_columns],
                BlockRows(
                    columns[rows],
                    maximum[rows],
                    sum_exp[rows],
                    grad_log_probs[rows],
                    None if grad_entropy is None else entropy[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                    kept_rows,
                ),
                grad_weight=total,
                overwrite=options.main_grad is None and number == 0,
                hidden_needs_grad=hidden_needs_grad,
                code=options.code,
                inverse_temperature=options.inverse_temperature,
            )
            if grad_hidden is not None and grad_block is not None:
                # Ranks sum this block while they compute the next one.
                started = _Summing(grad_block, positions[block], owner, options)
                if summing is not None:
                    summing.finish(grad_hidden)
                summing = started
        if summing is not None and grad_hidden is not None:
            summing.finish(grad_hidden)
        grad_weight = None
        if total is not None and options.main_grad is None:
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, *(None for _ in others)


def _gather_positions(hidden: torch.Tensor, options: _Options) -> torch.Tensor:
    """Hidden states [T, H] of all positions, by an all-gather with sequence parallelism."""
    group = options.tp_group
    if not options.sequence_parallel or group is None:
        return hidden
    hidden = hidden.contiguous()
    shards = [torch.empty_like(hidden) for _ in range(group.size())]
    dist.all_gather(shards, hidden, group=group)
    return torch.cat(shards)


class _Summing:
    """A running reduction of one block's dX over tensor-parallel ranks."""

    def __init__(
        self, grad: torch.Tensor, positions: torch.Tensor, owner: int, options: _Options
    ) -> None:
        group = options.tp_group
        self.grad, self.positions, self.owner = grad, positions, owner
        self.is_mine, self.work = True, None
        if options.sequence_parallel and group is not None:
            self.is_mine = owner == group.rank()
            self.work = dist.reduce(grad, group=group, group_dst=owner, async_op=True)
        elif group is not None:
            self.work = dist.all_reduce(grad, group=group, async_op=True)

    def finish(self, grad_hidden: torch.Tensor) -> None:
        """Wait, and copy the sum into this rank's gradient."""
        if self.work is not None:
            self.work.wait()
        if self.is_mine:
            local = self.positions - self.owner * len(grad_hidden)
            grad_hidden.index_copy_(0, local, self.grad.to(grad_hidden.dtype))
