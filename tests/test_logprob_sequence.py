"""From log-probs of tokens to one number per sequence."""

import pytest
import torch

from gapo_megatron.logprob import segment_mean, sequence_log_ratio, token_log_probs
from tests.logprob_setup import problem, reference


def test_sequence_log_ratio_is_the_mean_over_the_sequence() -> None:
    hidden, weight, labels = problem(900, 3000, kind="peaked", dtype=torch.bfloat16)
    sequence_ids = torch.tensor([0] * 300 + [2] * 599 + [3])  # sequence 1 has no tokens
    counts = torch.tensor([300, 0, 599, 1])
    moved = (hidden.float() + 0.01).bfloat16()
    old = token_log_probs(moved, weight, labels).requires_grad_()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    log_ratio, log_probs = sequence_log_ratio(
        *leaves,
        labels,
        old,
        sequence_ids=sequence_ids,
        num_sequences=4,
        num_response_tokens=counts,
    )
    with torch.no_grad():
        difference = reference(hidden, weight, labels)[0] - reference(moved, weight, labels)[0]
    expected = [difference[:300].mean(), 0.0, difference[300:899].mean(), difference[899]]
    assert not log_probs.requires_grad
    # The bound the clip widths need (1e-5): errors of a token average out over a sequence.
    means = log_ratio.detach()
    assert means.tolist()[:3] == pytest.approx([float(d) for d in expected[:3]], abs=1e-5)
    assert float(means[3]) == pytest.approx(float(expected[3]), abs=5e-5)  # a single token
    log_ratio[0].backward()
    assert hidden.grad is not None and old.grad is None
    assert hidden.grad[:300].any() and not hidden.grad[300:].any()


def test_sequence_log_ratio_at_equal_weights_is_exactly_zero() -> None:
    hidden, weight, labels = problem(40, 90, dtype=torch.bfloat16)
    log_ratio, _ = sequence_log_ratio(
        hidden,
        weight,
        labels,
        token_log_probs(hidden, weight, labels),
        sequence_ids=torch.arange(40) % 3,
        num_sequences=3,
        num_response_tokens=torch.tensor([14, 13, 13]),
    )
    assert torch.equal(log_ratio, torch.zeros(3, dtype=torch.float64))


def test_segment_mean_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    ids, counts = torch.tensor([0, 2, 0, 2]), torch.tensor([2, 0, 4])
    means = segment_mean(values, ids, 3, counts)
    assert means.dtype == torch.float64
    assert means.tolist() == [2.0, 0.0, 3.0]
    means.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.25, 0.5, 0.25]
