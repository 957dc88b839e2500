import dataclasses
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.errors import ConfigError, RolloutError
from gapo_megatron.objective import METHODS, group_advantages, group_counts
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.types import Group, Outcome, Prompt, Rollout, Verdict
from tests.batches import make_batch

NAN = float("nan")
verdict_rows = st.integers(2, 16).flatmap(
    lambda k: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=k, max_size=k), min_size=1, max_size=5
    )
)


def reference_advantages(row, *, normalize_std, focal_gamma):
    """The paper's words, one group at a time."""
    known = [reward for reward in row if not math.isnan(reward)]
    if len(set(known)) < 2:
        return [0.0] * len(row)
    mean = sum(known) / len(known)
    scale = (1 - mean) ** focal_gamma
    if normalize_std:
        scale /= statistics.stdev(known)
    return [0.0 if math.isnan(reward) else (reward - mean) * scale for reward in row]


@given(rows=verdict_rows, normalize_std=st.booleans(), gamma=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_advantages_match_the_reference(rows, normalize_std, gamma):
    advantages = group_advantages(
        torch.tensor(rows), normalize_std=normalize_std, focal_gamma=gamma
    )
    assert advantages.dtype == torch.float64
    for row, got in zip(rows, advantages.tolist(), strict=True):
        expected = reference_advantages(row, normalize_std=normalize_std, focal_gamma=gamma)
        # A few float64 roundings of numbers below 4.
        assert got == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("c", range(1, 8))
def test_a_correct_rollout_gets_the_share_that_is_wrong(c):
    rewards = torch.tensor([[1.0] * c + [0.0] * (8 - c)])
    advantages = group_advantages(rewards)[0]
    assert advantages[:c].tolist() == [(8 - c) / 8] * c
    assert advantages[c:].tolist() == [-c / 8] * (8 - c)


@given(rows=verdict_rows, normalize_std=st.booleans())
def test_a_group_sums_to_zero(rows, normalize_std):
    advantages = group_advantages(torch.tensor(rows), normalize_std=normalize_std)
    # 16 float64 roundings of numbers below 4.
    assert advantages.sum(dim=1).abs().max() < 1e-13


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_say_exactly_nothing(reward, normalize_std):
    """Nine times 0.1 divided by 9 is not 0.1: a zero found by subtraction would not be zero."""
    rewards = torch.full((1, 9), reward, dtype=torch.float64)
    advantages = group_advantages(rewards, normalize_std=normalize_std, focal_gamma=1.0)
    assert bool((advantages == 0).all())


def test_unknown_is_not_wrong():
    """The unknown rollout leaves the group: the others are those of a group of three."""
    rewards = torch.tensor([[1.0, 0.0, NAN, 0.0]])
    assert group_advantages(rewards)[0].tolist() == pytest.approx([2 / 3, -1 / 3, 0.0, -1 / 3])
    num_correct, group_size = group_counts(rewards)
    assert (num_correct.tolist(), group_size.tolist()) == ([1], [3])


@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [1.0, NAN, NAN], [0.0, NAN, NAN]])
def test_fewer_than_two_valid_rollouts_say_nothing(row):
    advantages = group_advantages(torch.tensor([row]), normalize_std=True, focal_gamma=0.5)
    assert advantages.tolist() == [[0.0, 0.0, 0.0]]


def test_standard_deviation_is_the_sample_one():
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_std=True)
    # sqrt of (0.75^2 + 3 * 0.25^2) / 3 is 0.5; exact in float64.
    assert advantages[0].tolist() == [1.5, -0.5, -0.5, -0.5]


def test_focal_shaping_shrinks_easy_groups():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    plain = group_advantages(rewards)
    shaped = group_advantages(rewards, focal_gamma=2.0)
    assert torch.equal(shaped, plain * torch.tensor([[0.75**2], [0.25**2]]))


def test_counts_are_integers():
    num_correct, group_size = group_counts(torch.tensor([[1.0, 1.0], [0.0, NAN]]))
    assert num_correct.dtype == group_size.dtype == torch.int64
    assert (num_correct.tolist(), group_size.tolist()) == ([2, 0], [2, 1])


