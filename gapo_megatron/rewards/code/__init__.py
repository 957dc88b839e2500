"""Verifier of programs: they run in a sandbox, on the tests of their problem.

What a program ought to print or return never enters its sandbox. Outputs are compared here;
asserts, which hold the expected values, run in a second sandbox and reach the program by messages.
So a program that ends the tests early, patches the comparison or prints what success looks like
only makes its own output wrong.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gapo_megatron.rewards.code.compare import TOLERANCE, same_text, same_value
from gapo_megatron.rewards.code.forms import AssertTests, CallTests, Tests, TextTests, read_tests
from gapo_megatron.rewards.code.program import extract_program
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
    start_sandbox,
)
from gapo_megatron.rewards.sandbox.inside.values import decode, encode
from gapo_megatron.types import Outcome, Verdict

DEFAULT_LIMITS = Limits()

_MESSAGE_VALUES = 1000
"""Values that a reply may have beside those expected: a wrong one is compared, not counted."""

MAX_ASSERTS_S = 60
"""For the asserts of a problem, beside what they wait for the program."""


def verify(
    response: str,
    answer: str,
    *,
    limits: Mapping[str, int] = {},
    sandbox: str = "bubblewrap",
    python: str = SYSTEM_PYTHON,
) -> Verdict:
    """Say whether the program in `response` passes every test of `answer`. Never raises.

    Tests run in order, and the first that fails decides. What the program brings upon itself (an
    exception, a limit, a broken protocol) is wrong; what it cannot help (tests that cannot be read,
    a sandbox that does not start or dies) is unknown.

    Args:
        response: text of the model; see `extract_program`.
        answer: JSON text of the tests; see `read_tests`.
        limits: of the program, by the names of `Limits`, where they are not its defaults. This
            takes `total_s` at the most, the start of two sandboxes, and `MAX_ASSERTS_S`.
        sandbox: `reward.sandbox`; `unsafe` runs programs with the trainer's rights.
        python: interpreter that runs the programs; a service has its own.
    """
    program = extract_program(response)
    if program is None:
        return Verdict(Outcome.WRONG, "the response holds no program")
    try:
        tests = read_tests(answer)
    except (ValueError, OSError) as error:
        return Verdict(Outcome.UNKNOWN, f"the tests cannot be read: {error}")
    return run_tests(program, tests, limits=Limits(**limits), sandbox=sandbox, python=python)


def check_answer(answer: str) -> None:
    """Refuse tests that no program could be judged by: those that cannot be read.

    Raises:
        ValueError: says what is amiss.
        OSError: they are in another file, which cannot be read.
    """
    read_tests(answer)


def check_excerpt(head: bytes, tail: bytes) -> None:
    """Refuse tests of another file by their ends: gigabytes are not read at every start.

    Args:
        head: the first bytes of the answer.
        tail: the last ones.

    Raises:
        ValueError: it is no JSON object or list.
    """
    ends = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] + tail.rstrip(b" \t\r\n")[-1:]
    if ends not in (b"{}", b"[]"):
        raise ValueError(f"from {head[:20]!r} to {tail[-20:]!r} is no JSON object or list")


def run_tests(
    program: str,
    tests: Tests,
    *,
    limits: Limits = DEFAULT_LIMITS,
    sandbox: str = "bubblewrap",
    python: str = SYSTEM_PYTHON,
) -> Verdict:
    """Say whether a program passes its tests; see `verify`."""
    try:
        with ExitStack() as stack:

            def start(limits: Limits = limits, *, is_second: bool = False) -> Sandbox:
                return stack.enter_context(
                    start_sandbox(limits, sandbox=sandbox, python=python, is_second=is_second)
                )

            if isinstance(tests, TextTests):
                return _run_texts(program, tests, start())
            if isinstance(tests, CallTests):
                return _run_calls(program, tests, start())
            # Their time is not the program's; more would outlast the pool's patience.
            brief = dataclasses.replace(limits, total_s=min(limits.total_s, MAX_ASSERTS_S))
            return _run_asserts(program, tests, start(), asserts=start(brief, is_second=True))
    except ProgramError as error:
        return _wrong(f"the program {error}")
    except RecursionError:
        return _wrong("the program returned a value that is nested too deep")
    except SandboxError as error:
        return Verdict(Outcome.UNKNOWN, str(error))


def call_program(
    program: str,
    function: str,
    arguments: Sequence[Sequence[Any]],
    *,
    limits: Limits = DEFAULT_LIMITS,
    sandbox: str = "bubblewrap",
    python: str = SYSTEM_PYTHON,
) -> list[Any]:
    """Return what a reference solution returns: the expected values of tests without any.

    Raises:
        ProgramError: the program failed.
        SandboxError: the sandbox did.
    """
    with start_sandbox(limits, sandbox=sandbox, python=python) as box:
        most = itertools.repeat(limits.max_values())
        replies = list(_calls(program, function, arguments, box, max_values=most))
    for reply in replies:
        if "value" not in reply:
            raise ProgramError(f"failed: {reply.get('error')}")
    return [decode(reply["value"]) for reply in replies]


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
    # Twice for tuples in place of lists, which name their kind; the rest is the message.
    most = [2 * _num_values(value) + _MESSAGE_VALUES for value in expected]
    replies = _calls(program, tests.function, tests.arguments, box, max_values=most)
    for number, (reply, output) in enumerate(zip(replies, expected, strict=True), 1):
        if "value" not in reply:
            return _wrong(f"test {number}: {reply.get('error')}")
        accepted = [output, output[0]] if tests.wrapped else [output]
        if not any(same_value(reply["value"], value, tolerance=tolerance) for value in accepted):
            return _wrong(f"test {number}: another value than expected")
    return Verdict(Outcome.CORRECT)


def _num_values(value: Any) -> int:
    """Items and collections of an encoded value."""
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + (sum(map(_num_values, value)) if isinstance(value, list) else 0)


def _calls(
    program: str,
    function: str,
    arguments: Sequence[Sequence[Any]],
    box: Sandbox,
    *,
    max_values: Iterable[int],
) -> Iterator[dict[str, Any]]:
    box.send({"program": program, "prelude": ""})
    box.send({"calls": True})
    for args, most in zip(arguments, max_values, strict=False):
        message = {"function": [function], "args": encode(list(args)), "kwargs": {}}
        yield box.ask(message, max_values=most)


def _run_asserts(program: str, tests: AssertTests, box: Sandbox, *, asserts: Sandbox) -> Verdict:
    """Pass messages between the two sandboxes, until the asserts are through."""
    box.send({"program": program, "prelude": tests.prelude})
    box.send({"calls": True})
    message: dict[str, Any] = {"check": dataclasses.asdict(tests)}
    num_calls = 0
    while True:
        try:
            # Their arguments are the problem's, which may be as many as a line holds.
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
        message = {"value": reply["value"]}  # whatever else the program wrote beside it
    failure = message["failure"]
    if message["fault"]:
        return Verdict(Outcome.UNKNOWN, f"the tests cannot be run: they {message['fault']}")
    if message["num_calls"] == 0:
        # Nothing that the program did made them fail, or pass.
        return Verdict(Outcome.UNKNOWN, f"the tests do not call the program: {failure or 'passed'}")
    return Verdict(Outcome.CORRECT) if failure is None else _wrong(failure)


def _wrong(reason: str) -> Verdict:
    return Verdict(Outcome.WRONG, reason)


__all__ = [
    "call_program",
    "check_answer",
    "check_excerpt",
    "read_tests",
    "run_tests",
    "verify",
]
