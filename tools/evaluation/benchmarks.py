"""Benchmarks, the paper's and the user's own: their files, and the conversion of rows to problems.

Files are used as published: JSON (one list) or JSONL, in one folder per benchmark below the user's
data folder (docs/evaluation.md lists them).
"""

from __future__ import annotations

import base64
import json
import pickletools
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gapo_megatron import rewards, user_code
from gapo_megatron.data.rows import Row, read_rows
from gapo_megatron.errors import ConfigError, DataError, said
from gapo_megatron.io.documents import is_unicode, keys_of
from gapo_megatron.io.files import file_name

BOXED = " Let's think step by step and output the final answer within \\boxed{}."
"""Instruction at the end of every mathematical problem; the verifier reads the box."""

LIVECODEBENCH_FROM, LIVECODEBENCH_BEFORE = "2024-08-01", "2025-02-01"
"""Dates of the contests in the paper's LCB-v5 column; training uses earlier contests."""

HUMANEVAL_LONGEST_RESULT = 100_000
"""Tests of HumanEval+ with longer results are skipped: some have a million values, too many to send
from one sandbox to another in time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as text; `Prompt` is its form in tokens."""

    id: str
    """Unique over all benchmarks; part of the seed of its samples."""
    prompt: str
    answers: tuple[str, ...]
    """Reference answers; a response that equals any of them is correct."""
    level: str = ""
    row: Row = field(default_factory=dict)
    """Columns of its row for a verifier or a user environment (`Prompt.row`)."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Description of a benchmark, without its data."""

    name: str
    title: str
    """Column title in tables; a user benchmark is called by its name."""
    kind: str
    """Verifier, as `reward.kind` of the config."""
    folder: str
    """Folder of its file, below the data folder."""
    read: Callable[[Row], tuple[str, str] | None]
    """Prompt and level of a row; None for a row outside the benchmark. Raises an exception of
    `_OTHER_SHAPE` for an unexpected row."""
    answers: Callable[[Row], tuple[str, ...]]
    """Answers of a row; raises as `read`. Separate, because tests of programs decode slowly."""
    references: tuple[str, ...] = ()
    """Columns with solutions or hidden tests; they stay out of `Problem.row`."""
    in_parts: bool = False
    """Whether it is published as several files, which are read in order of their names."""
    in_average: bool = False
    """Whether it is one of the six mathematical benchmarks of the paper's column Avg."""

    def find_files(self, data_dir: str | Path) -> list[Path]:
        """Find the file of the benchmark, or all of its parts in the order of their names.

        Raises:
            ConfigError: there is no file, or several for a benchmark that is a single file.
        """
        folder = Path(data_dir) / self.folder
        found = sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")])
        if not found or (len(found) > 1 and not self.in_parts):
            names = ", ".join(path.name for path in found) or "none"
            raise ConfigError(
                f"benchmark {self.name}: {folder} must hold one .json or .jsonl file; found {names}"
            )
        return found

    def load(
        self, *paths: Path, keep: Callable[[Row, str], Row] = lambda row, where: {}
    ) -> list[Problem]:
        """Read the problems, in file order; `keep` makes `Problem.row` of a row and its place.

        Raises:
            DataError: a file cannot be read or has an unexpected format; names file, row and rule.
        """
        return list(self._problems(paths, keep))

    def prompts(self, *paths: Path) -> Iterator[tuple[str, str]]:
        """Id and prompt of each problem; raises as `load`, except for errors in answers."""
        return ((one.id, one.prompt) for one in self._problems(paths))

    def _problems(
        self, paths: Sequence[Path], keep: Callable[[Row, str], Row] | None = None
    ) -> Iterator[Problem]:
        rows = ((path, *row) for path in paths for row in read_rows(path, columns=()))
        found = False
        for index, (path, number, row, _) in enumerate(rows):
            try:
                parts = self.read(row)
                answers = self.answers(row) if parts and keep else ()
            except _OTHER_SHAPE as error:
                raise DataError(
                    f"{path}:{number}: unexpected format for a row of {self.name}: "
                    f"{said(error)}; the row has {keys_of(row)}"
                ) from None
            if parts is None:
                continue
            prompt, level = parts
            if not prompt.strip() or (keep and not (answers and all(answers))):
                raise DataError(f"{path}:{number}: the prompt or the answer is empty")
            if not is_unicode(prompt + level):
                raise DataError(f"{path}:{number}: the prompt contains a lone surrogate")
            for answer in answers:
                try:
                    rewards.check_answer(self.kind, answer)
                except DataError as error:
                    raise DataError(f"{path}:{number}: answer: {error}") from None
            found = True
            kept = keep(row, f"{path}:{number}") if keep else {}
            yield Problem(f"{self.name}-{index}", prompt, answers, level, kept)
        if not found:
            raise DataError(f"{', '.join(map(str, paths))}: contains no problems of {self.name}")


