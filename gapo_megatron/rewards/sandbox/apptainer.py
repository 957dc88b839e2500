"""The walls that Apptainer puts up, as its command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile

from gapo_megatron.rewards.sandbox.base import SandboxError
from gapo_megatron.rewards.sandbox.interpreter import ENVIRONMENT

_UNLIMITED = ("/dev/shm", "/dev/mqueue", "/var/tmp")
"""Where --contain puts memory that no limit counts, or that is not emptied after a test."""


def walls(image: str) -> list[str]:
    """The command that runs what follows it behind walls.

    A namespace of users, always: without one the kernel would count the trainer's own threads
    against a program's limit of processes.

    Args:
        image: a .sif file or a folder, with a Python and /usr/bin/env.

    Raises:
        SandboxError: Apptainer is not here, or the empty folder cannot be had.
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
        # Apptainer has variables of its own, which say where the image lies.
        *("/usr/bin/env", "-i", *(f"{name}={value}" for name, value in ENVIRONMENT.items())),
    ]


def empty_folder() -> str:
    """A folder that every user of the machine can read, and only we could fill.

    Made each time, for /tmp may be swept; one that is there may be another user's trap.
    """
    path = f"{tempfile.gettempdir()}/gapo-empty-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        found = os.lstat(path)  # of a link: that is none of ours
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & 0o022 or os.listdir(path):
            raise SandboxError(
                f"the sandbox cannot start: {path} must be an empty folder of ours that nobody "
                "else can write to; remove it"
            )
    except OSError as error:
        raise SandboxError(f"the sandbox cannot start: {error}") from None
    return path


__all__ = ["empty_folder", "walls"]
