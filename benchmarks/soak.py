"""Run a config for long, and see what grows: memory, descriptors, threads, processes, files.

    PYTHONPATH=. python -m benchmarks.soak [CONFIG section.key=value ...] [--output FOLDER]
    PYTHONPATH=. python -m benchmarks.soak --output FOLDER      its table and curves again

Without CONFIG: 500 steps of the demo with tools (`DEMO`), whose warm start must be there. Starts
torchrun with one rank that trains and one that generates, as a user would, and reads /proc from
outside: nothing in the run knows of it. FOLDER gets samples.csv, output.txt, curves.png and the
run. `InSandbox` answers some calls of that demo by programs in the sandbox.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from gapo_megatron.io.metric_files import METRICS_NAME, last_step
from gapo_megatron.rewards.code import run_program
from gapo_megatron.rollout.environments.tools import Tools

MIB = 2**20
SHARES = (0.05, 0.25, 0.5, 1.0)
"""Parts of the run in the table: medians of the samples around them."""
AROUND = 0.03
MEMORY = {"Pss": "PSS, MiB", "Anonymous": "anonymous, MiB", "Pss_Shmem": "shared, MiB"}
"""Lines of smaps_rollup. PSS counts a page that n processes share as 1/n in each of them, and so
falls while a process starts a child; anonymous memory is all that no file backs."""
RANKS = ("trains", "generates")

DEMO = """
configs/demo_tools.toml run.num_steps=500 batch.rollout_prompts=4 batch.minibatch_prompts=2
batch.rollouts_per_prompt=4 environment.kind=benchmarks/soak.py:InSandbox rollout.max_staleness=1
checkpoint.background=true checkpoint.every_steps=10 evaluation.every_steps=100
evaluation.samples_per_prompt=1 reward.num_workers=1 data.curriculum=0.5
"""

Samples = dict[tuple[str, str], list[tuple[float, float]]]
"""(step, value) by process and quantity."""


class InSandbox(Tools):
    """The demo's calculator; of calls with two digits, those with a 4 first run in the sandbox."""

    def _run(self, call: str) -> str:
        if found := re.search(r'"expression": "(4\d\*\d\d)"', call):
            output, failure = run_program(f"print({found[1]})", **self._box)
            return f"error: {failure}" if failure else output.strip()
        return super()._run(call)


def sample(launcher: psutil.Process, folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield what the run holds now, as (process, quantity, value)."""
    for rank, process in [("torchrun", launcher), *zip(RANKS, launcher.children(), strict=False)]:
        yield from sample_process(rank, process)
        workers = process.children(recursive=True) if rank != "torchrun" else []
        yield rank, "child processes", len(workers)
        yield rank, "PSS of children, MiB", sum(memory(one).get("Pss", 0) for one in workers)
    num_files, num_bytes = Counter[str](), Counter[str]()
    for top in ("run", "temporary"):
        for path in (folder / top).rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "N", str(path.relative_to(folder)))
            kind = re.sub(r"(checkpoints/[^/]+|code|hf|temporary)/.*", r"\1", kind)
            num_files[kind] += 1
            num_bytes[kind] += status.st_size
    for kind in num_files:
        yield kind, "files", num_files[kind]
        yield kind, "MiB", num_bytes[kind] / MIB


def sample_process(name: str, process: psutil.Process) -> Iterator[tuple[str, str, float]]:
    """Yield memory, descriptors and threads of a process; nothing if it has ended."""
    try:
        for line, value in memory(process).items():
            yield name, MEMORY[line], value
        yield name, "descriptors", process.num_fds()
        yield name, "threads", process.num_threads()
    except psutil.NoSuchProcess:
        return


def memory(process: psutil.Process) -> dict[str, float]:
    """`MEMORY` of a process in MiB; empty if it has ended."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", text, flags=re.MULTILINE))
    return {line: int(found[line]) / 1024 for line in MEMORY if line in found}


