"""Verifiers that wait for others, and verifiers that compare the responses to a prompt."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.config.reward_section import VerifierConfig
from gapo_megatron.rewards import pool as pool_module
from gapo_megatron.rewards import worker_process
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

SOURCE = """
import asyncio, os, sys, time

class Judge:
    def __init__(self):
        self.waiting = 0

    async def verify(self, response, answer):
        command, _, argument = response.partition(" ")
        if command == "together":  # each waits until so many wait in this process
            self.waiting += 1
            while self.waiting < int(argument):
                await asyncio.sleep(0.001)
            return {"score": True, "pid": os.getpid()}
        if command == "hang":
            await asyncio.sleep(3600)
        if command == "stubborn":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        if command == "block":
            time.sleep(3600)
        if command == "compute":
            while True: pass
        if command == "brood":  # seconds, after the others have begun
            await asyncio.sleep(0.1)
            time.sleep(float(argument))
            return True
        if command == "pause":
            for _ in range(3):
                await asyncio.sleep(0.1)
            return True
        if command == "exit":
            os._exit(3)
        if command == "leave":
            sys.exit(3)
        if command == "cancel":
            raise asyncio.CancelledError
        if command == "raise":
            raise OSError("no judge")
        if command == "text":
            return "yes"
        await asyncio.sleep(0)
        print("asked", response)
        return response == answer

def plain(response, answer):
    return response == answer

async def later(response):
    await asyncio.sleep(0.001)
    return response

def looping(response, answer):
    return asyncio.run(later(response)) == answer
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def judge() -> RewardConfig:
    """By default with a long limit; a row may choose a short one, or a verifier that waits not."""
    own = {"kind": "mine.py:Judge"}
    others = {"brief": {**own, "timeout_s": 1}, "plain": "mine.py:plain"}
    return RewardConfig(kind="mine.py:Judge", timeout_s=600, verifiers=others)


def judged(config: RewardConfig, items: Sequence[tuple[Any, ...]], **options: Any) -> list[Verdict]:
    with rewards.start_pool(config, num_workers=1, **options) as pool:
        return pool.judge(items)


