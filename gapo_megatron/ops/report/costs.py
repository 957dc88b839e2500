"""Figures of what a step costs, and of the rounding that a clip must be wider than."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.series import NoData, Row
from gapo_megatron.ops.report.style import (
    COLOURS,
    HATCHES,
    arm_style,
    column,
    legend_below,
    outer_names,
    over_steps,
    panels,
    thinned,
)

SMALL = 0.02
"""Stages below this share of every arm's step are drawn as part of `other`."""
WAIT = "wait"
TRAINING, GENERATION = SIDES = ("training", "generation")
"""Sides of a run in which some ranks only generate; the other runs have none."""
_OF_SIDES = {"evaluate": 0, "rollout": 1, "reward": 2, WAIT: 3, "sync": 5}
"""Order in which stages of two sides are drawn; the others come before the sync."""
SKIPPED = {
    "skip/forward_token_share": "forward",
    "skip/old_pass_token_share": "old log-probs",
    "skip/backward_token_share": "backward",
    "skip/head_backward_token_share": "head backward",
}
MEMORY = {
    "memory/after_sleep/free_gib": "free, vLLM asleep",
    "memory/update_peak/free_gib": "free, at the peak",
    "memory/after_wake/free_gib": "free, vLLM awake",
    "memory/host_rss_gib": "a process, in host memory",
}
"""Metric -> what it measures; free memory takes the minimum, used memory the maximum."""


def step_time(comparison: Comparison) -> Exhibit:
    """Seconds of a step by stage: a bar per arm, or one per side where some ranks only generate."""
    rows = [row for arm in comparison.curves for row in time_rows(arm)]
    if not rows:
        raise NoData("no run has timings")
    labels = list(dict.fromkeys(map(_bar, rows)))
    figure, (axis,) = panels(1, row_inches=_bars_inches(labels))
    draw_time(axis, rows)
    legend_below(figure, axis, handle_length=1.4)
    notes = [
        f"Means over steps and seeds. `other` is the time between stages, and the stages that take "
        f"less than {100 * SMALL:.0f} % of every bar. Runs on one machine at the same time slow "
        "each other down."
    ]
    if found := waiting_notes(comparison.curves):
        notes += [
            "A method with generation ranks has one bar for the ranks that train and one for those "
            "that generate. `wait` is the time that one side waits for the other: training ranks "
            "for a batch, or for the end of generation before a weight sync; generation ranks for "
            "their next orders.",
            *found,
        ]
    return Exhibit(
        aid="Mean wall-clock seconds of a training step, split by stage.",
        rows=rows,
        figure=figure,
        notes=notes,
    )


def waiting_notes(arms: Sequence[Arm]) -> list[str]:
    """Which share of a step each side of an arm waits, a sentence per arm with generation ranks."""
    notes = []
    for arm in arms:
        waits = {row["side"]: row["share"] for row in time_rows(arm) if row["stage"] == WAIT}
        if TRAINING in waits and GENERATION in waits:
            shown = (f"{side} waits {100 * float(waits[side] or 0):.0f} %" for side in SIDES)
            notes.append(f"{arm.label}: {', '.join(shown)} of a step.")
    return notes


def time_rows(arm: Arm) -> list[Row]:
    """Seconds of each stage per step: mean over all steps of all seeds; the rest is `other`.

    Where ranks only generate, those of each side, as shares of the side's own step. A sync of
    training that takes longer than generation's has waited for it: that much is `wait`.
    """
    steps = [row for run in arm.runs for row in run.timings if "time/step_s" in row]
    apart = [row for row in steps if "generation/step_s" in row]
    if not steps:
        return []
    training = _mean_seconds(apart or steps, "time")
    if not apart:
        return _stage_rows(arm, "", training)
    generation = _mean_seconds(apart, "generation")
    held_s = max(0.0, training.get("sync", 0.0) - generation.get("sync", 0.0))
    training = {WAIT: 0.0, "sync": 0.0} | training
    training[WAIT] += held_s
    training["sync"] -= held_s
    return [
        *_stage_rows(arm, TRAINING, training),
        *_stage_rows(arm, GENERATION, {WAIT: 0.0} | generation),
    ]


def _mean_seconds(steps: Sequence[Mapping[str, float]], section: str) -> dict[str, float]:
    """Seconds per step of `section/<stage>_s` by stage, that of the whole step among them."""
    totals: dict[str, float] = {}
    for row in steps:
        for key, seconds in row.items():
            match = re.fullmatch(rf"{section}/(\w+)_s", key)
            if match and match[1] != "unix":  # that one is the clock
                totals[match[1]] = totals.get(match[1], 0.0) + seconds
    return {stage: total / len(steps) for stage, total in totals.items()}


