"""Metrics that verifiers give beside a score, and the total of components that judge together."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig, parse_config
from gapo_megatron.io.documents import parse_toml
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.rewards import pool as pool_module
from gapo_megatron.rewards import verdict_metrics
from gapo_megatron.types import Outcome, Verdict
from tests.configs import config_of

SOURCE = """
import numpy as np
from gapo_megatron.types import Outcome, Verdict

RESULTS = {
    "float": {"score": 0.75, "format": 1, "length": np.float32(2.5), "ok": True},
    "bool": {"score": True, "acc": 0.5, "pred": "42"},
    "verdict": {"score": Verdict(Outcome.CORRECT, "so", 2.0, metrics={"a": 1, "b": 1}), "b": 2},
    "none": {"score": None, "format": 1},
    "odd": {"score": 0, "nan": float("nan"), "list": [1], 7: 1, "a b": 1, "x" * 65: 1, "fine": 3},
    "many": {"score": 1} | {f"m{i:02}": i for i in range(40)},
    "plain": 1.0,
    "own": Verdict(Outcome.WRONG, metrics={"own": 4, "bad name": 1, "inf": float("inf")}),
    "no score": {"acc": 1},
}

def table(response, answer):
    return RESULTS[response]

def share(response, answer, *, of=1):
    return {"score": float(response) / of, "raw": float(response)}

def fails(response, answer):
    if response == "0.25":
        raise ValueError("no")
    return response == "0.5"

def short(response, answer):
    return len(response) < 4

