"""Verifiers by name: modules of this package, and user code.

A user verifier is a function `verify(response, answer, **row)`, or a class whose objects have such
a method; `async def` too. `response` is the final answer (`rewards.final_answer`). It returns True
or False, a number (`reward.correct_above`), a dict with one of them as `score` and metrics beside
it, None where it cannot tell, or a `Verdict`. `row` has the other columns of the problem's row:
those that the function names, or all of them with `**row`. Parameters of `OPTIONAL` get more.

`verify_group(responses, answer, **row)` judges all responses to a prompt in one call, and returns a
list of such results. Reward functions of other frameworks are known by their parameters
(`rewards.foreign`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gapo_megatron import user_code
from gapo_megatron.errors import ConfigError, said
from gapo_megatron.rewards import foreign
from gapo_megatron.rewards.conversation import conversation
from gapo_megatron.rewards.final_answer import final_answer
from gapo_megatron.rewards.results import UNREADABLE, Ignore, UnreadableError, to_verdict
from gapo_megatron.types import Outcome, Verdict

WHOLE, MESSAGES, TOKENS, STATE, ROW = "whole_response", "messages", "token_ids", "state", "row"
PROMPT_TOKENS = "prompt_token_ids"
OPTIONAL = frozenset({WHOLE, MESSAGES, TOKENS, PROMPT_TOKENS, STATE, ROW})
"""Parameters of a verifier that get more than a column of the row."""
EXTRAS = OPTIONAL - {WHOLE, ROW}
"""Those whose value the trainer sends beside response and row."""
RESPONSES = "responses"
"""First parameter of a verifier that judges all responses to a prompt in one call."""
GROUP = "verify_group"
"""Name of such a function or method; its first parameter may then have any name."""

_NO_ANSWER = Verdict(Outcome.WRONG, "no final answer: the thinking never ends")
_SEVERAL = ", or verify_group(self, responses, answer, **row)"


@dataclass(frozen=True)
class Shape:
    """How a verifier is called, as far as the pool must know."""

    columns: frozenset[str] | None = None
    """Columns of the row that are sent to it; None: all."""
    extras: frozenset[str] = frozenset()
    """Which of `EXTRAS` are sent to it."""
    is_group: bool = False
    """Whether a call judges all responses to a prompt."""
    is_async: bool = False
    """Whether several calls may be in flight in a worker."""


class Question(NamedTuple):
    """A response to judge, as a worker gets it."""

    response: str
    extras: Mapping[str, Any] = {}
    """Values of `EXTRAS`, those that the verifier names."""


@dataclass(frozen=True)
class Verifier:
    """A loaded verifier."""

    verify: Callable[..., Any]
    """(response or responses, answer, **row) -> what `to_verdict` reads, or a list of that."""
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
    optional: frozenset[str] = frozenset()
    """Which of `OPTIONAL` it names. With `whole_response` it also judges a response without a
    final answer, as an empty one."""
    settings: frozenset[str] = frozenset()
    """Names that the settings give, which no column replaces."""
    is_group: bool = False
    is_async: bool = False

    @property
    def shape(self) -> Shape:
        """What the pool sends to it, and how."""
        columns = self.columns
        if ROW in self.optional:
            columns = None
        elif columns is not None and MESSAGES in self.optional:
            columns |= {"prompt", MESSAGES}
        return Shape(columns, self.optional & EXTRAS, self.is_group, self.is_async)

    def judge(
        self, response: str, answer: str, row: Mapping[str, Any], *, correct_above: float
    ) -> Verdict:
        """`judge_all` of one response, for a verifier that is not `async`."""
        asked = self.judge_all([Question(response)], answer, row, correct_above=correct_above)
        [verdict] = run_at_once(asked)
        return verdict

    async def judge_all(
        self,
        questions: Sequence[Question],
        answer: str,
        row: Mapping[str, Any],
        *,
        correct_above: float,
        ignore: Ignore = bool,
    ) -> list[Verdict]:
        """Verdicts on texts of `marked_text`: of one response, or of all responses to a prompt.

        Unknown if `verify` raises or returns anything else. A response whose thinking never ends is
        wrong, and left out of a group. The first exception at each place prints its traceback.
        """
        finals = [final_answer(one.response) for one in questions]
        verdicts = [_NO_ANSWER] * len(questions)
        places = [i for i, one in enumerate(finals) if WHOLE in self.optional or one is not None]
        if not places:
            return verdicts
        texts = [finals[i] or "" for i in places]
        given = self._given([questions[i] for i in places], row)
        try:
            result = self.verify(texts if self.is_group else texts[0], answer, **given)
            if self.is_async:
                result = await result
        except UnreadableError as error:
            found = [Verdict(Outcome.UNKNOWN, f"{UNREADABLE}{said(error)}")] * len(places)
        except Exception as error:  # on hostile input sympy may raise anything
            found = [self._failed(error)] * len(places)
        else:
            found = self._read(result, len(places), correct_above=correct_above, ignore=ignore)
        for place, verdict in zip(places, found, strict=True):
            verdicts[place] = verdict
        return verdicts

    def _given(self, questions: Sequence[Question], row: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments: columns of the row, and `optional`, in a group as lists."""
        given = {key: one for key, one in row.items() if self.takes(key)}
        values: dict[str, Callable[[Question], Any]] = {
            WHOLE: lambda one: one.response,
            MESSAGES: lambda one: conversation(row, one.response, one.extras.get(MESSAGES)),
        }
        for name in self.optional - {ROW}:
            value = values.get(name, functools.partial(_extra, name))
            each = [value(one) for one in questions]
            given[name] = each if self.is_group else each[0]
        if ROW in self.optional:
            given[ROW] = dict(row)
        return given

    def _failed(self, error: Exception) -> Verdict:
        place = self._place(error)
        if place not in self.shown:
            self.shown.add(place)
            with contextlib.suppress(Exception):  # it may have closed standard error
                traceback.print_exception(error)
        return Verdict(Outcome.UNKNOWN, f"{place}: {said(error)}")

    def _read(
        self, result: Any, count: int, *, correct_above: float, ignore: Ignore
    ) -> list[Verdict]:
        if not self.is_group:
            return [_read_one(result, correct_above=correct_above, ignore=ignore)]
        try:
            results = result.tolist() if hasattr(result, "tolist") else result
            if not isinstance(results, list | tuple) or len(results) != count:
                size = f" of {len(results)}" if isinstance(results, list | tuple) else ""
                raise TypeError(
                    f"{type(results).__name__}{size}, not a list with a result for each of "
                    f"{count} responses"
                )
        except Exception as error:
            return [Verdict(Outcome.UNKNOWN, f"{UNREADABLE}{said(error)}")] * count
        return [_read_one(one, correct_above=correct_above, ignore=ignore) for one in results]

    def _place(self, error: Exception) -> str:
        """File and line: the innermost in the verifier's own file, else the innermost of all."""
        frames = traceback.extract_tb(error.__traceback__)
        of_own = [one for one in frames if one.filename == self.file]
        innermost = (of_own or frames)[-1]
        return f"{innermost.filename}:{innermost.lineno}"

    def takes(self, column: str) -> bool:
        """Whether `verify` takes this column of the row."""
        return column in self.columns if self.columns is not None else column not in self.settings


