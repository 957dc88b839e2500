"""The tests of a problem, read from the forms in which the public sets hold them (docs/data.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextTests:
    """Standard input and the expected standard output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments of a function, or of a method of class Solution, and the expected value."""

    function: str
    arguments: tuple[Sequence[Any], ...]
    outputs: tuple[Any, ...]
    tolerance: float | None = None
    """Of floats, where the problem states its own."""
    wrapped: bool = False
    """Each output is a list of one item, which some sets put around a value, and some do not."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Python code that calls the program and asserts what it returns."""

    code: str
    prelude: str = ""
    """Code of the problem that asserts and program may use: imports, given helpers."""
    entry_point: str = ""
    """Function that the code's `check` takes; empty where the code names what it calls."""


Tests = TextTests | CallTests | AssertTests


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
            {"file": PATH, "offset": BYTES, "length": BYTES}    where one of these is, a byte range

    Raises:
        ValueError: none of these, or without a single test; says what is amiss.
        OSError: the file of a reference cannot be read.
    """
    value = json.loads(answer)
    if isinstance(value, Mapping) and "file" in value:
        value = json.loads(_read_range(value))
    if isinstance(value, list):
        return _read_list(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"tests must be a JSON object or list, not {type(value).__name__}")
    if "functional" in value:
        return AssertTests(_text(value, "functional"))
    if "test" in value:
        return AssertTests(_text(value, "test"), value.get("prompt", ""), value["entry_point"])
    if "test_list" in value:
        if not isinstance(value["test_list"], list):
            raise ValueError("test_list of the tests must be a list, an item a test")
        setup = [*value.get("test_imports", []), value.get("test_setup_code", "")]
        return AssertTests("\n".join(value["test_list"]), "\n".join(filter(None, setup)))
    if "inputs" in value and "outputs" in value:
        return _read_pairs(
            value["inputs"],
            value["outputs"],
            function=value.get("fn_name"),
            tolerance=value.get("tolerance"),
        )
    raise ValueError(f"tests have no known form; their keys are {', '.join(value) or 'none'}")


def _read_range(reference: Mapping[str, Any]) -> bytes:
    with open(reference["file"], "rb") as file:
        data = os.pread(file.fileno(), reference["length"], reference["offset"])
    if len(data) != reference["length"]:
        raise ValueError(
            f"{reference['file']} ends before byte {reference['offset'] + reference['length']}"
        )
    return data


def _read_list(tests: list[Any]) -> Tests:
    for test in tests:
        if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
            raise ValueError("a test of the list has no input or no output")
    functions = {_function_of(test) for test in tests}
    if len(functions) > 1:
        raise ValueError(f"tests name different functions: {sorted(map(str, functions))}")
    return _read_pairs(
        [test["input"] for test in tests],
        [test["output"] for test in tests],
        function=functions.pop() if functions else None,
    )


def _function_of(test: Mapping[str, Any]) -> str | None:
    metadata = test.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    return test.get("fn_name") or metadata.get("func_name") or None


def _read_pairs(
    inputs: Any,
    outputs: Any,
    *,
    function: str | None,
    tolerance: float | None = None,
) -> Tests:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs of the tests must be lists, an item a test")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if not function:
        texts = tuple(map(_lines, outputs))
        if not any(map(str.strip, texts)):
            raise ValueError("every expected output is empty: a program that does nothing passes")
        return TextTests(tuple(map(_lines, inputs)), texts)
    arguments, values = zip(*map(_call, inputs, outputs), strict=True)
    if all(value is None for value in values):
        raise ValueError("every expected value is None: a function that does nothing passes")
    wrapped = not isinstance(inputs[0], str) and all(
        isinstance(value, list) and len(value) == 1 for value in values
    )
    return CallTests(function, arguments, values, tolerance, wrapped)


def _lines(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"text of a test is {json.dumps(value)[:60]}")


def _call(arguments: Any, value: Any) -> tuple[Sequence[Any], Any]:
    """One test of a function: JSON text, an argument a line, or values as they are."""
    if isinstance(arguments, str):
        lines = [line for line in arguments.split("\n") if line.strip()]
        return [json.loads(line) for line in lines], json.loads(value)
    if not isinstance(arguments, list):
        raise ValueError(f"arguments of a test are {json.dumps(arguments)[:60]}")
    return arguments, value


def _text(tests: Mapping[str, Any], key: str) -> str:
    if not isinstance(tests[key], str) or not tests[key].strip():
        raise ValueError(f"{key} of the tests is not code")
    return str(tests[key])
