"""What the metrics cost: seconds per step of computing, exchanging and writing them.

    make demo && python benchmarks/telemetry.py

Trains the demo for a few steps in this process, as `gapo_megatron.train` does it, with a clock
around every function that exists for metrics alone. Then the same functions on a batch of the
paper's size, without a model: 256 prompts x 8 rollouts of 1 to 3092 tokens, four mini-batches,
random log-probs, on one CPU thread. Prints JSON lines and a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron import train
from gapo_megatron.batching import plan
from gapo_megatron.config import load_config
from gapo_megatron.learn import metrics as learn_metrics
from gapo_megatron.objective import METHODS, diagnostics, policy_loss
from gapo_megatron.run import run
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.types import Batch

# Label -> where the function is looked up when it is called.
PARTS = {
    "sums of micro-batches": (diagnostics, "per_correct_sums"),
    "adding them up": (learn_metrics, "add"),
    "exchange": (learn_metrics, "add_over_ranks"),
    "means": (diagnostics, "summarize"),
    "correlation window": (diagnostics.CorrelationWindow, "add"),
    "rollouts": (run, "count_by_correct"),
    "writing": (MetricsWriter, "log"),
}


def main() -> None:
    """Measure both, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    table = Table(title="seconds per step of metrics alone (median of steps)")
    for column in ("part", "the demo", "share of the step", "the paper's size"):
        table.add_column(column, justify="right")
    demo, step_s = measure_run(arguments.config, arguments.overrides, num_steps=arguments.steps)
    large = measure_large()
    rows = {name: (demo[name], large.get(name)) for name in PARTS}
    rows["all"] = (sum(demo.values()), sum(large.values()))
    print(json.dumps({"step_s": step_s, "parts_s": rows}), flush=True)
    for name, (small_s, large_s) in rows.items():
        shown = "" if large_s is None else f"{large_s:.4f}"
        table.add_row(name, f"{small_s:.5f}", f"{small_s / step_s:.2%}", shown)
    table.add_row("step", f"{step_s:.3f}", "", "")
    Console(width=100).print(table)


def measure_run(
    config_path: str, overrides: list[str], *, num_steps: int
) -> tuple[dict[str, float], float]:
    """Seconds of every part per step, and of the whole step; medians without the first step."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = [f"run.output_dir={folder}", f"run.num_steps={num_steps}"]
        settings += ["evaluation.every_steps=0", "metrics.rounding_every_steps=0"]
        config = load_config(config_path, [*settings, *overrides])
        if not (Path(config.model.hf_dir) / "config.json").exists():
            raise SystemExit("the demo's warm start is not there: run `make demo` first")
        calls: dict[str, list[tuple[float, float]]] = {name: [] for name in PARTS}
        for name, (owner, attribute) in PARTS.items():
            timed = _timed(getattr(owner, attribute), calls[name])
            stack.enter_context(patch.object(owner, attribute, timed))
        train.train(config)
        lines = (Path(folder) / "timings.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "time/step_s" in line][1:]
    # A step's line is written when it ends: what was called since the one before belongs to it.
    ends = [line["time/unix_s"] for line in steps]
    starts = [end - line["time/step_s"] for line, end in zip(steps, ends, strict=True)]
    per_step = {
        name: [sum(s for at, s in made if a < at <= b) for a, b in zip(starts, ends, strict=True)]
        for name, made in calls.items()
    }
    # Sums are added within the exchange too.
    per_step["writing"] = [seconds for _, seconds in calls["writing"][1:]]
    medians = {name: statistics.median(seconds) for name, seconds in per_step.items()}
    return medians, statistics.median(line["time/step_s"] for line in steps)


def _timed(function: Callable[..., Any], made: list[tuple[float, float]]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            made.append((time.time(), time.perf_counter() - start))

    return timed


def measure_large(
    *, num_prompts: int = 256, group_size: int = 8, repeats: int = 5
) -> dict[str, float]:
    """Seconds of the parts that need no model, over a whole step; medians."""
    torch.set_num_threads(1)
    batch = _random_batch(num_prompts, group_size)
    lengths = batch.num_response_tokens
    packing = plan(
        lengths,
        batch.advantages,
        num_response_tokens=lengths,
        valid=batch.valid,
        num_minibatches=4,
        max_tokens_per_microbatch=32768,
        data_parallel_size=1,
    )
    microbatches = [list(m) for part in packing.minibatches for m in part.microbatches[0]]
    prepared = [_prepare(batch, indices, group_size) for indices in microbatches]
    found: dict[str, list[float]] = {
        name: [] for name in PARTS if name not in ("exchange", "writing")
    }
    for _ in range(repeats):
        made: list[tuple[float, float]] = []
        every = _timed(diagnostics.per_correct_sums, made)
        sums = [every(loss, **arguments) for loss, arguments in prepared]
        found["sums of micro-batches"].append(sum(s for _, s in made))
        start, totals = time.perf_counter(), {}
        for one in sums:
            learn_metrics.add(totals, one)
        found["adding them up"].append(time.perf_counter() - start)
        start = time.perf_counter()
        metrics = diagnostics.summarize(totals)
        found["means"].append(time.perf_counter() - start)
        window = diagnostics.CorrelationWindow()
        for _ in range(diagnostics.WINDOW):
            window.add(metrics)
        start = time.perf_counter()
        window.add(metrics)
        found["correlation window"].append(time.perf_counter() - start)
        start = time.perf_counter()
        diagnostics.count_by_correct(batch, group_size=group_size)
        found["rollouts"].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _random_batch(num_prompts: int, group_size: int) -> Batch:
    random = np.random.default_rng(0)
    size = num_prompts * group_size
    rewards = random.random((num_prompts, group_size)) < random.random((num_prompts, 1))
    num_correct = torch.from_numpy(rewards.sum(axis=1)).repeat_interleave(group_size)
    responses = [np.zeros(n, np.int32) for n in random.integers(1, 3093, size)]
    return Batch(
        prompt_ids=[np.zeros(100, np.int32)] * size,
        response_ids=responses,
        rollout_log_probs=[-random.random(len(ids)).astype(np.float32) for ids in responses],
        advantages=torch.from_numpy(rewards).flatten().double() - num_correct / group_size,
        num_correct=num_correct,
        group_size=torch.full((size,), group_size),
        valid=torch.ones(size, dtype=torch.bool),
    )


def _prepare(batch: Batch, indices: list[int], group_size: int) -> tuple[Any, dict[str, Any]]:
    counts = batch.num_response_tokens[indices]
    ids = torch.arange(len(indices)).repeat_interleave(counts)
    old = -torch.rand(len(ids))
    shared = {
        "sequence_ids": ids,
        "advantages": batch.advantages[indices],
        "num_correct": batch.num_correct[indices],
        "group_size": group_size,
    }
    loss = policy_loss(
        old + 0.1 * torch.randn(len(ids)),
        old,
        num_tokens_global=10**6,
        num_sequences_global=512,
        max_response_tokens=3092,
        method=METHODS["gapo_token"],  # token ratios: the dearer statistics
        **shared,
    )
    is_carried = torch.zeros(len(counts), dtype=torch.bool)
    return loss, shared | {"num_response_tokens": counts, "is_carried": is_carried}


if __name__ == "__main__":
    main()
