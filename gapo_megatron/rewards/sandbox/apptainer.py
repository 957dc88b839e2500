"""The command line with which Apptainer isolates a program."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile

from gapo_megatron.rewards.sandbox.base import SandboxError
from gapo_megatron.rewards.sandbox.interpreter import ENVIRONMENT

_UNLIMITED = ("/dev/shm", "/dev/mqueue", "/var/tmp")
"""Folders that --contain backs with memory that no limit counts or that keeps files of a test."""


def walls(image: str) -> list[str]:
    """The command that isolates the command after it.

    It always uses a user namespace: otherwise the kernel would count the trainer's threads against
    a program's limit of processes.

    Args:
        image: a .sif file or a folder, with Python and /usr/bin/env.

    Raises:
        SandboxError: Apptainer is not installed, or the empty folder cannot be created.
    """
    apptainer = shutil.which("apptainer")
    if apptainer is None:
        raise SandboxError("the sandbox cannot start: apptainer is not on PATH")
    empty = empty_folder()
    return [
        *(apptainer, "--silent", "--nocolor", "exec"),
        *("--userns", "--containall", "--no-privs", "--net", "--network", "none"),
        *("--hostname", "sandbox", "--no-home", "--no-init", "--no-umask", "--no-eval"),
        *("--no-mount", "sys,devpts,home,cwd,bind-paths"),
        *("--bind", ",".join(f"{empty}:{path}:ro" for path in _UNLIMITED)),
        *("--pwd", "/tmp", image),
        # Apptainer sets variables of its own, which name the image.
        *("/usr/bin/env", "-i", *(f"{name}={value}" for name, value in ENVIRONMENT.items())),
    ]


def empty_folder() -> str:
    """An empty folder that every user can read, and only this user could fill.

    Created on every call, because /tmp may be cleaned. An existing one may be another user's trap.
    """
    path = f"{tempfile.gettempdir()}/gapo-empty-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        found = os.lstat(path)  # not through links
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & 0o022 or os.listdir(path):
            raise SandboxError(
                f"the sandbox cannot start: {path} must be an empty folder of this user that no "
                "other user can write to; remove it"
            )
    except OSError as error:
        raise SandboxError(f"the sandbox cannot start: {error}") from None
    return path


__all__ = ["empty_folder", "walls"]