def without_request(prompt: str) -> str:
    """Strip our instructions from a prompt, which leaves the text of the problem."""
    text = prompt.removesuffix(BOXED)
    for template in (ANSWER_TEXT, ANSWER_CALL, _COMPLETE):
        for literal, *_ in string.Formatter().parse(template):
            if literal.strip(" \n`python"):
                text = text.replace(literal.strip(), " ")
    return text.strip()


def _math(row: Row, *, level: str = "") -> tuple[str, str]:
    """Prompt and level of a mathematical problem; `level` is the column that holds the level."""
    return _text(row, "problem") + BOXED, _text(row, level) if level else ""


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"{key} must be a string, not {type(row[key]).__name__}")
    return str(row[key])


def _math_answers(row: Row) -> tuple[str, ...]:
    """Read a string, a number, or a list of alternatives; drop those that differ in spaces."""
    value = row["answer"]
    texts = [_one_answer(one) for one in (value if isinstance(value, list) else [value])]
    by_letters = {"".join(text.split()): text for text in reversed(texts)}
    return tuple(reversed(by_letters.values()))


def _one_answer(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"answer ({value!r}) must be text or a number")
    if value != value:
        raise ValueError("answer is NaN")
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _math500(row: Row) -> tuple[str, str]:
    prompt, _ = _math(row)
    return prompt, f"level {_one_answer(row['difficulty'])}"


def _ifeval_answers(row: Row) -> tuple[str, ...]:
    instructions, arguments = row["instruction_id_list"], row["kwargs"]
    if len(instructions) != len(arguments):
        raise ValueError(f"{len(instructions)} instructions with {len(arguments)} kwargs")
    answer = [
        {"id": name, **{key: value for key, value in given.items() if value is not None}}
        for name, given in zip(instructions, arguments, strict=True)
    ]
    return (json.dumps({"instructions": answer}, ensure_ascii=False),)


def _humaneval_plus(row: Row) -> tuple[str, str]:
    return _COMPLETE.format(signature=_text(row, "prompt")), ""


def _humaneval_plus_answers(row: Row) -> tuple[str, ...]:
    signature = _text(row, "prompt")
    tests = {
        "prompt": signature,
        "entry_point": _text(row, "entry_point"),
        "test": _HUMANEVAL_PLUS_TEST.format(
            reference=signature + _text(row, "canonical_solution"),
            entry_point=_text(row, "entry_point"),
            inputs=ascii(ascii([*row["base_input"], *row["plus_input"]])),
            compare=_COMPARE_ZERO if row["entry_point"] == "find_zero" else _COMPARE,
            tolerance=float(row["atol"]),
            longest=HUMANEVAL_LONGEST_RESULT,
        ),
    }
    return (json.dumps(tests),)


def _livecodebench(row: Row) -> tuple[str, str] | None:
    if not LIVECODEBENCH_FROM <= _text(row, "contest_date") < LIVECODEBENCH_BEFORE:
        return None
    asked = ANSWER_CALL if _function_name(row) else ANSWER_TEXT
    prompt = asked.format(problem=_text(row, "question_content"), starter=row["starter_code"])
    return prompt, _text(row, "difficulty")


def _function_name(row: Row) -> str | None:
    """Name of the method to write; None for a program that reads and prints."""
    name = json.loads(row["metadata"] or "{}").get("func_name")
    return str(name) if name else None


def _livecodebench_answers(row: Row) -> tuple[str, ...]:
    private = _text(row, "private_test_cases")
    if not private.lstrip().startswith("["):  # pickled text, compressed, in base64
        private = _unpickle_text(zlib.decompress(base64.b64decode(private)))
    function = _function_name(row)
    tests = [*json.loads(row["public_test_cases"]), *json.loads(private)]
    answer = [
        {"input": test["input"], "output": test["output"], "fn_name": function} for test in tests
    ]
    return (json.dumps(answer),)


def _unpickle_text(data: bytes) -> str:
    """Return the text in a pickle without unpickling it, which could call any function."""
    texts = []
    for operation, argument, _ in pickletools.genops(data):
        if isinstance(argument, str) and "UNICODE" in operation.name:
            texts.append(argument)
        elif operation.name not in _AROUND_TEXT:
            shown = f"{operation.name} {argument!s:.60}"
            raise ValueError(f"private_test_cases must be a pickled text, but contain {shown}")
    [text] = texts
    return text


_AROUND_TEXT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
"""Operations of a pickle without content."""


# The reference solution gives the expected values; the inputs include those of HumanEval's asserts.
_HUMANEVAL_PLUS_TEST = """
{reference}


def check(candidate):
    import ast, copy, math

    def same(given, expected, tolerance):
        if isinstance(expected, float) or isinstance(given, float):
            if not isinstance(given, (int, float)) or not isinstance(expected, (int, float)):
                return False
            return given == expected or math.isclose(
                given, expected, rel_tol=1e-7, abs_tol=tolerance or 1e-6
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(given, (list, tuple))
                and len(given) == len(expected)
                and all(same(a, b, tolerance) for a, b in zip(given, expected))
            )
        return given == expected

    for arguments in ast.literal_eval({inputs}):
        expected = {entry_point}(*copy.deepcopy(arguments))
        if isinstance(expected, (str, list)) and len(expected) > {longest}:
            continue
        given = candidate(*copy.deepcopy(arguments))
        tolerance = {tolerance}
        {compare}
"""
_COMPARE = "assert same(given, expected, tolerance)"
_COMPARE_ZERO = (
    "assert abs(poly(*arguments, given)) <= tolerance  # any zero of the polynomial will do"
)

_COMPLETE = """\
Complete this Python function. Answer with one Python code block that holds the whole function and \
every import and helper it needs.

```python
{signature}
```
"""

ANSWER_TEXT = """\
{problem}

Write a Python program that reads the input from standard input and prints the output to standard \
output. Answer with one Python code block that holds the whole program.
"""

ANSWER_CALL = """\
{problem}

Complete this Python code. Answer with one Python code block that holds the whole class.

```python
{starter}
```
"""

_OTHER_SHAPE = (
    *(KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError),
    zlib.error,
)

_SIX: dict[str, tuple[str, str, Callable[[Row], tuple[str, str]]]] = {
    "aime24": ("AIME24", "aime24", _math),
    "aime25": ("AIME25", "aime25", _math),
    "amc23": ("AMC", "amc23", _math),
    "math500": ("MATH500", "math500", _math500),
    "minerva": ("Minerva", "minerva_math", partial(_math, level="type")),
    "olympiadbench": ("Olympiad", "olympiadbench", partial(_math, level="subfield")),
}

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        *(
            Benchmark(
                *(name, title, "math", folder, read, _math_answers, ("solution",)), in_average=True
            )
            for name, (title, folder, read) in _SIX.items()
        ),
        Benchmark(
            *("ifeval", "IFEval", "instructions", "ifeval"),
            *(lambda row: (_text(row, "prompt"), ""), _ifeval_answers),
        ),
        Benchmark(
            *("livecodebench", "LCB-v5", "code", "livecodebench"),
            *(_livecodebench, _livecodebench_answers),
            references=("private_test_cases",),
            in_parts=True,
        ),
        Benchmark(
            *("humaneval_plus", "HumanEval+", "code", "humaneval_plus"),
            *(_humaneval_plus, _humaneval_plus_answers),
            references=("canonical_solution", "test", "base_input", "plus_input"),
        ),
    )
}
"""Benchmarks by name, in the order of the paper's columns."""


def find_benchmark(name: str, *, field: str) -> Benchmark:
    """Return the paper's benchmark with this name, or load the user's.

    Args:
        name: a key of `BENCHMARKS`, or code, `path/to/file.py:NAME` or `package.module:NAME`.
        field: option with this name, for messages.

    Raises:
        ConfigError: there is no such benchmark; or the code cannot be loaded, is no `Benchmark`, or
            has a name that is taken or no folder's.
    """
    if not user_code.is_code(name):
        if name not in BENCHMARKS:
            known = ", ".join(BENCHMARKS)
            raise ConfigError(
                f"{field} ({name!r}) is not one of {known}, nor code of your own, "
                "path/to/file.py:NAME"
            )
        return BENCHMARKS[name]
    found = user_code.load(name, setting=field)
    if not isinstance(found, Benchmark):
        raise ConfigError(
            f"{field} ({name!r}) must be a gapo_tools.evaluation.benchmarks.Benchmark, not "
            f"{type(found).__name__}"
        )
    check_name(found.name, field=f"{field} ({name!r}): name")
    return found


def check_name(name: str, *, field: str) -> None:
    """Refuse a name that a folder of samples or a column of the paper's tables cannot have.

    Raises:
        ConfigError: names the field, the name and the rule.
    """
    if file_name(name) != name or "." in name or name in ("average", *BENCHMARKS):
        raise ConfigError(
            f"{field} ({name!r}) must be a word of letters, digits and _+-, of at most 100 bytes, "
            f"and none of average, {', '.join(BENCHMARKS)}"
        )