def huge(response, answer):
    return 1e6
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def judged(config: RewardConfig, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
    with rewards.start_pool(config, num_workers=2) as pool:
        return pool.judge(items)


def test_a_dict_has_a_score_and_metrics(mine: str, caplog: pytest.LogCaptureFixture) -> None:
    names = ["float", "bool", "verdict", "none", "odd", "many", "plain", "own", "no score"]
    items = [(name, "") for name in names] * 3
    verdicts = judged(RewardConfig(kind=f"{mine}:table"), items)
    found = dict(zip(names, verdicts, strict=False))
    assert [(one.outcome, one.grade) for one in verdicts[:9]] == [
        *((Outcome.CORRECT, 0.75), (Outcome.CORRECT, None), (Outcome.CORRECT, 2.0)),
        *((Outcome.UNKNOWN, None), (Outcome.WRONG, 0.0), (Outcome.CORRECT, 1.0)),
        *((Outcome.CORRECT, 1.0), (Outcome.WRONG, None), (Outcome.UNKNOWN, None)),
    ]
    assert {name: dict(found[name].metrics) for name in names if name != "many"} == {
        "float": {"format": 1, "length": 2.5, "ok": 1},
        **{"bool": {"acc": 0.5}, "verdict": {"a": 1, "b": 2}, "none": {"format": 1}},
        **{"odd": {"fine": 3}, "plain": {}, "own": {"own": 4}, "no score": {}},
    }
    assert dict(found["many"].metrics) == {f"m{i:02}": i for i in range(32)}
    assert "score" in found["no score"].reason
    # Each entry that is left out is told of once, though it came three times, to two workers.
    told = [message for message in caplog.messages if "metric" in message]
    left_out = ["'pred'", "'nan'", "'list'", "7", "'a b'", "'xxx", "'m32'", "'bad name'", "'inf'"]
    for name in left_out:
        assert sum(f": {name}" in message for message in told) == 1, name
    assert len(told) == len(set(told))


def test_metrics_of_all_ranks_are_means_by_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the gather of the unknown verdicts, whatever the ranks and whoever lacks a name."""
    rng = random.Random(0)
    ranks = [
        [
            (
                c := rng.randrange(3),
                [
                    Verdict(
                        rng.choice([*Outcome]),
                        metrics={
                            name: rng.randrange(9) + 10 * c for name in "ab" if rng.random() < 0.7
                        },
                    )
                    for _ in range(4)
                ],
            )
            for _ in range(5)
        ]
        for _ in range(3)
    ]
    ours = [[rewards.sum_metrics(groups)] for groups in ranks]
    calls = []

    def gather(parts: Sequence[Any]) -> list[Any]:
        calls.append(parts)
        return [([(0, 0, [])], ours[0]), *parts, ([(0, 0, [])], ours[2])]

    carrier = rewards.Carrier(ours[1], gather)
    verdicts = [found for _, found in ranks[1]]
    rewards.share_unknown(verdicts, gather=carrier.gather)
    assert len(calls) == 1
    values: dict[str, list[float]] = {}
    for c, found in (group for groups in ranks for group in groups):
        for one in found:
            for name, value in one.metrics.items() if one.outcome is not Outcome.UNKNOWN else ():
                values.setdefault(f"verifier/{name}", []).append(value)
                values.setdefault(f"per_c/verifier/{name}/c{c}", []).append(value)
    means = {name: math.fsum(some) / len(some) for name, some in values.items()}
    assert rewards.verifier_metrics(carrier.sums, is_first=True) == pytest.approx(means, abs=1e-12)
    monkeypatch.setattr(verdict_metrics, "MOST_NAMES", 1)
    only = rewards.verifier_metrics(carrier.sums, is_first=False)
    assert {name.split("/")[-2] for name in only if "per_c" in name} == {"a"}


def test_components_judge_together(mine: str) -> None:
    config = RewardConfig(
        components={
            "share": {"kind": f"{mine}:share", "settings": {"of": 2}, "weight": 4},
            "exact": "exact",
            "fails": {"kind": f"{mine}:fails", "weight": -0.5, "timeout_s": 20},
        },
        verifiers={"short": f"{mine}:short"},
        correct_above=1.0,
    )
    items = [("0.5", "0.5"), ("0.5", "1"), ("0.25", "0.25"), ("1", "1"), ("1", "", "short")]
    both, less, unknown, most, other = judged(config, items)
    scores = [{"share": 0.25, "exact": 1, "fails": 1}, {"share": 0.25, "exact": 0, "fails": 1}]
    assert [dict(one.metrics) for one in (both, less)] == [
        {**one, "share/raw": 0.5} for one in scores
    ]
    assert [one.grade for one in (both, less, most)] == [1.5, 0.5, 3.0]
    assert [one.outcome for one in (both, less, most)] == ["correct", "wrong", "correct"]
    assert "exact 0" in less.reason and both.answer == "0.5" and not less.answer
    # Never 0, and never the sum of the others.
    assert (unknown.outcome, unknown.grade, unknown.metrics) == (Outcome.UNKNOWN, None, {})
    assert "component fails" in unknown.reason and "ValueError: no" in unknown.reason
    assert (other.outcome, other.metrics) == (Outcome.CORRECT, {})
    assert rewards.row_columns(config) == frozenset()
    assert config.code_names == [f"{mine}:share", f"{mine}:fails", f"{mine}:short"]


def test_a_run_reads_its_components_back(mine: str) -> None:
    components = {"a": "exact", "b": {"kind": f"{mine}:short", "weight": -2, "timeout_s": 3}}
    config = config_of({"reward": {"components": components, "kind": "", "correct_above": 0.9}})
    written = parse_toml(to_toml(config), where="written")
    assert parse_config(written, source="written") == config
    assert config.reward.components["b"].weight == -2
    graded = {
        "reward": {"components": components, "kind": "", "graded": True},
        "objective": {"method": "gspo"},
    }
    assert config_of(graded).reward.graded


def test_a_component_may_be_asked_alone(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name; its verdict is then the only one, also beside a total."""
    monkeypatch.setattr(pool_module, "QUESTION_S", 60.0)

    def may_end(is_done: bool) -> bool:
        assert is_done, "the pool waits for components that nobody has asked"
        return True

    config = RewardConfig(components={"a": "exact", "b": f"{mine}:short"})
    with rewards.start_pool(config, num_workers=1) as pool:
        items = [("1", "1", "a"), ("1", "1"), ("12345", "", "b")]
        alone, both, other = pool.judge(items, may_end=may_end)
    assert (alone.outcome, alone.grade, alone.metrics) == (Outcome.CORRECT, None, {})
    assert both.grade == 2.0 and other.outcome is Outcome.WRONG


def test_a_total_beyond_the_largest_grade_is_unknown(mine: str) -> None:
    config = RewardConfig(components={"a": {"kind": f"{mine}:huge", "weight": 2}})
    [verdict] = judged(config, [("", "")])
    assert verdict.outcome is Outcome.UNKNOWN and "1e+06" in verdict.reason


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "kind ('') is required"),
        ({"kind": "math", "components": {"a": "exact"}}, "kind ('math')"),
        ({"settings": {"a": 1}, "components": {"a": "exact"}}, "settings"),
        ({"components": {"a": {"kind": "exact", "weight": 0}}}, "weight (0)"),
        ({"components": {"a": {"kind": "exact", "weight": math.nan}}}, "finite"),
        ({"components": {"a": {"kind": "exact", "weight": 1e7}}}, "1000000"),
        ({"components": {"a": {"kind": "exacd"}}}, "exact"),
        ({"components": {"a": {"kind": "exact", "settings": {"x": 1}}}}, "settings"),
        ({"components": {"a/b": "exact"}}, "a/b"),
        ({"components": {"a": "exact"}, "verifiers": {"a": "exact"}}, "'a'"),
        ({"components": {f"a{i}": "exact" for i in range(17)}}, "17"),
        ({"components": {"a": "environment"}}, "components.a: kind ('environment')"),
        (
            {"kind": "environment", "verifiers": {"b": "environment"}},
            "verifiers.b: kind ('environment')",
        ),
        ({"verifiers": {"b": {"kind": ""}}, "kind": "math"}, "kind"),
        ({"verifiers": {"b": {"kind": "exact", "weight": 2}}, "kind": "math"}, "weight"),
    ],
)
def test_components_that_make_no_sense_are_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate(tree)
    assert said in str(caught.value)
