from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.launch import prepare as module
from gapo_megatron.launch.prepare import prepare
from tests.messages import mentions
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.toml")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "gapo_megatron.launch.prepare"),
            *("--ranks-per-node=1", *arguments),
        ],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


Here = Callable[..., list[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The lines of the command, in this process: errors are raised."""
    monkeypatch.setattr(module, "fail_fast", contextlib.nullcontext)

    def call(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["prepare", "--ranks-per-node=1", *arguments])
        module.main()
        return capsys.readouterr().out.splitlines()

    return call


def test_command_line_prints_four_lines_and_freezes(tmp_path: Path, here: Here) -> None:
    run_dir = tmp_path / "a run"
    arguments = [DEMO, f"run.output_dir={run_dir}", "run.seed=3", "--world-size=2", "--job=17"]
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    code = run_dir / "code" / "17"
    assert done.stdout.splitlines() == [str(run_dir), str(code), "unfinished", "0"]
    assert load_config(code / "config.toml") == load_config(DEMO, arguments[1:3])
    assert (code / "gapo_megatron" / "train.py").is_file()

    (run_dir / "finished.json").write_text(json.dumps({"num_steps": 250}))
    assert here(*arguments)[2] == "finished"
    # The folder belongs to a longer run now: not finished.
    (run_dir / "OWNER").touch()
    (run_dir / "checkpoints/step_00000250").mkdir(parents=True)
    assert here(*arguments[:-1], "run.num_steps=251", "--job=18")[2] == "unfinished"
    sides = here(*arguments[:-1], "rollout.generation_nodes=1", "--job=19")
    assert sides[3] == "1", "ranks that only generate, of two nodes of one rank each"


def test_a_config_that_cannot_run_exits_2_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(DEMO, f"run.output_dir={run_dir}", "run.sed=1", "--world-size=3", "--job=17")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(mentions("run.sed", "'seed'"), done.stderr)
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "parallel.tensor_model_parallel_size=2",
            ("world size", 3, "parallel.tensor_model_parallel_size", 2),
        ),
        ("rollout.tensor_parallel_size=2", ("rollout.tensor_parallel_size", 2, "world size", 3)),
        ("rollout.generation_nodes=3", ("rollout.generation_nodes (3)", "nodes (3)")),
    ],
)
def test_a_layout_that_the_ranks_do_not_divide_is_refused(
    tmp_path: Path, here: Here, override: str, named: tuple[object, ...]
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=mentions(*named)):
        here(DEMO, f"run.output_dir={run_dir}", override, "--world-size=3", "--job=17")
    assert not run_dir.exists()


def test_a_requeued_job_keeps_code_and_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_path = tmp_path / "config.toml"
    text = Path(DEMO).read_text().replace("runs/demo", "run")
    config_path.write_text(text)
    first, code = prepare(str(config_path), [], world_size=1, job="17")
    marker = code / "gapo_megatron" / "marker"
    marker.touch()
    config_path.write_text(text.replace("num_steps = 250", "num_steps = 9"))
    again = prepare(str(config_path), [], world_size=1, job="17", restarts=1)
    assert again == (first, code)
    assert marker.exists()
    # Another job of the same run takes what is there now; and so does another start in the job.
    for job, name in (("18", "18"), ("17", r"17-\d{8}T\d{6}-\d+")):
        second, other_code = prepare(str(config_path), [], world_size=1, job=job)
        assert second.run.num_steps == 9
        assert other_code.parent == code.parent and re.fullmatch(name, other_code.name)
    assert code == tmp_path / "run" / "code" / "17"


def test_a_job_frozen_at_submission_is_not_frozen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, code = prepare(DEMO, [f"run.output_dir={tmp_path}"], world_size=1, job="submitted")
    monkeypatch.setenv("GAPO_CODE", str(code))
    found = prepare(str(code / "config.toml"), [], world_size=1, job="17")
    assert found == (config, code)
    assert [path.name for path in code.parent.iterdir()] == ["submitted"]


@pytest.mark.parametrize(
    ("folder", "in_slurm", "character"),
    [("a:b", False, "':'"), ("a\nb", False, r"'\n'"), ("a%j", True, "'%'"), ("a%j", False, None)],
)
def test_a_folder_that_the_launcher_would_misread_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    in_slurm: bool,
    character: str | None,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
    overrides = [f"run.output_dir={tmp_path}/{folder}"]
    if character is None:
        prepare(DEMO, overrides, world_size=1, job="17")
        return
    with pytest.raises(ConfigError, match=mentions("run.output_dir", character)):
        prepare(DEMO, overrides, world_size=1, job="17")
    assert list(tmp_path.iterdir()) == []
