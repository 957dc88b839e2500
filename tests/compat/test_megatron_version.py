"""A Megatron-core that is too old is refused before anything is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from gapo_megatron.compat.megatron_version import version
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
CHECK = """\
from gapo_megatron.launch.node_checks import check_packages
check = check_packages()
raise SystemExit(None if check.ok else check.detail)
"""
INFO = "MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = {!r}\n"


def with_megatron(
    folder: Path, numbers: tuple[int, int, int, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')")
    (core / "package_info.py").write_text(INFO.format(*numbers))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-m", "gapo_megatron.train", str(ROOT / "configs" / "demo.toml")), 2),
        (("-c", CHECK), 1),
    ],
    ids=["run", "preflight and doctor"],
)
def test_an_older_one_is_refused(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    result = with_megatron(tmp_path, (0, 19, 1, ""), *arguments)
    assert re.search(mentions("megatron-core", "0.19.1", "0.19.2"), result.stderr)
    assert "Traceback" not in result.stderr
    assert result.returncode == code


def test_newer_ones_are_taken(tmp_path: Path) -> None:
    assert with_megatron(tmp_path, (0, 20, 0, "rc1"), "-c", CHECK).returncode == 0


def test_the_version_is_not_that_of_a_repository_around_it() -> None:
    assert version() == megatron.core.__version__.partition("+")[0]
