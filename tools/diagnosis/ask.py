"""Run code in a separate interpreter, which may crash or hang."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from gapo_megatron.launch.freeze import repository
from gapo_megatron.launch.node_checks import CommandError, run_command

Answer = dict[str, Any] | CommandError
"""What the code printed, or what went wrong."""

_TIMEOUT_S = 300.0
"""Cold imports over a network file system take minutes."""
_OF_A_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "GAPO_",
)


def ask(code: str, env: Mapping[str, str]) -> Answer:
    """Run Python code, and return the JSON object that it prints as its last line.

    Args:
        code: run by this interpreter, with this package on its path.
        env: environment of this process; a launcher's variables are removed, so that the code does
            not wait for other ranks.
    """
    try:
        said = run_command(
            sys.executable, "-W", "ignore", "-c", code, env=alone(env), timeout_s=_TIMEOUT_S
        )
    except CommandError as error:
        said = str(error).removeprefix(f"{sys.executable}: ")
        return CommandError(re.sub(r"^error( \(rank 0\))?: ", "", said))  # added by `fail_fast`
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def alone(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without a launcher's variables, with this package on Python's path."""
    kept = {name: value for name, value in env.items() if not name.startswith(_OF_A_LAUNCHER)}
    folders = [str(repository()), *env.get("PYTHONPATH", "").split(os.pathsep)]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def probe_code(call: str) -> str:
    """Python code that calls a function of `probe`; an error is its last line of output."""
    return (
        "from gapo_megatron.run.fail_fast import fail_fast\n"
        "from gapo_megatron.run.processes import quiet_libraries\n"
        "with fail_fast():\n    quiet_libraries()\n"
        f"    from gapo_tools.diagnosis import probe\n    probe.{call}\n"
    )
