"""Which groups a batch is made of, and which problems. tests/test_train.py runs it whole."""

from __future__ import annotations

import pytest

from gapo_megatron.config import BatchConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import ConfigError
from gapo_megatron.sample import choose, is_informative, most_drawn
from gapo_megatron.types import Prompt
from tests.learn_setup import make_groups


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [("cw", True), ("cc", False), ("ww", False), ("cwu", True), ("cu", False), ("uu", False)],
)
def test_a_group_teaches_where_valid_rewards_differ(verdicts: str, expected: bool) -> None:
    (group,) = make_groups([verdicts])
    assert is_informative(group) is expected


@pytest.mark.parametrize(
    ("verdicts", "wanted", "expected"),
    [
        (["cw", "cc", "ww", "wc"], 2, [0, 3]),
        (["cc", "cw", "ww", "wc", "cw"], 2, [1, 3]),
        # Filled up with the first that teach nothing, in the order drawn.
        (["cc", "ww", "cw", "cc"], 3, [0, 1, 2]),
        (["ww", "ww", "ww"], 2, [0, 1]),
    ],
)
def test_the_batch_keeps_the_first_that_teach(
    verdicts: list[str], wanted: int, expected: list[int]
) -> None:
    groups = make_groups(verdicts)
    assert [groups.index(group) for group in choose(groups, wanted)] == expected


def test_no_problem_comes_twice_in_a_batch_of_several_draws() -> None:
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(10)], seed=0)
    all_drawn = []
    for _ in range(30):
        drawn = source.next_batch(5)
        for more in (3, 1):
            drawn += source.next_batch(more, drawn=drawn)
        ids = [prompt.id for prompt in drawn]
        assert len(set(ids)) == 9
        all_drawn += ids
    assert {all_drawn.count(str(i)) for i in range(10)} == {27}
    with pytest.raises(ConfigError, match=r"\(11\) is larger than the dataset \(10 problems\)"):
        source.next_batch(2, drawn=drawn)


def test_problems_given_back_come_again_and_all_as_often() -> None:
    """Also over the ends of epochs, where one may be there twice."""
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(10)], seed=0)
    learned = []
    for number in range(60):
        drawn = source.next_batch(6)
        ids = [prompt.id for prompt in drawn]
        assert len(set(ids)) == 6
        late = drawn[number % 3 :: 3]
        source.give_back(late)
        learned += [prompt.id for prompt in drawn if prompt not in late]
        begun = (1 + source.state_dict()["epoch"]) * 10
        assert len(source.state_dict()["remaining"]) + len(learned) == begun
    counts = [learned.count(str(i)) for i in range(10)]
    assert sum(counts) == 240
    assert max(counts) - min(counts) <= 2


def test_a_step_must_not_draw_more_problems_than_there_are() -> None:
    batch = BatchConfig(rollout_prompts=8, minibatch_prompts=8)
    assert most_drawn(batch) == 8
    more = batch.model_copy(update={"oversampling": 1.3, "dynamic_sampling_rounds": 2})
    assert most_drawn(more) == 3 * 11
