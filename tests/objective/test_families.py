"""Loss families beside the published code of their authors, or of those who took them up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapo_megatron.objective import METHODS, Method, PolicyLoss
from gapo_megatron.objective.clipping import MAX_LOG_RATIO
from tests.objective.response import loss_of

Theirs = Callable[[Tensor, Tensor, float], Tensor]
"""From log-probs and old log-probs [T] and the advantage to losses, to be summed."""


def random_tokens(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probs [T] with autograd, and old ones: probabilities of all sizes, and far apart."""
    generator = torch.Generator().manual_seed(seed)
    old = -8 * torch.rand(200, generator=generator, dtype=torch.float64) ** 2
    shift = scale * torch.randn(200, generator=generator, dtype=torch.float64)
    return (old + shift).clamp(max=-1e-6).requires_grad_(), old


def abc(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """The paper's comparison with GRPO (section 4.5): r_clipped = clip(r), then -r_clipped A."""
    ratio = (log_probs - old_log_probs).exp()
    low, high = (0.6, 1.2) if advantage > 0 else (0.8, 2.5)
    return -torch.clamp(ratio, low, high) * advantage


def aspo(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`compute_policy_loss_archer` of Archer2.0, both widths 0.2 for every token."""
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    capped = -advantage * 3 * log_probs
    if advantage < 0:
        bounded = torch.clamp(ratio, min=0.8)
        return torch.where(bounded <= 3, -advantage * bounded, capped)
    bounded = torch.clamp(ratio, max=1.2)
    inverse = (bounded / bounded.detach()) / bounded.detach()
    return torch.where(1 / bounded <= 3, -advantage * inverse, capped)


def aspo_with_our_values(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """The same gradients; beyond the cap the value -3 A, where theirs has another scale."""
    losses = aspo(log_probs, old_log_probs, advantage)
    ratio = (log_probs - old_log_probs).detach().exp()
    is_capped = (1 / ratio if advantage > 0 else ratio) > 3
    return losses - torch.where(is_capped, losses + 3 * advantage, 0).detach()


def dcpo(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`compute_policy_loss_dcpo` of lime-RL/DCPO, clip_type "dynamic", its cap at 10."""
    old = old_log_probs.exp()
    low = 0.5 + 0.5 * torch.sqrt(torch.clamp(1 - 4 * 0.16 / old, min=0))
    high = torch.clamp(0.5 + 0.5 * torch.sqrt(1 + 4 * 0.2 / old), max=10)
    ratio = (log_probs - old_log_probs).exp()
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    losses = torch.maximum(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        losses = torch.minimum(losses, torch.full_like(losses, -advantage * 10))
    return losses


def dgpo(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`compute_policy_loss` of DGPO-RL, its n = 1 and m = 2, both widths 0.2."""
    ratio, constant = (log_probs - old_log_probs).exp(), log_probs.detach()
    if advantage < 0:
        below = torch.exp(log_probs + constant - 2 * old_log_probs) / 0.8
        return -advantage * torch.where(ratio < 0.8, below, ratio)
    above = torch.exp(log_probs + (math.log(1.2) - old_log_probs - constant) / 2)
    return -advantage * torch.where(ratio > 1.2, above, ratio)


def dppo(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`compute_policy_loss_dppo_tv` of verl: -A sg(min(r, C)) m log pi."""
    log_ratio = (log_probs - old_log_probs).clamp(-20, 20)
    ratio = log_ratio.exp().clamp(max=5.0).detach()
    difference = log_probs.exp() - old_log_probs.exp()
    valid = difference <= 0.15 if advantage > 0 else difference >= -0.15
    return -advantage * ratio * log_probs * valid.detach()


def fspo(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`_clipped_sequence_objective` of quantumglass/GRPO-series, of one response."""
    total = (log_probs - old_log_probs).sum()
    root = len(log_probs) ** 0.5
    bounded = total.clamp(-0.03 * root, 0.05 * root)
    return -torch.minimum(total.exp() * advantage, bounded.exp() * advantage)[None]


def topr_of_roll(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """`_compute_topr_loss` of ROLL, of a response whose score has the sign of its advantage."""
    if advantage > 0:
        return -advantage * log_probs
    ratio = (log_probs - old_log_probs).exp()
    return -ratio.clamp(0, 1).detach() * advantage * log_probs


def topr(log_probs: Tensor, old_log_probs: Tensor, advantage: float) -> Tensor:
    """The paper's algorithm 1, as transcribed: -sg(alpha) R log pi(y | x)."""
    ratio = (log_probs.sum() - old_log_probs.sum()).exp().detach()
    alpha = 1 if advantage > 0 else ratio.clamp(0, 1)
    return (-alpha * advantage * log_probs.sum())[None]


ABC = dataclasses.replace(METHODS["abc"], eps_low_correct=0.4, eps_high_wrong=1.5)
FSPO = dataclasses.replace(METHODS["fspo"], eps_high_max=0.05)
TOPR_OF_TOKENS = dataclasses.replace(METHODS["topr"], ratio="token")


@pytest.mark.parametrize("advantage", [0.75, -0.25])
@pytest.mark.parametrize(
    ("method", "theirs", "scale", "rounding"),
    [
        (ABC, abc, 2.0, 1e-12),
        (METHODS["aspo"], aspo_with_our_values, 2.0, 1e-12),
        (METHODS["aspo"], aspo, 0.2, 1e-12),  # where none is capped
        (METHODS["dcpo"], dcpo, 2.0, 1e-12),
        (METHODS["dgpo"], dgpo, 2.0, 1e-12),
        (METHODS["dppo_tv"], dppo, 2.0, 1e-12),
        (FSPO, fspo, 0.01, 1e-12),
        (FSPO, fspo, 0.1, 1e-12),
        (TOPR_OF_TOKENS, topr_of_roll, 1.0, 1e-12),
        # Sums of 200 logs of order one, and what their rounding makes of the product.
        (METHODS["topr"], topr, 0.02, 1e-11),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", value)),
)
def test_losses_and_gradients_are_theirs(
    method: Method, theirs: Theirs, scale: float, rounding: float, advantage: float
) -> None:
    clipped = []
    for seed in range(8):
        log_probs, old = random_tokens(seed, scale)
        result = loss_of(method, advantage, log_probs, old)
        divisor = 1 if method.aggregation == "sequence_sum" else len(old)
        expected = theirs(log_probs, old, advantage).sum() / divisor
        ours, others = (torch.autograd.grad(one, log_probs)[0] for one in (result.loss, expected))
        torch.testing.assert_close(ours, others, rtol=rounding, atol=rounding)
        torch.testing.assert_close(result.loss, expected, rtol=rounding, atol=rounding)
        clipped += result.clipped.tolist()
    is_clipped_at_all = not (method.family == "topr" and advantage > 0) and scale != 0.01
    assert set(clipped) == ({True, False} if is_clipped_at_all else {False})


def evaluate(
    name: str, advantage: float, log_ratios: list[float], old: float = 0.0
) -> tuple[PolicyLoss, list[float]]:
    """A response's loss, and its gradient times the number of tokens where it is a mean."""
    old_log_probs = torch.full((len(log_ratios),), old, dtype=torch.float64)
    log_probs = (old_log_probs + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    result = loss_of(METHODS[name], advantage, log_probs, old_log_probs)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    size = len(log_ratios) if METHODS[name].aggregation == "sequence_mean" else 1
    assert bool(result.gradient_mass.isfinite().all() & result.gradient_mass_lost.isfinite().all())
    return result, (size * gradient).tolist()


def test_sapo_has_the_figures_of_other_peoples_curves() -> None:
    """r w at r = 3 and 5, as measured on TRL's own loss."""
    for advantage, expected in ((1.0, [1.26, 0.353]), (-1.0, [1.17, 0.291])):
        _, gradient = evaluate("sapo", advantage, [math.log(3), math.log(5)])
        # Three digits were written down.
        assert [abs(one) for one in gradient] == pytest.approx(expected, rel=4e-3)


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_what_runs_away_stays_finite_and_is_pulled_back(advantage: float) -> None:
    """Log-ratios of hundreds of nats, where exp would swamp a gradient."""
    largest = math.exp(MAX_LOG_RATIO)
    # DCPO: exp(-800) is 0 in float64.
    result, gradient = evaluate("dcpo", advantage, [math.log(5), math.log(20)], old=-800.0)
    assert result.clipped.tolist() == [False, True]
    assert gradient == pytest.approx([-advantage * 5, 0], rel=1e-11)
    for sign in (1, -1):
        is_held = advantage * sign > 0
        # FSPO: 60 tokens that each rose, or fell, by two nats.
        result, gradient = evaluate("fspo", advantage, [2.0 * sign] * 60)
        assert result.ratio.tolist() == pytest.approx([largest**sign], rel=1e-12)
        slope = 0 if is_held else -advantage * largest**sign
        assert gradient == pytest.approx([slope] * 60, rel=1e-11)
        # GMPO: the mean of two such tokens.
        result, gradient = evaluate("gmpo", advantage, [500.0 * sign] * 2)
        bound = 0.4 * sign if is_held else MAX_LOG_RATIO * sign
        assert float(result.loss.detach()) == pytest.approx(-advantage * math.exp(bound), rel=1e-12)
        slope = 0 if is_held else -advantage * math.exp(bound)
        assert gradient == pytest.approx([slope] * 2, rel=1e-12)
        # SAPO: 37 widths above 1 the gate rounds to 0.
        result, gradient = evaluate("sapo", advantage, [500.0 * sign])
        assert result.clipped.tolist() == [sign > 0] and math.isfinite(gradient[0])
    # TOPR: a wrong response keeps a gradient, however far it fell.
    result, gradient = evaluate("topr", advantage, [-2.0] * 60)
    assert gradient == pytest.approx([-advantage * (1 if advantage > 0 else 1 / largest)] * 60)
    assert result.clipped.tolist() == [False]


def test_atr_has_the_published_range() -> None:
    """delta = 0.02 is 0.813..1.214; a token on its way back keeps its gradient."""
    for advantage, inside, outside, back in ((0.5, 1.213, 1.214, 0.5), (-0.5, 0.8132, 0.8130, 2)):
        logs = [math.log(one) for one in (inside, outside, back)]
        result, gradient = evaluate("atr", advantage, logs)
        assert result.clipped.tolist() == [False, True, False]
        assert gradient == pytest.approx([-advantage * inside, 0, -advantage * back], rel=1e-12)


def test_an_atr_width_of_zero_clips_every_ratio_on_its_side() -> None:
    """A method of one's own may have one; its root is 0, by which Newton's method would divide."""
    atr = dataclasses.replace(METHODS["atr"], eps_high_max=0.0)
    log_probs = torch.tensor([0.1, -0.1], dtype=torch.float64, requires_grad=True)
    result = loss_of(atr, 0.5, log_probs, torch.zeros(2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert result.clipped.tolist() == [True, False]
    assert gradient.tolist() == pytest.approx([0, -0.25 * math.exp(-0.1)], rel=1e-12)
