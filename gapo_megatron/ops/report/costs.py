"""Figures of costs: seconds of a step by stage, and rounding beside the clip's widths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.series import NoData, Row, distinct, select
from gapo_megatron.ops.report.style import (
    COLOURS,
    HATCHES,
    Exhibit,
    arm_style,
    column,
    legend_below,
    panels,
    wrapped,
)

SMALL = 0.02
"""Stages below this share of every bar are drawn as part of `other`."""
WAIT = "wait"
TRAINING, GENERATION = SIDES = ("training", "generation")
"""Ranks of a run with generation ranks; other runs have one side, named ""."""
_ORDER = {"evaluate": 0, "rollout": 1, "reward": 2, WAIT: 3, "sync": 5}
"""Order of a run's stages with generation ranks; all others come before the sync."""


# -- time of a step --------------------------------------------------------------------------------


def step_time(comparison: Comparison) -> Exhibit:
    """Seconds of a step by stage: a bar per arm; with generation ranks, a bar per side."""
    rows = [row for arm in comparison.curves for row in time_rows(arm)]
    if not rows:
        raise NoData("no run has timings")
    labels = [*dict.fromkeys(map(_bar, rows))]
    figure, (axis,) = panels(1, row_inches=_bars_inches(labels))
    draw_time(axis, rows)
    axis.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
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
    """State the share of a step that each side waits, for each arm with generation ranks."""
    notes = []
    for arm in arms:
        waits = {row["side"]: row["share"] for row in select(time_rows(arm), stage=WAIT)}
        if TRAINING in waits and GENERATION in waits:
            shown = (f"{side} waits {100 * waits[side]:.0f} %" for side in SIDES)
            notes.append(f"{arm.label}: {', '.join(shown)} of a step.")
    return notes


def time_rows(arm: Arm) -> list[Row]:
    """Rows of arm, side, stage, seconds, share: means over all steps of all seeds.

    With generation ranks, shares are of the side's own step. Where training's sync takes longer
    than generation's, it has waited for generation: the difference counts as `wait`.
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
    """Mean of `section/<stage>_s` by stage, `step` (the whole of it) included."""
    totals: dict[str, float] = {}
    for row in steps:
        for key, seconds in row.items():
            match = re.fullmatch(rf"{section}/(\w+)_s", key)
            if match and match[1] != "unix":  # the time of day
                totals[match[1]] = totals.get(match[1], 0.0) + seconds
    return {stage: total / len(steps) for stage, total in totals.items()}


def _stage_rows(arm: Arm, side: str, seconds: Mapping[str, float]) -> list[Row]:
    whole = seconds["step"]
    stages = {stage: value for stage, value in seconds.items() if stage != "step"}
    stages["other"] = max(whole - sum(stages.values()), 0.0)
    rows: list[Row] = []
    for stage, value in stages.items():
        row: Row = {"arm": arm.label, "side": side, "stage": stage, "seconds": value}
        rows.append(row | {"share": value / whole if whole else 0.0})
    return rows


def draw_time(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw one bar per arm (or per side of it), cut into stages."""
    labels = list(dict.fromkeys(map(_bar, rows)))
    seconds = {(_bar(row), row["stage"]): row["seconds"] for row in rows}
    large = [
        stage
        for stage in distinct(rows, "stage")
        if stage != "other" and any(row["share"] >= SMALL for row in select(rows, stage=stage))
    ]
    if WAIT in large:  # sync last: both sides are in it at the same time
        large.sort(key=lambda stage: _ORDER.get(stage, _ORDER[WAIT] + 1))
    left = np.zeros(len(labels))
    whole = np.array(
        [sum(v for (bar, _), v in seconds.items() if bar == label) for label in labels]
    )
    for place, stage in enumerate([*large, "other"]):
        width = np.array([seconds.get((label, stage), 0.0) for label in labels])
        if stage == "other":  # with the small stages
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


def _bar(row: Row) -> str:
    """Label of the bar that a row is part of."""
    side = row.get("side")
    return f"{row['arm']}, {side}" if side else str(row["arm"])


