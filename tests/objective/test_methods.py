"""Presets against the paper's tables."""

import dataclasses

import pytest

from gapo_megatron.objective import METHODS

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
