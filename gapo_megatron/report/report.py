"""One picture per run or set of runs: what was learned, what the clip did per c, time spent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from gapo_megatron.errors import DataError

FONT_SIZE = 9
WINDOW_SHARE = 0.1
"""Curves per c are means over this share of the steps: one step holds few groups of each c."""
MAX_WINDOW = 200
"""The paper's window, reached by runs of 2000 steps."""

Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What a run left behind, in step order."""

    name: str
    metrics: list[Row]
    timings: list[Row]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [N], values [N]) of the rows that have `key`, float64."""
        rows = [row for row in self.metrics if key in row]
        return np.array([row["step"] for row in rows]), np.array([row[key] for row in rows])

    def keys(self, pattern: str) -> list[str]:
        """Metrics whose whole name matches, in natural order ("c9" before "c10")."""
        names = {key for row in self.metrics for key in row if re.fullmatch(pattern, key)}
        return sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Draw the picture of one run, or of several runs on the same axes (seeds of one experiment).

    Panels: reward; held-out pass@1 and pass@k; per c of the correct rollouts, the clipped share and
    the mean deviation of the ratio from 1 (means over the runs); correlation of that deviation with
    the advantage; seconds per step by stage. A panel whose metrics no run has says so.

    Args:
        run_dirs: folders with `metrics.jsonl` and, where kept, `timings.jsonl`.
        output: PNG file to write; its folder is made when missing.

    Returns:
        `output`.

    Raises:
        DataError: no metrics in a folder, or a line that is not a JSON object with a step.
    """
    runs = [_read_run(Path(run_dir)) for run_dir in run_dirs]
    figure = Figure(figsize=(15, 8.5), dpi=110, layout="constrained")
    axes = figure.subplots(2, 3)
    _draw_reward(axes[0, 0], runs)
    _draw_pass_at_k(axes[0, 1], runs)
    _draw_time(axes[0, 2], runs)
    _draw_per_c(
        axes[1, 0], runs, "clip_fraction_sequences", "clipped share of sequences", "Clip fraction"
    )
    _draw_per_c(axes[1, 1], runs, "ratio_deviation", "mean of ratio $s - 1$", "Ratio deviation")
    _draw_correlation(axes[1, 2], runs)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.title.set_fontsize(FONT_SIZE + 2)
    figure.suptitle(", ".join(run.name for run in runs), fontsize=FONT_SIZE + 3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def _read_run(run_dir: Path) -> Run:
    metrics = _read_rows(run_dir / "metrics.jsonl")
    if not metrics:
        raise DataError(f"{run_dir}: metrics.jsonl is missing or holds no step")
    return Run(run_dir.name, metrics, _read_rows(run_dir / "timings.jsonl"))


def _read_rows(path: Path) -> list[Row]:
    """Rows in step order, a step's rows (training, evaluation) merged; nulls were not finite."""
    if not path.is_file():
        return []
    rows: dict[int, Row] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            known = {key: value for key, value in row.items() if value is not None}
            rows.setdefault(row["step"], {}).update(known)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path}:{number}: not a JSON object with a step") from None
    return [rows[step] for step in sorted(rows)]


