"""Which groups a batch is made of, and which problems. tests/test_train.py runs it whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gapo_megatron import sample as sample_module
from gapo_megatron.config import BatchConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import ConfigError
from gapo_megatron.metrics import Stopwatch
from gapo_megatron.sample import choose, is_informative, most_drawn, sample
from gapo_megatron.types import Carried, OpenGroup, Outcome, Prompt, Rollout, Verdict
from tests.learn_setup import make_config, make_groups


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


class StandInEngine:
    """One engine on one rank: every decoding step gives each response a token.

    Response j to prompt i has 1 + (7 i + 3 j) % 11 tokens, each the number of the step of the run.
    """

    def __init__(self) -> None:
        self.places = (1.0, 2.0)
        self.num_tokens = 0

    def share(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    part = gather = share

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_groups: int,
        num_samples: int,
        begun: Mapping[str, tuple[Rollout, ...]],
        keep_open: bool,
        step: int,
        **_: Any,
    ) -> list[tuple[Rollout, ...]]:
        lengths = [
            [1 + (7 * int(prompt.id) + 3 * j) % 11 for j in range(num_samples)]
            for prompt in prompts
        ]
        not_begun = Rollout(np.empty(0, np.int32), np.empty(0, np.float32), False, finished=False)
        so_far = [begun.get(prompt.id, (not_begun,) * num_samples) for prompt in prompts]
        missing = [
            max(n - len(r.token_ids) for n, r in zip(row, group, strict=True))
            for row, group in zip(lengths, so_far, strict=True)
        ]
        num_steps = sorted(missing)[num_groups - 1]

        def go_on(rollout: Rollout, length: int) -> Rollout:
            tokens = rollout.token_ids.tolist()
            new = min(num_steps, length - len(tokens))
            self.num_tokens += new
            ids = np.array([*tokens, *[step] * new], np.int32)
            log_probs = np.full(len(ids), -1, np.float32)
            return replace(rollout, token_ids=ids, log_probs=log_probs, finished=len(ids) == length)

        groups = [tuple(map(go_on, group, row)) for group, row in zip(so_far, lengths, strict=True)]
        whole = [i for i, count in enumerate(missing) if count <= num_steps][:num_groups]
        return [group if keep_open or i in whole else () for i, group in enumerate(groups)]


@pytest.mark.parametrize("rounds", [0, 2])
def test_open_groups_are_finished_and_nothing_that_was_sampled_is_lost(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Problems are learned from as often as each other, however long their responses."""
    config = make_config(
        Path("unused"),
        batch={
            "rollout_prompts": 6,
            "minibatch_prompts": 6,
            "oversampling": 1.5,
            "partial_rollouts": True,
            "dynamic_sampling_rounds": rounds,
        },
    )

    def judge(_: Any, prompts: Any, rollouts: Any, **__: Any) -> list[tuple[Verdict, ...]]:
        # Every third problem teaches nothing.
        return [
            tuple(
                Verdict(Outcome.CORRECT if j == 0 and int(prompt.id) % 3 else Outcome.WRONG)
                for j in range(len(group))
            )
            for prompt, group in zip(prompts, rollouts, strict=True)
        ]

    monkeypatch.setattr(sample_module.rewards, "score", judge)
    source = PromptSource([Prompt(str(i), (i,), "") for i in range(40)], seed=0)
    engine, attempt = StandInEngine(), SimpleNamespace(patience=lambda _: None)
    opened: list[OpenGroup] = []
    finished: list[str] = []
    num_tokens = 0
    gaps = []
    for step in range(60):
        stopwatch = Stopwatch()
        sampled = sample(
            engine,
            source,
            None,
            None,
            config,
            open_groups=opened,
            attempt=attempt,
            stopwatch=stopwatch,
            step=step,
        )
        assert sampled is not None
        ids = [group.prompt.id for group in sampled.groups]
        assert len(ids) == len(set(ids)) == 6
        still = {group.prompt.id for group in sampled.open_groups}
        assert len(still) == len(sampled.open_groups) and not still & set(ids)
        rollouts = [r for group in sampled.groups for r in group.rollouts]
        assert all(r.finished for r in rollouts)
        if not rounds:
            # Three of nine stay open, and what went on is nearly always what is finished first.
            assert len(still) == 3
            assert len(source.state_dict()["remaining"]) + len(finished) + 6 + 3 == 40 * (
                1 + source.state_dict()["epoch"]
            )
            finished += ids
            num_tokens += sum(len(r.token_ids) for r in rollouts)
            carried = sum((r.token_ids < step).sum() for r in rollouts)
            share = carried / sum(len(r.token_ids) for r in rollouts)
            assert sampled.metrics["rollout/carried_token_share"] == pytest.approx(share)
            gap = step - min(int(r.token_ids[0]) for r in rollouts)
            assert sampled.metrics["rollout/oldest_version_gap"] == gap
            assert sampled.metrics["rollout/broken_off_group_share"] == pytest.approx(1 / 3)
            gaps.append(gap)
        # What `carry` does: versions are the tokens here.
        opened = [
            replace(
                group,
                rollouts=tuple(
                    replace(
                        r, carried=Carried(r.token_ids, r.log_probs) if len(r.token_ids) else None
                    )
                    for r in group.rollouts
                ),
            )
            for group in sampled.open_groups
        ]
    if not rounds:
        counts = [finished.count(str(i)) for i in range(40)]
        assert sum(counts) == 360 and max(counts) - min(counts) <= 2
        assert max(gaps) >= 1
        num_tokens += sum(len(r.token_ids) for group in opened for r in group.rollouts)
        assert num_tokens == engine.num_tokens
    # Without the option, what is open goes on once more, and then the source has it back.
    alone = config.batch.model_copy(update={"partial_rollouts": False, "oversampling": 1.0})
    sampled = sample(
        engine,
        source,
        None,
        None,
        config.model_copy(update={"batch": alone}),
        open_groups=opened,
        attempt=attempt,
        stopwatch=stopwatch,
        step=60,
    )
    assert sampled is not None and sampled.open_groups == []
    if not rounds:
        assert {group.prompt.id for group in opened} < {g.prompt.id for g in sampled.groups}
