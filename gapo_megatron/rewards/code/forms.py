"""Reads the tests of a problem from the formats of the public data sets (docs/data.md)."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapo_megatron.io.documents import keys_of, open_file


@dataclass(frozen=True, slots=True)
class TextTests:
    """Standard input and the expected standard output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments of a function, or of a method of class Solution, and expected values."""

    function: str
    arguments: tuple[Sequence[Any], ...]
    outputs: tuple[Any, ...]
    tolerance: float | None = None
    """Tolerance for floats, if the problem states one."""
    wrapped: bool = False
    """Each output is a list of one item, which in some data sets is only a wrapper."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Python code that calls the program and asserts what it returns."""

    code: str
    prelude: str = ""
    """Code of the problem for asserts and program: imports, given helpers."""
    entry_point: str = ""
    """Function to pass to `check` in the code; empty if the code calls functions by name."""


Tests = TextTests | CallTests | AssertTests

_DEFINES_CHECK = re.compile(r"^def\s+check\b", re.MULTILINE)
_CALLED = re.compile(r"(?<![\w.])([^\W\d]\w*)[ \t]*\(")
_DEFINED = re.compile(r"\bdef[ \t]+(\w+)")
_CALLS_CHECK = re.compile(r"^check\b", re.MULTILINE)


def read_tests(answer: str) -> Tests:
    """Read the tests of one problem.

    Args:
        answer: JSON text of one of

            {"inputs": [...], "outputs": [...]}                 text, or lists of lines
            {"inputs": ..., "outputs": ..., "fn_name": NAME}    argument lists and values
            [{"input": ..., "output": ...}, ...]                the same, test by test; a test's own
                                                                "fn_name" or "metadata.func_name"
            {"functional": CODE}                                ends in check(Solution().method)
            {"test": CODE, "entry_point": NAME, "prompt": CODE} defines check(candidate)
            {"test_list": [CODE, ...]}                          asserts that name the function;
                                                                "test_imports", "test_setup_code"
            {"file": PATH, "offset": BYTES, "length": BYTES}    byte range of a file with one of
                                                                these

    Raises:
        ValueError: another format, or no test; says what is wrong.
        OSError: the named file cannot be read.
    """
    value = _json(answer)
    if isinstance(value, Mapping) and "file" in value:
        value = _json(_read_range(value))
    if isinstance(value, list):
        return _read_list(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"tests must be a JSON object or list, not {type(value).__name__}")
    if "functional" in value:
        return AssertTests(_text(value, "functional", needed=True))
    if "test" in value:
        if "entry_point" not in value:
            raise ValueError("tests with the key test also need entry_point, the checked function")
        code, entry_point = _text(value, "test", needed=True), _text(value, "entry_point")
        if not entry_point and _DEFINES_CHECK.search(code) and not _CALLS_CHECK.search(code):
            raise ValueError("entry_point is empty, but the code defines check and never calls it")
        return AssertTests(code, _text(value, "prompt"), entry_point)
    if "test_list" in value:
        tests, imports = (_texts(value.get(key, []), key) for key in ("test_list", "test_imports"))
        if not any(map(str.strip, tests)):
            raise ValueError("test_list is empty")
        setup = [*imports, _text(value, "test_setup_code")]
        return AssertTests("\n".join(tests), "\n".join(filter(None, setup)))
    if "inputs" in value and "outputs" in value:
        return _read_pairs(
            value["inputs"],
            value["outputs"],
            function=_text(value, "fn_name"),
            tolerance=value.get("tolerance"),
        )
    raise ValueError(f"unknown format of tests, with the keys {keys_of(value)}")


def names_of(tests: Tests) -> frozenset[str]:
    """Functions and classes that a program must define: those that the tests call."""
    if isinstance(tests, CallTests):
        return frozenset({tests.function})
    if isinstance(tests, TextTests):
        return frozenset()
    if tests.entry_point:
        return frozenset({tests.entry_point})
    return frozenset(_CALLED.findall(tests.code)).difference(_DEFINED.findall(tests.code))


def _json(text: str | bytes) -> Any:
    """Parse any JSON that Python reads: tests may contain NaN or lone surrogates."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the tests are nested too deeply") from None


def _read_range(reference: Mapping[str, Any]) -> bytes:
    path, offset, length = (reference.get(key) for key in ("file", "offset", "length"))
    if not (isinstance(path, str) and type(offset) is int and type(length) is int):
        raise ValueError("tests with the key file also need offset and length, in whole bytes")
    with open_file(path) as file:
        if not 0 <= offset < offset + length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} has no bytes {offset} to {offset + length}")
        return os.pread(file.fileno(), length, offset)


def _read_list(tests: list[Any]) -> Tests:
    for test in tests:
        if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
            raise ValueError("every test in a list needs input and output")
    functions = {_function_of(test) for test in tests}
    if len(functions) > 1:
        raise ValueError(f"tests name different functions: {sorted(functions)}")
    return _read_pairs(
        [test["input"] for test in tests],
        [test["output"] for test in tests],
        function=functions.pop() if functions else "",
    )


def _function_of(test: Mapping[str, Any]) -> str:
    if function := _text(test, "fn_name"):
        return function
    metadata = test.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = _json(metadata)
    if not isinstance(metadata, Mapping):
        raise ValueError("metadata of a test must be an object")
    return _text(metadata, "func_name")


def _read_pairs(
    inputs: Any,
    outputs: Any,
    *,
    function: str,
    tolerance: Any = None,
) -> Tests:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs must be lists with one item per test")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if not function:
        texts = tuple(map(_lines, outputs))
        if not any(map(str.strip, texts)):
            raise ValueError("every expected output is empty: a program that does nothing passes")
        return TextTests(tuple(map(_lines, inputs)), texts)
    is_number = type(tolerance) in (int, float) and 0 <= tolerance < math.inf
    if tolerance is not None and not is_number:
        raise ValueError(f"tolerance of the tests ({_shown(tolerance)}) must be a number >= 0")
    arguments, values = zip(*map(_call, inputs, outputs), strict=True)
    if all(value is None for value in values):
        raise ValueError("every expected value is None: a function that does nothing passes")
    wrapped = not isinstance(inputs[0], str) and all(
        isinstance(value, list) and len(value) == 1 for value in values
    )
    return CallTests(function, arguments, values, tolerance, wrapped)


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(_texts(value, "text of a test"))


def _call(arguments: Any, value: Any) -> tuple[Sequence[Any], Any]:
    """Read one test of a function: JSON text with one argument per line, or values."""
    if isinstance(arguments, str):
        if not isinstance(value, str):
            raise ValueError(
                f"a test with arguments as text needs its output as text, not {_shown(value)}"
            )
        return [_json(line) for line in arguments.split("\n") if line.strip()], _json(value)
    if not isinstance(arguments, list):
        raise ValueError(f"arguments of a test ({_shown(arguments)}) must be a list or text")
    return arguments, value


def _text(tests: Mapping[str, Any], key: str, *, needed: bool = False) -> str:
    value = tests.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value.strip()):
        raise ValueError(f"{key} of the tests ({_shown(value)}) must be text, and not empty")
    return value


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} ({_shown(value)}) must be a list of texts")
    return value


def _shown(value: Any) -> str:
    """A short form of a value, even if it is nested too deeply for `repr`."""
    return reprlib.repr(value)
