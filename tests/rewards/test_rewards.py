"""Verifiers, and scoring of rollouts."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import exact
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from gapo_tools.demonstration import demo_task as arithmetic
from tests.messages import mentions


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("11>16>25", Outcome.CORRECT),
        ("25", Outcome.CORRECT),
        ("11>16>26", Outcome.WRONG),
        ("25>", Outcome.WRONG),
        ("025", Outcome.WRONG),
        (" 25", Outcome.WRONG),
        ("25>16", Outcome.WRONG),
        ("", Outcome.WRONG),
    ],
)
def test_exact_compares_the_last_field_to_the_letter(response, outcome):
    assert exact.verify(response, "25").outcome is outcome


def test_exact_says_what_it_expected():
    assert exact.verify("1>2", "3").reason == "answered '2', expected '3'"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = arithmetic.write_tokenizer(["0123456789+=>"], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)
    return load_tokenizer(folder)


def _group(tokenizer, prompt: Prompt, *texts: str, ends: bool = True) -> list[Episode]:
    tokens = [tokenizer.encode(text) + [tokenizer.eos_token_id] * ends for text in texts]
    return [
        Episode(
            prompt, i, np.array(ids, np.int32), np.zeros(len(ids), np.float32), truncated=not ends
        )
        for i, ids in enumerate(tokens)
    ]


def _judging(pool: rewards.Pool, groups, tokenizer) -> rewards.Judging:
    """Of a generation that has ended, the last response first."""
    prompts = [group[0].prompt for group in groups]
    judging = rewards.Judging(pool, prompts, judge=OneTurn(tokenizer).judge)
    for group in groups:
        for one in reversed(group):
            judging.add([one])
    return judging


def test_score_judges_every_response_by_its_text(tokenizer):
    groups = [
        _group(tokenizer, Prompt("a", (1,), "12"), "5>12", "5>13"),
        _group(tokenizer, Prompt("b", (1,), "3"), "3", "3>", ends=False),
    ]
    with rewards.start_pool(RewardConfig(kind="exact"), num_workers=2) as pool:
        verdicts = rewards.score(_judging(pool, groups, tokenizer), groups)
    found = [[verdict.outcome for verdict in group] for group in verdicts]
    assert found == [[Outcome.CORRECT, Outcome.WRONG]] * 2


def test_what_other_ranks_judge_and_what_is_unfinished_counts_nowhere(tokenizer, caplog):
    """A rank knows its problems before generation, and which of them are whole only after it."""
    mine, unfinished, others = (
        _group(tokenizer, Prompt(name, (1,), ""), "2", "1") for name in "abc"
    )
    # To this verifier "1" is unknown and everything else correct.
    with rewards.Pool("tests.reward_setup", num_workers=1, timeout_s=600) as pool:
        prompts = [unfinished[0].prompt, mine[0].prompt]
        judging = rewards.Judging(pool, prompts, judge=OneTurn(tokenizer).judge)
        judging.add([others[1], unfinished[1]])
        judging.add([others[0], mine[0]])
        assert len(pool._open) == 2
        [[verdict]] = rewards.score(judging, [mine[:1]])
    assert verdict.outcome is Outcome.CORRECT
    assert not caplog.messages


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "judged",
    [("1", b"1"), ("1", {1}), ("1",), ("1", "1", "x"), ("1",) * 5, "12", None, _Mute()],
    ids=repr,
)
def test_an_environment_that_gives_no_two_texts_is_unknown(tokenizer, judged):
    [group] = groups = [_group(tokenizer, Prompt("a", (1,), ""), "1", "2")]

    def judge(one):
        if one.sample:
            return "2", "2"
        if isinstance(judged, Exception):
            raise judged
        return judged

    with rewards.start_pool(RewardConfig(kind="exact"), num_workers=1) as pool:
        judging = rewards.Judging(pool, [group[0].prompt], judge=judge)
        judging.add(group)
        [verdicts] = rewards.score(judging, groups)
    assert [one.outcome for one in verdicts] == [Outcome.UNKNOWN, Outcome.CORRECT]
    assert verdicts[0].reason.startswith("judge: ")


@pytest.mark.parametrize("reward", [{"kind": "exact"}, {"components": {"a": "exact"}}])
@pytest.mark.parametrize("judged", [1, True, Verdict(Outcome.CORRECT)], ids=repr)
def test_a_verdict_of_the_environment_is_no_other_verifiers(tokenizer, reward, judged):
    """It would bypass them; only `reward.kind = "environment"` says that it decides."""
    [group] = groups = [_group(tokenizer, Prompt("a", (1,), ""), "1", "2")]
    with rewards.start_pool(RewardConfig(**reward), num_workers=1) as pool:
        judging = rewards.Judging(
            pool, [group[0].prompt], judge=lambda one: ("2", "2") if one.sample else judged
        )
        judging.add(group)
        [verdicts] = rewards.score(judging, groups)
    assert [one.outcome for one in verdicts] == [Outcome.UNKNOWN, Outcome.CORRECT]
    assert 'reward.kind = "environment"' in verdicts[0].reason


def test_rows_with_a_verifier_of_their_own_take_no_verdict_of_the_environment(tokenizer):
    own, others = Prompt("a", (1,), "", verifier="text"), Prompt("b", (1,), "")
    groups = [_group(tokenizer, one, "1") for one in (own, others)]
    config = RewardConfig(kind="environment", verifiers={"text": "exact"})
    with rewards.start_pool(config, num_workers=1) as pool:
        judging = rewards.Judging(pool, [own, others], judge=lambda one: 1.0)
        judging.add([one for group in groups for one in group])
        [[refused], [taken]] = rewards.score(judging, groups)
    assert (refused.outcome, taken.outcome) == (Outcome.UNKNOWN, Outcome.CORRECT)


def _verdicts(num_unknown: int, of: int = 10) -> list[tuple[Verdict, ...]]:
    """Ever rarer reasons: the i-th of `num_unknown` halves."""
    unknown, left = [], num_unknown
    while left:
        unknown += [Verdict(Outcome.UNKNOWN, f"reason {left}")] * (half := -(-left // 2))
        left -= half
    return [tuple(unknown), (Verdict(Outcome.WRONG),) * (of - num_unknown)]


def test_the_most_common_reasons_of_all_ranks_are_told(caplog):
    def gather(ours):
        other = [(200, 34, [("reason 64", 1), ("elsewhere", 33)])]
        return [*other, *ours]

    share, text = rewards.share_unknown(_verdicts(64, of=100), gather=gather)
    assert share == (64 + 34) / 300
    first, *lines = text.splitlines()
    assert {"98", "300"} <= set(first.split())
    counts = {"reason 64": 33, "elsewhere": 33, "reason 32": 16, "reason 16": 8, "reason 8": 4}
    assert lines == [f"  {count} x {reason}" for reason, count in counts.items()]
    assert rewards.share_unknown(_verdicts(0), gather=list) == (0, "")


@pytest.mark.parametrize(
    ("most", "steps", "unknown", "ended"),
    [
        (0.5, 3, [6, 10, 5, 6, 6, 6], 5),  # half is no more than half: counted anew
        (0.5, 1, [5, 0, 6], 2),
        (0.0, 2, [1, 0, 1, 1], 3),
        (1.0, 1, [10, 10, 10], None),
    ],
)
def test_a_run_ends_after_steps_without_most_verdicts(caplog, most, steps, unknown, ended):
    config = RewardConfig(kind="exact", max_unknown_share=most, max_unknown_steps=steps)
    watch = rewards.UnknownWatch(config)
    for step, num_unknown in enumerate(unknown):
        ends = pytest.raises(
            ConfigError,
            match=mentions("reward.max_unknown_share", f"{most:g}", steps, step, "reason"),
        )
        with ends if step == ended else nullcontext():
            share = watch.check(step, _verdicts(num_unknown), gather=list, is_first=step > 0)
            assert share == num_unknown / 10
    assert len(caplog.messages) == sum(number > 0 for number in unknown[1:])


def test_a_step_that_is_sampled_again_counts_once(caplog):
    config = RewardConfig(kind="exact", max_unknown_share=0.5, max_unknown_steps=2)
    watch = rewards.UnknownWatch(config)
    for step in (0, 0, 0):
        watch.check(step, _verdicts(9), gather=list, is_first=False)
    with pytest.raises(ConfigError):
        watch.check(1, _verdicts(9), gather=list, is_first=False)


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ([(False, False), (True, True)], True),  # whoever is done aborts nothing
        ([(False, False), (False, True)], False),
    ],
)
def test_ranks_end_judging_together_or_abort_together(tokenizer, others, kept):
    asked = []

    def gather(ours):
        asked.append(ours)
        return [*ours, others[len(asked) - 1]]

    def should_abort(elapsed_s: float) -> bool:
        assert elapsed_s >= 0
        return False

    with rewards.Pool("tests.reward_setup", num_workers=1, timeout_s=600) as pool:
        groups = [_group(tokenizer, Prompt("a", (1,), ""), "2")]
        judging = _judging(pool, groups, tokenizer)
        verdicts = rewards.score(judging, groups, gather=gather, should_abort=should_abort)
    assert asked[-2:] == [[(True, False)]] * 2
    assert (verdicts is not None) is kept


def test_code_is_refused_where_programs_cannot_be_isolated():
    broken = RewardConfig(kind="code", python="/no/python")
    with pytest.raises(
        ConfigError, match=mentions("reward.python", "/no/python", "docs/sandbox.md")
    ):
        rewards.check(broken)


@pytest.mark.parametrize("kind", ["math", "code", "instructions", "exact"])
def test_every_kind_starts_and_answers(kind):
    with rewards.start_pool(RewardConfig(kind=kind), num_workers=1) as pool:
        [verdict] = pool.judge([("", "1")])
        assert verdict.outcome is not Outcome.CORRECT
        assert "crashed" not in verdict.reason
