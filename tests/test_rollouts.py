"""The table of a batch, and tokens that only some ranks have: both stay together."""

from __future__ import annotations

import numpy as np
import pytest

from gapo_megatron.config.methods import METHODS
from gapo_megatron.objective import make_batch
from gapo_megatron.rollouts import COLUMNS, ROW, Batch, Rollouts
from tests.batches import random_rollouts, readable

HELD = (1, 2, 4)
"""Rows of the tests whose tokens are here."""


def at(rollouts: Rollouts, rows: dict[int, int]) -> dict[str, dict[int, object]]:
    """As `readable`, of some rows under other numbers."""
    return {
        name: {new: held[old] for old, new in rows.items() if old in held}
        for name, held in readable(rollouts).items()
    }


def part(rollouts: Rollouts, rows: tuple[int, ...] = HELD) -> Rollouts:
    """On a rank that has these rows' tokens alone."""
    return rollouts.with_tokens(
        {
            name: {row: array for row, array in held.items() if row in rows}
            for name, held in rollouts.tokens.items()
        }
    )


@pytest.fixture
def whole() -> Rollouts:
    """Two groups of three, all of them here."""
    return random_rollouts(0, 2, problems=[7, 5])


def test_a_row_is_twenty_six_words_in_the_order_of_its_columns() -> None:
    """As in checkpoints."""
    names = (
        *("problem", "sample", "num_prompt_tokens", "num_response_tokens", "num_sampled_tokens"),
        *("num_carried_tokens", "num_carried_sampled", "oldest_version", "is_truncated"),
        *("is_finished", "outcome", "holder"),
    )
    table = np.zeros(1, dtype=ROW)
    for number, name in enumerate(names):
        table[name] = number + 1
    table["log_prob_sum"], table["grade"] = -2.5, 0.5
    table["num_scored_tokens"], table["newest_version"] = 17, 18
    table["num_routed_tokens"], table["num_routes"], table["num_note_bytes"] = 19, 20, 21
    table["answer"], table["answer_form"], table["num_conversations"] = 22, 23, 26
    words = table.view(np.int32)
    assert words[:12].tolist() == [*range(1, 13)]
    assert words[12:16].view(np.float64).tolist() == [-2.5, 0.5]
    assert words[16:21].tolist() == [17, 18, 19, 20, 21]
    assert words[21:25].view(np.int64).tolist() == [22, 23] and words[25] == 26


def test_tokens_elsewhere_are_a_key_error_that_names_the_sequence(whole: Rollouts) -> None:
    batch = make_batch(part(whole), METHODS["gapo"])
    assert isinstance(batch, Batch) and batch.rows_here == [*HELD] and len(batch) == 6
    assert readable(batch) == at(whole, {row: row for row in HELD})
    lengths = batch.num_sampled_tokens, batch.num_fed_tokens
    assert [one.tolist() for one in lengths] == [
        whole.num_sampled_tokens.tolist(),
        whole.num_fed_tokens.tolist(),
    ]
    for name in COLUMNS:
        with pytest.raises(KeyError, match=r"\bsequence 3\b"):
            getattr(batch, name)[3]
    with pytest.raises(KeyError, match=r"\bsequence 0\b"):
        batch.is_sampled(0)


def test_rows_are_taken_in_any_order_and_numbered_anew(whole: Rollouts) -> None:
    rows = [4, 0, 2]
    for rollouts in (whole, part(whole), Rollouts(whole.table)):
        taken = rollouts.take(np.array(rows))
        assert taken.table.tobytes() == whole.table[rows].tobytes()
        assert readable(taken) == at(rollouts, {row: i for i, row in enumerate(rows)})
    assert part(whole).take(rows).rows_here == [0, 2]
    assert taken.rows_here == [] and len(whole.take([])) == 0
    with pytest.raises(KeyError, match=r"\bsequence 1\b"):
        part(whole).take(rows).response_ids[1]


def test_groups_are_taken_as_a_whole(whole: Rollouts) -> None:
    swapped = part(whole).take_groups([1, 0])
    assert swapped.problems == [5, 7] and swapped.num_groups == 2
    assert whole.rows_of([1, 0]) == [3, 4, 5, 0, 1, 2]
    assert readable(swapped) == at(whole, {1: 4, 2: 5, 4: 1})
    assert len(whole.take_groups([])) == 0


