"""Lengths of a step, against draws of them."""

import dataclasses

import numpy as np
import pytest

from gapo_megatron.errors import ConfigError
from gapo_tools.planner.workload import (
    DEFAULT_SPREAD,
    default_workload,
    longest_of,
    spread_of,
    survival,
)
from tests.messages import mentions
from tests.scaling_setup import WORKLOAD, config, draw_lengths


@pytest.mark.parametrize("spread", [0.3, 0.7, 1.5])
def test_lengths_have_the_mean_they_were_given(spread):
    workload = dataclasses.replace(WORKLOAD, spread=spread)
    lengths, shares = survival(workload)
    step = 3092 / len(lengths)
    assert shares.sum() * step == pytest.approx(700, rel=0.01)
    drawn = draw_lengths(np.random.default_rng(0), 200_000, mean=700, spread=spread)
    assert workload.mean_squared_response == pytest.approx((drawn**2).mean(), rel=0.02)
    assert np.interp(1000, lengths, shares) == pytest.approx((drawn > 1000).mean(), abs=0.01)


def test_spread_comes_back_from_the_truncated_share():
    workload = dataclasses.replace(WORKLOAD, spread=1.1)
    _, shares = survival(workload)
    found = spread_of(mean=700, longest=3092, truncated_share=float(shares[-1]))
    assert found == pytest.approx(1.1, rel=0.02)
    assert spread_of(mean=700, longest=3092, truncated_share=0.0) == DEFAULT_SPREAD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean_response_tokens": 4000}, r"\bmean.response.tokens\W+4000\b"),
        ({"active_share": 1.2}, r"\bactive_share\W+1\.2\b"),
        ({"spread": 0.0}, r"\bspread\W+0\b"),
        ({"mean_prompt_tokens": 0.0}, r"\bmean.prompt.tokens\W+0\b"),
        ({"mean_response_tokens": float("nan")}, r"\bmean.response.tokens\W+nan\b"),
    ],
)
def test_wrong_workloads_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(WORKLOAD, **changes)


def test_the_longest_of_many():
    """Means over draws, and of squares."""
    rng = np.random.default_rng(1)
    longest = draw_lengths(rng, (5000, 12), mean=700, spread=0.7).max(axis=1)
    found, squared = longest_of(WORKLOAD, 12)
    assert found == pytest.approx(longest.mean(), rel=0.02)
    assert squared == pytest.approx((longest**2).mean(), rel=0.03)
    assert longest_of(WORKLOAD, 1)[0] == pytest.approx(700, rel=0.01)


def test_dynamic_sampling_draws_again_for_the_groups_that_teach_nothing():
    batch = config(batch={"rollout_prompts": 100, "minibatch_prompts": 50}).batch
    assert WORKLOAD.prompts_by_round(batch) == [100]
    assert WORKLOAD.trained_share(batch) == pytest.approx(0.7)
    thrice = batch.model_copy(update={"dynamic_sampling_rounds": 2})
    assert WORKLOAD.prompts_by_round(thrice) == pytest.approx([100, 30, 9])
    assert WORKLOAD.trained_share(thrice) == pytest.approx(0.973)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"batch": {"oversampling": 1.5}}, ("batch.oversampling", "1.5")),
        ({"rollout": {"draft": "ngram"}}, ("rollout.draft", "ngram")),
    ],
)
def test_what_no_equation_knows_is_not_planned(sections, words):
    """How much shorter over-sampling makes the tail, and how many draft tokens are accepted."""
    with pytest.raises(ConfigError, match=mentions(*words)):
        default_workload(config(**sections))
