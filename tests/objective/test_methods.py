"""Presets against the paper's tables."""

import dataclasses
import math

import pytest
import torch

from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.objective.families import FAMILIES, LossInputs, LossResult

# Columns of the paper's main table: name, eps_low, eps_high (the largest, for the adaptive ones).
WIDTHS = [
    ("grpo", "token", 0.2, 0.2),
    ("f_grpo", "token", 0.2, 0.2),
    ("dr_grpo", "token", 0.2, 0.28),
    ("gapo_token", "token", 0.2, 0.28),
    ("gspo", "sequence", 3e-3, 3e-3),
    ("gspo_asym", "sequence", 3e-3, 5e-3),
    ("f_gspo", "sequence", 3e-3, 5e-3),
    ("gapo", "sequence", 3e-3, 5e-3),
]


@pytest.mark.parametrize(("name", "ratio", "eps_low", "eps_high"), WIDTHS)
def test_widths_are_those_of_the_paper(name, ratio, eps_low, eps_high):
    method = METHODS[name]
    assert (method.ratio, method.eps_low, method.eps_high_max) == (ratio, eps_low, eps_high)


def test_every_method_has_a_family_that_is_there():
    assert {method.family for method in METHODS.values()} == FAMILIES.keys()


def test_matched_pairs_differ_in_one_thing():
    """What the paper compares at equal clip width differs in nothing but the idea compared."""

    def difference(first, second):
        first, second = (dataclasses.asdict(METHODS[name]) for name in (first, second))
        return {key for key in first if first[key] != second[key]} - {"name"}

    assert difference("gapo", "gspo_asym") == {"adaptive"}
    assert difference("gapo", "gapo_proportional") == {"has_floor"}
    assert difference("gspo", "gspo_asym") == {"eps_high_max"}
    assert difference("f_gspo", "gspo_asym") == {"focal_gamma"}
    assert difference("f_grpo", "grpo") == {"focal_gamma"}
    assert difference("gapo_token", "gapo") == {"ratio", "eps_low", "eps_high_max"}


def test_the_paper_trains_with_raw_advantages_and_token_level_aggregation():
    for name in ("gspo", "gspo_asym", "f_gspo", "gapo", "gapo_token"):
        assert METHODS[name].aggregation == "token_mean"
        assert not METHODS[name].normalize_std


def test_a_new_family_is_a_function_and_a_line_of_the_table(monkeypatch):
    """What all families have in common is done for it: log-ratios, denominators, flags."""

    def unclipped(tokens: LossInputs) -> LossResult:
        return -tokens.counts * tokens.advantages * tokens.ratio(), {}

    monkeypatch.setitem(FAMILIES, "unclipped", unclipped)
    method = dataclasses.replace(METHODS["gspo"], name="toy", family="unclipped")
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    result = policy_loss(
        log_probs,
        log_probs.detach() - 0.5,
        sequence_ids=torch.tensor([0, 0, 1]),
        advantages=torch.tensor([1.0, -1.0]),
        num_correct=torch.tensor([1, 1]),
        group_size=2,
        num_tokens_global=6,
        method=method,
    )
    growth = math.exp(0.5)
    assert float(result.loss.detach()) == pytest.approx(-(2 * 1.0 - 1.0) / 6 * growth)
    result.loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-growth / 6, -growth / 6, growth / 6])
