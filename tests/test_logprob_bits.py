"""Which bits of the operator do not depend on what else is in the call."""

import pytest
import torch

from gapo_megatron.logprob import token_log_probs
from tests.logprob_setup import problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [50, 2049, 5000])
def test_a_row_keeps_its_bits_whatever_its_neighbours(num_columns: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = problem(600, num_columns, dtype=dtype)
    whole = token_log_probs(hidden, weight, labels)
    random = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 5, 15, 17, 100, 511, 599):
        rows = torch.randperm(600, generator=random)[:size]
        assert torch.equal(token_log_probs(hidden[rows], weight, labels[rows]), whole[rows])


def test_a_gradient_of_hidden_keeps_its_bits_whatever_its_neighbours() -> None:
    inputs = problem(200, 300)
    hidden, weight, labels = inputs
    upstream = torch.randn(200, generator=torch.Generator().manual_seed(3))
    grads = []
    for rows in (slice(None), slice(7, 9)):
        leaf = hidden[rows].clone().requires_grad_()
        token_log_probs(leaf, weight, labels[rows]).backward(upstream[rows])
        grads.append(leaf.grad)
    assert torch.equal(grads[0][7:9], grads[1])


def test_with_and_without_autograd_the_bits_are_the_same() -> None:
    hidden, weight, labels = problem(100, 300, dtype=torch.bfloat16)
    with torch.no_grad():
        old = token_log_probs(hidden, weight, labels, temperature=0.6)
    new = token_log_probs(hidden.requires_grad_(), weight, labels, temperature=0.6)
    assert torch.equal((new.double() - old.double()).exp(), torch.ones(100, dtype=torch.float64))
