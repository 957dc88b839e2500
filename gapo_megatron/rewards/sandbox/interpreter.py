"""The interpreter of the programs, and how our process inside the sandbox comes to run on it."""

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
"""User and group of programs when the trainer is root, whom the kernel lets exceed limits."""

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same verdict every time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

PIPE_BYTES = 2**16
"""What the kernel keeps of a pipe that nobody reads."""

_INSIDE = (
    "processes",
    *(
        f"sandbox.inside.{name}"
        for name in ["channel", "values", "seccomp", "program", "asserts", "serve"]
    ),
)
"""Our modules in the sandbox, of `rewards`; each imports only those before it."""

# They come on standard input: a sandbox need not see, or be able to read, the folder they lie in.
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
    """What an interpreter says of itself, asked once."""

    executable: str
    prefixes: list[str]
    line: bytes
    """What `start_command` waits for: our modules, compiled, for that is a third of the time they
    take to start. Fits into a pipe, so that nobody waits to write it."""


@functools.cache
def ask_interpreter(*command: str, as_nobody: bool = False) -> Interpreter:
    """Ask the interpreter that `command` starts.

    Raises:
        SandboxError: it does not run, or is none.
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
        raise SandboxError(f"{command[-1]} is no Python: it answered {shown}") from None
    assert len(line) < PIPE_BYTES, len(line)
    return Interpreter(executable, prefixes, line.encode())


def start_command(limits: Limits, *, python: str) -> list[str]:
    """Command line of our process; it begins by reading `Interpreter.line`."""
    limits_text = json.dumps(dataclasses.asdict(limits))
    # Not `-m`, which loads more than this needs.
    return [python, "-s", "-B", "-X", "utf8", "-c", _START, limits_text]


def host_environment() -> dict[str, str]:
    """Environment outside the walls: where programs are, and nothing else of the trainer's."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


@functools.cache
def drop_root() -> dict[str, Any]:
    """Arguments of Popen. Root of a container that is an ordinary user outside stays as it is."""
    mapping = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    if os.geteuid() != 0 or mapping[:3] != ["0", "0", str(2**32 - 1)]:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


__all__ = ["ENVIRONMENT", "ask_interpreter", "drop_root", "host_environment", "start_command"]
