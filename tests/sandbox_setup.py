"""Tests that run programs need a machine that can isolate them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.sandbox import SYSTEM_PYTHON, Limits
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome, Verdict
from tests.needs import needs
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
PATIENT = {"cpu_s": 60, "wall_s": 300, "total_s": 300}
"""Limits of a program that is not about them: a busy machine is never late for these."""
SUM = {"inputs": ["3 4\n", "10 20\n"], "outputs": ["7\n", "30\n"]}
CORRECT = Verdict(Outcome.CORRECT)


def _obstacle(sandbox: str) -> str:
    try:
        check_sandbox(sandbox=sandbox, python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))
    except ConfigError as error:
        return str(error)
    return ""


OBSTACLE = _obstacle("bubblewrap")
needs_sandbox = needs(OBSTACLE)


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def judge(program: str, tests: object, *, sandbox: str = "bubblewrap", **limits: int) -> Verdict:
    """The verdict on a program of that response, with patient limits unless others are given."""
    return verify(fenced(program), json.dumps(tests), sandbox=sandbox, limits=PATIENT | limits)


def wait_until_gone(marker: str) -> None:
    wait_until(lambda: not processes_with(marker), "the end of a sandbox's processes")


def open_to_everyone(folder: Path) -> None:
    """Let every user of the machine reach a folder of ours: sandboxes of root are not root's."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)


def processes_with(marker: str) -> list[int]:
    """Processes of this machine whose command line holds the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in command:
            found.append(int(path.parent.name))
    return found


@contextmanager
def running_server(
    home: Path, *options: str, num_programs: int, host: str = "127.0.0.1"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with its secret in a home folder: its process, and `reward.sandbox` for it."""
    command = [sys.executable, str(ROOT / "tools/serve_sandboxes.py"), "--host", host]
    command += ["--port", "0", "--num-programs", str(num_programs), *options]
    environment = os.environ | {"HOME": str(home)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


def make_image(folder: Path) -> None:
    """Copy the system's Python, and the libraries it needs, into an image of Apptainer's."""
    for name in ("usr/bin", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home", "etc"):
        (folder / name).mkdir(parents=True)
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    asked = subprocess.run([SYSTEM_PYTHON, "-c", code], capture_output=True, text=True, check=True)
    library = Path(asked.stdout.strip())
    shutil.copytree(library, f"{folder}{library}", ignore=shutil.ignore_patterns("test", "config*"))
    programs = [SYSTEM_PYTHON, "/usr/bin/env"]
    for path in programs:
        shutil.copy(path, f"{folder}{path}")
    programs += map(str, library.glob("lib-dynload/*.so"))
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for path in set(re.findall(r"(/lib\S+) \(", listed)):
        Path(f"{folder}{path}").parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, f"{folder}{path}")


@pytest.fixture(scope="module")
def bubblewrap() -> str:
    """`reward.sandbox`."""
    return "bubblewrap"


@pytest.fixture(scope="module")
def apptainer() -> Iterator[str]:
    """`reward.sandbox`, with an image; skips where Apptainer is not here, or cannot isolate."""
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not on PATH")
    # Not in pytest's folder, which every run of the same user closes to others again.
    with tempfile.TemporaryDirectory(prefix="gapo-image-") as name:
        Path(name).chmod(0o755)
        make_image(Path(name))
        sandbox = f"apptainer:{name}"
        if obstacle := _obstacle(sandbox):
            pytest.skip(obstacle)
        yield sandbox


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`reward.sandbox`, of a server with one place on this machine."""
    home = tmp_path_factory.mktemp("home")
    with running_server(home, num_programs=1) as (_, sandbox), pytest.MonkeyPatch.context() as here:
        here.setenv("HOME", str(home))
        yield sandbox
