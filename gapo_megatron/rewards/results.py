"""What a verifier returned, read once, as a `Verdict`; and the total of several components."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gapo_megatron.errors import shown
from gapo_megatron.types import Outcome, Verdict

UNREADABLE = "what the verifier returned cannot be read: "
"""Beginning of the reason where a verifier returned what is no verdict."""

MOST_GRADE = 1e6
"""Largest grade, up or down: the advantages of a group with larger ones may overflow."""

SCORE = "score"
"""Key of a returned mapping that holds the grade; its other keys are metrics."""

MOST_METRICS = 32
"""Metrics that a verdict may have."""

METRIC_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
"""A name of a metric, and of a component."""


class UnreadableError(TypeError):
    """A verifier returned what is no verdict."""


Ignore = Callable[[str], object]
"""Receives why an entry of a mapping is not logged."""


def to_verdict(result: Any, *, correct_above: float, ignore: Ignore = bool) -> Verdict:
    """A verdict from what a verifier returned.

    Args:
        result: True, False, None, a `Verdict`, or a number within `MOST_GRADE`; also as a NumPy
            scalar or one-element tensor. Or a mapping that has one of them as its `score`, and
            numbers under other names: its metrics.
        correct_above: numbers above it are correct, others wrong.
        ignore: called for each entry of a mapping that is no metric.

    Raises:
        TypeError, ValueError: anything else.
    """
    if isinstance(result, Mapping):
        if SCORE not in result:
            raise TypeError(f"a dict without {SCORE!r}: {shown(dict(result))}")
        verdict = to_verdict(result[SCORE], correct_above=correct_above, ignore=ignore)
        metrics = {key: one for key, one in result.items() if key != SCORE}
        return replace(verdict, metrics=read_metrics({**verdict.metrics, **metrics}, ignore=ignore))
    if isinstance(result, Verdict):
        if not isinstance(result.outcome, Outcome):
            raise TypeError(f"the outcome {result.outcome!r} is not an Outcome")
        grade = None if result.grade is None else read_grade(_bare(result.grade))
        return replace(result, grade=grade, metrics=read_metrics(result.metrics, ignore=ignore))
    if result is None:
        return Verdict(Outcome.UNKNOWN, "the verifier returned None")
    result = _bare(result)
    if isinstance(result, bool):
        return Verdict(Outcome.CORRECT if result else Outcome.WRONG)
    grade = read_grade(result)
    return Verdict(_outcome(grade, correct_above), f"graded {grade:g}", grade)


def _outcome(grade: float, correct_above: float) -> Outcome:
    return Outcome.CORRECT if grade > correct_above else Outcome.WRONG


def _bare(value: Any) -> Any:
    """A NumPy scalar or one-element tensor as Python's bool or number."""
    return value.item() if hasattr(value, "item") else value


def read_grade(value: Any) -> float:
    """A grade as a float.

    Raises:
        TypeError, ValueError: no number, or none within `MOST_GRADE`.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"the verifier returned {type(value).__name__}, not bool, number, dict, Verdict or None"
        )
    grade = float(value)
    if not abs(grade) <= MOST_GRADE:  # also NaN
        raise ValueError(f"the verifier returned {grade:g}, not a number within {MOST_GRADE:,.0f}")
    return grade


def read_metrics(entries: Mapping[Any, Any], *, ignore: Ignore = bool) -> dict[str, float]:
    """The entries that are metrics: the first `MOST_METRICS` finite numbers with a proper name.

    A name is as `METRIC_NAME`, with at most one `/`. `ignore` is called for every other entry.
    """
    metrics: dict[str, float] = {}
    for key, value in entries.items():
        name = shown(key)
        try:
            bare = _bare(value)
            number = float(bare) if isinstance(bare, numbers.Real) else None
        except Exception as error:  # of an object's own methods
            ignore(f"{name}: {type(error).__name__}")
            continue
        if not isinstance(key, str) or not METRIC_NAME.fullmatch(key.replace("/", "_", 1)):
            ignore(f"{name}: a name has 1 to 64 letters, digits or '_.+-'")
        elif number is None:
            ignore(f"{name}: is {type(value).__name__}, not a number")
        elif not math.isfinite(number):
            ignore(f"{name}: is {number}, not finite")
        elif len(metrics) == MOST_METRICS:
            ignore(f"{name}: more than {MOST_METRICS} metrics")
        else:
            metrics[key] = number
    return metrics


def total(
    parts: Mapping[str, Verdict], weights: Mapping[str, float], *, correct_above: float
) -> Verdict:
    """The verdict on a response that several components have judged.

    Its grade is the sum of weight x score; a component's score is its grade, or 1 if it is correct
    and has none, or 0 if it is wrong. If a component is unknown, so is the total. Its metrics are
    the scores by component, and the components' own as `COMPONENT/NAME`.

    Args:
        parts: verdict of each component.
        weights: weight of each component.
        correct_above: totals above it are correct, others wrong.
    """
    scores: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, one in parts.items():
        if one.outcome is Outcome.UNKNOWN:
            return Verdict(Outcome.UNKNOWN, f"component {name}: {one.reason}")
        scores[name] = one.grade if one.grade is not None else float(one.outcome == Outcome.CORRECT)
        metrics |= {f"{name}/{key}": value for key, value in one.metrics.items()}
    grade = math.fsum(weights[name] * score for name, score in scores.items())
    reason = ", ".join(f"{name} {score:g}" for name, score in scores.items())
    if not abs(grade) <= MOST_GRADE:
        return Verdict(Outcome.UNKNOWN, f"the total is beyond {MOST_GRADE:g}: {reason}")
    outcome = _outcome(grade, correct_above)
    answers = {one.answer for one in parts.values()} - {""}
    answer = answers.pop() if len(answers) == 1 and outcome is Outcome.CORRECT else ""
    return Verdict(outcome, f"{grade:g}: {reason}", grade, answer, scores | metrics)
