"""Verifiers by name: modules of this package, and user code.

A user verifier is a function `verify(response, answer, **row)`, or a class whose
objects have such a method. `response` is the final answer (`rewards.final_answer`). It returns True
or False, a number (`reward.correct_above`), None where it cannot tell, or a `Verdict`. `row` has
the other columns of the problem's row: those that the function names, or all of them with `**row`.
A function that names `whole_response` gets the response with its thinking, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from gapo_megatron import user_code
from gapo_megatron.errors import ConfigError, said
from gapo_megatron.rewards.final_answer import final_answer
from gapo_megatron.types import Outcome, Verdict

UNREADABLE = "what the verifier returned cannot be read: "
"""Beginning of the reason where a verifier returned what is no verdict."""

MOST_GRADE = 1e6
"""Largest grade, up or down: the advantages of a group with larger ones may overflow."""

WHOLE = "whole_response"
"""Parameter of a verifier that gets the whole response."""


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier."""

    verify: Callable[..., Any]
    """(response, answer, **row) -> bool, number, Verdict or None."""
    check_answer: Callable[..., None] | None
    """(answer) -> None; raises an exception for an answer that `verify` cannot use."""
    columns: frozenset[str] | None
    """Columns of the row that `verify` takes; None: all."""
    required: frozenset[str] = frozenset()
    """Those without which it cannot be called."""
    file: str = ""
    """File that holds it."""
    shown: set[str] = field(default_factory=set)
    """Places whose traceback has been printed."""
    takes_whole: bool = False
    """Whether `verify` takes `whole_response`; it then also judges a response without a final
    answer, as an empty one."""

    def judge(
        self, response: str, answer: str, row: Mapping[str, Any], *, correct_above: float
    ) -> Verdict:
        """Verdict on a text of `marked_text`; unknown if `verify` raises or returns anything else.

        A response whose thinking never ends is wrong. The first exception at each place prints its
        traceback.
        """
        given = {key: one for key, one in row.items() if self.takes(key)}
        final = final_answer(response)
        if self.takes_whole:
            given[WHOLE] = response
        elif final is None:
            return Verdict(Outcome.WRONG, "no final answer: the thinking never ends")
        try:
            result = self.verify(final or "", answer, **given)
        except Exception as error:  # on hostile input sympy may raise anything
            place = self._place(error)
            if place not in self.shown:
                self.shown.add(place)
                with contextlib.suppress(Exception):  # it may have closed standard error
                    traceback.print_exception(error)
            return Verdict(Outcome.UNKNOWN, f"{place}: {said(error)}")
        try:
            return to_verdict(result, correct_above=correct_above)
        except Exception as error:  # of an object's own methods
            return Verdict(Outcome.UNKNOWN, f"{UNREADABLE}{said(error)}")

    def _place(self, error: Exception) -> str:
        """File and line: the innermost in the verifier's own file, else the innermost of all."""
        frames = traceback.extract_tb(error.__traceback__)
        of_own = [one for one in frames if one.filename == self.file]
        innermost = (of_own or frames)[-1]
        return f"{innermost.filename}:{innermost.lineno}"

    def takes(self, column: str) -> bool:
        """Whether `verify` takes this column of the row."""
        return self.columns is None or column in self.columns


def load(name: str, settings: Mapping[str, Any], *, setting: str) -> Verifier:
    """Import a verifier.

    Args:
        name: module with `verify`, or user code (`user_code.is_code`).
        settings: keyword arguments of `verify`, or of the user's class.
        setting: setting that names it, for messages.

    Raises:
        ConfigError: names setting, code and what is missing.
    """
    if not user_code.is_code(name):
        module = importlib.import_module(name)
        built_in = functools.partial(module.verify, **settings)
        return Verifier(
            built_in, getattr(module, "check_answer", None), frozenset(), file=module.__file__ or ""
        )
    made = user_code.load_with_settings(name, settings, setting=setting)
    verify: Any = made
    source = sys.modules.get(made.func.__module__)
    if inspect.isclass(made.func):
        built = user_code.build(made, setting=setting)
        verify, check = getattr(built, "verify", None), getattr(built, "check_answer", None)
        if not callable(verify):
            raise ConfigError(
                f"{setting} ({name!r}) must have a method verify(self, response, answer, **row)"
            )
    else:
        check = getattr(source, "check_answer", None)
    # A class has its settings already: its method may take columns of the same names.
    given = frozenset() if inspect.isclass(made.func) else settings.keys()
    columns, required = _columns(verify, given | {WHOLE}, setting=setting, name=name)
    return Verifier(
        verify,
        check,
        columns,
        required,
        file=getattr(source, "__file__", None) or "",
        takes_whole=WHOLE in inspect.signature(verify).parameters,
    )


def _columns(
    verify: Callable[..., Any], given: Set[str], *, setting: str, name: str
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """`Verifier.columns` and `Verifier.required`."""
    parameters = inspect.signature(verify).parameters
    try:
        inspect.signature(verify).bind_partial("response", "answer")
    except TypeError as error:
        raise ConfigError(f"{setting} ({name!r}) must take (response, answer): {error}") from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [one for one in [*parameters.values()][2:] if one.kind in by_name]
    columns = frozenset(one.name for one in named) - given
    required = columns & {one.name for one in named if one.default is one.empty}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return None if takes_all else columns, required


def to_verdict(result: Any, *, correct_above: float) -> Verdict:
    """A verdict from what a verifier returned.

    Args:
        result: True, False, None, a `Verdict`, or a number within `MOST_GRADE`; also as a NumPy
            scalar or one-element tensor.
        correct_above: numbers above it are correct, others wrong.

    Raises:
        TypeError, ValueError: anything else.
    """
    if isinstance(result, Verdict):
        if not isinstance(result.outcome, Outcome):
            raise TypeError(f"the outcome {result.outcome!r} is not an Outcome")
        if result.grade is None:
            return result
        return replace(result, grade=read_grade(_bare(result.grade)))
    if result is None:
        return Verdict(Outcome.UNKNOWN, "the verifier returned None")
    result = _bare(result)
    if isinstance(result, bool):
        return Verdict(Outcome.CORRECT if result else Outcome.WRONG)
    grade = read_grade(result)
    outcome = Outcome.CORRECT if grade > correct_above else Outcome.WRONG
    return Verdict(outcome, f"graded {grade:g}", grade)


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
            f"the verifier returned {type(value).__name__}, not bool, number, Verdict or None"
        )
    grade = float(value)
    if not abs(grade) <= MOST_GRADE:  # also NaN
        raise ValueError(f"the verifier returned {grade:g}, not a number within {MOST_GRADE:,.0f}")
    return grade