def _stage_rows(arm: Arm, side: str, seconds: Mapping[str, float]) -> list[Row]:
    whole = seconds["step"]
    stages = {stage: value for stage, value in seconds.items() if stage != "step"}
    stages["other"] = max(whole - sum(stages.values()), 0.0)
    return [
        {
            "arm": arm.label,
            "side": side,
            "stage": stage,
            "seconds": value,
            "share": value / whole if whole else 0.0,
        }
        for stage, value in stages.items()
    ]


def _bar(row: Row) -> str:
    """Name of the bar that a row is part of."""
    side = row.get("side")
    return f"{row['arm']}, {side}" if side else str(row["arm"])


def draw_time(axis: Axes, rows: Sequence[Row]) -> None:
    """One bar per arm, or per side of it, cut into stages."""
    labels = list(dict.fromkeys(map(_bar, rows)))
    seconds = {(_bar(row), row["stage"]): float(row["seconds"] or 0) for row in rows}
    large = [
        stage
        for stage in dict.fromkeys(str(row["stage"]) for row in rows)
        if stage != "other"
        and any(row["stage"] == stage and float(row["share"] or 0) >= SMALL for row in rows)
    ]
    if WAIT in large:  # of two sides the sync comes last: both have it at once
        large.sort(key=lambda stage: _OF_SIDES.get(stage, _OF_SIDES[WAIT] + 1))
    left = np.zeros(len(labels))
    whole = np.array(
        [sum(v for (bar, _), v in seconds.items() if bar == label) for label in labels]
    )
    for place, stage in enumerate([*large, "other"]):
        width = np.array([seconds.get((label, stage), 0.0) for label in labels])
        if stage == "other":
            width = whole - left
        axis.barh(
            labels,
            width,
            left=left,
            height=0.65,
            label=stage.replace("_", " "),
            linewidth=0.4,
            **_stage_look(stage, place),
        )
        left = left + width
    axis.set(xlabel="seconds per step", ylabel="method")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def _stage_look(stage: str, place: int) -> dict[str, Any]:
    """Colour and hatch of the stage at `place`: waiting is empty, what is small is grey."""
    if stage == WAIT:
        return {"color": "white", "hatch": "//////", "edgecolor": "0.6"}
    return {
        "color": "0.8" if stage == "other" else COLOURS[place % len(COLOURS)],
        "hatch": HATCHES[place % len(HATCHES)],
        "edgecolor": "white",
    }


def memory(comparison: Comparison) -> Exhibit:
    """GiB of the rank that has it worst, over training."""
    rows = [row for arm in comparison.curves for row in memory_rows(arm)]
    if not rows:
        raise NoData("no run has memory/*: an older version's runs")
    names = list(dict.fromkeys(str(row["metric"]) for row in rows))
    labels = list(dict.fromkeys(str(row["arm"]) for row in rows))
    figure, axes = panels(len(names), share_y=False)
    for axis, name in zip(axes, names, strict=True):
        for place, label in enumerate(labels):
            chosen = [row for row in rows if row["metric"] == name and row["arm"] == label]
            look = arm_style(place) | {"marker": ""}
            shown = thinned(chosen)
            axis.plot(column(shown, "step"), column(shown, "gib"), label=label, **look)
        over_steps(axis, labels)
        axis.set(title=name, ylabel="GiB")
    outer_names(axes, share_y=False)
    legend_below(figure, *axes)
    return Exhibit(
        aid="Memory of the rank with the least free GPU memory, and of the process that uses the "
        "most host memory, against the step. A curve that keeps falling (free memory) or rising "
        "(host memory) is a leak.",
        rows=rows,
        figure=figure,
        notes=["Where there are several seeds, the worst one is shown."],
    )


def memory_rows(arm: Arm) -> list[Row]:
    """Per step the worst of all seeds; none of a device where runs had none."""
    rows: list[Row] = []
    for key, name in MEMORY.items():
        worst: dict[int, float] = {}
        pick = min if "/free_" in key else max
        for step, value in (pair for run in arm.runs for pair in run.series(key).items()):
            worst[step] = pick(worst.get(step, value), value)
        rows += [
            {"arm": arm.label, "metric": name, "step": step, "gib": worst[step]}
            for step in sorted(worst)
        ]
    return rows