def _extra(name: str, question: Question) -> Any:
    """The value that the trainer sent; a trial before a run sends none."""
    return question.extras.get(name, [] if name in (TOKENS, PROMPT_TOKENS) else None)


def _read_one(result: Any, *, correct_above: float, ignore: Ignore) -> Verdict:
    try:
        return to_verdict(result, correct_above=correct_above, ignore=ignore)
    except Exception as error:  # of an object's own methods
        return Verdict(Outcome.UNKNOWN, f"{UNREADABLE}{said(error)}")


def run_at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("it waits for something, and needs an event loop")


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
    is_class = inspect.isclass(made.func)
    if is_class:
        built = user_code.build(made, setting=setting)
        check = getattr(built, "check_answer", None)
        verify = getattr(built, "verify", None) or getattr(built, GROUP, None)
        if not callable(verify):
            raise ConfigError(
                f"{setting} ({name!r}) must have a method verify(self, response, answer, **row)"
                f"{_SEVERAL}"
            )
    else:
        check = getattr(source, "check_answer", None)
    verify = foreign.adapted(verify, setting=setting, name=name)
    # A class has its settings already: its method may take columns of the same names.
    given = frozenset() if is_class else settings.keys()
    parameters, columns, required = _parameters(verify, given, setting=setting, name=name)
    return Verifier(
        verify,
        check,
        columns,
        required,
        file=getattr(source, "__file__", None) or "",
        optional=OPTIONAL & parameters,
        settings=frozenset(given),
        is_group=_is_group(verify),
        is_async=foreign.is_async(verify),
    )


def _is_group(function: Callable[..., Any]) -> bool:
    """Whether a call judges all responses to a prompt: by its name, or its first parameter's."""
    first = next(iter(inspect.signature(function).parameters))
    while isinstance(function, functools.partial):
        function = function.func
    return first == RESPONSES or getattr(function, "__name__", "") == GROUP


def _parameters(
    verify: Callable[..., Any], given: Set[str], *, setting: str, name: str
) -> tuple[frozenset[str], frozenset[str] | None, frozenset[str]]:
    """Names that `verify` takes beside response and answer, `Verifier.columns` and `required`."""
    parameters = inspect.signature(verify).parameters
    try:
        inspect.signature(verify).bind_partial("response", "answer")
    except TypeError as error:
        raise ConfigError(f"{setting} ({name!r}) must take (response, answer): {error}") from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [one for one in [*parameters.values()][2:] if one.kind in by_name]
    names = frozenset(one.name for one in named) - given
    columns = names - OPTIONAL
    required = columns & {one.name for one in named if one.default is one.empty}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return names, None if takes_all else columns, required


__all__ = ["Question", "Shape", "Verifier", "load", "run_at_once"]