def test_refuses_what_is_not_a_group():
    with pytest.raises(ConfigError, match=r"batch\.rollouts_per_prompt\b.*\b1\b"):
        group_advantages(torch.ones(3, 1))
    with pytest.raises(AssertionError, match="int64"):
        group_advantages(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(AssertionError, match="finite"):
        group_advantages(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(AssertionError, match=r"\b0\b.*\b1\b.*\bNaN\b"):
        group_counts(torch.tensor([[0.5, 1.0]]))


def rollout(*token_ids, num_log_probs=None):
    count = len(token_ids) if num_log_probs is None else num_log_probs
    return Rollout(
        token_ids=np.array(token_ids, dtype=np.int32),
        log_probs=np.full(count, -0.5, dtype=np.float32),
        truncated=False,
    )


def group(name, outcomes, rollouts):
    return Group(
        prompt=Prompt(id=name, token_ids=(7, 8, 9), answer="1"),
        rollouts=tuple(rollouts),
        verdicts=tuple(Verdict(outcome) for outcome in outcomes),
    )


C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


def test_batch_lies_flat_group_after_group():
    first = group("a", [C, W, U], [rollout(1), rollout(2, 3), rollout(4)])
    second = group("b", [C, C, C], [rollout(5), rollout(6), rollout(7, 7, 7)])
    batch = make_batch([first, second], METHODS["gapo"])
    assert len(batch) == 6
    assert [ids.tolist() for ids in batch.response_ids] == [[1], [2, 3], [4], [5], [6], [7, 7, 7]]
    assert all(ids.tolist() == [7, 8, 9] and ids.dtype == np.int32 for ids in batch.prompt_ids)
    assert [len(values) for values in batch.rollout_log_probs] == [1, 2, 1, 1, 1, 3]
    assert batch.num_response_tokens.tolist() == [1, 2, 1, 1, 1, 3]
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    assert batch.num_correct.tolist() == [1, 1, 1, 3, 3, 3]
    assert batch.group_size.tolist() == [2, 2, 2, 3, 3, 3]
    assert batch.valid.tolist() == [True, True, False, True, True, True]


def test_the_method_decides_the_advantages():
    groups = [group("a", [C, W, W, W], [rollout(1)] * 4)]
    raw = make_batch(groups, METHODS["gapo"]).advantages
    assert raw.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert torch.equal(make_batch(groups, METHODS["dapo"]).advantages, 2 * raw)
    assert torch.equal(make_batch(groups, METHODS["f_gspo"]).advantages, 0.75 * raw)


def test_bad_rollouts_are_named():
    with pytest.raises(RolloutError, match=r"'a'.*\b1\b.*\b0\b"):
        make_batch([group("a", [C, W], [rollout(1), rollout()])], METHODS["gapo"])
    with pytest.raises(RolloutError, match=r"'b'.*\b0\b.*\b2\b.*\b1\b"):
        bad = [rollout(1, 2, num_log_probs=1), rollout(1)]
        make_batch([group("b", [C, W], bad)], METHODS["gapo"])


def test_groups_must_be_alike():
    with pytest.raises(AssertionError, match="at least one"):
        make_batch([], METHODS["gapo"])
    with pytest.raises(AssertionError, match=r"rollouts.*\b2\b.*\b3\b"):
        groups = [
            group("a", [C, W], [rollout(1)] * 2),
            group("b", [C, W, W], [rollout(1)] * 3),
        ]
        make_batch(groups, METHODS["gapo"])
    with pytest.raises(AssertionError, match="verdicts"):
        make_batch([group("a", [C], [rollout(1)] * 2)], METHODS["gapo"])


def masked(rollout, *mask):
    return dataclasses.replace(rollout, response_mask=np.array(mask, dtype=bool))


def test_masks_reach_the_batch_and_its_counts():
    first = masked(rollout(1, 2, 3), True, False, True)
    batch = make_batch([group("a", [C, W], [first, rollout(4, 5)])], METHODS["gapo"])
    assert [mask.tolist() for mask in batch.response_masks] == [[True, False, True], [True, True]]
    assert batch.num_response_tokens.tolist() == [2, 2]
    plain = make_batch([group("a", [C, W], [rollout(1, 2, 3), rollout(4, 5)])], METHODS["gapo"])
    assert plain.response_masks == [] and plain.num_response_tokens.tolist() == [3, 2]


@pytest.mark.parametrize("mask", [(True,), (True, True, True), (False, False)])
def test_a_mask_that_is_not_the_responses_is_refused(mask):
    wrong = masked(rollout(1, 2), *mask)
    with pytest.raises(RolloutError, match=r"'a', rollout 1\b.*\bresponse_mask\b"):
        make_batch([group("a", [C, W], [rollout(3), wrong])], METHODS["gapo"])


def test_counts_per_c_are_of_sampled_tokens():
    """Whatever the log-probs of the others are."""
    found = []
    for junk in (0.0, -100.0):
        one = masked(rollout(1, 2, 3, 4), True, False, False, True)
        one.log_probs[1:3] = junk
        batch = make_batch([group("a", [C, W], [one, rollout(5, 6)])], METHODS["gapo"])
        found.append(count_by_correct(batch, group_size=2))
    assert found[0] == found[1]
    assert found[0]["rollout/entropy"] == 0.5
    assert found[0]["per_c/correct/response_length/c1"] == 2.0