def skipped_work(comparison: Comparison) -> Exhibit:
    """Share of the work left out because it could not change the weights."""
    rows: list[Row] = []
    for arm in comparison.curves:
        for key, name in SKIPPED.items():
            by_run = [list(run.series(key).values()) for run in arm.runs]
            values = [value for one in by_run for value in one]
            if values:
                rows.append({"arm": arm.label, "work": name, "share": float(np.mean(values))})
    if not rows:
        raise NoData("no run has skip/*")
    labels = list(dict.fromkeys(str(row["arm"]) for row in rows))
    figure, axis = _bars(labels)
    for place, name in enumerate(dict.fromkeys(str(row["work"]) for row in rows)):
        chosen = [row for row in rows if row["work"] == name]
        heights = [labels.index(str(row["arm"])) for row in chosen]
        look = arm_style(place) | {"linestyle": ""}
        axis.plot(100 * column(chosen, "share"), heights, label=name, **look)
    axis.set(xlabel="skipped (% of the tokens)", xlim=(0, 100))
    legend_below(figure, axis)
    return Exhibit(
        aid="Share of the tokens that each pass skipped because they could not change the weights: "
        "groups that are all correct or all wrong (every pass), the old log-probs of the first "
        "mini-batch, and the backward pass of clipped rollouts.",
        rows=rows,
        figure=figure,
        notes=["Means over steps and seeds."],
    )


def rounding(comparison: Comparison) -> Exhibit:
    """Rounding: how far a step moves its ratios, and how far rounding does, beside the clips."""
    rows = [row for arm in comparison.curves if (row := _rounding_row(arm))]
    if not rows:
        raise NoData("no run has measured it (metrics.rounding_every_steps)")
    figure, axis = _bars([str(row["arm"]) for row in rows])
    heights = np.arange(len(rows))
    for place, (name, label) in enumerate(
        {"signal": "moved by the step", "rounding": "moved by rounding"}.items()
    ):
        look = arm_style(place) | {"linestyle": ""}
        axis.plot(column(rows, name), heights, label=f"{label} (rms)", **look)
    # A method's two clips may be equal: one below the line of its bar, the other above.
    for place, (name, side) in enumerate({"eps_low": 0.4, "eps_high_max": -0.4}.items(), start=2):
        colour = arm_style(place)["color"]
        axis.vlines(column(rows, name), heights, heights + side, color=colour, lw=1.5, label=name)
    keys = ("signal", "rounding", "eps_low", "eps_high_max")
    sizes = [v for key in keys for v in column(rows, key) if v > 0]
    axis.set(xlabel="|log ratio|", xscale="log")
    if sizes:
        axis.set_xlim(min(sizes) / 2, 2 * max(sizes))
    axis.xaxis.set_major_locator(LogLocator(numticks=6))
    axis.xaxis.set_major_formatter("{x:.0e}")
    axis.minorticks_off()
    legend_below(figure, axis)
    return Exhibit(
        aid="How far a step moves the log-ratio of a sequence, and how far rounding does, beside "
        "the widths of the clip. Where rounding is as wide as the clip, it decides part of what "
        "is clipped.",
        rows=rows,
        figure=figure,
        notes=[
            "Root mean squares over sequences (for token ratios, over tokens), measured steps and "
            "seeds. The log-ratio is computed twice on the same weights, in the run's arithmetic "
            "and without its rounding; rounding is the difference, correlation is between the two.",
            "changed: share of the clip's decisions (A not 0) that differ between the two.",
        ],
    )


def _rounding_row(arm: Arm) -> Row | None:
    """Signal and rounding of an arm, over all seeds and all steps that measured them."""

    def values(name: str) -> np.ndarray:
        series = (run.series(f"numerics/{name}").values() for run in arm.runs)
        return np.array([value for one in series for value in one])

    if not len(values("ratio_rounding")):
        return None
    correlation, changed = values("ratio_correlation"), values("clip_decisions_changed")
    method = arm.method
    return {
        "arm": arm.label,
        "signal": float(np.sqrt(np.mean(values("ratio_signal") ** 2))),
        "rounding": float(np.sqrt(np.mean(values("ratio_rounding") ** 2))),
        "correlation": float(np.mean(correlation)) if len(correlation) else None,
        "changed": float(np.mean(changed)) if len(changed) else None,
        "eps_low": method.eps_low if method.is_band else None,
        "eps_high_max": method.eps_high_max if method.is_band else None,
    }


def _bars(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A panel with a line for each of `labels`, from the top."""
    figure, (axis,) = panels(1, row_inches=_bars_inches(labels))
    axis.set_yticks(range(len(labels)), labels)
    axis.set(ylabel="method", ylim=(len(labels) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    return figure, axis


def _bars_inches(labels: Sequence[str]) -> float:
    """Height of a panel with a line for each of `labels`; a single one leaves room for its name."""
    return 0.55 + 0.18 * max(2, len(labels))
