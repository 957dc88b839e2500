"""A study whose runs train nothing: what tests of tools/submit.py share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
SUBMIT = [sys.executable, str(ROOT / "tools" / "submit.py")]

# One rank: a step is 0.05 s and a line of metrics. What a run is told to do comes with its seed:
# EVENTS="1:exit 7" makes rank 1 of seed 1 end so, once; "2:deaf" makes seed 2 never stop. While the
# file HOLD exists, no run gets beyond step 10: what befalls it finds it running.
_TRAINER = r"""
import json, os, sys, time, tomllib
from pathlib import Path

run = tomllib.loads(Path(sys.argv[1]).read_text())["run"]
run_dir, attempt = Path(run["output_dir"]), Path(os.environ["GAPO_ATTEMPT_DIR"])
(run_dir / "config.toml").write_bytes(Path(sys.argv[1]).read_bytes())
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
events = dict(one.split(":") for one in os.environ.get("EVENTS", "").split(",") if one)
event = events.get(str(run["seed"]), "")
print(json.dumps({"config": sys.argv[1], **os.environ}), flush=True)
hold = Path(os.environ.get("HOLD", "/dev/null/none"))
checkpoints = run_dir / "checkpoints"
checkpoints.mkdir(exist_ok=True)
step = len(list(checkpoints.iterdir()))
while step < run["num_steps"] and not ((attempt / "stop").exists() and event != "deaf"):
    time.sleep(0.05)
    if step == 10 and hold.exists():
        continue
    if event.startswith("exit") and step == 3 and not (run_dir / "met").exists():
        if rank == 1:
            (run_dir / "met").touch()
            os._exit(int(event.split()[1]))
        continue  # rank 1 may come late
    if rank == 0:
        metrics = {"reward/mean": step / 100, "eval/pass@1": 0.5}
        for name, values in (("metrics", metrics), ("timings", {"time/step_s": 2})):
            with (run_dir / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        (checkpoints / f"step_{step + 1:08d}").mkdir()
    step += 1
if rank == 0:
    finished = step == run["num_steps"]
    if finished:
        (run_dir / "finished.json").write_text(json.dumps({"num_steps": step}))
    (attempt / "outcome").write_text("finished\n" if finished else "stopped\n")
"""


def stand_in_python(folder: Path) -> Path:
    """An interpreter that is the real one for all but training."""
    trainer, python = folder / "trainer.py", folder / "python"
    trainer.write_text(_TRAINER)
    python.write_text(
        "#!/bin/bash\n"
        f'[ "$2" != gapo_megatron.train ] || exec {sys.executable} -u {trainer} "$3"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """Of a tools/submit.py whose jobs use the stand-in; no launcher's variables."""
    foreign = re.compile(
        r"(SLURM|SBATCH|GAPO)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|EVENTS|HOLD"
        r"|GENERATION_NODES"
    )
    kept = {name: value for name, value in os.environ.items() if not foreign.fullmatch(name)}
    ours = {"PYTHON": str(stand_in_python(folder)), "CHECK_NODES": "0", "SITE_FILE": os.devnull}
    return kept | ours | changes


def write_study(
    folder: Path, *, num_runs: int, num_steps: int, tasks: int = 2, more: str = ""
) -> Path:
    """A study of seeds 0, 1, ... in `folder`/runs/seed_0, ..., and of what `more` lists."""
    (folder / "config.toml").write_text(
        f'base = "{ROOT}/configs/demo.toml"\n[run]\nnum_steps = {num_steps}\n'
    )
    path = folder / "study.toml"
    path.write_text(
        'config = "config.toml"\n'
        'output_dir = "runs"\n'
        f"[grid]\nrun.seed = {list(range(num_runs))}\n{more}"
        f"[resources]\ntasks_per_node = {tasks}\ngpus_per_node = 0\ncpus_per_task = 1\n"
        "exclusive = false\n"
    )
    return path


def steps_of(run_dir: Path) -> list[int]:
    """Steps in the order of the run's metrics."""
    return [
        int(line.split()[1].rstrip(","))
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def submit(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run tools/submit.py in `folder` to its end."""
    return subprocess.run(
        [*SUBMIT, *arguments],
        cwd=folder,
        env=environment(folder, **changes),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
