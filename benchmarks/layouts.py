"""Compare the first steps of the demo on 1 rank, TP = 2, PP = 2 and DP = 2.

    make demo && python benchmarks/layouts.py

Starts from the demo's warm start (runs/demo). Samples are the same on every layout, because each
request has its own seed and the weights agree to rounding. Prints all differences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.config import load_config
from gapo_megatron.ops.launch.ranks import ranks_command

REPOSITORY = Path(__file__).resolve().parents[1]
LAYOUTS = {
    "1 rank": [],
    "TP=2": ["parallel.tensor_model_parallel_size=2"],
    "PP=2": ["parallel.pipeline_model_parallel_size=2"],
    "DP=2": ["parallel.tensor_model_parallel_size=1"],
}
METRICS = (
    "reward/mean",
    "loss/policy",
    "optim/grad_norm",
    "clip/fraction_sequences",
    "ratio/abs_deviation",
)


def main() -> None:
    """Run every layout and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    if not Path(load_config(arguments.config).model.hf_dir).is_dir():
        raise SystemExit("the demo's warm start does not exist: run `make demo` first")
    with tempfile.TemporaryDirectory() as folder:
        lines = {
            name: run(arguments, overrides, Path(folder) / name.replace(" ", "_"))
            for name, overrides in LAYOUTS.items()
        }
    table = Table(title=f"first {arguments.steps} steps of {arguments.config}")
    table.add_column("step", justify="right")
    table.add_column("metric")
    for name in lines:
        table.add_column(name, justify="right")
    for step in range(arguments.steps):
        for metric in METRICS:
            values = [f"{run_lines[step][metric]:.9g}" for run_lines in lines.values()]
            table.add_row(str(step), metric, *values)
    Console(width=120).print(table)


def run(arguments: argparse.Namespace, overrides: list[str], run_dir: Path) -> list[dict]:
    """Run one layout and return the lines of its metrics.jsonl."""
    command = ranks_command("gapo_megatron.train", 2 if overrides else 1)
    command += [arguments.config, f"run.output_dir={run_dir}"]
    command += [f"run.num_steps={arguments.steps}", "evaluation.every_steps=0", *overrides]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(REPOSITORY),
    }
    subprocess.run(command, check=True, env=environment, cwd=REPOSITORY, capture_output=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
