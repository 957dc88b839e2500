"""Figures of what was learned: reward, held-out pass@1 and pass@k over training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.runs import Run, Values
from gapo_megatron.ops.report.series import (
    SEED,
    Row,
    curves,
    pass_keys,
    window_of,
    window_text,
    windowed,
)
from gapo_megatron.ops.report.style import (
    NUM_COLUMNS,
    arm_style,
    draw_band,
    legend_below,
    outer_names,
    over_steps,
    panels,
    same_range,
    wrapped,
)

MOST_ARMS = 3
"""Arms in one panel at most: with more, bands are a slab, and colours too many to tell apart."""
OTHER = "the method above the panel"
SHARE_LIMITS = (0.0, 1.0)

Shown = Mapping[str, Arm]
"""The arms of a panel, by their names in the legend; places in it are places of `arm_style`."""


def reward(comparison: Comparison) -> Exhibit:
    """Share of correct rollouts in training."""
    rows, window = reward_rows(comparison.curves)

    def draw(axis: Axes, _: str, shown: Shown) -> None:
        draw_reward(axis, rows, shown)

    return Exhibit(
        aid="Share of the rollouts on training problems that are correct, against the step.",
        rows=rows,
        figure=compare([("", shown) for shown in sharing(comparison.curves, rows)], draw),
        notes=[
            f"Each point is {window_text(window)}.",
            seeds_note(comparison.curves),
        ],
    )


def reward_rows(arms: Sequence[Arm]) -> tuple[list[Row], int]:
    """Rows, and the window in steps."""
    window = window_of([run for arm in arms for run in arm.runs])

    def smooth(run: Run) -> Values:
        values = run.series("reward/mean")
        return windowed(values, list(values), window, bin_steps=run.bin_steps)

    return curves(arms, smooth, what="reward/mean"), window


def draw_reward(axis: Axes, rows: Sequence[Row], shown: Shown) -> None:
    """Percent correct over steps."""
    axis.set_ylabel("correct (%)")
    draw_arms(axis, rows, shown, limits=SHARE_LIMITS, scale=100)


def pass_at_k(comparison: Comparison) -> Exhibit:
    """Held-out pass@1 and pass@k."""
    rows = pass_rows(comparison.curves)
    names = list(dict.fromkeys(str(row["metric"]) for row in rows))
    shared = sharing(comparison.curves, rows)
    thin = (
        "Thin lines: single seeds. " if any(len(arm.runs) > 1 for arm in comparison.curves) else ""
    )

    def draw(axis: Axes, metric: str, shown: Shown) -> None:
        draw_pass(axis, rows, shown, metric)

    return Exhibit(
        aid="Accuracy on held-out problems, against the step. pass@1 is the chance that one answer "
        "is correct, pass@k the chance that at least one of k is.",
        rows=rows,
        figure=compare(
            [(name, shown) for shown in shared for name in names],
            draw,
            num_columns=1 if len(shared) == 1 else len(names),
        ),
        notes=[thin + seeds_note(comparison.curves)],
    )


def pass_rows(arms: Sequence[Arm]) -> list[Row]:
    """Rows of pass@1 and pass@k for the largest k that all have; each seed has its own columns."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    rows: list[Row] = []
    for key in pass_keys(arms):
        name = key.removeprefix("eval/")
        rows += curves(arms, operator.methodcaller("series", key), what=key, metric=name)
        by_arm = {arm.label: {run.seed: run.series(key) for run in arm.runs} for arm in arms}
        for row in rows:
            if row["metric"] == name:
                by_seed = by_arm[str(row["arm"])]
                row |= {f"{SEED}{s}": by_seed.get(s, {}).get(int(row["step"] or 0)) for s in seeds}
    return rows


def draw_pass(
    axis: Axes,
    rows: Sequence[Row],
    shown: Shown,
    metric: str,
    *,
    first_place: int = 0,
    name: str = "",
) -> None:
    """Percent of problems over steps.

    Args:
        axis: where to.
        rows: those of `pass_rows`.
        shown: the arms.
        metric: which metric of `rows`.
        first_place: place in `arm_style` of the first arm.
        name: what the legend adds to the arm's name, where a panel has several metrics.
    """
    axis.set_ylabel(f"{metric} (%)")
    chosen = [row for row in rows if row["metric"] == metric]
    look = {"limits": SHARE_LIMITS, "scale": 100, "points": True}
    draw_arms(axis, chosen, shown, first_place=first_place, name=name, **look)


def draw_arms(
    axis: Axes,
    rows: Sequence[Row],
    shown: Shown,
    *,
    first_place: int = 0,
    name: str = "",
    **how: Any,
) -> None:
    """A line and a band for each arm, labelled; those without rows are left out.

    Args:
        axis: where to.
        rows: rows with arm, step, mean, low, high.
        shown: the arms.
        first_place: place in `arm_style` of the first arm.
        name: what the legend adds to an arm's name.
        how: `limits`, `scale` and `points` of `draw_band`.
    """
    present = {row["arm"] for row in rows}
    over_steps(axis, [arm.label for arm in shown.values() if arm.label in present])
    for place, (label, arm) in enumerate(shown.items(), start=first_place):
        chosen = [row for row in rows if row["arm"] == arm.label]
        if chosen:
            draw_band(axis, chosen, label=f"{label} {name}".strip(), **how, **arm_style(place))


def sharing(arms: Sequence[Arm], rows: Sequence[Row]) -> list[Shown]:
    """The arms of each panel; those without rows are left out.

    Up to `MOST_ARMS` are in one panel; of more, each has one with the first beside it.
    """
    present = {row["arm"] for row in rows}
    drawn = [arm for arm in arms if arm.label in present]
    if len(drawn) <= MOST_ARMS:
        return [{arm.label: arm for arm in drawn}]
    first, *others = drawn
    return [{first.label: first, OTHER: other} for other in others]


def compare(
    contents: Sequence[tuple[str, Shown]],
    draw: Callable[[Axes, str, Shown], None],
    *,
    num_columns: int = NUM_COLUMNS,
) -> Figure:
    """A figure with a panel for each of `contents`.

    Args:
        contents: quantity and arms of each; panels of one quantity have one range of y.
        draw: draws a panel, its names included.
        num_columns: columns of panels.
    """
    one_quantity = len({quantity for quantity, _ in contents}) == 1
    is_single = OTHER not in contents[0][1]
    figure, axes = panels(
        len(contents),
        num_columns=num_columns,
        row_inches=1.5 if is_single else 1.1,
        share_y=one_quantity,
    )
    by_quantity: dict[str, list[Axes]] = {}
    for place, (axis, (quantity, shown)) in enumerate(zip(axes, contents, strict=True)):
        draw(axis, quantity, shown)
        by_quantity.setdefault(quantity, []).append(axis)
        if not is_single and one_quantity:
            axis.set_title(wrapped(shown[OTHER].label))
        elif not is_single and place % num_columns == 0:
            axis.set_title(shown[OTHER].label, loc="left")  # of the whole row
    for alike in by_quantity.values():
        same_range(alike)
    outer_names(axes, num_columns=num_columns, share_y=one_quantity)
    legend_below(figure, *axes)
    return figure


def seeds_note(arms: Sequence[Arm]) -> str:
    """Note on the number of seeds and the meaning of the bands."""
    numbers = sorted({len(arm.runs) for arm in arms})
    if numbers == [1]:
        return "One seed per method: no bands."
    counts = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in arms)
    if len(numbers) == 1:
        counts = f"{numbers[0]} each"
    return (
        f"Bands: 95 % Student-t intervals of the mean over seeds ({counts}), cut off where values "
        "are impossible."
    )
