"""The off-policy sequence mask over several families: what it drops, and what is left."""

import dataclasses

import pytest
import torch

from gapo_megatron.objective import METHODS, policy_loss

DELTA = 1e-3
FAMILIES = ("opsm", "gapo", "cispo", "sapo", "gmpo")
IDS = torch.tensor([0, 0, 1])
COMMON = {
    "advantages": torch.tensor([-0.5, 0.5]),
    "num_correct": torch.tensor([4, 4]),
    "group_size": 8,
}


def with_mask(name):
    return dataclasses.replace(METHODS[name], off_policy_mask=DELTA)


def loss_of(mean, method, advantage=-0.5):
    """(result, gradient): response 0 has mean log-ratio `mean`, response 1 one of 1e-4."""
    old = torch.zeros(3, dtype=torch.float64)
    shifts = torch.tensor([mean + 2e-4, mean - 2e-4, 1e-4], dtype=torch.float64)
    log_probs = (old + shifts).requires_grad_()
    result = policy_loss(
        log_probs,
        old,
        sequence_ids=IDS,
        num_tokens_global=3,
        num_sequences_global=2,
        method=method,
        **COMMON | {"advantages": torch.tensor([advantage, 0.5])},
    )
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return result, gradient


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("advantage", "mean", "dropped"),
    [
        (-0.5, -1.01e-3, True),
        (-0.5, -0.99e-3, False),
        (-0.5, +1.01e-3, False),  # rose although wrong: the loss pulls it back
        (-0.5, +1.0, False),
        (+0.5, -1.01e-3, False),
        (+0.5, -1.0, False),
        (0.0, -1.0, False),
    ],
)
def test_both_sides_of_delta_and_both_signs(name, advantage, mean, dropped):
    method = with_mask(name)
    result, gradient = loss_of(mean, method, advantage)
    plain, before = loss_of(mean, dataclasses.replace(method, off_policy_mask=None), advantage)
    rows = IDS if result.per_token else torch.tensor([0, 1])
    if not dropped:
        assert float(result.loss.detach()) == float(plain.loss.detach())
        assert torch.equal(gradient, before)
        assert torch.equal(result.clipped, plain.clipped)
        assert torch.equal(result.gradient_mass_lost, plain.gradient_mass_lost)
        return
    assert gradient.tolist()[:2] == [0, 0], "exactly"
    assert float(gradient[2]) == float(before[2]) != 0, "denominators keep what is dropped"
    assert bool(result.clipped[rows == 0].all())
    assert torch.equal(result.gradient_mass, plain.gradient_mass)
    own = rows == 0
    assert torch.equal(result.gradient_mass_lost[own], result.gradient_mass[own])
    assert torch.equal(result.gradient_mass_lost[~own], plain.gradient_mass_lost[~own])