def soak(command: list[str], folder: Path, every_s: float) -> None:
    """Start the run and write a sample to samples.csv every `every_s` seconds until it ends."""
    (folder / "temporary").mkdir(parents=True)
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {"TMPDIR": str((folder / "temporary").resolve())}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, "-m", "gapo_megatron.train", *command]
    settings = [f"run.output_dir={folder / 'run'}", "rollout.generation_ranks=1"]
    with (
        (folder / "output.txt").open("w") as output,
        (folder / "samples.csv").open("w", newline="") as file,
        subprocess.Popen(
            [*command, *settings], env=os.environ | variables, stdout=output, stderr=output
        ) as run,
    ):
        writer, start = csv.writer(file), time.monotonic()
        writer.writerow(("second", "step", "of", "quantity", "value"))
        while run.poll() is None:
            step, at = last_step(folder / "run" / METRICS_NAME), round(time.monotonic() - start, 1)
            try:
                seen = [*sample(psutil.Process(run.pid), folder)]
            except psutil.NoSuchProcess:
                continue
            if step is not None:
                writer.writerows((at, step, *key, round(value, 3)) for *key, value in seen)
                file.flush()
            time.sleep(every_s)
    if run.returncode:
        sys.exit(f"the run has failed with {run.returncode}: {folder / 'output.txt'}")


def read(path: Path) -> tuple[Samples, float]:
    """Samples by process and quantity before the last step, and that; a missing one is 0."""
    rows = [*csv.DictReader(path.open(newline=""))]
    at = {row["second"]: float(row["step"]) for row in rows}
    samples: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        samples[row["of"], row["quantity"]][row["second"]] = float(row["value"])
    last = max(at.values())
    moments = [second for second, step in at.items() if step < last]  # then the ranks end
    return {
        key: [(at[second], values.get(second, 0.0)) for second in moments]
        for key, values in samples.items()
    }, last


def slope(points: np.ndarray, *, num_draws: int = 2000) -> tuple[float, float, float]:
    """Least-squares growth in 100 steps, and the 95 % interval of a moving-block bootstrap."""
    x, y = points[:, 0] / 100, points[:, 1]
    x = x - x.mean()
    found = x @ y / (x @ x)
    rest = y - y.mean() - found * x
    block = max(1, round(len(x) ** 0.5))
    starts = np.random.default_rng(0).integers(
        0, len(x) - block + 1, size=(num_draws, -(-len(x) // block))
    )
    drawn = rest[(starts[..., None] + np.arange(block)).reshape(num_draws, -1)[:, : len(x)]]
    low, high = found + np.percentile(drawn @ x / (x @ x), (2.5, 97.5))
    return float(found), float(low), float(high)


def print_table(samples: Samples, num_steps: float) -> None:
    """Print a row for each quantity that is ever other than zero; of files, those that change."""
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    print(f"| of | quantity | {shares} | per 100 steps, second half |\n|{'---|' * 7}")
    for (of, quantity), listed in sorted(samples.items()):
        points = np.array(listed)
        if not points[:, 1].any() or (quantity in ("files", "MiB") and np.ptp(points[:, 1]) < 0.05):
            continue
        near = [abs(points[:, 0] / num_steps - share) < AROUND for share in SHARES]
        cells = [f"{np.median(points[one, 1]):.1f}" if one.any() else "" for one in near]
        growth, low, high = slope(points[points[:, 0] >= num_steps / 2])
        per_100 = f"{growth:+.2f} [{low:.2f}, {high:.2f}]"
        print(f"| {of} | {quantity} | {' | '.join(cells)} | {per_100} |")


def draw(samples: Samples, path: Path) -> None:
    """Draw memory, descriptors, threads and files over steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    quantities = ("PSS, MiB", "anonymous, MiB", "descriptors", "threads", "child processes")
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 5.5), sharex=True, layout="constrained")
    for axis, quantity in zip(axes.flat, quantities, strict=False):
        for rank in RANKS:
            axis.plot(*np.array(samples[rank, quantity]).T, label=f"rank that {rank}", linewidth=1)
        axis.set(title=quantity, ylim=(0, None))
    axes.flat[0].legend()
    kept = [np.array(one) for (of, what), one in samples.items() if what == "MiB" if "check" in of]
    axes.flat[5].plot(kept[0][:, 0], sum(one[:, 1] for one in kept), linewidth=1)
    axes.flat[5].set(title="checkpoints, MiB", ylim=(0, None))
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run, unless the folder has samples; print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", nargs="*", help="config and settings of the run")
    parser.add_argument("--output", type=Path, help="for all files; default: a temporary folder")
    parser.add_argument("--every", type=float, default=5, help="seconds between samples")
    arguments = parser.parse_intermixed_args()
    folder = arguments.output or Path(tempfile.mkdtemp())
    if arguments.command or not (folder / "samples.csv").exists():
        soak(arguments.command or DEMO.split(), folder, arguments.every)
    samples, num_steps = read(folder / "samples.csv")
    print_table(samples, num_steps)
    draw(samples, folder / "curves.png")
    print(f"curves: {folder / 'curves.png'}")


if __name__ == "__main__":
    main()