def test_parts_are_joined_with_what_each_has_here(whole: Rollouts) -> None:
    other = random_rollouts(1, 1, problems=[9])
    joined = Rollouts.join([part(whole), Rollouts(other.table), Rollouts.join([]), other])
    assert joined.problems == [7, 5, 9, 9] and len(joined) == 12
    assert joined.table.tobytes() == b"".join(one.table.tobytes() for one in (whole, other, other))
    expected = at(whole, {row: row for row in HELD})
    for name, held in at(other, {0: 9, 1: 10, 2: 11}).items():
        expected[name] |= held
    assert readable(joined) == expected
    with pytest.raises(KeyError, match=r"\bsequence 6\b"):
        joined.response_ids[6]
    nothing = Rollouts.join([])
    assert (len(nothing), nothing.num_groups, nothing.problems) == (0, 0, [])
    assert nothing.rollouts_per_prompt == 0 and not nothing.has_carried


def test_other_values_leave_the_first_table_alone(whole: Rollouts) -> None:
    batch = make_batch(part(whole), METHODS["gapo"])
    before = whole.table.tobytes()
    changed = batch.changed(holder=[0, 1, 2, 0, 1, 2], num_carried_tokens=0)
    assert whole.table.tobytes() == batch.table.tobytes() == before
    assert changed.table["holder"].tolist() == [0, 1, 2] * 2
    assert whole.has_carried and whole.has_scored and not changed.has_carried
    assert changed.tokens is batch.tokens and changed.advantages is batch.advantages
    others = [name for name in ROW.names or () if name not in ("holder", "num_carried_tokens")]
    assert changed.table[others].tolist() == whole.table[others].tolist()


def test_other_tokens_replace_all_of_them(whole: Rollouts) -> None:
    """Empty masks, as messages bring them, are none."""
    batch = make_batch(part(whole), METHODS["gapo"])
    tokens = {name: {3: whole.tokens[name].get(3, np.empty(0, bool))} for name in COLUMNS}
    found = batch.with_tokens(tokens)
    assert found.rows_here == [3] and batch.rows_here == [*HELD]
    assert readable(found) == at(whole, {3: 3}) and not found.response_masks
    assert found.table is batch.table and found.advantages is batch.advantages
    with pytest.raises(KeyError, match=r"\bsequence 1\b"):
        found.prompt_ids[1]


def test_rows_that_begin_within_a_group_are_refused(whole: Rollouts) -> None:
    with pytest.raises(AssertionError, match="sample 0"):
        whole.take([1, 2]).rows_of([0])


def test_lengths_and_sums_are_counted(whole: Rollouts) -> None:
    """A mask of nothing but sampled tokens is none."""
    ids = [np.arange(n, dtype=np.int32) for n in (2, 3)]
    log_probs = [np.array([-1, -2, -4], np.float32)] * 2
    masks = [np.array([True, False, True]), np.ones(3, bool)]
    carried = [log_probs[0][:2], log_probs[0][:0]]
    rollouts = Rollouts.of(
        ids, [ids[1]] * 2, log_probs, carried_log_probs=carried, response_masks=masks
    )
    assert rollouts.table["num_prompt_tokens"].tolist() == [2, 3]
    assert rollouts.table["num_response_tokens"].tolist() == [3, 3]
    assert rollouts.table["num_sampled_tokens"].tolist() == [2, 3]
    assert rollouts.table["num_carried_tokens"].tolist() == [2, 0]
    assert rollouts.table["num_scored_tokens"].tolist() == [2, 0]
    assert rollouts.carried_versions[0].tolist() == [0, 0]
    assert rollouts.table["num_carried_sampled"].tolist() == [1, 0]
    assert rollouts.table["log_prob_sum"].tolist() == [-5, -7]
    assert {*rollouts.response_masks} == {0}
    versions = [np.arange(n, dtype=np.int32) for n in (3, 1)]
    older = Rollouts.of(ids, [ids[1]] * 2, carried_versions=versions, response_masks=masks)
    assert older.table["num_carried_tokens"].tolist() == [3, 1] and older.has_carried
    assert older.table["num_carried_sampled"].tolist() == [2, 1] and not older.has_scored
    scored = Rollouts.of(ids, ids)
    assert scored.num_fed_tokens.tolist() == [3, 5]
    assert not scored.rollout_log_probs and scored.table["log_prob_sum"].tolist() == [0, 0]
