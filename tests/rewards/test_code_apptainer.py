"""Programs behind Apptainer's walls. `test_code_hostile` attacks them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.sandbox import SYSTEM_PYTHON, Limits, SandboxError, process
from gapo_megatron.rewards.sandbox.apptainer import empty_folder
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome
from tests.messages import mentions
from tests.sandbox_setup import (
    PATIENT,
    ROOT,
    SUM,
    apptainer,
    judge,
    processes_with,
    wait_until_gone,
)

__all__ = ["apptainer"]  # a fixture

ASSERTS = {"test_list": ["assert add(3, 4) == 7"]}
SMALL = Limits(memory_mib=128)


def test_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=mentions("reward.sandbox", "PATH", "docs/sandbox.md")):
        check_sandbox(sandbox="apptainer:/image", python=SYSTEM_PYTHON, limits=SMALL)


@pytest.mark.parametrize("trap", ["a link", "a file in it", "open to all", "another user's"])
def test_an_empty_folder_that_another_user_may_have_made_is_refused(tmp_path, monkeypatch, trap):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    empty = Path(empty_folder())
    assert Path(empty_folder()) == empty  # it stays
    if trap == "a link":
        empty.rename(tmp_path / "there")
        empty.symlink_to(tmp_path / "there")
    elif trap == "a file in it":
        (empty / "file").touch()
    elif trap == "open to all":
        empty.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(empty, 65534, 65534)
    else:
        pytest.skip("only root can make another user's folder")
    with pytest.raises(SandboxError, match=mentions(empty, "remove")):
        empty_folder()


def test_an_image_that_is_not_there_is_named(apptainer):
    with pytest.raises(ConfigError, match=r"/nonexistent"):
        check_sandbox(sandbox="apptainer:/nonexistent", python=SYSTEM_PYTHON, limits=SMALL)
    with pytest.raises(ConfigError, match=mentions("reward.python", "/no/python")):
        check_sandbox(sandbox=apptainer, python="/no/python", limits=SMALL)


@pytest.mark.parametrize(
    ("program", "tests", "outcome"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", SUM, Outcome.CORRECT),
        ("print(8)", SUM, Outcome.WRONG),
        ("def add(a, b): return a + b", ASSERTS, Outcome.CORRECT),
        ("import os\nos._exit(0)", ASSERTS, Outcome.WRONG),
        # Nothing stays from one test to the next, wherever it was left.
        (
            "import os\nfor f in ('/tmp', '/dev', '/var/tmp', '/dev/shm', '/dev/mqueue', '/etc'):\n"
            "    try: open(f + '/left', 'x')\n    except FileExistsError: os._exit(1)\n"
            "    except OSError: pass\nprint(sum(map(int, input().split())))",
            SUM,
            Outcome.CORRECT,
        ),
    ],
)
def test_programs_are_judged(apptainer, program, tests, outcome):
    assert judge(program, tests, sandbox=apptainer).outcome is outcome


@pytest.mark.parametrize(
    ("option", "num_parts", "instead", "wall"),
    [
        ("--bind", 2, [], "outside /tmp"),
        ("--no-init", 1, [], "sockets"),
        ("--pwd", 1, ["--bind", f"{ROOT}:/mnt:ro", "--pwd"], "files of the machine"),
    ],
)
def test_a_wall_that_is_missing_is_named(apptainer, monkeypatch, option, num_parts, instead, wall):
    original = process.apptainer.walls

    def walls(image: str) -> list[str]:
        parts = original(image)
        place = parts.index(option)
        return [*parts[:place], *instead, *parts[place + num_parts :]]

    monkeypatch.setattr(process.apptainer, "walls", walls)
    with pytest.raises(ConfigError, match=mentions("reward.sandbox", wall)):
        check_sandbox(sandbox=apptainer, python=SYSTEM_PYTHON, limits=SMALL)


def test_a_tmp_that_is_smaller_than_promised_is_refused(apptainer):
    with pytest.raises(ConfigError, match=mentions("/tmp", "disk_mib")):
        check_sandbox(
            sandbox=apptainer, python=SYSTEM_PYTHON, limits=Limits(memory_mib=128, disk_mib=9999)
        )


def test_nothing_is_left_when_the_judge_is_killed(apptainer):
    script = (
        "from gapo_megatron.rewards.sandbox import *\n"
        f"limits = Limits(disk_mib=53, **{PATIENT})\n"
        f"box = start_sandbox(limits, sandbox={apptainer!r}, python=SYSTEM_PYTHON)\n"
        # No limit of its own ends it.
        "box.send({'program': 'import time; time.sleep(3600)', 'prelude': ''})\n"
        "box.send({'stdin': ''})\nprint('started', flush=True)\nbox.receive()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as judging:
        assert judging.stdout
        assert judging.stdout.readline() == b"started\n"
        assert processes_with('"disk_mib": 53')
        judging.kill()
    wait_until_gone('"disk_mib": 53')


def test_an_image_in_one_file_serves_too(apptainer, tmp_path):
    if not os.access("/dev/fuse", os.W_OK) or shutil.which("mksquashfs") is None:
        pytest.skip("needs mksquashfs and a /dev/fuse that may be used")
    if Path("/dev/fuse").stat().st_mode & 0o006 != 0o006:
        pytest.skip("/dev/fuse is closed to ordinary users")
    image = f"{apptainer.partition(':')[2]}.sif"
    build = ["apptainer", "--quiet", "build", image, apptainer.partition(":")[2]]
    subprocess.run(build, check=True, capture_output=True)
    try:
        check_sandbox(sandbox=f"apptainer:{image}", python=SYSTEM_PYTHON, limits=SMALL)
        loop = "while True: pass"
        verdict = judge(loop, SUM, sandbox=f"apptainer:{image}", cpu_s=1)
        assert verdict.outcome is Outcome.WRONG
        assert "CPU time" in verdict.reason
        wait_until_gone("squashfuse")
    finally:
        os.unlink(image)
