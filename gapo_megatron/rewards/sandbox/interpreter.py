"""The interpreter of the programs, and how our runner process starts on it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron.rewards.sandbox.base import START_TIMEOUT_S, Limits, SandboxError

NOBODY = 65534
"""User and group of programs when the trainer is root, who may exceed limits."""

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # reproducible verdicts
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

PIPE_BYTES = 2**16
"""Capacity of a pipe."""

_INSIDE = (
    "processes",
    *(
        f"sandbox.inside.{name}"
        for name in ["channel", "values", "seccomp", "program", "asserts", "serve"]
    ),
)
"""Modules of `rewards` that run in the sandbox; each imports only those before it."""

# They are sent on standard input, so the sandbox needs no access to their folder.
_START = """
import binascii, marshal, sys, types, zlib
line = sys.stdin.buffer.readline()
for name, code in marshal.loads(zlib.decompress(binascii.a2b_base64(line))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
module.main()()
"""

_QUESTION = """
import binascii, json, marshal, sys, zlib
inside = [(name, compile(text, path, "exec")) for name, path, text in json.load(sys.stdin)]
line = binascii.b2a_base64(zlib.compress(marshal.dumps(inside))).decode()
print(json.dumps([sys.executable, [sys.prefix, sys.base_prefix], line]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Properties of an interpreter, queried once."""

    executable: str
    prefixes: list[str]
    line: bytes
    """First input of `start_command`: our modules, already compiled, which saves a third of the
    start-up time. Fits into a pipe, so that writing it never blocks."""


@functools.cache
def ask_interpreter(*command: str, as_nobody: bool = False) -> Interpreter:
    """Start the interpreter `command` and query its properties.

    Raises:
        SandboxError: it does not run, or is not a Python interpreter.
    """
    rewards = Path(__file__).parents[1]
    paths = {name: f"{name.replace('.', '/')}.py" for name in _INSIDE}
    sources = [
        (f"gapo_megatron.rewards.{name}", path, (rewards / path).read_text())
        for name, path in paths.items()
    ]
    try:
        answer = subprocess.run(
            [*command, "-I", "-c", _QUESTION],
            input=json.dumps(sources),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            cwd="/",
            env=host_environment(),
            **(drop_root() if as_nobody else {}),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{command[-1]} does not run: {error}") from None
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise SandboxError(f"{command[-1]} does not run: {reason or answer.returncode}")
    try:
        executable, prefixes, line = json.loads(answer.stdout)
    except (ValueError, RecursionError):
        shown = ascii(answer.stdout[:60])
        raise SandboxError(
            f"{command[-1]} is not a Python interpreter: it printed {shown}"
        ) from None
    assert len(line) < PIPE_BYTES, len(line)
    return Interpreter(executable, prefixes, line.encode())


def start_command(limits: Limits, *, python: str) -> list[str]:
    """Command line of our runner process, which first reads `Interpreter.line`."""
    limits_text = json.dumps(dataclasses.asdict(limits))
    # Not `-m`, which imports more modules.
    return [python, "-s", "-B", "-X", "utf8", "-c", _START, limits_text]


def host_environment() -> dict[str, str]:
    """Environment of the sandbox command itself: the trainer's PATH and nothing else."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


@functools.cache
def drop_root() -> dict[str, Any]:
    """Arguments of Popen that drop root. Root of a user namespace has no rights outside: kept."""
    mapping = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    if os.geteuid() != 0 or mapping[:3] != ["0", "0", str(2**32 - 1)]:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


__all__ = ["ENVIRONMENT", "ask_interpreter", "drop_root", "host_environment", "start_command"]
