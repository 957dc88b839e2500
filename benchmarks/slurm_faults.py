"""Seconds that each fault costs a job, and the parts of its start-up: two Markdown tables.

    python benchmarks/slurm_faults.py [--only NAME ...]

Runs the demo's training on a private cluster of three emulated nodes (tests/slurm), with two ranks
on two of them, once for each fault. Needs slurm-wlm and munge, and root for the full disk. Takes 20
minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.training import (
    Training,
    damaged_checkpoints,
    differing_files,
    fill,
    make_checkout,
    small_disk,
)

HIT_IN_STEP = 5  # from 0; the newest checkpoint is of step 4, unless a save is hit
HANG_TIMEOUT_S = 40
FIRST_JOB = 141  # so that ports differ from those of concurrent tests

Hit = Callable[[Training], None]


@dataclass(frozen=True)
class Fault:
    """One way to hit a run.

    Attributes:
        stage: of the step in which it is hit.
        hit: does it.
        options: of sbatch.
        is_slow: Slurm takes longer than a stage to do it; rank 0 is held still meanwhile, and the
            seconds count from the end of that.
    """

    name: str
    stage: str
    hit: Hit
    options: tuple[str, ...] = ()
    is_slow: bool = False


def stop(run: Training) -> None:
    """Send the signal that Slurm sends ahead of a time limit."""
    run.cluster.run("scancel", "--batch", "--signal=USR1", run.job)


def preempt(run: Training) -> None:
    """Submit a job of a higher partition that needs every node."""
    options = ("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
    run.cluster.submit(*options, "--wrap=true")


def reach_time_limit(run: Training) -> None:
    """Move the time limit close; Slurm checks it every half minute and warns."""
    run.cluster.run("scontrol", "update", f"JobId={run.job}", "EndTime=now+120seconds")
    run.until_stop_asked()


def break_node(run: Training) -> None:
    """Remove the interpreter on a node; the rank on it dies."""
    bad_node_file(run).write_text(nodes(run)[1])
    run.kill(1, signal.SIGKILL)


def cancel(run: Training) -> None:
    """Cancel the job as a user does."""
    run.cluster.run("scancel", run.job)


def lose_run(run: Training) -> None:
    """Take the run as the launcher of another attempt does."""
    (run.run_dir / "OWNER").write_text("another.0\n")


FAULTS = (
    Fault("stop during generation", "rollout", stop),
    Fault("stop during update", "update", stop),
    Fault("stop during save", "checkpoint", stop),
    Fault("preemption", "update", preempt, options=("--partition=low",)),
    Fault("time limit", "rollout", reach_time_limit, is_slow=True),
    Fault("rank killed", "update", lambda run: run.kill(1, signal.SIGKILL)),
    Fault("rank hangs", "update", lambda run: run.kill(1, signal.SIGSTOP)),
    Fault("node lost", "update", lambda run: run.cluster.kill_node(nodes(run)[1])),
    Fault("first node lost", "update", lambda run: run.cluster.kill_node(nodes(run)[0])),
    Fault("bad node", "update", break_node),
    Fault("disk full", "checkpoint", lambda run: fill(filler(run), leave=2**22), is_slow=True),
    Fault("run taken over", "checkpoint", lose_run, is_slow=True),
    Fault("scancel then sbatch", "update", cancel),
)


@dataclass(frozen=True)
class Cost:
    """Cost of a fault in seconds; the first four fields add up to the step it hit."""

    until_ended_s: float
    """Until the job left its nodes: detection, and the save if there is one."""
    until_begun_s: float
    """Until the attempt that trains again began: Slurm's wait, prepare, failed attempts."""
    start_up_s: float
    """Until its first step: check of the nodes, and the parts in the second table."""
    repeated_s: float
    """Until the step that was hit."""
    num_steps_repeated: int
    differing: list[str]
    """Files that differ from those of the undisturbed run."""


# Columns of the table of faults: total seconds, and the fields of `Cost`.
HEADER = ("back, s", "ended", "waited", "start-up", "repeated", "steps repeated", "same in the end")


def main() -> None:
    """Measure every fault and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    arguments = parser.parse_args()
    if missing := missing_programs():
        raise SystemExit(f"not installed: {', '.join(missing)}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(prefix="gapo-") as name:
        folder = Path(name)
        make_checkout(folder / "checkout")
        with running_cluster(folder / "cluster", first_job=FIRST_JOB, patience=1) as cluster:
            undisturbed = new_run(cluster, folder, "undisturbed")
            measure_start_up(undisturbed)
            print("\n| fault | " + " | ".join(HEADER) + " |\n|" + "---|" * (1 + len(HEADER)))
            for fault in FAULTS:
                if fault.name in arguments.only:
                    run = new_run(cluster, folder, fault.name.replace(" ", "_"))
                    print_cost(fault, measure(fault, run, reference=undisturbed.run_dir))
                    cluster.clear()


def new_run(cluster: Cluster, folder: Path, name: str) -> Training:
    """Make a run folder with an interpreter that can be removed on one node."""
    settings = f"run.hang_timeout_s={HANG_TIMEOUT_S}"
    run = Training(cluster, folder / "checkout", folder / name, settings)
    python = folder / name / "python"
    python.write_text(f"""#!/bin/bash
