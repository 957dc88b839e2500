"""Run folders with known numbers, as training leaves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gapo_megatron.config import load_config
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.runs import read_run
from gapo_tools.reporting.series import Row
from gapo_tools.reporting.style import Exhibit

CONFIG = Path(__file__).parents[1] / "configs" / "demo.toml"
NUM_STEPS = 40
NUM_PROBLEMS = 5
SIGNAL, ROUNDING = 4e-3, 1e-7
DOSE = 1e-3


def pass_at(method: str, seed: int, step: int) -> tuple[float, float]:
    """pass@1 and pass@8 of a run."""
    gain = {"gapo": 0.2, "gspo": 0.1}.get(method, 0.12)
    spread = 0.01 if method == "gapo" else 0.015
    level = 0.3 + gain * step / NUM_STEPS + spread * seed**2
    return level, level + 0.3


def deviation(c: int, k: int, seed: int, step: int, method: str = "gapo") -> float:
    """Falls with c; of even and odd steps different."""
    level = 0.002 if method == "gspo_asym" else 0.001
    return level * (k - c) * (1 + 0.1 * seed) * (1 + step % 2)


def clipped(c: int, seed: int) -> float:
    """Rises with c."""
    return 0.02 * c + 0.01 * seed


def clipped_tokens(c: int, seed: int, step: int) -> float:
    """Other than that of rollouts, and of even and odd steps different."""
    return clipped(c, seed) * (0.5 if step % 2 else 0.75)


def length(c: int, step: int) -> float:
    """Tokens of a correct rollout; of even and odd steps different."""
    return 10.0 + c + 5 * (step % 2)


def num_sequences(c: int, step: int) -> float:
    """Weights: even steps have three times the rollouts of odd ones."""
    return float(c * (1 if step % 2 else 3))


def solved(method: str, seed: int, step: int, problem: int) -> int:
    """Of eight samples."""
    return min(8, max(0, 8 - 2 * problem + (2 if method == "gapo" and step else 0) - seed % 2))


def write_run(
    folder: Path,
    *overrides: str,
    method: str = "gapo",
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    wanted: int = NUM_STEPS,
    clocks: Sequence[dict[str, float]] = ({"time/rollout_s": 0.5, "time/step_s": 0.75},),
) -> Path:
    """A run of `num_steps` steps out of `wanted`, evaluated every 20.

    `clocks`: timings of its steps, in turn.
    """
    given = [f"run.output_dir={folder}", f"run.seed={seed}", f"run.num_steps={wanted}"]
    config = load_config(CONFIG, [*given, f"objective.method={method}", *overrides])
    k = config.batch.rollouts_per_prompt
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    metrics: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        if step % 20 == 0:
            first, last = pass_at(method, seed, step)
            metrics.append({"step": step, "eval/pass@1": first, "eval/pass@8": last})
            _write_evaluation(folder / "evaluations" / f"step_{step}.json", method, seed, step)
        if step < num_steps:
            metrics.append(_row(step, k, seed, method))
    timings = [
        {"step": 0, "time/unix_s": 1e9, "startup/vllm_s": 36.0},
        *(
            {"step": step, "time/unix_s": 1e9} | clocks[step % len(clocks)]
            for step in range(num_steps)
        ),
    ]
    for name, rows in (("metrics", metrics), ("timings", timings)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def clocks_apart() -> list[dict[str, float]]:
    """A step of 10 s on both sides: training waits 4 s for batches, and in every other sync 2 s."""
    training = {"wait": 4.0, "old_log_probs": 1.0, "update": 3.5, "step": 10.0}
    generation = {"rollout": 7.0, "reward": 0.5, "sync": 0.25, "wait": 2.25, "step": 10.0}
    return [
        {f"time/{stage}_s": value for stage, value in (training | {"sync": sync}).items()}
        | {f"generation/{stage}_s": value for stage, value in generation.items()}
        | {"perf/world_size": 6, "perf/generation_ranks": 2}
        for sync in (0.25, 2.25)
    ]


def write_study(root: Path, methods: Sequence[str], seeds: Sequence[int]) -> Comparison:
    """Runs of all methods and seeds; of the first two methods one with another k, one with another
    clip."""
    folders = [
        write_run(root / f"{method}_{seed}", method=method, seed=seed)
        for method in methods
        for seed in seeds
    ]
    for method in methods[:2]:
        for name, override in {
            "k": "batch.rollouts_per_prompt=4",
            "clip": "objective.eps_high_max=0.03",
        }.items():
            folders.append(write_run(root / f"{method}_{name}", override, method=method))
    return compare(*folders)


def compare(*folders: Path) -> Comparison:
    """The runs in these folders."""
    return Comparison.of([read_run(folder) for folder in folders])


def rows_of(exhibit: Exhibit, **wanted: Any) -> list[Row]:
    """Rows that have these values."""
    return [row for row in exhibit.rows if all(row[key] == value for key, value in wanted.items())]


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % Student-t interval of the mean, by scipy."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return float(low), float(high)


def _row(step: int, k: int, seed: int, method: str) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        "step": step,
        "reward/mean": 0.4 + step / 100 + seed / 10,
        "loss/policy": None,  # was not finite
        "rollout/response_length/mean": 100.0 + step,
        "optim/grad_norm": 0.5 + seed,
        "mismatch/mean_abs_log_prob_diff": 1e-7,
        "reward/unknown_share": 0.02,
        "ratio/advantage_correlation_window": 0.9 - 0.1 * seed,
    }
    if method.startswith("gapo"):
        row |= {
            "clip/positive_gradient_mass_lost": 0.25,
            "clip/dose_decisions": DOSE * (1 + step),
            "clip/dose_gradient": DOSE / 2,
        }
    if step % 20 == 0:
        row |= {"numerics/ratio_signal": SIGNAL * (1 + seed)}
        row |= {"numerics/ratio_rounding": ROUNDING * (1 + seed)}
        row |= {"numerics/ratio_correlation": 0.95, "numerics/clip_decisions_changed": 0.02}
    for c in range(k + 1):
        row[f"per_c/groups/c{c}"] = 32 / (k + 1)
        row[f"per_c/group_share/c{c}"] = 1 / (k + 1)
    for c in range(1, k):
        row[f"per_c/correct/sequences/c{c}"] = num_sequences(c, step)
        row[f"per_c/correct/advantage/c{c}"] = 1 - c / k
        row[f"per_c/correct/ratio_deviation/c{c}"] = deviation(c, k, seed, step, method)
        row[f"per_c/correct/ratio_abs_deviation/c{c}"] = 3 * deviation(c, k, seed, step, method)
        row[f"per_c/correct/clip_fraction_sequences/c{c}"] = clipped(c, seed)
        row[f"per_c/correct/clip_fraction_tokens/c{c}"] = clipped_tokens(c, seed, step)
        row[f"per_c/correct/response_length/c{c}"] = length(c, step)
        row[f"per_c/correct/clip_gradient_mass_lost/c{c}"] = clipped(c, seed) / 2
    return row


def _write_evaluation(path: Path, method: str, seed: int, step: int) -> None:
    path.parent.mkdir(exist_ok=True)
    problems = [
        {"id": f"p{i}", "level": "", "num_samples": 8, "num_correct": solved(method, seed, step, i)}
        for i in range(NUM_PROBLEMS)
    ]
    path.write_text(json.dumps({"problems": problems}))