def test_calls_wait_together_and_no_more_than_so_many(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MOST_IN_FLIGHT", 5)
    with rewards.start_pool(judge(), num_workers=2) as pool:
        pool.wait_until_ready()
        verdicts = pool.judge([("together 5", "")] * 10)
    assert [one.outcome for one in verdicts] == ["correct"] * 10
    assert len({one.metrics["pid"] for one in verdicts}) == 2
    # Of six that wait for each other, the sixth begins when the others have been given up.
    verdicts = judged(judge(), [("together 6", "", "brief")] * 6)
    assert [one.outcome for one in verdicts] == [*["unknown"] * 5, "correct"]


def test_each_call_has_its_own_limit(source: Path) -> None:
    """One that answers no cancellation holds up nothing, and neither do those that fail."""
    items: list[tuple[str, ...]] = [(name, "", "brief") for name in ("hang", "stubborn")]
    items += [(str(n), str(n % 2)) for n in range(40)]
    items += [(name, "") for name in ("raise", "text", "cancel")]
    verdicts = judged(judge(), items, output=source.parent / "out.log")
    late, others, failed = verdicts[:2], verdicts[2:42], verdicts[42:]
    assert [one.outcome for one in [*late, *failed]] == [Outcome.UNKNOWN] * 5
    assert all(one.reason.startswith("mine.py:Judge: timeout") for one in late)
    assert [one.outcome for one in others] == ["wrong" if n > 1 else "correct" for n in range(40)]
    assert f"{source}:" in failed[0].reason and "OSError: no judge" in failed[0].reason
    assert "cannot be read" in failed[1].reason and "cancel" in failed[2].reason
    printed = (source.parent / "out.log").read_text()
    assert "asked 7" in printed and printed.count("OSError: no judge") == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [("block", "of a CPU"), ("compute", "CPU time"), ("exit", "exit code 3"), ("leave", "code 3")],
)
def test_one_that_never_waits_or_ends_the_worker_changes_no_other_verdict(
    source: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    """Also those that were in flight with it: they are judged again."""
    monkeypatch.setattr(worker_process, "GRACE_S", 0.5)
    items: list[tuple[str, ...]] = [(str(n), str(n % 2)) for n in range(12)]
    items.insert(5, (command, "", "brief"))
    verdicts = judged(judge(), [*items, ("1", "1", "plain"), ("2", "1", "plain")])
    bad, wrong = verdicts.pop(5), verdicts.pop()
    assert bad.outcome is Outcome.UNKNOWN and reason in bad.reason
    assert [one.outcome for one in verdicts] == [
        *("correct" if n < 2 else "wrong" for n in range(12)),
        "correct",
    ]
    assert wrong.outcome is Outcome.WRONG


@pytest.mark.parametrize("seconds", [1.2, 2.5])
def test_one_that_stalls_the_others_exceeds_only_its_own_limit(
    source: Path, seconds: float
) -> None:
    """Though it returns in the end, and the timers of all fire late."""
    items: list[tuple[str, ...]] = [("pause", "", "brief") for _ in range(9)]
    items.insert(4, (f"brood {seconds}", "", "brief"))
    verdicts = judged(judge(), items)
    late = verdicts.pop(4)
    assert late.outcome is Outcome.UNKNOWN and "timeout: no verdict in 1 s" in late.reason
    assert [one.outcome for one in verdicts] == ["correct"] * 9


def test_one_that_is_not_async_may_run_a_loop_of_its_own(source: Path) -> None:
    """Also among others that are; what they have left behind goes on."""
    own = {"judge": "mine.py:Judge", "looping": "mine.py:looping"}
    items: list[tuple[str, ...]] = [("1", "1")] * 4
    verdicts = judged(RewardConfig(components=own), items)
    assert [(one.outcome, one.grade) for one in verdicts] == [("correct", 2.0)] * 4
    mixed = judge().model_copy(
        update={"verifiers": {**judge().verifiers, "own": VerifierConfig(kind="mine.py:looping")}}
    )
    items = [("stubborn", "", "brief"), *[("1", "1", "own"), ("1", "1"), ("2", "1", "own")] * 3]
    verdicts = judged(mixed, items)
    assert [one.outcome for one in verdicts] == ["unknown", *["correct", "correct", "wrong"] * 3]


def test_a_trial_and_components_await_too(source: Path) -> None:
    own = {"kind": "mine.py:Judge", "weight": 0.25}
    config = RewardConfig(components={"judge": own, "exact": "exact"})
    [verdict] = rewards.try_verifiers(config, [("1", "1")])
    assert (verdict.outcome, verdict.grade) == (Outcome.CORRECT, 1.25)


GROUPS = """
import os
from gapo_megatron.types import Outcome, Verdict

def verify_group(responses, answer, level=None):
    if "raise" in responses: raise ValueError(answer)
    if "short" in responses: return [True]
    lengths = [len(one) for one in responses]
    return [
        None if one == "none" else {"score": len(one) == min(lengths), "n": len(lengths)}
        for one in responses
    ]

class Whole:
    async def verify_group(self, texts, answer, whole_response, messages, token_ids, state, row):
        assert [one[0]["content"] for one in messages] == [row["prompt"]] * len(texts)
        return [
            whole == f"<think>{i}</think>{text}" and ids == [i] and said == {"i": i}
            for i, (text, whole, ids, said) in enumerate(
                zip(texts, whole_response, token_ids, state, strict=True))
        ]
"""


def episodes(prompt: Prompt, texts: Sequence[str], **facts: Any) -> list[Episode]:
    zeros = np.zeros(1, np.float32)
    return [
        Episode(
            prompt,
            i,
            np.array([i], np.int32),
            zeros,
            final_text=text,
            failure="lost" if text == "failed" else "",
            truncated=text.startswith("cut"),
        )
        for i, text in enumerate(texts)
    ]


def of_group(
    config: RewardConfig, groups: Sequence[Sequence[Episode]], *, seed: int = 0, **options: Any
) -> list[list[Verdict]]:
    """Verdicts on groups whose responses end in some order, as of a generation."""
    prompts = [group[0].prompt for group in groups]
    ended = [one for group in groups for one in group]
    random.Random(seed).shuffle(ended)
    options.setdefault("judge", lambda one: (one.final_text, one.prompt.answer))
    with rewards.start_pool(config, num_workers=2) as pool:
        judging = rewards.Judging(pool, prompts, group_size=len(groups[0]), **options)
        for start in range(0, len(ended), 3):
            judging.add(ended[start : start + 3])
        verdicts = rewards.score(judging, groups)
    assert verdicts is not None
    return [[*group] for group in verdicts]


@pytest.fixture
def compare(source: Path) -> str:
    source.write_text(GROUPS)
    return "mine.py:verify_group"


def test_a_group_is_compared_once_it_has_ended(compare: str) -> None:
    """Without the episodes that failed or have no answer; the others of its prompt's k count."""
    texts = [
        ["aa", "b", "cc", "d"],
        ["aa", "failed", "none", "<think>b"],
        ["raise", "b", "failed", "c"],
        ["short", "b", "cc", "d"],
        ["failed"] * 4,
        ["cutxx", "aaa", "aa", "cut"],
    ]
    groups = [episodes(Prompt(f"p{i}", (1,), "x"), one) for i, one in enumerate(texts)]
    c, w, u = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN
    expected = [[w, c, w, c], [c, u, u, w], [u] * 4, [u] * 4, [u] * 4, [w, w, c, w]]
    for seed in range(3):
        verdicts = of_group(RewardConfig(kind=compare), groups, seed=seed)
        assert [[one.outcome for one in group] for group in verdicts] == expected
    counts = [[one.metrics.get("n") for one in group] for group in verdicts]
    assert counts[:2] == [[4] * 4, [2, None, None, None]]
    assert "ValueError: x" in verdicts[2][0].reason and verdicts[2][2].reason == "lost"
    assert "list of 1" in verdicts[3][0].reason and "4 responses" in verdicts[3][0].reason
    # What leaves the group for its length is not compared with either.
    [left] = of_group(RewardConfig(kind=compare), groups[5:], compares_truncated=False)
    assert [one.outcome for one in left] == [u, w, c, u]
    assert (left[0].reason, left[1].metrics) == ("truncated", {"n": 2})


def test_a_group_gets_lists_and_one_row(compare: str) -> None:
    prompt = Prompt("p", (1,), "x", row={"prompt": "q", "level": "1"})
    group = episodes(prompt, [f"<think>{i}</think>{text}" for i, text in enumerate("abc")])
    [verdicts] = of_group(
        RewardConfig(kind="mine.py:Whole"),
        [group],
        judge=lambda one: (one.final_text, "x", {"i": one.sample}),
    )
    assert [one.outcome for one in verdicts] == ["correct"] * 3


def test_a_component_may_compare(compare: str) -> None:
    config = RewardConfig(components={"shortest": {"kind": compare, "weight": 2}, "exact": "exact"})
    groups = [episodes(Prompt(f"p{i}", (1,), "b"), ["aa", "b", "failed"]) for i in range(5)]
    for verdicts in of_group(config, groups):
        assert [one.grade for one in verdicts] == [0, 3, None]
        assert verdicts[1].metrics == {"shortest": 1, "exact": 1, "shortest/n": 2}


def test_groups_are_compared_apart_and_have_one_answer(compare: str) -> None:
    """An evaluation asks for each reference answer of a problem, in one call of the pool."""
    items = [(text, answer, "", {}, {}, answer) for text in ("aa", "b") for answer in "xy"]
    items += [("aaaa", "x", "", {}, {}, "other"), ("a", "x")]
    items += [("a", answer, "", {}, {}, "two") for answer in "xy"]
    verdicts = judged(RewardConfig(kind=compare), items)
    assert [one.metrics["n"] for one in verdicts[:6]] == [2, 2, 2, 2, 1, 1]
    assert [one.outcome is Outcome.CORRECT for one in verdicts[:6]] == [
        *(False, False, True, True, True, True)
    ]
    for one in verdicts[6:]:
        assert one.outcome is Outcome.UNKNOWN and "different answers" in one.reason


def test_a_reply_on_a_large_group_is_not_too_long(source: Path) -> None:
    source.write_text(
        "from gapo_megatron.types import Outcome, Verdict\n"
        "def verify_group(responses, answer):\n"
        "    many = {f'{i:064}': i / 3 for i in range(32)}\n"
        "    return [Verdict(Outcome.WRONG, '\\x00' * 900, 0.5, '\\x00' * 900, many)"
        " for _ in responses]\n"
    )
    items = [(str(i), "", "", {}, {}, "p") for i in range(64)]
    verdicts = judged(RewardConfig(kind="mine.py:verify_group"), items)
    assert {one.outcome for one in verdicts} == {Outcome.WRONG}
    assert all(len(one.metrics) == 32 for one in verdicts)
