from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.launch.freeze import freeze
from tests.messages import mentions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository: package and script committed, another file ignored."""
    root = tmp_path / "checkout"
    for name, text in {
        ".gitignore": "slurm/site.sh\n",
        "README.md": "not needed by a job",
        "gapo_megatron/__init__.py": "version = 'committed'\n",
        "slurm/launch.sh": "#!/bin/bash\n",
        "tools/jobs.py": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "slurm" / "launch.sh").chmod(0o755)
    (root / "gapo_tools").symlink_to("tools")
    git(root.parent, "init", "--quiet", "--initial-branch=trunk", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=first")
    return root


def files_of(folder: Path) -> dict[str, str]:
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    found.pop("code.json")
    return found


def test_copies_what_a_job_reads_as_it_is_now(checkout: Path, tmp_path: Path) -> None:
    (checkout / "gapo_megatron" / "__init__.py").write_text("version = 'edited'\n")
    (checkout / "gapo_megatron" / "new.py").write_text("# untracked\n")
    (checkout / "slurm" / "site.sh").write_text("# ignored by git, needed by launch.sh\n")
    (checkout / "gapo_megatron" / "__pycache__").mkdir()
    (checkout / "tools" / "linked.py").symlink_to("../README.md")
    # What an editor keeps beside a file, and what has no content.
    (checkout / "tools" / ".#jobs.py").symlink_to("somebody@host.1234:1700000000")
    for name in (".jobs.py.swp", "jobs.py~"):
        (checkout / "tools" / name).touch()
    (checkout / "tools" / "gone.py").symlink_to("../nowhere")
    os.mkfifo(checkout / "slurm" / "pipe")
    code = tmp_path / "runs" / "a" / "code" / "17"
    freeze(checkout, code, config="[run]\n")
    frozen = files_of(code)
    assert frozen == {
        "gapo_megatron/__init__.py": "version = 'edited'\n",
        "gapo_megatron/new.py": "# untracked\n",
        "slurm/launch.sh": "#!/bin/bash\n",
        "slurm/site.sh": "# ignored by git, needed by launch.sh\n",
        "tools/jobs.py": "",
        "tools/linked.py": "not needed by a job",
        "config.toml": "[run]\n",
    }
    assert (code / "slurm" / "launch.sh").stat().st_mode & 0o111
    assert (code / "gapo_tools").resolve() == code / "tools"
    # What happens to the checkout afterwards does not reach it.
    git(checkout, "checkout", "--quiet", "--", ".")
    (checkout / "gapo_megatron" / "new.py").unlink()
    assert files_of(code) == frozen


def test_a_folder_that_lies_elsewhere_is_copied(checkout: Path, tmp_path: Path) -> None:
    configs = tmp_path / "shared"
    configs.mkdir()
    (configs / "mine.toml").write_text("as it is now")
    (checkout / "configs").symlink_to("../shared")
    freeze(checkout, tmp_path / "code", config="")
    (configs / "mine.toml").unlink()
    assert (tmp_path / "code" / "configs" / "mine.toml").read_text() == "as it is now"


def test_a_copy_without_its_link_is_refused(checkout: Path, tmp_path: Path) -> None:
    """Otherwise the job would take another checkout's tools, or none."""
    (checkout / "gapo_tools").unlink()
    with pytest.raises(ConfigError, match=mentions("gapo_tools", "ln -s tools gapo_tools")):
        freeze(checkout, tmp_path / "code", config="")
    assert not (tmp_path / "code").exists()


def test_says_where_the_code_came_from(checkout: Path, tmp_path: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    before = time.time()
    freeze(checkout, tmp_path / "clean", config="")
    (checkout / "slurm" / "new.sh").write_text("")
    freeze(checkout, tmp_path / "changed", config="")
    clean, changed = (
        json.loads((tmp_path / name / "code.json").read_text()) for name in ("clean", "changed")
    )
    assert before <= clean.pop("unix_s") <= changed.pop("unix_s") <= time.time()
    assert clean == {"commit": commit, "branch": "trunk", "has_local_changes": False}
    assert changed == clean | {"has_local_changes": True}


def test_leaves_git_alone(checkout: Path, tmp_path: Path) -> None:
    """Also while another program holds git's lock, and though the index is out of date."""
    (checkout / "gapo_megatron" / "__init__.py").touch()
    lock = checkout / ".git" / "index.lock"
    lock.touch()
    before = {path: path.stat().st_mtime_ns for path in (checkout / ".git").rglob("*")}
    freeze(checkout, tmp_path / "code", config="")
    assert {path: path.stat().st_mtime_ns for path in (checkout / ".git").rglob("*")} == before


@pytest.mark.parametrize("inside", ["nothing", "another checkout"])
def test_without_git_the_origin_is_unknown(checkout: Path, tmp_path: Path, inside: str) -> None:
    installed = (checkout if inside == "another checkout" else tmp_path) / "lib" / "site-packages"
    (installed / "gapo_megatron").mkdir(parents=True)
    (installed / "gapo_megatron" / "__init__.py").write_text("")
    freeze(installed, tmp_path / "code", config="")
    origin = json.loads((tmp_path / "code" / "code.json").read_text())
    origin.pop("unix_s")
    assert origin == {"commit": None, "branch": None, "has_local_changes": None}
    assert files_of(tmp_path / "code") == {"gapo_megatron/__init__.py": "", "config.toml": ""}


def test_a_checkout_that_cannot_be_copied_leaves_no_draft(checkout: Path, tmp_path: Path) -> None:
    (checkout / "slurm" / "damaged").symlink_to("/proc/self/mem")  # reading it is an EIO
    with pytest.raises(ConfigError, match=mentions(checkout, "damaged")):
        freeze(checkout, tmp_path / "run" / "code" / "17", config="")
    assert list((tmp_path / "run" / "code").iterdir()) == []
