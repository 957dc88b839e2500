import dataclasses
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron import objective
from gapo_megatron.errors import ConfigError, RolloutError
from gapo_megatron.objective import METHODS, group_advantages, group_counts
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.objective.groups import rewards_differ
from gapo_megatron.rollout.selection import choose, informative
from gapo_megatron.types import Episode, Prompt
from tests.batches import make_batch, make_rollouts
from tests.messages import mentions

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


@given(rows=verdict_rows, number=st.integers(1, 3))
def test_virtual_answers_match_the_reference(rows, number):
    """NGRPO: the mean and the standard deviation of a group and of answers of reward 1."""
    rewards = torch.tensor(rows)
    advantages = group_advantages(rewards, normalize_std=True, virtual_correct=number)
    signal = rewards_differ(rewards, virtual_correct=number)
    for row, got, differs in zip(rows, advantages.tolist(), signal.tolist(), strict=True):
        known = [reward for reward in row if not math.isnan(reward)]
        whole = known + [1.0] * number
        expected = [0.0] * len(row)
        if len(known) > 1 and set(known) != {1.0}:
            mean, scale = sum(whole) / len(whole), statistics.stdev(whole)
            expected = [0.0 if math.isnan(reward) else (reward - mean) / scale for reward in row]
        # A few float64 roundings of numbers below 4.
        assert got == pytest.approx(expected, abs=1e-14)
        assert differs == any(expected)


def test_a_virtual_answer_teaches_from_a_group_without_a_correct_one():
    """-1 / sqrt(k + 1) each; of a group of one, and of unknown verdicts, nothing is known."""
    groups = [group(name, *([token] for token in range(8))) for name in "abcd"]
    verdicts = ["wwwwwwww", "cccccccc", "wwwuuuuu", "wuuuuuuu"]
    batch = make_batch(groups, verdicts, METHODS["ngrpo"])
    expected = [[-1 / 3] * 8, [0.0] * 8, [-1 / 2] * 3 + [0.0] * 5, [0.0] * 8]
    for got, row in zip(batch.advantages.view(-1, 8).tolist(), expected, strict=True):
        assert got == pytest.approx(row, abs=1e-15)
    assert batch.num_correct.tolist() == [0] * 8 + [8] * 8 + [0] * 16
    assert batch.group_size.tolist() == [8] * 16 + [3] * 8 + [1] * 8
    kept = informative(batch, virtual_correct=1).tolist()
    assert kept == [True, False, True, False]
    assert choose(batch, 2, virtual_correct=1) == [0, 2] and choose(batch, 2) == [0, 1]
    found = count_by_correct(batch, group_size=8)
    assert (found["per_c/groups/c0"], found["groups/none_correct_share"]) == (3, 3 / 4)
    with pytest.raises(ConfigError, match=mentions("virtual_correct", "1.5")):
        group_advantages(torch.tensor([[1.5, 0.0]]), virtual_correct=1)


WEIGHTS = [0.3, 0.5, 0.15, 1 / 3, 0.1, 0.7, 1e-3]


@given(
    parts=st.lists(st.sampled_from(WEIGHTS), min_size=2, max_size=12),
    orders=st.lists(st.randoms(use_true_random=False), min_size=2, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, -1e5, 1e-5]),
    normalize_std=st.booleans(),
)
def test_sums_of_the_same_parts_say_exactly_nothing(parts, orders, dtype, scale, normalize_std):
    """In whatever order a verifier adds up its criteria, in float32 or float64."""
    sums = []
    for order in orders:
        order.shuffle(parts)
        total = torch.zeros((), dtype=dtype)
        for part in parts:
            total = total + torch.tensor(part, dtype=dtype)
        sums.append(total * scale)
    rewards = torch.stack(sums)[None]
    assert not group_advantages(rewards, normalize_std=normalize_std).any()
    assert not rewards_differ(rewards).any()


def test_parts_that_cancel_say_nothing_and_whole_numbers_always_something():
    cancelled = torch.tensor([[0.1 + 0.2 - 0.3, 0.1 - 0.3 + 0.2]], dtype=torch.float64)
    assert cancelled[0, 0] != cancelled[0, 1] and not rewards_differ(cancelled).any()
    assert rewards_differ(torch.tensor([[1e6, 1e6 - 1], [-1e6, 1 - 1e6], [0.0, 1.0]])).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
@pytest.mark.parametrize("spread", [1e-5, 0.01, 1.0])
def test_real_spreads_keep_their_signal_and_are_centred(spread, scale):
    rewards = scale * (0.5 + spread * torch.tensor([[0.0, 0, 1, NAN]], dtype=torch.float64))
    advantages = group_advantages(rewards, normalize_std=True)
    assert advantages[0].tolist() == pytest.approx([-(3**-0.5)] * 2 + [2 * 3**-0.5, 0], rel=1e-9)


def test_a_floor_bounds_what_noise_is_blown_up_to():
    rewards = torch.tensor([[0.5, 0.5, 0.5, 0.501], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    raw, full = (group_advantages(rewards, normalize_std=one) for one in (False, True))
    floored = group_advantages(rewards, normalize_std=True, std_floor=0.1)
    assert torch.equal(floored[0], raw[0] / 0.1) and torch.equal(floored[1], full[1])


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_focal_shaping_refuses_a_mean_above_one(gamma):
    with pytest.raises(ConfigError, match=mentions("focal_gamma", f"{gamma:g}", 1.5)):
        group_advantages(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), focal_gamma=gamma)


def test_unknown_is_not_wrong():
    """The unknown rollout leaves the group: the others are those of a group of three."""
    rewards = torch.tensor([[1.0, 0.0, NAN, 0.0]])
    assert group_advantages(rewards)[0].tolist() == pytest.approx([2 / 3, -1 / 3, 0.0, -1 / 3])
    num_correct, group_size = group_counts(rewards)
    assert (num_correct.tolist(), group_size.tolist()) == ([1], [3])


def test_refuses_what_is_not_a_group():
    with pytest.raises(ConfigError, match=r"batch\.rollouts_per_prompt\b.*\b1\b"):
        group_advantages(torch.ones(3, 1))
    with pytest.raises(AssertionError, match="int64"):
        group_advantages(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(AssertionError, match="finite"):
        group_advantages(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(AssertionError, match=r"\b0\b.*\b1\b.*\bNaN\b"):
        group_counts(torch.tensor([[0.5, 1.0]]))


def group(name, *responses):
    """Responses by their tokens."""
    prompt = Prompt(id=name, token_ids=(7, 8, 9), answer="1")
    return tuple(
        Episode(prompt, i, np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32))
        for i, ids in enumerate(responses)
    )


def batch_of(groups, verdicts, method="gapo"):
    return make_batch(groups, verdicts, METHODS[method])


def test_batch_lies_flat_group_after_group():
    groups = [group("a", [1], [2, 3], [4]), group("b", [5], [6], [7, 7, 7])]
    batch = batch_of(groups, ["cwu", "ccc"])
    assert len(batch) == 6
    responses = [batch.response_ids[i].tolist() for i in range(6)]
    assert responses == [[1], [2, 3], [4], [5], [6], [7, 7, 7]]
    prompts = [batch.prompt_ids[i] for i in range(6)]
    assert all(ids.tolist() == [7, 8, 9] and ids.dtype == np.int32 for ids in prompts)
    assert [len(batch.rollout_log_probs[i]) for i in range(6)] == [1, 2, 1, 1, 1, 3]
    assert batch.num_sampled_tokens.tolist() == [1, 2, 1, 1, 1, 3]
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    assert batch.num_correct.tolist() == [1, 1, 1, 3, 3, 3]
    assert batch.group_size.tolist() == [2, 2, 2, 3, 3, 3]
    assert batch.valid.tolist() == [True, True, False, True, True, True]
    assert batch.plan is None


def test_a_batch_needs_no_tokens():
    """Every rank makes the same of the table, whatever it holds; it keeps what is there."""
    rollouts = make_rollouts([group("a", [1], [2, 3]), group("b", [4], [5])], ["cw", "cu"])
    whole = objective.make_batch(rollouts, METHODS["gapo"])
    held = {name: {1: one[1]} if 1 in one else {} for name, one in rollouts.tokens.items()}
    part = objective.make_batch(rollouts.with_tokens(held), METHODS["gapo"])
    assert (part.table == whole.table).all() and part.rows_here == [1]
    for name in ("advantages", "num_correct", "group_size", "valid"):
        assert getattr(part, name).equal(getattr(whole, name)), name


def test_bad_rollouts_are_named():
    with pytest.raises(RolloutError, match=r"'a'.*\b1\b.*\b0\b"):
        batch_of([group("a", [1], [])], ["cw"])
    first, second = group("b", [1, 2], [1])
    bad = dataclasses.replace(first, log_probs=first.log_probs[:1])
    with pytest.raises(RolloutError, match=r"'b'.*\b0\b.*\b2\b.*\b1\b"):
        batch_of([(bad, second)], ["cw"])


def test_groups_must_be_alike():
    with pytest.raises(AssertionError, match="at least one"):
        batch_of([], [])
    with pytest.raises(AssertionError, match=r"rollouts.*\b2\b.*\b3\b"):
        batch_of([group("a", *[[1]] * 2), group("b", *[[1]] * 3)], ["cw", "cww"])
    with pytest.raises(AssertionError, match="verdicts"):
        batch_of([group("a", [1], [1])], ["c"])


def test_a_batch_is_of_finished_rollouts():
    first, second = group("a", [1], [2])
    rollouts = make_rollouts([(first, second)], ["cw"]).changed(is_finished=[1, 0])
    with pytest.raises(AssertionError, match="finished"):
        objective.make_batch(rollouts, METHODS["gapo"])


def masked(episode, *mask):
    return dataclasses.replace(episode, response_mask=np.array(mask, dtype=bool))


@pytest.mark.parametrize("mask", [(True,), (True, True, True), (False, False)])
def test_a_mask_that_is_not_the_responses_is_refused(mask):
    first, second = group("a", [3], [1, 2])
    with pytest.raises(RolloutError, match=r"'a', rollout 1\b.*\bresponse_mask\b"):
        batch_of([(first, masked(second, *mask))], ["cw"])


def test_counts_per_c_are_of_sampled_tokens():
    """Whatever the log-probs of the others are."""
    found = []
    for junk in (0.0, -100.0):
        first, second = group("a", [1, 2, 3, 4], [5, 6])
        first.log_probs[1:3] = junk
        batch = batch_of([(masked(first, True, False, False, True), second)], ["cw"])
        found.append(count_by_correct(batch, group_size=2))
    assert found[0] == found[1]
    assert found[0]["rollout/entropy"] == 0.5
    assert found[0]["per_c/correct/response_length/c1"] == 2.0


def test_graded_rewards_give_the_advantages_and_verdicts_give_c() -> None:
    """The second group has no correct response; the third is equal; unknown stays unknown."""
    groups = [group(name, *([token] for token in range(4))) for name in "abc"]
    rollouts = make_rollouts(groups, ["cwwu", "wwww", "wwww"])
    grades = [0.9, 0.1, math.inf, 0.7, 0.0, 0.25, 0.5, 0.25, 0.3, 0.3, 0.3, 0.3]
    graded = rollouts.changed(grade=grades)
    batch = objective.make_batch(graded, dataclasses.replace(METHODS["grpo"], normalize_std=False))
    floored = dataclasses.replace(METHODS["grpo"], std_floor=10.0)
    smaller = objective.make_batch(graded, floored).advantages
    assert smaller.tolist() == pytest.approx((batch.advantages / 10).tolist(), abs=1e-15)
    known = [0.9, 0.1, 0.0]  # a verdict without a number counts 0 or 1; the unknown one nothing
    mean = sum(known) / 3
    expected = [*(one - mean for one in known), 0, -0.25, 0, 0.25, 0, 0, 0, 0, 0]
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-15)
    assert batch.num_correct.tolist() == [1] * 4 + [0] * 8
    assert batch.group_size.tolist() == [3] * 4 + [4] * 8
    assert informative(graded).tolist() == [True, True, False]
    assert informative(rollouts).tolist() == [True, False, False]
