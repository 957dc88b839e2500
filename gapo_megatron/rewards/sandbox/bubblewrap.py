"""The command line with which bubblewrap isolates a program."""

from __future__ import annotations

import os
import shutil

from gapo_megatron.rewards.sandbox.base import Limits, SandboxError
from gapo_megatron.rewards.sandbox.interpreter import ENVIRONMENT, ask_interpreter

_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")


def walls(limits: Limits, *, python: str) -> list[str]:
    """The command that isolates the command after it.

    Args:
        limits: limits of the program; `disk_mib` is the size of its /tmp.
        python: interpreter of the programs, which is mounted.

    Raises:
        SandboxError: `python` does not run or would be hidden, or bubblewrap is not installed.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("the sandbox cannot start: bwrap (bubblewrap) is not on PATH")
    return [
        bwrap,
        *("--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
        *(part for item in ENVIRONMENT.items() for part in ("--setenv", *item)),
        *_mounts(python),
        *("--proc", "/proc", "--dir", "/dev"),
        *(
            part
            for name in ("null", "full", "random", "urandom")
            for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
        ),
        # It reads the same, but mapping the real /dev/zero gives shared memory without a limit.
        *("--dev-bind", "/dev/full", "/dev/zero"),
        *("--symlink", "/proc/self/fd", "/dev/fd"),
        *("--symlink", "/proc/self/fd/0", "/dev/stdin"),
        *("--symlink", "/proc/self/fd/1", "/dev/stdout"),
        *("--symlink", "/proc/self/fd/2", "/dev/stderr"),
        *("--size", str(limits.disk_mib * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/", "--"),
    ]


def _mounts(python: str) -> list[str]:
    """Read-only: the interpreter, its prefix unless that is /usr, and the shared libraries."""
    interpreter = ask_interpreter(python)
    prefixes = [path for path in interpreter.prefixes if path != "/usr"]
    mounts: list[str] = []
    for path in _LIBRARIES:
        if os.path.islink(path):
            mounts += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            mounts += ["--ro-bind", path, path]
    if hidden := [path for path in (python, *prefixes) if path.startswith("/tmp/")]:
        raise SandboxError(
            f"{hidden[0]} must not be in /tmp: programs have a private /tmp, which hides it"
        )
    links = {os.path.realpath(python)}
    for path in (python, interpreter.executable):
        while os.path.islink(path):  # such as the interpreter of a virtual environment
            links.add(path)
            path = os.path.join(os.path.dirname(path), os.readlink(path))
    outside = [path for path in links if not any(path.startswith(f"{p}/") for p in prefixes)]
    for path in [*prefixes, *outside]:
        mounts += ["--ro-bind", path, path]
    return mounts


__all__ = ["walls"]
