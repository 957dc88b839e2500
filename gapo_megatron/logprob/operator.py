"""Log-probabilities of given tokens under a vocabulary-parallel output layer, without the logits.

The forward pass keeps two numbers per row (maximum and sum of exponentials); the backward pass
computes the logits again, only for rows whose log-probability has a non-zero gradient.
docs/numerics.md says why the logits are float32 and what was measured.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob.tiles import (
    MAXIMUM,
    SUM_EXP,
    TARGET,
    WEIGHTED,
    gradients,
    merge_stats,
    softmax_stats,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each row's label: log_softmax(hidden @ weight.T / temperature)[label].

    Accumulated in float32 (float64 for float64 inputs), never holding more than one tile of
    logits. A row's value does not depend on the other rows of the call, as far as the platform's
    matrix product allows (docs/numerics.md).

    Args:
        hidden: [R, H] float32, bfloat16 or float64, the same on every tensor-parallel rank.
            R = response tokens; may be 0.
        weight: [V_local, H] like `hidden`: this rank's rows of the output layer.
        labels: [R] int64 token ids in 0..vocab_size-1, the same on every tensor-parallel rank.
        temperature: the logits are divided by it.
        vocab_start: token id of the first row of `weight`: tp_rank * V_local.
        vocab_size: real tokens over all ranks; later rows of `weight` are padding, which takes no
            part and gets no gradient. None: no padding.
        tp_group: ranks that hold the other shards of the vocabulary; None: `weight` is whole.
        return_entropy: also return the entropy of each row's distribution, in nats, with gradient.

    Returns:
        [R] float32 (float64 for float64 inputs), bitwise the same on every rank of `tp_group`; with
        `return_entropy` (log-probs, entropy). The gradient of `hidden` is complete on every rank,
        that of `weight` is the local shard's; both have their input's dtype.

    Collectives: forward, one all-gather over `tp_group`; backward, one all-reduce over `tp_group`
        if `hidden` needs a gradient. None if R = 0.

    Raises:
        ValueError: shape, dtype, device, label or vocabulary range; names the argument and the row.
        DivergenceError: a result is not finite; names the row and what is wrong there.
    """
    tp_size = 1 if tp_group is None else tp_group.size()
    tp_rank = 0 if tp_group is None else tp_group.rank()
    if vocab_size is None:
        vocab_size = len(weight) * tp_size
    _check_tensors(hidden, weight, labels)
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
    _check_labels(labels, vocab_size)
    log_probs, entropy = _TokenLogProbs.apply(
        hidden, weight, labels, 1 / temperature, vocab_start, vocab_size, tp_group, return_entropy
    )
    return (log_probs, entropy) if return_entropy else log_probs


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        inverse_temperature: float,
        vocab_start: int,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_columns = min(max(vocab_size - vocab_start, 0), len(weight))
        columns = labels - vocab_start
        stats = softmax_stats(
            hidden,
            weight[:num_columns],
            columns,
            inverse_temperature=inverse_temperature,
            with_entropy=with_entropy,
        )
        if tp_group is not None and len(hidden):
            shards = [torch.empty_like(stats) for _ in range(tp_group.size())]
            dist.all_gather(shards, stats, group=tp_group)
            # In rank order on every rank: the same bits everywhere.
            stats = functools.reduce(merge_stats, shards)
        maximum, sum_exp = stats[MAXIMUM], stats[SUM_EXP]
        log_sum = sum_exp.log()
        # target - maximum first: exact where they are close, however large both are.
        log_probs = (stats[TARGET] - maximum) - log_sum
        entropy = log_sum - stats[WEIGHTED] / sum_exp if with_entropy else None
        _check_finite(log_probs, entropy, hidden, weight[:num_columns], vocab_start)

        ctx.save_for_backward(hidden, weight, columns, maximum, sum_exp, entropy)
        ctx.inverse_temperature = inverse_temperature
        ctx.num_columns = num_columns
        ctx.tp_group = tp_group
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, columns, maximum, sum_exp, entropy = ctx.saved_tensors
        hidden_needs_grad, weight_needs_grad, *others = ctx.needs_input_grad
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(maximum)
        is_active = grad_log_probs != 0
        if grad_entropy is not None:
            is_active = is_active | (grad_entropy != 0)
        # Rows without gradient (clipped sequences, A = 0) are left out: they would add exact zeros.
        active = is_active.nonzero()[:, 0]
        all_active = len(active) == len(hidden)
        rows = slice(None) if all_active else active

        grad_weight = None
        if weight_needs_grad:
            grad_weight = torch.zeros(weight.shape, dtype=maximum.dtype, device=weight.device)
        grad_hidden = gradients(
            hidden[rows],
            weight[: ctx.num_columns],
            columns[rows],
            maximum=maximum[rows],
            sum_exp=sum_exp[rows],
            grad_log_probs=grad_log_probs[rows],
            entropy=None if grad_entropy is None else entropy[rows],
            grad_entropy=None if grad_entropy is None else grad_entropy[rows],
            inverse_temperature=ctx.inverse_temperature,
            hidden_needs_grad=hidden_needs_grad,
            grad_weight=grad_weight,
        )
        if grad_hidden is not None:
            if not all_active:
                grad_hidden = maximum.new_zeros(hidden.shape).index_copy_(0, active, grad_hidden)
            if ctx.tp_group is not None and len(hidden):
                # All rows, not only the active ones: the ranks' sizes then agree even if a caller's
                # losses should not, and nothing can hang.
                dist.all_reduce(grad_hidden, group=ctx.tp_group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None for _ in others)


def _check_tensors(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    if hidden.dim() != 2 or hidden.dtype not in DTYPES:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} must be [R, H] in one of {DTYPES}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} must be [V_local, {hidden.shape[1]}] "
            f"{hidden.dtype} like hidden"
        )
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels {tuple(labels.shape)} {labels.dtype} must be [{len(hidden)}] torch.int64"
        )
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden ({hidden.device}), weight ({weight.device}) and labels ({labels.device}) "
            "must be on one device"
        )


def _check_labels(labels: torch.Tensor, vocab_size: int) -> None:
    outside = (labels < 0) | (labels >= vocab_size)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"labels[{row}] ({int(labels[row])}) must be in 0..{vocab_size - 1}")


def _check_finite(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    vocab_start: int,
) -> None:
    # Every tensor-parallel rank sees the same values here, so all of them raise, and none waits.
    finite = log_probs.isfinite()
    if entropy is not None:
        finite = finite & entropy.isfinite()
    if bool(finite.all()):
        return
    row = int((~finite).nonzero()[0])
    message = f"log-probability of row {row} is not finite ({int((~finite).sum())} rows in all): "
    bad_weight = (~weight.isfinite().all(dim=1)).nonzero()
    if not bool(hidden[row].isfinite().all()):
        cause = f"hidden[{row}] is not finite"
    elif len(bad_weight):
        cause = f"weight row of token {vocab_start + int(bad_weight[0])} is not finite"
    else:
        cause = "its logits overflow, or a weight row of another rank's shard is not finite"
    raise DivergenceError(message + cause)
