"""The log-prob operator when its caller knows, or asks later, what it would wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gapo_megatron.device import Flags
from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import RowPlan, token_log_probs
from tests.logprob_setup import problem
from tests.messages import mentions
from tests.synchronisations import counted_waits

ROWS = 50


def gradients(
    is_active: Tensor, row_plan: RowPlan | None, num_active: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, dX and dW, of rows that lie apart."""
    hidden, weight, labels = problem(2 * ROWS, 90)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    rows = torch.arange(0, 2 * ROWS, 2)
    values = token_log_probs(*leaves, labels[:ROWS], row_index=rows, row_plan=row_plan)
    assert isinstance(values, Tensor)
    if row_plan is not None:
        row_plan.num_active = num_active
    (torch.linspace(-1, 1, ROWS) * is_active * values).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return values.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("is_active", [torch.arange(ROWS) % 3 == 0, torch.zeros(ROWS) > 0], ids=str)
def test_no_pass_waits_and_the_bits_are_the_same(is_active: Tensor) -> None:
    expected = gradients(is_active, None)
    row_plan = RowPlan(Flags(), (0, ROWS))
    num_active = int(is_active.sum())
    with counted_waits() as waits:
        found = gradients(is_active, row_plan, [num_active])
    assert not waits
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    row_plan.flags.check()


def test_without_a_number_all_rows_are_computed() -> None:
    is_active = torch.arange(ROWS) % 3 == 0
    log_probs, grad_hidden, grad_weight = gradients(is_active, None)
    with counted_waits() as waits:
        found = gradients(is_active, RowPlan(Flags(), (0, ROWS)))
    assert not waits
    assert torch.equal(found[0], log_probs) and torch.equal(found[1], grad_hidden)
    # Zeros among the terms of a sum change its order: float32 sums of 17 terms of order 1.
    torch.testing.assert_close(found[2], grad_weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_what_is_not_finite_is_named_when_it_is_read(return_entropy: bool) -> None:
    hidden, weight, labels = problem(9, 12)
    for tensor, place, named in (
        (hidden, (5, 3), ["row 5", "hidden[10]"]),
        (weight, (7, 3), ["weight", "token 7"]),
    ):
        before = tensor[place].clone()
        tensor[place] = torch.nan
        flags = Flags()
        flags.where = "micro-batch 2"
        rows = torch.arange(0, 18, 2)
        wide = hidden.repeat_interleave(2, dim=0)
        with counted_waits() as waits:
            token_log_probs(
                wide,
                weight,
                labels,
                row_index=rows,
                return_entropy=return_entropy,
                row_plan=RowPlan(flags, (0, 9)),
            )
        assert not waits
        with pytest.raises(DivergenceError, match=mentions("micro-batch 2", *named)):
            flags.check()
        tensor[place] = before
