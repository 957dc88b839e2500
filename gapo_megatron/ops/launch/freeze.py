"""The code of a job, copied when it is submitted: editing the checkout later never changes the job.

Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, DataError, shown
from gapo_megatron.io.documents import read_json

ROOMS = ("gapo_megatron", "slurm", "tools", "configs")
"""Folders of a checkout that a job reads."""


def repository() -> Path:
    """The checkout that this module was imported from."""
    return Path(__file__).resolve().parents[3]


def freeze(repository: Path, folder: Path, *, config: str) -> None:
    """Copy the code into `folder`, with the resolved config: whole, or not there at all.

    The files are copied as they are, not as git knows them: uncommitted changes, new files and the
    git-ignored slurm/site.sh are part of what is run, and jobs that start together do not meet at
    git's lock. code.json tells where they came from.

    Args:
        repository: a checkout, or a folder with the package alone (installed, in a container).
        folder: must not exist yet; its parents need not.
        config: text of `config.toml`.

    Raises:
        ConfigError: something in the checkout cannot be copied, or the folder not be written.
    """
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for room in ROOMS:
            if (repository / room).is_dir():
                shutil.copytree(
                    repository / room, draft / room, ignore=shutil.ignore_patterns("__pycache__")
                )
        (draft / "config.toml").write_text(config, encoding="utf-8")
        origin = json.dumps(_origin(repository), indent=1)
        (draft / "code.json").write_text(origin + "\n", encoding="utf-8")
        draft.rename(folder)
    except OSError as error:  # also copytree's, of several files
        shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(
            f"the code of {repository} cannot be copied to {folder}: {error}"
        ) from None


def frozen_code(folder: Path) -> str:
    """Identifier of frozen code: its commit, and a digest where the commit does not tell all.

    Args:
        folder: the folder as `freeze` left it.

    Returns:
        `1a2b3c4d5e6f`; where files differ from the commit, or it is not known, with a digest of the
        package: `1a2b3c4d5e6f+01234567`, `+01234567`.

    Raises:
        FileNotFoundError: there is no code.json.
        DataError: it is damaged.
    """
    path = folder / "code.json"
    origin = read_json(path, error=DataError)
    commit = origin.get("commit") if isinstance(origin, dict) else 0
    if not isinstance(commit, str | None):
        raise DataError(f"{path}: commit ({shown(commit)}) must be that of a checkout, or null")
    commit = (commit or "")[:12]
    if commit and not origin.get("has_local_changes"):
        return commit
    digest = hashlib.sha256()
    package = folder / "gapo_megatron"
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{commit}+{digest.hexdigest()[:8]}"


def _origin(repository: Path) -> dict[str, Any]:
    """Commit, branch, and whether the files differ from it; None where git knows nothing."""
    origin = dict.fromkeys(("commit", "branch", "has_local_changes"))
    known = _git(repository, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
    # A package installed below some other checkout does not come from its commit.
    if known is not None and Path(known.splitlines()[0]).samefile(repository):
        _, origin["commit"], origin["branch"] = known.splitlines()
        origin["has_local_changes"] = bool(_git(repository, "status", "--porcelain", "--", *ROOMS))
    return origin | {"unix_s": time.time()}


def _git(repository: Path, *arguments: str) -> str | None:
    # Without optional locks: `git status` would refresh the index of a checkout others work in.
    command = ["git", "--no-optional-locks", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout
