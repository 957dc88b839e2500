"""Conversion of episodes to rows of the table, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gapo_megatron.errors import RolloutError
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Prompt, TurnSettings
from tests.batches import make_rollouts, random_rollouts


def test_a_row_has_the_facts_of_its_response() -> None:
    rollouts = random_rollouts(5, 4, problems=[9, 1, 70_000, 3], policy_version=11, holder=2)
    table = rollouts.table
    assert rollouts.problems == [9, 1, 70_000, 3] and rollouts.rollouts_per_prompt == 3
    assert table["sample"].tolist() == [0, 1, 2] * 4
    assert table["oldest_version"].tolist() == [11, 3, 11] * 4
    assert table["outcome"].tolist() == [1, 0, 2] * 4
    assert {*table["holder"].tolist()} == {2} and table["is_finished"].all()
    for row in range(12):
        log_probs, is_sampled = rollouts.rollout_log_probs[row], rollouts.is_sampled(row)
        num_carried = len(rollouts.carried_log_probs[row])
        facts = table[row]
        assert facts["num_prompt_tokens"] == len(rollouts.prompt_ids[row])
        assert facts["num_response_tokens"] == len(rollouts.response_ids[row]) == len(is_sampled)
        assert facts["num_sampled_tokens"] == is_sampled.sum()
        assert facts["num_conversations"] == 1 + rollouts.conversations_of(row).max()
        assert facts["num_carried_tokens"] == num_carried
        assert facts["num_carried_sampled"] == is_sampled[:num_carried].sum()
        assert facts["log_prob_sum"] == log_probs[is_sampled].sum(dtype=np.float64)
    assert {*rollouts.response_masks} == {2, 5, 8, 11} and rollouts.has_carried
    assert {*rollouts.conversations} == {*np.flatnonzero(table["num_conversations"] == 3)} != set()


@pytest.mark.parametrize(("judges_truncated", "outcomes"), [(True, [1, 0]), (False, [1, 2])])
def test_a_truncated_response_may_be_unknown(judges_truncated: bool, outcomes: list[int]) -> None:
    one = Episode(Prompt("p", (1,), ""), 0, np.ones(2, np.int32), np.ones(2, np.float32))
    groups = [(one, replace(one, sample=1, truncated=True))]
    rollouts = make_rollouts(groups, ["cw"], judges_truncated=judges_truncated)
    assert rollouts.table["outcome"].tolist() == outcomes
    assert rollouts.table["is_truncated"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("num_log_probs", "mask", "named"),
    [
        (3, [True, False], "response_mask of 2"),
        (3, [False, False, False], "response_mask of 3, 0 of them"),
        (2, [True, False, True], "3 response tokens with 2 log-probs"),
    ],
)
def test_a_response_that_does_not_fit_itself_is_named(
    num_log_probs: int, mask: list[bool], named: str
) -> None:
    """Refused before its mask is used to count."""
    log_probs = np.ones(num_log_probs, np.float32)
    one = Episode(
        Prompt("p", (1,), ""), 0, np.ones(3, np.int32), log_probs, response_mask=np.array(mask)
    )
    with pytest.raises(RolloutError, match=rf"'p', rollout 0\b.*{named}"):
        make_rollouts([(one,)], ["c"])


def test_an_open_group_comes_back_as_it_was() -> None:
    """Finished or not, begun or not, with carried tokens and a mask; without an outcome."""
    prompt = Prompt("p", (1, 2, 3), "the answer", "hard")
    ids, log_probs = np.array([4, 5, 6], np.int32), -np.ones(3, np.float32)
    mask = np.array([True, False, True])
    done = Episode(prompt, 0, ids, log_probs, truncated=True)
    unfinished = Episode(prompt, 1, ids, log_probs, finished=False, response_mask=mask)
    old, versions = np.array([-0.5, 0], np.float32), np.array([3, 4], np.int32)
    both = replace(unfinished, sample=2, carried_log_probs=old, carried_versions=versions)
    not_begun = Episode(prompt, 3, ids[:0], log_probs[:0], finished=False)
    unscored = replace(both, sample=4, carried_log_probs=None)
    several = replace(unfinished, sample=5, conversations=np.array([0, 1, 1], np.int32))
    several = replace(several, turn=TurnSettings(conversation=1))
    group = (done, unfinished, both, not_begun, unscored, several)
    rollouts = to_rollouts([group], policy_version=7)
    assert np.isnan(rollouts.rewards).all()
    # The data has the problem, and what the model has read first may be other tokens.
    (found,) = to_episodes(rollouts, [replace(prompt, token_ids=(9,))])
    for one, expected in zip(found, group, strict=True):
        assert (one.prompt, one.sample) == (prompt, expected.sample)
        assert one.token_ids.tolist() == expected.token_ids.tolist()
        assert one.log_probs.tolist() == expected.log_probs.tolist()
        assert (one.truncated, one.finished) == (expected.truncated, expected.finished)
        assert (one.response_mask is None) == (expected.response_mask is None)
        assert one.is_sampled.tolist() == expected.is_sampled.tolist()
        assert one.context().tolist() == expected.context().tolist() and one.turn == expected.turn
        for name in ("carried_log_probs", "carried_versions", "conversations"):
            ours, theirs = getattr(one, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or ours.tolist() == theirs.tolist()


def test_every_token_has_the_version_that_sampled_it() -> None:
    """Over three steps, the trainer's log-probs kept or not."""
    ids, prompt = np.arange(6, dtype=np.int32), Prompt("p", (1, 2, 3), "")
    log_probs, mask = -np.ones(6, np.float32), np.array([1, 0, 1, 1, 1, 1], bool)
    rollouts, one = Rollouts.join([]), Episode(prompt, 0, ids[:0], log_probs[:0], finished=False)
    for version, length in ((3, 2), (4, 2), (6, 5)):
        more = replace(
            one, token_ids=ids[:length], log_probs=log_probs[:length], response_mask=mask[:length]
        )
        rollouts = to_rollouts([(more,)], policy_version=version)
        rollouts = rollouts.carried()
        ((one,),) = to_episodes(rollouts, [prompt])
    assert rollouts.carried_versions[0].tolist() == [3, 3, 6, 6, 6]
    facts = rollouts.table[0]
    assert (facts["oldest_version"], facts["num_scored_tokens"]) == (3, 0)
    assert (facts["num_carried_tokens"], facts["num_carried_sampled"]) == (5, 4)
    end = replace(one, token_ids=ids, log_probs=log_probs, response_mask=mask, finished=True)
    found = to_rollouts([(end,)], policy_version=9)
    assert found.versions(0).tolist() == [3, 3, 6, 6, 6, 9]
    assert (found.table[0]["oldest_version"], found.table[0]["newest_version"]) == (3, 9)
