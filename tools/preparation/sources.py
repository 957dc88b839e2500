"""How a row becomes a problem: DeepScaleR, DeepCoder, and the user's own files."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gapo_megatron import rewards
from gapo_megatron.data.rows import Row
from gapo_megatron.errors import DataError
from gapo_megatron.rewards import math as math_answers
from gapo_megatron.rewards.code.forms import CallTests, Tests, TextTests, read_tests
from gapo_tools.evaluation.benchmarks import ANSWER_CALL, ANSWER_TEXT, BOXED

Kind = Literal["math", "code", "instructions", "exact"]

ANSWER_FUNCTION = """\
{problem}

Write a Python function `{function}` that solves this. Answer with one Python code block that \
holds the whole function.
"""


class UnreadableError(Exception):
    """The row is well-formed, but no verifier can judge a response by it; says why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem that may go into the problem file."""

    text: str
    """The problem's own words, for comparison with duplicates and benchmarks."""
    prompt: str
    """The text together with the instructions around it."""
    answer: str
    """Reference answer in the verifier's form: plain text or JSON."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set by name, without its data."""

    name: str
    """Name of the source; also the prefix of generated ids."""
    kind: Kind
    """Verifier, as `reward.kind` of the config."""
    deduplicates: bool
    columns: tuple[str, ...]
    """Keys of a row that `read` needs."""
    read: Callable[[Row], Candidate]
    """Makes a problem of a row. Raises KeyError, TypeError or ValueError for a row of another form,
    UnreadableError if no verifier can judge by it."""
    id_of: Callable[[Row], str] = lambda row: ""
    """The row's own id; empty if it has none."""
    optional: tuple[str, ...] = ()
    """Keys that are read if a row has them."""
    level_of: Callable[[Row, Path], str] = lambda row, path: ""
    """Level of a row in a file; empty if there is none."""


def deepscaler(*, suffix: str = BOXED) -> Source:
    """Rows with `problem` and `answer`; `suffix` is appended to every prompt."""

    def read(row: Row) -> Candidate:
        text, answer = _text(row, "problem"), _plain(row["answer"])
        _check("math", answer, key="answer")
        return Candidate(text, text + suffix, answer)

    return Source("deepscaler", "math", True, ("problem", "answer"), read)


def deepcoder() -> Source:
    """Rows with `problem` and `tests`; `starter_code` and `metadata` are optional.

    Not deduplicated, as in the paper. The level is the name of the file's folder, which is the
    subset (`primeintellect`, `taco`, `lcbv5`).
    """

    def read(row: Row) -> Candidate:
        text, tests = _text(row, "problem"), _decoded(row["tests"])
        function = (_decoded(row.get("metadata")) or {}).get("func_name")
        if function and isinstance(tests, list):  # LiveCodeBench names it beside the tests
            tests = [{**test, "fn_name": function} for test in tests]
        answer = _encoded(tests)
        _check("code", answer, key="tests")
        prompt = _ask_program(text, read_tests(answer), starter=row.get("starter_code") or "")
        return Candidate(text, prompt, answer)

    def level_of(row: Row, path: Path) -> str:
        return path.absolute().parent.name

    return Source(
        "deepcoder",
        "code",
        False,
        ("problem", "tests"),
        read,
        optional=("starter_code", "metadata"),
        level_of=level_of,
    )


def own(
    kind: Kind,
    *,
    suffix: str = "",
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    answer_after: str = "",
) -> Source:
    """Rows of the user's files; level and id are optional, and an id is then generated.

    The answer is what follows the last `answer_after`, if that is not empty.
    """

    def read(row: Row) -> Candidate:
        text, answer = _text(row, prompt_key), row[answer_key]
        if answer_after:
            _, mark, answer = _text(row, answer_key).rpartition(answer_after)
            if not mark:
                raise UnreadableError(f"key {answer_key!r} has no {answer_after!r}")
        is_json = kind in ("code", "instructions")
        answer = _encoded(_decoded(answer)) if is_json else _plain(answer)
        _check(kind, answer, key=answer_key)
        return Candidate(text, text + suffix, answer)

    return Source(
        "own",
        kind,
        True,
        (prompt_key, answer_key),
        read,
        optional=("level", "id"),
        id_of=lambda row: _plain(row.get("id")),
        level_of=lambda row, path: _plain(row.get("level")),
    )


def _ask_program(text: str, tests: Tests, *, starter: str) -> str:
    if isinstance(tests, TextTests):
        return ANSWER_TEXT.format(problem=text)
    if isinstance(tests, CallTests):
        if starter.strip():
            return ANSWER_CALL.format(problem=text, starter=starter)
        return ANSWER_FUNCTION.format(problem=text, function=tests.function)
    return text  # LeetCode's: it ends in the code to complete


def _check(kind: Kind, answer: str, *, key: str) -> None:
    """Refuse an answer that the verifier cannot read; for `math`, also an ambiguous one."""
    if not answer.strip():
        raise UnreadableError(f"key {key!r} is empty")
    try:
        rewards.check_answer(kind, answer)
        if kind == "math":
            math_answers.check_reference(answer)
    except (DataError, ValueError) as error:
        raise UnreadableError(f"the {kind} verifier cannot read key {key!r}: {error}") from None


def _text(row: Row, key: str) -> str:
    value = "" if row[key] is None else row[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a string, not {type(value).__name__}")
    text = value.strip()
    if not text:
        raise UnreadableError(f"{key} is empty")
    return text


def _plain(value: Any) -> str:
    if value is None or value != value:  # tables write NaN where a value is missing
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{reprlib.repr(value)!r} must be text or a number")
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _decoded(value: Any) -> Any:
    """Parse a value that some data sets store as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not valid JSON: {error}") from None


def _encoded(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise UnreadableError("the answer is nested too deep") from None