def _window(num_steps: int) -> int:
    return max(1, min(MAX_WINDOW, round(num_steps * WINDOW_SHARE)))


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values that are numbers; NaN where none is."""
    out = np.full(len(values), np.nan)
    for i in range(len(values)):
        recent = values[max(0, i + 1 - window) : i + 1]
        recent = recent[~np.isnan(recent)]
        if len(recent):
            out[i] = recent.mean()
    return out


def _colour(index: int) -> str:
    return f"C{index % 10}"


def _draw_reward(axis: Axes, runs: Sequence[Run]) -> None:
    axis.set(title="Reward of the rollouts", xlabel="step", ylabel="mean reward (share correct)")
    for index, run in enumerate(runs):
        steps, values = run.series("reward/mean")
        window = _window(len(values))
        axis.plot(steps, values, color=_colour(index), alpha=0.25, linewidth=0.8)
        label = f"{run.name} (mean of {window} steps)"
        axis.plot(steps, _smooth(values, window), color=_colour(index), label=label)
    _finish(axis, any("reward/mean" in row for run in runs for row in run.metrics))


def _draw_pass_at_k(axis: Axes, runs: Sequence[Run]) -> None:
    axis.set(title="Held-out problems", xlabel="step", ylabel="share solved")
    found = False
    for index, run in enumerate(runs):
        for style, key in zip(("-", "--", ":"), run.keys(r"eval/pass@\d+"), strict=False):
            steps, values = run.series(key)
            found = True
            label = f"{key.removeprefix('eval/')} {run.name}"
            axis.plot(
                steps, values, style, color=_colour(index), marker="o", markersize=3, label=label
            )
    axis.set_ylim(0, 1.02)
    _finish(axis, found)


def _draw_time(axis: Axes, runs: Sequence[Run]) -> None:
    """Seconds of each stage summed over steps and runs; what no stage claims is `other`."""
    axis.set(title="Time", xlabel="seconds, all steps together", ylabel="stage")
    stages: dict[str, float] = {}
    for row in (row for run in runs for row in run.timings):
        for key, seconds in row.items():
            match = re.fullmatch(r"time/(.+)_s", key)
            if match and match[1] != "unix":  # that one is the clock
                stages[match[1]] = stages.get(match[1], 0.0) + seconds
    total = stages.pop("step", 0.0)
    if total:
        stages["other"] = max(total - sum(stages.values()), 0.0)
        axis.set_title(f"Time: {total / 60:.1f} minutes")
        bars = axis.barh(list(stages), list(stages.values()), color="C0")
        shares = [f"{100 * seconds / total:.1f} %" for seconds in stages.values()]
        axis.bar_label(bars, shares, padding=3, fontsize=FONT_SIZE)
        axis.invert_yaxis()
        axis.set_xlim(right=1.2 * max(stages.values()))
    _finish(axis, total > 0)


def _draw_per_c(axis: Axes, runs: Sequence[Run], name: str, ylabel: str, title: str) -> None:
    prefix = f"per_c/correct/{name}/c"
    found = {int(key.removeprefix(prefix)) for run in runs for key in run.keys(prefix + r"\d+")}
    num_steps = len({row["step"] for run in runs for row in run.metrics if "reward/mean" in row})
    window = _window(num_steps)
    axis.set(title=f"{title}, correct rollouts ({window}-step mean)", xlabel="step", ylabel=ylabel)
    if found:
        colours = _c_colours(max(found))
        for c in sorted(found):
            steps, values = _mean_per_c(runs, prefix, c, window)
            axis.plot(steps, values, color=colours(c - 1), linewidth=1.4)
        norm = BoundaryNorm(np.arange(0.5, max(found) + 1), colours.N)
        bar = axis.figure.colorbar(ScalarMappable(norm, colours), ax=axis, pad=0.02)
        bar.set_ticks(range(1, max(found) + 1))
        bar.minorticks_off()
        bar.set_label("$c$: correct rollouts in the group", fontsize=FONT_SIZE)
        bar.ax.tick_params(labelsize=FONT_SIZE)
    _finish(axis, bool(found))


def _draw_correlation(axis: Axes, runs: Sequence[Run]) -> None:
    axis.set(xlabel="step", ylabel="Pearson correlation")
    drawn = False
    window = 1
    for index, run in enumerate(runs):
        steps, values, window = _windowed_correlation(run)
        drawn |= len(steps) > 0
        axis.plot(steps, values, color=_colour(index), label=run.name)
    axis.set_title(f"Ratio deviation against advantage ({window} steps)")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set_ylim(-1.05, 1.05)
    _finish(axis, drawn)


def _windowed_correlation(run: Run) -> tuple[np.ndarray, np.ndarray, int]:
    """Correlation over the points (step, c) of a sliding window, as in the paper's figure.

    The advantage of a correct rollout is 1 - c/k, so its correlation with anything is minus that
    of c, whatever k is.

    Returns:
        Last steps of the windows [N], correlations [N], and the window in steps.
    """
    prefix = "per_c/correct/ratio_deviation/c"
    keys = run.keys(prefix + r"\d+")
    rows = [row for row in run.metrics if any(key in row for key in keys)]
    window = max(2, _window(len(rows)))
    steps, values = [], []
    for end in range(window, len(rows) + 1):
        points = [
            (-float(key.removeprefix(prefix)), row[key])
            for row in rows[end - window : end]
            for key in keys
            if key in row
        ]
        pairs = np.array(points)
        if pairs.std(axis=0).min() > 0:
            steps.append(rows[end - 1]["step"])
            values.append(float(np.corrcoef(pairs.T)[0, 1]))
    return np.array(steps), np.array(values), window


def _mean_per_c(
    runs: Sequence[Run], prefix: str, c: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean over runs and over the last `window` steps, weighted by the groups each step had."""
    sums: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for row in run.metrics:
            if f"{prefix}{c}" in row:
                weight = row.get(f"per_c/groups/c{c}") or 1.0
                sums.setdefault(row["step"], []).append((weight, weight * row[f"{prefix}{c}"]))
    steps = sorted(sums)
    totals = np.array([np.sum(sums[step], axis=0) for step in steps]).reshape(-1, 2)
    first = np.searchsorted(steps, np.array(steps) - window, side="right")
    cumulative = np.vstack([np.zeros((1, 2)), totals.cumsum(axis=0)])
    windowed = cumulative[1:] - cumulative[first]
    return np.array(steps), windowed[:, 1] / windowed[:, 0]


def _c_colours(num: int) -> ListedColormap:
    """One colour for each c = 1..num, from the dark end (scarce) to the light end (abundant)."""
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, num)))


def _finish(axis: Axes, has_data: bool) -> None:
    axis.tick_params(labelsize=FONT_SIZE)
    if not has_data:
        axis.text(0.5, 0.5, "no data", ha="center", va="center", transform=axis.transAxes)
    elif axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=FONT_SIZE - 1, loc="best")
