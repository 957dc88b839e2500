"""Dynamic sampling: which groups a batch is made of. tests/test_train.py runs it whole."""

from __future__ import annotations

import pytest

from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import ConfigError
from gapo_megatron.sample import choose, is_informative
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
