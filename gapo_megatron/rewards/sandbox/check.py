"""Checks that this machine or service can isolate programs, before any model is built."""

from __future__ import annotations

import dataclasses
import json
import warnings

from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.rewards.sandbox import (
    REMOTE,
    Kind,
    Limits,
    SandboxError,
    run_once,
    split_setting,
)

_PROBE = """
import json, os, resource, socket, time

def works(action):
    try:
        action()
    except (OSError, MemoryError):
        return False
    return True

def fork_all():
    for _ in range(NUM_PROCESSES):
        if os.fork() == 0:
            time.sleep(60)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def is_outside(folder):  # folders on the file system of /tmp are limited and emptied with it
    return os.path.isdir(folder) and os.stat(folder).st_dev != os.stat("/tmp").st_dev

def has_capabilities():
    with open("/proc/self/status") as file:
        return any(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))

def mounts():
    with open("/proc/self/mountinfo") as file:
        return {line.split()[4] for line in file}

FOLDERS = ("/", "/usr/lib", "/etc", "/home", "/root", "/dev", "/dev/shm", "/dev/mqueue", "/var/tmp")
disk = os.statvfs("/tmp")
walls = {
    "network sockets can be opened": works(socket.socket),
    "files outside /tmp can be written": any(
        works(lambda: write(folder + "/probe")) for folder in filter(is_outside, FOLDERS)
    ),
    "files of the machine can be read": FILES_CAN_BE_READ,
    "processes of the machine can be seen": sum(map(str.isdigit, os.listdir("/proc"))) > 2,
    "programs have capabilities": has_capabilities(),
    "/tmp is smaller than `disk_mib`": disk.f_blocks * disk.f_frsize < DISK_MIB * 2**20,
    "the number of processes has no limit": works(fork_all),
    "memory has no limit": works(lambda: bytearray((MEMORY_MIB + 64) * 2**20)),
}
print(json.dumps([name for name, stands in walls.items() if stands]))
"""

_FILES_CAN_BE_READ: dict[Kind, str] = {
    "bubblewrap": 'any(map(os.path.exists, ("/etc/passwd", "/home", "/root")))',
    "service": 'any(map(os.path.exists, ("/etc/passwd", "/home", "/root")))',
    # An image has such files of its own; any other mount comes from the machine.
    "apptainer": 'any(m not in ("/", "/proc", "/tmp", "/var/tmp") and not '
    'm.startswith(("/dev", "/etc/")) for m in mounts())',
}

_NEEDS: dict[Kind, str] = {
    "bubblewrap": "This needs Linux 5.14 or later, bubblewrap (the package `bubblewrap`) and "
    "unprivileged user namespaces",
    "apptainer": "This needs Linux 5.14 or later, Apptainer 1.1 or later, unprivileged user "
    "namespaces, and an image with Python and /usr/bin/env",
    "service": "This needs tools/serve_sandboxes.py running on that machine, and its file "
    "~/.config/gapo_megatron/sandbox.pem on this one",
    "sandboxfusion": "This needs a SandboxFusion whose /run_code runs Python",
    "unsafe": "This needs a Python interpreter",
}


def check_sandbox(*, sandbox: str, python: str, limits: Limits) -> None:
    """Start a sandbox and test its isolation from inside.

    Args:
        sandbox: `reward.sandbox` of the config; `unsafe` only warns, and of SandboxFusion it is
            only tested that it runs programs.
        python: `reward.python` of the config.
        limits: limits of the programs.

    Raises:
        ConfigError: programs cannot be isolated here; says what failed and what is needed.
    """
    kind, _ = split_setting(sandbox)
    if kind == "unsafe":
        warnings.warn(
            "reward.sandbox ('unsafe'): PROGRAMS WRITTEN BY THE MODEL WILL RUN WITH YOUR RIGHTS. "
            "They can read, change and delete all your files and use the network.",
            stacklevel=2,
        )
    if kind == "sandboxfusion":
        warnings.warn(
            f"reward.sandbox ({sandbox!r}): programs are isolated as that service isolates them, "
            "and can forge the verdict of asserts (docs/sandbox.md)",
            stacklevel=2,
        )
    asked = limits  # a service may refuse more
    if kind not in REMOTE:  # more time, for a busy machine
        asked = dataclasses.replace(limits, cpu_s=20, wall_s=60, total_s=max(60, limits.total_s))
    try:
        output, failure = run_once(
            _probe(kind, limits), limits=asked, sandbox=sandbox, python=python
        )
    except SandboxError as error:
        raise ConfigError(_explain(sandbox, python, str(error))) from None
    if failure:
        raise ConfigError(_explain(sandbox, python, f"a program {failure}"))
    try:
        failed = "; ".join(json.loads(output))
    except (ValueError, TypeError):
        failed = f"a program printed {shown(output[:40])}"
    if failed:
        raise ConfigError(_explain(sandbox, python, failed))


def _probe(kind: Kind, limits: Limits) -> str:
    if kind in ("unsafe", "sandboxfusion"):
        return "print([])"  # the probe could change a machine without isolation
    probe = _PROBE.replace("FILES_CAN_BE_READ", _FILES_CAN_BE_READ[kind])
    for name, value in dataclasses.asdict(limits).items():
        probe = probe.replace(name.upper(), str(value))
    return probe


def _explain(sandbox: str, python: str, reason: str) -> str:
    kind, _ = split_setting(sandbox)
    settings, place = f"reward.sandbox ({sandbox!r})", "by the service"
    if kind not in REMOTE:
        settings, place = f"{settings}, reward.python ({python!r})", "on this machine"
    return (
        f"{settings}: programs cannot be isolated {place}: {reason}. {_NEEDS[kind]}; "
        "docs/sandbox.md says how to test each. reward.kind='code' cannot run without it"
    )


__all__ = ["check_sandbox"]
