"""Frozen code: a job's copy of the checkout, so that later edits do not change the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError

ROOMS = ("gapo_megatron", "slurm", "tools", "gapo_tools", "configs")
"""Folders of a checkout that a job needs; `gapo_tools` is a link to `tools`."""

_SCRATCH = shutil.ignore_patterns("__pycache__", ".#*", "*.sw?", "*~")  # of Python, and of editors


def repository() -> Path:
    """The checkout that this module was imported from."""
    return Path(__file__).resolve().parents[2]


def freeze(repository: Path, folder: Path, *, config: str) -> None:
    """Copy code and resolved config into `folder`, completely or not at all.

    Files are copied as they are on disk, including uncommitted changes, new files and the
    git-ignored slurm/site.sh; jobs that start together do not compete for git's lock. code.json
    records where the files came from.

    Args:
        repository: a checkout, or a folder with only the package (installed, in a container).
        folder: must not exist; its parents are created.
        config: text of `config.toml`.

    Raises:
        ConfigError: a file cannot be copied, or the folder cannot be written, or the checkout is a
            copy without its link.
    """
    if (repository / "tools").is_dir() and not (repository / "gapo_tools").exists():
        raise ConfigError(
            f"{repository}/gapo_tools is missing, the link to tools that every copy of a checkout "
            "must have: ln -s tools gapo_tools"
        )
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for room in ROOMS:
            path = repository / room
            # A link to another room stays one. What other links lead to may change: it is copied.
            if path.is_symlink() and (target := os.readlink(path)) in ROOMS:
                (draft / room).symlink_to(target)
            elif path.is_dir():
                shutil.copytree(path, draft / room, ignore=_not_needed)
        (draft / "config.toml").write_text(config, encoding="utf-8")
        origin = json.dumps(_origin(repository), indent=1)
        (draft / "code.json").write_text(origin + "\n", encoding="utf-8")
        draft.rename(folder)
    except OSError as error:  # copytree's shutil.Error is one too
        shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(
            f"the code of {repository} cannot be copied to {folder}: {error}"
        ) from None


def _not_needed(folder: str, names: list[str]) -> set[str]:
    """Caches, editors' files, and what is neither file nor folder, as a pipe or a link to nothing.

    copytree's `ignore_dangling_symlinks` would also leave out relative links that lead somewhere.
    """
    paths = [Path(folder, name) for name in names]
    empty = {path.name for path in paths if not (path.is_file() or path.is_dir())}
    return empty | _SCRATCH(folder, names)


def _origin(repository: Path) -> dict[str, Any]:
    """Commit, branch, and whether files differ from the commit; None outside a git checkout."""
    origin = dict.fromkeys(("commit", "branch", "has_local_changes"))
    known = _git(repository, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
    # A package that is installed inside another checkout does not have that checkout's commit.
    if known is not None and Path(known.splitlines()[0]).samefile(repository):
        _, origin["commit"], origin["branch"] = known.splitlines()
        origin["has_local_changes"] = bool(_git(repository, "status", "--porcelain", "--", *ROOMS))
    return origin | {"unix_s": time.time()}


def _git(repository: Path, *arguments: str) -> str | None:
    # Without optional locks, because `git status` would rewrite the index of a shared checkout.
    command = ["git", "--no-optional-locks", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout
