#!/usr/bin/env python3
"""Stands in for the interpreter of slurm/launch.sh: honours the attempt folder, trains nothing.

RUN_DIR        the run folder
ACTIONS        what the ranks of attempt 0, 1, ... do, by comma; the last one from there on
STEPS          how many steps make the run finished, of 0.1 s each (default 3)
SAVE_S         how long a stop takes (default 0)
BAD_NODES      nodes whose check says nothing
GENERATION     how many of the ranks only generate (default 0)
BANNER         what prepare says before its lines
PREPARE_EXIT   exit code of prepare
SHOW           variables that the ranks print
SLOW           the program that waits for RUN_DIR.go, from RUN_DIR.waits on: prepare or preflight
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def prepare(arguments: list[str]) -> int:
    """Print what launch.sh reads; freeze a copy of slurm/ as the job's code."""
    if code := int(os.environ.get("PREPARE_EXIT", "0")):
        print("error: stand-in config", file=sys.stderr)
        return code
    run_dir = Path(os.environ["RUN_DIR"])
    frozen = os.environ.get("GAPO_CODE")
    code_dir = Path(frozen or run_dir / "code" / arguments[arguments.index("--job") + 1])
    if not code_dir.exists():
        shutil.copytree(Path(os.environ["PYTHONPATH"].split(":")[0]) / "slurm", code_dir / "slurm")
        (code_dir / "config.toml").write_text(" ".join(arguments) + "\n")
    print(os.environ.get("BANNER", ""), run_dir, code_dir, sep="\n")
    print("finished" if (run_dir / "finished.json").exists() else "unfinished")
    print(os.environ.get("GENERATION", "0"))
    return 0


def preflight(arguments: list[str]) -> int:
    """Say that this node is well, or nothing."""
    node = os.environ["SLURMD_NODENAME"]
    if node not in os.environ.get("BAD_NODES", "").split():
        (Path(arguments[arguments.index("--output") + 1]) / f"{node}.ok").touch()
    return 0


def prepared(arguments: list[str]) -> int:
    """What PREPARE names: leave a mark, with what a launcher would have said of the ranks."""
    try:
        Path(arguments[0]).write_text(os.environ.get("WORLD_SIZE", ""))
    except FileNotFoundError:
        return 1
    return 0


def postmortem(arguments: list[str]) -> int:
    """Show what launch.log has; exit codes 2 and 3 are not worth a retry."""
    lines = (Path(arguments[0]) / "launch.log").read_text().splitlines()
    print("postmortem:", lines[0] if lines else "nothing")
    return 4 if lines and lines[0].endswith(("exit code 2", "exit code 3")) else 0


def train() -> None:
    """Be one rank; the last rank is the one that fails."""
    run_dir, attempt = Path(os.environ["RUN_DIR"]), Path(os.environ["GAPO_ATTEMPT_DIR"])
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
    actions = os.environ.get("ACTIONS", "train").split(",")
    number = int(os.environ["GAPO_ATTEMPT"].rpartition(".")[2].partition("-")[0])
    action, _, value = actions[min(number, len(actions) - 1)].partition(":")
    for name in os.environ.get("SHOW", "").split():
        print(f"{name}={os.environ.get(name)}")
    print(f"rank {rank} of {size}: {action} {value}".strip(), flush=True)
    if action == "lose" and rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("train", "lose"):
        _steps(run_dir, attempt, rank)
    if action == "save":  # one step more, then crash
        steps = len(list((run_dir / "checkpoints").glob("step_*")))
        (run_dir / "checkpoints" / f"step_{steps + 1:08d}").mkdir(parents=True, exist_ok=True)
    if action == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action == "parent":  # as vLLM may be, of processes that outlive it
        child = subprocess.Popen(["sleep", "infinity"])
        (attempt / f"child_{rank}").write_text(str(child.pid))
    (attempt / f"ready_{rank}").touch()
    if rank == size - 1:
        while len(list(attempt.glob("ready_*"))) < size:
            time.sleep(0.02)
        if action in ("exit", "save", "deaf", "parent"):
            os._exit(int(value))
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while action == "wait":  # for a request to stop, and fail
            time.sleep(0.02)
            if (attempt / "stop").exists():
                os._exit(int(value))
    if action == "quit":
        sys.exit(0)
    time.sleep(3600)


def _steps(run_dir: Path, attempt: Path, rank: int) -> None:
    done = run_dir / "steps.log"
    while True:
        steps = len(done.read_text().splitlines()) if done.exists() else 0
        finished = steps >= int(os.environ.get("STEPS", "3"))
        if finished or (attempt / "stop").exists():
            time.sleep(0 if finished else float(os.environ.get("SAVE_S", "0")))
            break
        time.sleep(0.1)
        if rank == 0:
            with done.open("a") as log:
                log.write(f"{steps + 1} {attempt.name}\n")
    if rank == 0:
        if finished:
            (run_dir / "finished.json").touch()
        (attempt / "outcome").write_text("finished\n" if finished else "stopped\n")
    sys.exit(0)


def main() -> None:
    """Dispatch on the module that follows -m; a program that follows -c is run as it is."""
    if sys.argv[1] == "-c":
        exec(sys.argv[2])
        return
    module, arguments = sys.argv[2], sys.argv[3:]
    if module == "gapo_megatron.train":
        train()
    name = module.rpartition(".")[2]
    if os.environ.get("SLOW") == name:
        run_dir = Path(os.environ["RUN_DIR"])
        run_dir.with_suffix(".waits").touch()
        while not run_dir.with_suffix(".go").exists():
            time.sleep(0.02)
    program = {
        "prepare": prepare,
        "preflight": preflight,
        "postmortem": postmortem,
        "prepared": prepared,
    }
    sys.exit(program[name](arguments))


if __name__ == "__main__":
    main()
