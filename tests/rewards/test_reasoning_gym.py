"""Scores of generated problems: the package's own, computed in the verifier's processes."""

from __future__ import annotations

import json
import random
import signal
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import reasoning_gym as ours
from gapo_megatron.types import Outcome
from tests.dist import SOAK
from tests.messages import mentions

CONFIG = RewardConfig(kind="reasoning_gym", timeout_s=60)
ENTRIES, LIMIT_S = 5, 20
ODD = [
    *("", " ", "0", "-1", "None", "True", "[]", "[1, 2", "{}", '{"a": 1}', "1/0", "nan", "1e999"),
    *("a b c", "x**2 + C", "3 + 4 * (2 - 1)", "½", "٣", "\u0000", "(" * 200, "A" * 2000, "1\n2\n3"),
]
"""Answers that no family expects, or only one does."""


def answers_of(entry: dict[str, Any], other: dict[str, Any], rng: random.Random) -> list[str]:
    """Right, nearly right, wrong and odd answers, whatever the family."""
    right = str(entry["answer"])
    lines = right.split("\n")
    return [
        *(right, f" {right}\n", right.upper(), right[:-1], right[::-1], right + right),
        *(f"The answer is {right}.", f"{lines[0]}", str(lines), f"<answer>{right}</answer>"),
        *(str(other["answer"]), str(entry["metadata"])[:300]),
        *rng.sample(ODD, 8),
    ]


def entries_of(family: str) -> tuple[Any, list[dict[str, Any]]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=3, size=20)
    return dataset, [dataset[i] for i in range(ENTRIES)]


class _LimitError(BaseException):
    pass


def score_of_package(dataset: Any, answer: str, entry: dict[str, Any]) -> float | None:
    """None: it raises, or does not come to an end."""

    def end(*_: object) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        return float(dataset.score_answer(ours.find_answer(answer), entry))
    except (Exception, _LimitError):
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def families() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


@pytest.mark.parametrize("spacing", [8, pytest.param(1, marks=SOAK)])
def test_scores_are_those_of_the_package(spacing: int) -> None:
    """For all families in the end. Where it raises, the verdict is unknown."""
    pytest.importorskip("reasoning_gym")
    rng, items, expected, names = random.Random(1), [], [], []
    for family in families()[::spacing]:
        dataset, entries = entries_of(family)
        for i, entry in enumerate(entries):
            text = ours.make_answer(family, {}, entry)
            for answer in answers_of(entry, entries[i - 1], rng):
                items.append((answer, text))
                expected.append(score_of_package(dataset, answer, entry))
                names.append(family)
    assert len({*names}) > 100 / spacing and len(items) >= 10_000 / spacing
    verdicts = rewards.try_verifiers(CONFIG, items)
    wrong = [
        (name, item[0][:80], score, one)
        for name, item, score, one in zip(names, items, expected, verdicts, strict=True)
        if one.grade != score or (score is None) != (one.outcome is Outcome.UNKNOWN)
    ]
    assert wrong == [], wrong
    assert expected.count(None) < 100
    scored = [(one.outcome, one.grade) for one in verdicts if one.grade is not None]
    assert {one > 0.5 for _, one in scored} == {True, False}
    assert all((outcome is Outcome.CORRECT) == (grade > 0.5) for outcome, grade in scored)


CALLS = [
    "__import__('os').system('touch {0}')",
    "open('{0}', 'w')",
    "exec(chr(111))",
    "(1).__class__.__base__.__subclasses__()",
    "1.5.hex()",
    "x.subs(x, 1)",
    "\uff45xec(1)",
    "[print(1) for _ in [1]]",
    "lambda: 1",
    "eval('1')",
    "test()",
    "getattr(x, y)",
]


def test_a_problem_of_a_file_is_not_executed(tmp_path: Path) -> None:
    """The package calls `eval` on the problem that the answer's metadata hold."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    family, made = "bitwise_arithmetic", tmp_path / "made"
    dataset = reasoning_gym.create_dataset(family, seed=3, size=20)
    items = []
    for problem in (*(call.format(made) for call in CALLS), "0x9**0x9**0x9"):
        entry = dataset[0] | {"metadata": {"problem": problem}, "answer": "0x1"}
        items.append(("0x2", ours.make_answer(family, {}, entry)))
    verdicts = rewards.try_verifiers(CONFIG, items)
    assert not made.exists()
    assert [one.grade for one in verdicts if (one.grade or 0) > 0.05] == []
    items = [(one["answer"], ours.make_answer(family, {}, one)) for one in dataset]
    assert {one.grade for one in rewards.try_verifiers(CONFIG, items)} == {1.0}


@pytest.mark.parametrize("family", ["spiral_matrix", "countdown", "simple_integration"])
def test_an_answer_is_not_executed(family: str, tmp_path: Path) -> None:
    """The package calls `eval` on answers of these families, directly or through sympy."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    made = tmp_path / "made"
    dataset = reasoning_gym.create_dataset(family, seed=3, size=20)
    text = ours.make_answer(family, {}, dataset[0])
    verdicts = rewards.try_verifiers(CONFIG, [(call.format(made), text) for call in CALLS])
    assert not made.exists()
    assert [one.grade for one in verdicts if one.grade is None or one.grade > 0.05] == []
    assert dataset.score_answer(CALLS[0].format(made), dataset[0]) < 1  # as it is without us
    assert made.exists()


def test_formulas_have_names_of_mathematics_only() -> None:
    pytest.importorskip("reasoning_gym")
    from gapo_megatron.compat.reasoning_gym import _parse_formula as parse_formula

    for call in CALLS:
        with pytest.raises(ValueError, match="no formula"):
            parse_formula(call)
    assert str(parse_formula("2*x**2.5 + sin(x)/1e3 + Abs(-pi) + C")) != ""
    assert float(parse_formula("1.5 + .5 + 2. + 1e1")) == 14


@pytest.mark.parametrize(
    "response",
    [
        *("a", "<answer>a</answer>", "x <answer> a </answer> y <answer>b\nc</answer> z"),
        *("<answer>a<answer>b</answer>c</answer>", "<answer>a", "</answer>a<answer>b</answer>"),
        *("<answer></answer>", "<answer>a</answer><answer>b", "<answer>  a</answer>"),
    ],
)
def test_the_answer_is_what_the_package_finds(response: str) -> None:
    utils = pytest.importorskip("reasoning_gym.utils")
    found = utils.extract_answer(response)
    assert ours.find_answer(response) == (response if found is None else found)


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    entry = {"answer": "1", "metadata": {"difficulty": (1, 2)}}
    text = ours.make_answer("gcd", {}, entry)
    rewards.check_answer("reasoning_gym", text)
    assert ours.reference_answer(text) == "1"
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    with pytest.raises(ValueError, match=mentions("0.0.1", json.loads(text)["version"])):
        ours.check_answer(text)
    for damaged in ("1", "{}", "[]", text[:-1]):
        with pytest.raises(ValueError):
            ours.check_answer(damaged)


def test_metadata_that_is_no_literal_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    for value in (object(), float("nan"), {"a": Path("x")}):
        with pytest.raises(TypeError, match="metadata"):
            ours.make_answer("gcd", {}, {"answer": "1", "metadata": value})


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match=mentions("reasoning-gym", "setup_env.sh", "pip install")):
        rewards.check(CONFIG)
