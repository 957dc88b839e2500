"""How a row becomes a problem: DeepScaleR, DeepCoder, and the user's own files."""

from __future__ import annotations

import functools
import json
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.config.data_section import RowKeys
from gapo_megatron.data.messages import Message, read_messages
from gapo_megatron.data.row_formats import (
    EmptyError,
    Problem,
    Reading,
    answer_text,
    find,
    first_row,
    heads,
)
from gapo_megatron.data.rows import Row
from gapo_megatron.data.schema import KEYS, kept_columns
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rewards import math as math_answers
from gapo_megatron.rewards.code.forms import CallTests, Tests, TextTests, read_tests
from gapo_tools.evaluation.benchmarks import ANSWER_CALL, ANSWER_TEXT, BOXED

ANSWER_FUNCTION = """\
{problem}

Write a Python function `{function}` that solves this. Answer with one Python code block that \
holds the whole function.
"""


_RECOGNISED = RowKeys()


class UnreadableError(Exception):
    """The row is well-formed, but no verifier can judge a response by it; says why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem that may go into the problem file."""

    text: str
    """The problem's own words, for comparison with duplicates and benchmarks."""
    prompt: str | Sequence[Message]
    """The text together with the instructions around it; or messages."""
    answer: str
    """Reference answer in the verifier's form: plain text or JSON."""
    kept: Row = field(default_factory=dict)
    """Further columns of the row for the problem file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set by name, without its data."""

    name: str
    """Name of the source; also the prefix of generated ids."""
    kind: str
    """Verifier, as `reward.kind` of the config."""
    deduplicates: bool
    columns: tuple[str, ...]
    """Columns that a Parquet file must have."""
    read: Callable[[Row, Path, int], Candidate]
    """Makes a problem of a row, in a file, of a number. Raises KeyError, TypeError or ValueError
    for a row of another form, or a DataError that names it; UnreadableError if no verifier can
    judge by it."""
    id_of: Callable[[Row], str] = lambda row: ""
    """The row's own id; empty if it has none."""
    optional: tuple[str, ...] | None = ()
    """Columns that are read of a Parquet file that has them; None: all."""
    level_of: Callable[[Row, Path], str] = lambda row, path: ""
    """Level of a row in a file; empty if there is none."""
    describe: Callable[[Path], str] = lambda path: ""
    """How the rows of a file are read, if it was not always clear."""


def deepscaler(*, suffix: str = BOXED) -> Source:
    """Rows with `problem` and `answer`; `suffix` is appended to every prompt."""

    def read(row: Row, path: Path, number: int) -> Candidate:
        text, answer = _text(row, "problem"), _plain(row["answer"])
        _check("math", answer, key="answer")
        return Candidate(text, text + suffix, answer)

    return Source("deepscaler", "math", True, ("problem", "answer"), read)


def deepcoder() -> Source:
    """Rows with `problem` and `tests`; `starter_code` and `metadata` are optional.

    Not deduplicated, as in the paper. The level is the name of the file's folder, which is the
    subset (`primeintellect`, `taco`, `lcbv5`).
    """

    def read(row: Row, path: Path, number: int) -> Candidate:
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
    kind: str,
    *,
    keys: RowKeys = _RECOGNISED,
    suffix: str = "",
    answer_after: str = "",
    keep: Collection[str] = (),
) -> Source:
    """Rows of the user's files; level and id are optional, and an id is then generated.

    Args:
        kind: verifier; the columns that a user verifier takes are kept.
        keys: how the rows are read.
        suffix: appended to every prompt, or to its last message.
        answer_after: the answer is what follows the last one of these, if it is not empty.
        keep: columns to keep in the problem file.

    Raises:
        ConfigError: the verifier cannot be loaded, or a column to keep is a key of the problem
            file.
    """
    for name in {*keep} & {*KEYS}:
        raise ConfigError(f"--keep-columns {name}: a key of the problem file itself")
    config = RewardConfig(kind=kind)
    taken = rewards.row_columns(config)
    columns = None if taken is None else {*taken, *keep}

    @functools.cache
    def reading_of(path: Path) -> Reading | None:
        first = first_row(path, keys)
        return first and first[0]

    def read(row: Row, path: Path, number: int) -> Candidate:
        reading, where = reading_of(path), f"{path}:{number}"
        assert reading, f"{path} has a row"
        try:
            problem = reading.read(row, path=path, number=number)
        except EmptyError as error:
            raise UnreadableError(str(error)) from None
        text, prompt = _own_prompt(problem, suffix, where=where)
        answer = _own_answer(
            problem.answer, kind, after=answer_after, key=reading.answer_key, where=where
        )
        _check(kind, answer, key=reading.answer_key)
        shown = row | {"id": "", "prompt" if isinstance(prompt, str) else "messages": prompt}
        kept = kept_columns(shown, columns, config, where=where)
        kept = {name: one for name, one in kept.items() if name not in KEYS}
        return Candidate(text, prompt, answer, kept)

    def id_of(row: Row) -> str:
        value = find(row, keys.id_key or "id")
        if keys.id_key and value is None:
            raise KeyError(keys.id_key)
        return _plain(value)

    return Source(
        "own",
        kind,
        True,
        (),
        read,
        optional=None if columns is None else (*heads(keys), "level", *columns),
        id_of=id_of,
        level_of=lambda row, path: _plain(row.get("level")),
        describe=lambda path: str(reading_of(path) or ""),
    )


def _own_prompt(
    problem: Problem, suffix: str, *, where: str
) -> tuple[str, str | Sequence[Message]]:
    """The problem's own words, and the prompt with the suffix."""
    if isinstance(problem.prompt, str):
        text = _text({problem.prompt_key: problem.prompt}, problem.prompt_key)
        return text, text + suffix
    messages = read_messages(problem.prompt, where=f"{where}: {problem.prompt_key}")
    text = "\n".join(one["content"] for one in messages if one["role"] != "system")
    messages[-1]["content"] += suffix
    return text, messages


def _own_answer(value: Any, kind: str, *, after: str, key: str, where: str) -> str:
    """The answer of a user's row as text; empty if there is none."""
    if after:
        _, mark, value = _text({key: value}, key).rpartition(after)
        if not mark:
            raise UnreadableError(f"key {key!r} has no {after!r}")
    if kind in ("code", "instructions"):
        return _encoded(_decoded(value))
    if isinstance(value, list | dict | Decimal):
        if value in ([], {}):
            raise UnreadableError(f"key {key!r} is empty")
        return answer_text(value, kind, where=f"{where}: {key}")
    return _plain(value)


def _ask_program(text: str, tests: Tests, *, starter: str) -> str:
    if isinstance(tests, TextTests):
        return ANSWER_TEXT.format(problem=text)
    if isinstance(tests, CallTests):
        if starter.strip():
            return ANSWER_CALL.format(problem=text, starter=starter)
        return ANSWER_FUNCTION.format(problem=text, function=tests.function)
    return text  # LeetCode's: it ends in the code to complete


def _check(kind: str, answer: str, *, key: str) -> None:
    """Refuse an answer that the verifier cannot read; for `math`, also an ambiguous one."""
    if not answer.strip():
        raise UnreadableError(f"key {key!r} is empty")
    try:
        rewards.check_answer(kind, answer)
        if kind == "math":
            math_answers.check_reference(answer)
    except (DataError, ValueError) as error:
        raise UnreadableError(f"the {kind} verifier cannot read key {key!r}: {error}") from None


def _text(row: Mapping[str, Any], key: str) -> str:
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