[ "$SLURMD_NODENAME" != "$(cat {bad_node_file(run)} 2> /dev/null)" ] || exit 127
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    return run


def nodes(run: Training) -> list[str]:
    """Nodes that a run starts on; the batch script is on the first."""
    return run.cluster.nodes[:2]


def bad_node_file(run: Training) -> Path:
    """File with the name of the node without an interpreter."""
    return run.run_dir.parent / "bad_node"


def filler(run: Training) -> Path:
    """File that fills the disk of the checkpoints."""
    return run.run_dir / "checkpoints" / "filler"


def submit(run: Training, *options: str) -> None:
    """Submit a run with the interpreter of `new_run`."""
    run.submit(*options, PYTHON=str(run.run_dir.parent / "python"))


def measure(fault: Fault, run: Training, *, reference: Path) -> Cost:
    """Hit a run once and wait for its end."""
    with ExitStack() as stack:
        if fault.name == "disk full" and not stack.enter_context(small_disk(filler(run).parent)):
            raise SystemExit("disk full: only root may mount the disk (see --only)")
        submit(run, *fault.options)
        if fault.is_slow:
            with run.paused_in(fault.stage, step=HIT_IN_STEP) as attempt:
                fault.hit(run)
                hit_in, start = run.step(), time.time()
        else:
            attempt = run.until_stage(fault.stage, step=HIT_IN_STEP)
            hit_in, start = run.step(), time.time()
            fault.hit(run)
        run.until_ended(attempt)
        ended = time.time()
        filler(run).unlink(missing_ok=True)
        if run.cluster.job(run.job)["JobState"] in ("FAILED", "CANCELLED"):
            submit(run, *fault.options)  # such a job is not requeued
        elif fault.name == "time limit":
            run.cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
        run.until_stage(not_in=attempt, step=hit_in)
        back = time.time()
        begun, startup = begun_unix_s(run), startup_line(run)
        run.cluster.wait(run.job, "COMPLETED", timeout_s=240)
        return Cost(
            until_ended_s=ended - start,
            until_begun_s=begun - ended,
            start_up_s=startup["time/unix_s"] - begun,
            repeated_s=back - startup["time/unix_s"],
            # A stop may take effect in the next step only.
            num_steps_repeated=max(0, hit_in - int(startup["step"])),
            differing=differing_files(run.run_dir, reference) + damaged_checkpoints(run.run_dir),
        )


def begun_unix_s(run: Training) -> float:
    """Time at which the newest attempt took the run."""
    return (run.run_dir / "attempts" / "latest").lstat().st_mtime


def startup_line(run: Training) -> dict[str, float]:
    """Newest line of timings with the parts of a start-up."""
    lines = map(json.loads, (run.run_dir / "timings.jsonl").read_text().splitlines())
    return [line for line in lines if "startup/imports_s" in line][-1]


def measure_start_up(run: Training) -> None:
    """Run undisturbed, and print the seconds from sbatch to the first step by part."""
    submitted = time.time()
    submit(run)
    run.until_stage()
    begun, startup = begun_unix_s(run), startup_line(run)
    parts = {
        key.removeprefix("startup/").removesuffix("_s").replace("_", " "): seconds
        for key, seconds in startup.items()
        if key.startswith("startup/")
    }
    ready = startup["time/unix_s"]
    seconds = {
        "queue and prepare": begun - submitted,
        "check of the nodes, srun": ready - sum(parts.values()) - begun,
    } | parts
    print("\n| from sbatch to the first step | s | % |\n|---|---|---|")
    for part, value in [*seconds.items(), ("all", ready - submitted)]:
        print(f"| {part} | {value:.1f} | {100 * value / (ready - submitted):.0f} |", flush=True)
    run.cluster.wait(run.job, "COMPLETED", timeout_s=240)


def print_cost(fault: Fault, cost: Cost) -> None:
    """Print one row of a table."""
    parts = (cost.until_ended_s, cost.until_begun_s, cost.start_up_s, cost.repeated_s)
    cells = [fault.name, *(f"{part:.1f}" for part in (sum(parts), *parts))]
    cells += [str(cost.num_steps_repeated), ", ".join(cost.differing) or "yes"]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
