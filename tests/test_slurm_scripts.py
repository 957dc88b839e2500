"""The batch scripts: valid bash, consistent resources, and a dry run that needs no Slurm."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("slurm/*.sbatch"), *ROOT.glob("slurm/*.sh"), *ROOT.glob("tools/*.sh")])
BATCH = [path for path in SCRIPTS if path.suffix == ".sbatch"]


def directives_of(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", path.read_text(), re.MULTILINE))


def without_launcher_variables(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
    return {k: v for k, v in kept.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | extra


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_one_task_per_gpu_and_nothing_hidden(path: Path) -> None:
    directives = directives_of(path)
    assert directives["ntasks-per-node"] == directives["gpus-per-node"]
    assert {"nodes", "time", "output", "requeue"} <= set(directives)
    # Tasks need to see each other's GPUs for peer-to-peer transfers.
    assert "gpus-per-task" not in directives
    assert "torchrun" not in path.read_text()


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_dry_run_without_slurm_from_any_folder(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(path), "run.seed=7"],
        env=without_launcher_variables(DRY_RUN="1", PYTHON=sys.executable),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "seed = 7" in done.stdout
    tasks = int(directives_of(path)["nodes"]) * int(directives_of(path)["ntasks-per-node"])
    assert f"{tasks} = tensor" in done.stdout


def test_launch_outside_a_job_explains_itself() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / "launch.sh"), "configs/ds_r1_1_5b/gapo.toml"],
        env=without_launcher_variables(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "not in a Slurm job: use sbatch, or DRY_RUN=1\n",
    )


def test_launch_starts_one_srun_with_the_overrides(tmp_path: Path) -> None:
    """A stand-in for srun writes down how it was called."""
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "12",
    }
    done = subprocess.run(
        ["bash", "slurm/launch.sh", "configs/ds_r1_1_5b/gapo.toml", "run.output_dir=a b"],
        env=without_launcher_variables(PYTHON=sys.executable, **job)
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == [
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--label",
        "--cpus-per-task=12",
        sys.executable,
        "-m",
        "gapo_megatron.train",
        "configs/ds_r1_1_5b/gapo.toml",
        "run.output_dir=a b",
    ]
