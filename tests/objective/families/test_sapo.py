"""SAPO's gate by hand, around where it counts as clipped, for both signs."""

import dataclasses
import math

import pytest
import torch

from gapo_megatron.objective import METHODS
from tests.objective.families.response import assert_found, evaluate, loss_of

SAPO = METHODS["sapo"]


# (advantage, tau, ratio, clipped). w = 1/2 at 1 + 2 ln(1 + sqrt(2)) / tau: 2.76275 and 2.67881.
BY_HAND = [
    (+0.5, 1.0, 2.762, False),
    (+0.5, 1.0, 2.763, True),
    (+0.5, 1.0, 1e-6, False),  # fell although correct: hardly held back
    (+0.5, 1.0, 1.0, False),
    (-0.5, 1.05, 2.678, False),
    (-0.5, 1.05, 2.679, True),  # rose although wrong: held back, unlike by a clip
    (-0.5, 1.05, 1e-6, False),
]


@pytest.mark.parametrize(("advantage", "tau", "ratio", "clipped"), BY_HAND)
def test_loss_gradient_and_mass_by_hand(advantage, tau, ratio, clipped):
    gate = 1 / math.cosh(tau / 2 * (ratio - 1)) ** 2
    assert_found(
        evaluate(SAPO, advantage, [ratio], [1.0]),
        loss=-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))),
        gradient=[-advantage * ratio * gate],
        ratio=[ratio],
        clipped=[clipped],
        mass=[0.5 * ratio],
        lost=[0.5 * ratio * (1 - gate)],
    )


def test_figures_of_other_peoples_curves():
    """r w at r = 3 and 5, as measured on TRL's own loss."""
    for advantage, expected in ((1.0, [1.26, 0.353]), (-1.0, [1.17, 0.291])):
        _, gradient = evaluate(SAPO, advantage, [3.0, 5.0], [1.0, 1.0])
        # Three digits were written down; a mean over two tokens.
        assert (2 * gradient.abs()).tolist() == pytest.approx(expected, rel=4e-3)


def test_temperature_goes_by_c_where_widths_do():
    """Widths 0.5 + 0.5 (8 - c) / 7 of correct responses; wrong ones keep 0.5."""
    method = dataclasses.replace(SAPO, adaptive=True, eps_low=0.5)
    for advantage, num_correct, width in ((0.5, 1, 1.0), (0.5, 4, 0.5 + 2 / 7), (-0.5, 1, 0.5)):
        _, gradient = evaluate(method, advantage, [2.0], [1.0], num_correct=num_correct)
        gate = 1 / math.cosh(1 / (2 * width)) ** 2
        assert float(gradient) == pytest.approx(-advantage * 2 * gate, rel=1e-12)


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_runaway_log_ratios_stay_finite(advantage):
    log_probs = torch.tensor([-1.0, -501.0, -30.0], requires_grad=True)
    old = torch.tensor([-501.0, -1.0, -1.0])
    result = loss_of(SAPO, advantage, log_probs, old)
    result.loss.backward()
    assert bool(log_probs.grad.isfinite().all() & result.loss.isfinite())
    assert bool((result.gradient_mass.isfinite() & result.gradient_mass_lost.isfinite()).all())
    assert log_probs.grad.tolist()[0] == 0, "37 widths above 1 the gate rounds to 0"
    assert result.clipped.tolist() == [True, False, False]
