"""One response of c = 4 of 8 under a method, for checks by hand and against a second reference."""

import pytest
import torch

from gapo_megatron.objective import policy_loss


def loss_of(method, advantage, log_probs, old_log_probs, *, num_correct=4, num_tokens=None):
    """`policy_loss` of log-probs [T]; the mini-batch is this response, or has `num_tokens`."""
    size = len(log_probs)
    return policy_loss(
        log_probs,
        old_log_probs,
        sequence_ids=torch.zeros(size, dtype=torch.int64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        num_correct=torch.tensor([num_correct]),
        group_size=8,
        num_tokens_global=num_tokens or size,
        num_sequences_global=1,
        method=method,
    )


def evaluate(method, advantage, new, old, **counts):
    """Of probabilities [T], new and old: the loss, and its gradient with respect to log-probs."""
    new, old = (torch.as_tensor(values, dtype=torch.float64) for values in (new, old))
    log_probs = new.log().requires_grad_()
    result = loss_of(method, advantage, log_probs, old.log(), **counts)
    return result, torch.autograd.grad(result.loss, log_probs)[0]


def assert_found(found, *, loss, gradient, ratio, clipped, mass, lost):
    """`found` by `evaluate` is what was worked by hand; a gradient of zero is exactly zero."""
    result, slopes = found
    assert result.clipped.tolist() == clipped
    assert result.ratio.tolist() == pytest.approx(ratio, rel=1e-11)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-11)
    assert slopes.tolist() == pytest.approx(gradient, rel=1e-11)
    assert [slope == 0 for slope in slopes.tolist()] == [slope == 0 for slope in gradient]
    assert result.gradient_mass.tolist() == pytest.approx(mass, rel=1e-11)
    assert result.gradient_mass_lost.tolist() == pytest.approx(lost, rel=1e-9, abs=1e-11)


def random_tokens(seed, size=200, scale=1.0):
    """Log-probs [T] with autograd, and old ones: probabilities of all sizes, and far apart."""
    generator = torch.Generator().manual_seed(seed)
    old = -8 * torch.rand(size, generator=generator, dtype=torch.float64) ** 2
    shift = scale * torch.randn(size, generator=generator, dtype=torch.float64)
    return (old + shift).clamp(max=-1e-6).requires_grad_(), old


def compare(method, second, advantage, seed, scale=1.0, rounding=1e-12):
    """`method` against `second`(log_probs, old, advantage), a loss for each token, summed."""
    log_probs, old = random_tokens(seed, scale=scale)
    result = loss_of(method, advantage, log_probs, old)
    divisor = len(old) if method.aggregation == "sequence_mean" else 1
    expected = second(log_probs, old, advantage).sum() / divisor
    ours, theirs = (torch.autograd.grad(loss, log_probs)[0] for loss in (result.loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)
    torch.testing.assert_close(result.loss, expected, rtol=rounding, atol=rounding)
    return result