def _stage_look(stage: str, place: int) -> dict[str, Any]:
    """Colour and hatch of a stage: waiting is empty, `other` is grey."""
    if stage == WAIT:
        return {"color": "white", "hatch": "//////", "edgecolor": "0.6"}
    return {
        "color": "0.8" if stage == "other" else COLOURS[place % len(COLOURS)],
        "hatch": HATCHES[place % len(HATCHES)],
        "edgecolor": "white",
    }


def _bars_inches(labels: Sequence[str]) -> float:
    """Height of a panel with bars of these labels; a single bar leaves room for the axis label."""
    lines = max(wrapped(label).count("\n") for label in labels)
    return 0.55 + (0.18 + 0.13 * lines) * max(2, len(labels))


# -- rounding --------------------------------------------------------------------------------------


_ROUTES_NOTE = (
    "routes: of models with experts, how far log-ratios move if tokens may go to other experts "
    "than before the step; with routing replay the run's ratios do not contain it. same_routes: "
    "share of the tokens that would go to the same ones, mean over layers and steps. "
    "engine_same_routes: share of the tokens that the trainer, at the weights that the step begins "
    "with, sends to the experts that the engine chose."
)


def rounding(comparison: Comparison) -> Exhibit:
    """How far a step moves its ratios, and how far rounding does, beside the clip's widths."""
    rows = [row for arm in comparison.curves if (row := _rounding_row(arm))]
    if not rows:
        raise NoData("no run measured rounding (metrics.rounding_every_steps)")
    has_routes = any(row["routes"] is not None for row in rows)
    if not has_routes:  # dense models
        rows = [{k: v for k, v in row.items() if "routes" not in k} for row in rows]
    labels = [str(row["arm"]) for row in rows]
    figure, (axis,) = panels(1, row_inches=_bars_inches(labels))
    axis.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    axis.set(ylabel="method", ylim=(len(rows) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    heights = np.arange(len(rows))
    moved = {"signal": "the step", "rounding": "rounding"}
    moved |= {"routes": "changed routes"} if has_routes else {}
    for place, (name, label) in enumerate(moved.items()):
        look = arm_style(place) | {"linestyle": ""}
        axis.plot(column(rows, name), heights, label=f"moved by {label} (rms)", **look)
    # The two widths may be equal: one is drawn below the line of its method, the other above.
    widths = {"eps_low": 0.4, "eps_high_max": -0.4}
    for place, (name, side) in enumerate(widths.items(), start=len(moved)):
        colour = arm_style(place)["color"]
        axis.vlines(column(rows, name), heights, heights + side, color=colour, lw=1.5, label=name)
    keys = (*moved, "eps_low", "eps_high_max")
    sizes = [v for key in keys for v in column(rows, key) if v > 0]
    axis.set(xlabel="|log ratio|", xscale="log")
    if sizes:
        axis.set_xlim(min(sizes) / 2, 2 * max(sizes))
    axis.xaxis.set_major_locator(LogLocator(numticks=4))
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
            *[_ROUTES_NOTE] * has_routes,
        ],
    )


def _rounding_row(arm: Arm) -> Row | None:
    """Signal and rounding over all seeds and measured steps; None if nothing was measured."""

    def values(name: str, group: str = "numerics") -> np.ndarray:
        series = (run.series(f"{group}/{name}").values() for run in arm.runs)
        return np.array([value for one in series for value in one])

    if not len(values("ratio_rounding")):
        return None
    correlation, changed = values("ratio_correlation"), values("clip_decisions_changed")
    routes, same = values("ratio_by_routes", "experts"), values("same_routes_share", "experts")
    engine = values("engine_same_routes_share", "experts")
    method = arm.method
    return {
        "arm": arm.label,
        "signal": float(np.sqrt(np.mean(values("ratio_signal") ** 2))),
        "rounding": float(np.sqrt(np.mean(values("ratio_rounding") ** 2))),
        "correlation": float(np.mean(correlation)) if len(correlation) else None,
        "changed": float(np.mean(changed)) if len(changed) else None,
        "routes": float(np.sqrt(np.mean(routes**2))) if len(routes) else None,
        "same_routes": float(np.mean(same)) if len(same) else None,
        "engine_same_routes": float(np.mean(engine)) if len(engine) else None,
        "eps_low": method.eps_low if method.is_band else None,
        "eps_high_max": method.eps_high_max if method.is_band else None,
    }
