"""Several data sources: shares, epochs, steps, returned problems, and the stored position."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

from gapo_megatron.config import BatchConfig, DataConfig, DataSource
from gapo_megatron.data.source import PromptSource, check_counts
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.types import Prompt
from tests.messages import mentions


def sources(**settings: Any) -> tuple[DataSource, ...]:
    """Sources by name: a weight, or all settings."""
    return tuple(
        DataSource(name=name, path="x", **(one if isinstance(one, dict) else {"weight": one}))
        for name, one in settings.items()
    )


def problems(**counts: int) -> list[Prompt]:
    return [
        Prompt(f"{name}/{i}", (i,), "", source=name)
        for name, count in counts.items()
        for i in range(count)
    ]


def mixture(seed: int = 0) -> PromptSource:
    prompts = problems(math=40, code=12, chat=7)
    return PromptSource(prompts, seed=seed, sources=sources(math=5.0, code=2.0, chat=1.0))


def counts_of(batch: list[Prompt]) -> Counter[str]:
    return Counter(prompt.source for prompt in batch)


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_every_batch_has_each_sources_share(size: int) -> None:
    source, total = mixture(), Counter[str]()
    for number in range(1, 200):
        batch = source.next_batch(size)
        assert len({prompt.id for prompt in batch}) == size
        total += counts_of(batch)
        for name, share in (("math", 5 / 8), ("code", 2 / 8), ("chat", 1 / 8)):
            assert abs(total[name] - number * size * share) < 1.5


def test_each_source_has_its_own_epochs() -> None:
    source = mixture()
    drawn = Counter(prompt.id for _ in range(100) for prompt in source.next_batch(8))
    by_source = {
        name: {count for id, count in drawn.items() if id.startswith(name)}
        for name in ("math", "code", "chat")
    }
    # 500 of 40 problems, 200 of 12, 100 of 7.
    assert by_source == {"math": {12, 13}, "code": {16, 17}, "chat": {14, 15}}


def test_a_sources_order_does_not_depend_on_the_others() -> None:
    """So that a study of mixtures compares the same problems of a source."""
    alone = PromptSource(problems(math=40), seed=0, sources=sources(math=1.0))
    expected = [prompt.id for prompt in alone.next_batch(40)]
    for seed in (0, 1):
        source = mixture(seed)
        drawn = [one.id for _ in range(8) for one in source.next_batch(8) if one.source == "math"]
        assert (drawn == expected) == (seed == 0)


def test_sources_begin_and_end_with_their_steps() -> None:
    prompts = problems(easy=30, hard=30, always=30)
    given = sources(easy={"last_step": 3}, hard={"first_step": 3}, always={"weight": 2.0})
    source = PromptSource(prompts, seed=0, sources=given)
    found = [counts_of(source.next_batch(12, step=step)) for step in range(6)]
    assert found[:3] == [{"easy": 4, "always": 8}] * 3
    assert found[3] == {"easy": 3, "hard": 3, "always": 6}
    assert found[4:] == [{"hard": 4, "always": 8}] * 2


def test_a_source_that_is_exhausted_in_a_batch_owes_the_rest() -> None:
    source = PromptSource(problems(a=20, b=3), seed=0, sources=sources(a=1.0, b=1.0))
    drawn = source.next_batch(10)
    assert counts_of(drawn) == {"a": 7, "b": 3}
    drawn += source.next_batch(10, drawn=drawn)
    assert counts_of(drawn) == {"a": 17, "b": 3}
    with pytest.raises(ConfigError, match=mentions(24, "23 problems")):
        source.next_batch(4, drawn=drawn)
    owed = source.next_batch(4)
    assert counts_of(owed) == {"b": 3, "a": 1}


def test_shares_are_those_of_kept_problems() -> None:
    """Problems of one source are always given back, as the longest of an over-sampled batch are."""
    source, kept = mixture(), Counter[str]()
    for step in range(100):
        drawn = source.next_batch(12, step=step)
        late = [one for one in drawn if one.source == "code"][:2]
        late += [one for one in drawn if one.source != "code"][: 4 - len(late)]
        source.give_back(late, step=step)
        kept += counts_of([one for one in drawn if one not in late])
    assert kept.total() == 800
    assert {name: count / 800 for name, count in kept.items()} == pytest.approx(
        {"math": 5 / 8, "code": 2 / 8, "chat": 1 / 8}, abs=0.01
    )


@pytest.mark.parametrize("taken", range(5))
def test_resume_continues_exactly(taken: int) -> None:
    def draw(source: PromptSource, step: int) -> list[Prompt]:
        drawn = source.next_batch(7, step=step)
        source.give_back(drawn[step % 3 :: 3], step=step)
        return drawn

    source = mixture()
    for step in range(taken):
        draw(source, step)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = mixture()
    resumed.load_state_dict(state)
    later = range(taken, taken + 40)
    assert [draw(resumed, step) for step in later] == [draw(source, step) for step in later]
    assert resumed.state_dict() == source.state_dict()


def test_changed_weights_keep_the_position() -> None:
    """`run.allow_changes` may name them."""
    source = mixture()
    before = source.next_batch(16)
    changed = PromptSource(source.problems, seed=0, sources=sources(math=1.0, code=1.0, chat=2.0))
    changed.load_state_dict(source.state_dict())
    after = changed.next_batch(8)
    assert counts_of(after) == {"math": 2, "code": 2, "chat": 4}
    assert not {one.id for one in before if one.source != "chat"} & {one.id for one in after}


def test_a_state_of_other_sources_is_refused() -> None:
    one_file = PromptSource(problems(math=40), seed=0)
    state = mixture().state_dict()
    with pytest.raises(CheckpointError, match=mentions("data.train_path", 40, "run.output_dir")):
        one_file.load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("data.source", 59)):
        mixture().load_state_dict(one_file.state_dict() | {"dataset": state["dataset"]})
    state["sources"]["code"]["remaining"] = [0]  # of `math`
    with pytest.raises(CheckpointError, match="remaining"):
        mixture().load_state_dict(state)


def test_another_verifier_is_another_data_set_and_columns_are_not() -> None:
    """A changed verifier may take other columns: `run.allow_changes` has a say in that."""
    before = PromptSource([Prompt("a", (1,), "2")], seed=0).state_dict()
    with pytest.raises(CheckpointError):
        PromptSource([Prompt("a", (1,), "2", verifier="code")], seed=0).load_state_dict(before)
    PromptSource([Prompt("a", (1,), "2", row={"unit": "m"})], seed=0).load_state_dict(before)


def test_a_source_too_small_for_its_share_is_refused_with_the_numbers() -> None:
    given = (
        DataSource(name="math", path="m.jsonl", weight=3.0),
        DataSource(name="code", path="c.jsonl", first_step=100),
    )
    data = DataConfig(source=given)
    batch = BatchConfig(rollout_prompts=16, minibatch_prompts=16)
    for num_steps, counts, said in (
        (200, {"math": 16, "code": 4}, ()),
        (
            200,
            {"math": 16, "code": 3},
            ("'code'", "steps 100 to 199", 16, "25.0%", 4, "c.jsonl", 3),
        ),
        (100, {"math": 16, "code": 3}, ()),
        (200, {"math": 15, "code": 4}, ("'math'", "steps 0 to 99", 16, 15)),
    ):
        expected = pytest.raises(DataError, match=mentions(*said)) if said else nullcontext()
        with expected:
            check_counts(counts, batch, data=data, num_steps=num_steps)
