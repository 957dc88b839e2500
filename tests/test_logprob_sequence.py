"""From log-probs of tokens to one number per sequence."""

import pytest
import torch

from gapo_megatron.logprob import segment_mean, sequence_log_ratio, token_log_probs
from gapo_megatron.objective import METHODS, Method, policy_loss, upper_clip
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


@pytest.mark.parametrize("method", [METHODS["gapo"], METHODS["gspo"]], ids=["gapo", "gspo"])
def test_sequence_ratios_make_the_loss_and_gradients_of_the_trainers_loop(method: Method) -> None:
    """One number per sequence is enough for a sequence-level loss; the loop starts from tokens."""
    hidden, weight, labels = problem(90, 70, dtype=torch.float64, hidden_size=8)
    lengths = torch.tensor([20, 0, 30, 1, 39])
    sequence_ids = torch.repeat_interleave(torch.arange(5), lengths)
    advantages = torch.tensor([0.75, 0.5, -0.25, 0.75, -0.5], dtype=torch.float64)
    num_correct = torch.tensor([1, 2, 3, 1, 2])
    # Above the clip, empty, inside, inside, below the clip.
    moved = torch.tensor([8e-3, 0.0, 1e-3, -1e-3, -9e-3], dtype=torch.float64)
    old = token_log_probs(hidden, weight, labels) - moved[sequence_ids]
    eps_low, eps_high_max = method.eps_low, method.eps_high_max
    high = torch.full_like(advantages, eps_high_max)
    if method.adaptive:
        high = upper_clip(num_correct, group_size=4, eps_low=eps_low, eps_high_max=eps_high_max)
        high = torch.where(advantages > 0, high, eps_low)

    def from_sequences(*leaves: torch.Tensor) -> torch.Tensor:
        log_ratio, _ = sequence_log_ratio(
            *leaves,
            labels,
            old,
            sequence_ids=sequence_ids,
            num_sequences=5,
            num_response_tokens=lengths,
        )
        ratio = log_ratio.exp()
        bounded = torch.minimum(ratio.clamp(min=1 - eps_low), 1 + high)
        losses = torch.maximum(-advantages * ratio, -advantages * bounded)
        return (lengths * losses).sum() / 90

    def from_tokens(*leaves: torch.Tensor) -> torch.Tensor:
        result = policy_loss(
            token_log_probs(*leaves, labels),
            old,
            sequence_ids=sequence_ids,
            advantages=advantages,
            num_correct=num_correct,
            group_size=4,
            num_tokens_global=90,
            method=method,
        )
        assert result.clipped.tolist() == [True, False, False, False, True]
        return result.loss

    found = []
    for loss_of in (from_sequences, from_tokens):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(*leaves)
        loss.backward()
        found.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for ours, expected in zip(*found, strict=True):
        # float64: the same sums, scaled before or after.
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    clipped_rows = [*range(20), *range(51, 90)]
    assert not found[0][1][clipped_rows].any() and found[0][1][20:51].all()
