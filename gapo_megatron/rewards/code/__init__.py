"""Verifier of programs: they run in a sandbox, on the tests of their problem.

The expected outputs never enter the program's sandbox. Outputs are compared here; asserts, which
hold expected values, run in a second sandbox and call the program by messages. So a program that
exits early, patches the comparison or prints a fake success only makes its own output wrong.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from gapo_megatron.errors import shown
from gapo_megatron.rewards.code.compare import TOLERANCE, same_text, same_value
from gapo_megatron.rewards.code.forms import (
    AssertTests,
    CallTests,
    Tests,
    TextTests,
    names_of,
    read_tests,
)
from gapo_megatron.rewards.code.program import blocks_of, program_of
from gapo_megatron.rewards.sandbox import (
    START_TIMEOUT_S,
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
    run_once,
    split_setting,
    start_sandbox,
)
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.sandbox.inside.values import encode
from gapo_megatron.rewards.sandbox.remote import MAX_OUTPUT_BYTES, post
from gapo_megatron.types import Outcome, Verdict

DEFAULT_LIMITS = Limits()

TESTS: dict[str, type[Tests]] = {one.__name__: one for one in (TextTests, CallTests, AssertTests)}
"""Forms of tests, by the name that a request to the service gives."""

_MESSAGE_VALUES = 1000
"""Values that a reply may have beyond the expected number: a slightly longer one is just wrong."""

MAX_ASSERTS_S = 60
"""Time limit for the asserts of a problem, without the time of the program."""


def verify(
    response: str,
    answer: str,
    *,
    limits: Mapping[str, int] = {},
    sandbox: str = "bubblewrap",
    python: str = SYSTEM_PYTHON,
) -> Verdict:
    """Say whether the program in `response` passes every test of `answer`. Never raises.

    Tests run in order up to the first that fails. A failure of the program (an exception, a limit,
    a broken protocol) is wrong. A failure outside it (unreadable tests, a sandbox that does not
    start or dies) is unknown. Takes at most `total_s`, the start of two sandboxes, and
    `MAX_ASSERTS_S`.

    Args:
        response: text of the model; see `program_of`.
        answer: JSON text of the tests; see `read_tests`.
        limits: fields of `Limits` that differ from its defaults.
        sandbox: `reward.sandbox`; `unsafe` runs programs with the trainer's rights.
        python: interpreter that runs the programs; a service has its own.
    """
    blocks = blocks_of(response)
    if not blocks:
        return Verdict(Outcome.WRONG, "the response holds no program")
    try:
        tests = read_tests(answer)
    except (ValueError, OSError) as error:
        return Verdict(Outcome.UNKNOWN, f"the tests cannot be read: {error}")
    program = program_of(blocks, names_of(tests))
    return run_tests(program, tests, limits=Limits(**limits), sandbox=sandbox, python=python)


def check_answer(answer: str) -> None:
    """Refuse tests that cannot be read.

    Raises:
        ValueError: says what is wrong.
        OSError: the tests are in another file, which cannot be read.
    """
    read_tests(answer)


def check_excerpt(head: bytes, tail: bytes) -> None:
    """Check only the two ends of tests in another file, which may have gigabytes.

    Args:
        head: first bytes of the answer.
        tail: last bytes of the answer.

    Raises:
        ValueError: the answer is not a JSON object or list.
    """
    ends = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] + tail.rstrip(b" \t\r\n")[-1:]
    if ends not in (b"{}", b"[]"):
        raise ValueError(
            f"{head[:20]!r} ... {tail[-20:]!r} must be a JSON object or list: it must begin and "
            "end with braces or brackets"
        )


def run_tests(
    program: str,
    tests: Tests,
    *,
    limits: Limits = DEFAULT_LIMITS,
    sandbox: str = "bubblewrap",
    python: str = SYSTEM_PYTHON,
    hangup: int | None = None,
) -> Verdict:
    """Say whether a program passes its tests; see `verify` and `start_sandbox`."""
    kind, _ = split_setting(sandbox)
    try:
        if kind == "service":
            return _ask_service(program, tests, limits=limits, sandbox=sandbox)
        with ExitStack() as stack:

            def start(limits: Limits = limits) -> Sandbox:
                return stack.enter_context(
                    start_sandbox(limits, sandbox=sandbox, python=python, hangup=hangup)
                )

            if kind == "sandboxfusion":
                _check_outputs(tests)
            if isinstance(tests, TextTests):
                return _run_texts(program, tests, start())
            if isinstance(tests, CallTests):
                return _run_calls(program, tests, start())
            if kind == "sandboxfusion":
                return _run_together(program, tests, start())
            # Asserts have a time limit of their own, within the time that the pool allows.
            brief = dataclasses.replace(limits, total_s=min(limits.total_s, MAX_ASSERTS_S))
            return _run_asserts(program, tests, start(), asserts=start(brief))
    except ProgramError as error:
        return _wrong(f"the program {error}")
    except RecursionError:
        return _wrong("the program returned a value that is nested too deeply")
    except SandboxError as error:
        return Verdict(Outcome.UNKNOWN, str(error))


def run_program(program: str, *, timeout_s: int, sandbox: str, python: str) -> tuple[str, str]:
    """Run a program without input; returns its standard output, and how it failed (or "").

    Raises:
        SandboxError: the sandbox failed.
    """
    return run_once(program, limits=_limits_of(timeout_s), sandbox=sandbox, python=python)


def check_programs(*, timeout_s: int, sandbox: str, python: str) -> None:
    """Check that `run_program` isolates programs on this machine.

    Raises:
        ConfigError: see `check_sandbox`.
    """
    check_sandbox(sandbox=sandbox, python=python, limits=_limits_of(timeout_s))


def _limits_of(timeout_s: int) -> Limits:
    return Limits(cpu_s=timeout_s, wall_s=2 * timeout_s, total_s=2 * timeout_s)


def _run_texts(program: str, tests: TextTests, box: Sandbox) -> Verdict:
    box.send({"program": program, "prelude": ""})
    for number, (text, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True), 1):
        reply = box.ask({"stdin": text})
        if reply["failure"]:
            return _wrong(f"test {number}: the program {reply['failure']}")
        if not same_text(reply["stdout"], expected):
            return _wrong(f"test {number}: another output than expected")
    return Verdict(Outcome.CORRECT)


def _run_calls(program: str, tests: CallTests, box: Sandbox) -> Verdict:
    tolerance = TOLERANCE if tests.tolerance is None else tests.tolerance
    expected = [encode(output) for output in tests.outputs]
    box.send({"program": program, "prelude": ""})
    box.send({"calls": True})
    for number, (args, output) in enumerate(zip(tests.arguments, expected, strict=True), 1):
        message = {"function": [tests.function], "args": encode(list(args)), "kwargs": {}}
        # Twice as many, because a tuple in place of a list is encoded with its kind.
        reply = box.ask(message, max_values=2 * _num_values(output) + _MESSAGE_VALUES)
        if "value" not in reply:
            return _wrong(f"test {number}: {reply.get('error')}")
        accepted = [output, output[0]] if tests.wrapped else [output]
        if not any(same_value(reply["value"], value, tolerance=tolerance) for value in accepted):
            return _wrong(f"test {number}: another value than expected")
    return Verdict(Outcome.CORRECT)


def _num_values(value: Any) -> int:
    """Number of items and collections in an encoded value."""
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + (sum(map(_num_values, value)) if isinstance(value, list) else 0)


def _run_asserts(program: str, tests: AssertTests, box: Sandbox, *, asserts: Sandbox) -> Verdict:
    """Relay messages between the two sandboxes until the asserts have finished."""
    box.send({"program": program, "prelude": tests.prelude})
    box.send({"calls": True})
    message: dict[str, Any] = {"check": dataclasses.asdict(tests)}
    num_calls = 0
    while True:
        try:
            # Arguments come from the problem, and may fill a line.
            message = asserts.ask(message, max_values=sys.maxsize)
        except ProgramError as error:
            message = {"error": str(error)}
        if "error" in message:
            message = {"num_calls": num_calls, "failure": f"the asserts: {message['error']}"}
            message["fault"] = ""
        if "function" not in message:
            break
        num_calls += 1
        reply = box.ask(message)
        if "value" not in reply:
            return _wrong(f"call {num_calls}: {reply.get('error')}")
        message = {"value": reply["value"]}  # without other keys that the program may have added
    failure = message["failure"]
    if message["fault"]:
        return Verdict(Outcome.UNKNOWN, f"the tests cannot be run: they {message['fault']}")
    if message["num_calls"] == 0:
        # Their result does not depend on the program.
        return Verdict(Outcome.UNKNOWN, f"the tests do not call the program: {failure or 'passed'}")
    return Verdict(Outcome.CORRECT) if failure is None else _wrong(failure)


def _ask_service(program: str, tests: Tests, *, limits: Limits, sandbox: str) -> Verdict:
    """Let a service of ours judge the program (`server`)."""
    body = {
        "program": program,
        "kind": type(tests).__name__,
        "tests": {field.name: getattr(tests, field.name) for field in dataclasses.fields(tests)},
        "limits": dataclasses.asdict(limits),
    }
    timeout_s = limits.total_s + MAX_ASSERTS_S + 2 * START_TIMEOUT_S
    answer = post(sandbox, "/verdict", body, timeout_s=timeout_s)
    try:
        return Verdict(Outcome(answer["outcome"]), str(answer["reason"]))
    except (TypeError, KeyError, ValueError):
        raise SandboxError(f"the service of {sandbox} answered {shown(answer)}") from None


def _check_outputs(tests: Tests) -> None:
    """Refuse tests whose right answers SandboxFusion would cut. SandboxError: which."""
    outputs = () if isinstance(tests, AssertTests) else tests.outputs
    for number, output in enumerate(outputs, 1):
        if len(json.dumps(output)) > MAX_OUTPUT_BYTES:
            raise SandboxError(
                f"test {number} expects more than SandboxFusion returns ({MAX_OUTPUT_BYTES} bytes)"
            )


def _run_together(program: str, tests: AssertTests, box: Sandbox) -> Verdict:
    """Run the asserts in the process of the program, which may forge their result."""
    if not names_of(tests):
        return Verdict(Outcome.UNKNOWN, "the tests do not call the program")
    box.send({"program": program, "prelude": tests.prelude})
    failure = box.ask({"check": dataclasses.asdict(tests)})["failure"]
    return _wrong(f"the program {failure}") if failure else Verdict(Outcome.CORRECT)


def _wrong(reason: str) -> Verdict:
    return Verdict(Outcome.WRONG, reason)


__all__ = [
    "check_answer",
    "check_excerpt",
    "read_tests",
    "run_tests",
    "verify",
]
