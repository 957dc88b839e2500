"""Run a program in a process of somebody else's sandbox, where one run gets one message.

There the asserts run in the process of the program, which can forge their result.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from gapo_megatron.rewards.sandbox.inside.program import STACK_BYTES, call, load
from gapo_megatron.rewards.sandbox.inside.values import encode, list_node, tree_node


def main(program: dict[str, str], message: dict[str, Any], mark: str) -> None:
    """Answer a message on standard output, as `serve` would.

    Args:
        program: the program and its prelude.
        message: see `inside`.
        mark: written on standard error just before the program starts: what fails earlier is no
            fault of the program. Also the answer of asserts that pass.
    """
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    most = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
    check = message.get("check")
    if check:
        load(program | {"program": ""}, "prelude")
        asserts = compile(check["code"], "tests.py", "exec")
    print(mark, file=sys.stderr, flush=True)
    if "stdin" in message:
        load(program, "__main__")
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints is no answer
    if check:
        namespace = load(program, "program")
        _run_asserts(asserts, check["entry_point"], namespace)
        answers.write(mark)
    else:
        try:
            answer = {"value": call(message, load(program, "program"))}
        except BaseException as error:  # such as SystemExit
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        json.dump(answer, answers)
    answers.flush()


def _run_asserts(asserts: Any, entry_point: str, namespace: dict[str, Any]) -> None:
    def is_same(one: Any, other: Any) -> bool:
        return bool(encode(one) == encode(other))

    names: dict[str, Any] = {"list_node": list_node, "tree_node": tree_node}
    names |= {"is_same_list": is_same, "is_same_tree": is_same} | namespace
    exec(asserts, names)
    if entry_point:
        names["check"](names[entry_point])
