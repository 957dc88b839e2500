"""Final accuracy of each arm: the summary, other settings, and ablations of k and the clip."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import astuple, fields, replace

from matplotlib.axes import Axes

from gapo_megatron.config.methods import Method
from gapo_megatron.evaluate.statistics import (
    Interval,
    has_spread,
    paired_difference,
    stars,
    welch_p_value,
)
from gapo_megatron.evaluate.table import NONE, Table, mean, with_interval
from gapo_megatron.ops.report.arms import CLIP, SIZES, Arm, Comparison, K
from gapo_megatron.ops.report.costs import waiting_notes
from gapo_megatron.ops.report.learning import SHARE_LIMITS
from gapo_megatron.ops.report.series import NoData, Row, final, interval, pass_keys, select
from gapo_megatron.ops.report.style import (
    Exhibit,
    arm_style,
    column,
    draw_bars,
    legend_below,
    panels,
)

INTERVALS = (
    "± is half the width of the 95 % Student-t interval: of a mean over seeds, or of the "
    "difference between runs with the same seed. There is none for a single seed, or where all "
    "seeds have the same value."
)
NOT_EVALUATED = "no method has an evaluation that all of its seeds have"


# -- tables of arms --------------------------------------------------------------------------------


def summary(comparison: Comparison) -> Exhibit:
    """Final pass@1 and pass@k of the arms in curves, differences from the first arm, hours."""
    first = comparison.first
    is_compared = len(comparison.curves) > 1
    notes = ["Values are those of the last evaluation that all seeds of a row have."]
    if any(len(arm.runs) > 1 for arm in comparison.curves):
        notes.insert(0, INTERVALS)
    if is_compared:
        notes.append(
            f"{first.label} - row: by how many percentage points {first.label} is better than the "
            "method of the row, where both were evaluated at the same step. Stars: Welch's t-test "
            "over seeds, * p < 0.05, ** p < 0.01, *** p < 0.001, not corrected for the number of "
            "tests."
        )
    notes += waiting_notes(comparison.curves)
    rows, columns, lines = _content(comparison.curves, first=first if is_compared else None)
    return Exhibit(
        aid="Settings, final accuracy on held-out problems and hours of each method.",
        rows=rows,
        table=Table("final accuracy on held-out problems", columns, lines, notes=notes),
    )


def others(comparison: Comparison) -> Exhibit:
    """Final accuracy of all other arms: ablations and branches, without significance tests."""
    arms = [arm for arm in comparison.arms if arm not in comparison.curves]
    if not arms:
        raise NoData("every method was run with one setting, and none branched")
    rows, columns, lines = _content(arms, first=None)
    title = "final accuracy on held-out problems, other settings"
    return Exhibit(
        aid="Final accuracy of the runs that the curves do not show: other settings, and branches.",
        rows=rows,
        table=Table(title, columns, lines, notes=[INTERVALS]),
    )


def _content(
    arms: Sequence[Arm], *, first: Arm | None
) -> tuple[list[Row], list[str], list[list[str]]]:
    """Rows of the CSV; columns and lines of the table; with differences if there is a `first`."""
    try:
        keys = pass_keys(arms)
    except NoData:
        keys = []
    rows, lines = [], []
    for arm in arms:
        method, steps = arm.method, min(run.num_steps for run in arm.runs)
        wanted = max(run.config.run.num_steps for run in arm.runs)
        hours = mean([run.hours for run in arm.runs])
        row: Row = {
            "method": arm.label,
            "k": arm.k,
            "eps_low": method.eps_low,
            "eps_high_max": method.eps_high_max,
            "seeds": " ".join(map(str, arm.seeds)),
            "steps": steps,
            "steps wanted": wanted,
            "hours": hours,
        }
        done = f"{steps}" if steps == wanted else f"{steps} of {wanted}"
        clips = [f"{method.eps_low:g}", f"{method.eps_high_max:g}"]
        line = [arm.label, f"{arm.k}", *clips, f"{len(arm.runs)}", done]
        for key in keys:
            name = key.removeprefix("eval/")
            step, values = final(arm, key) or (None, [])
            found = interval(values) if values else dict.fromkeys(("mean", "low", "high"))
            row |= {f"{name} {bound}": found[bound] for bound in ("mean", "low", "high")}
            row[f"{name} step"] = step
            line.append(with_interval(values))
            if first is not None:
                more, cell = _difference(first, arm, key)
                row |= {f"{name} {head}": value for head, value in more.items()}
                line.append(cell)
        rows.append(row)
        lines.append([*line, f"{hours:.2f}"])
    columns = ["method", "k", "eps_low", "eps_high_max", "seeds", "steps"]
    for key in keys:
        columns.append(f"{key.removeprefix('eval/')} (%)")
        columns += [f"{first.label} - row"] if first is not None else []
    return rows, [*columns, "hours"], lines


def _difference(first: Arm, arm: Arm, key: str) -> tuple[Row, str]:
    """Columns of the CSV and cell of the table for `first` minus `arm`, with Welch's test."""
    pair = None if arm is first else _final_pair(first, arm, key)
    found = None if pair is None else gain(first, arm, key)
    p_value = math.nan if pair is None else welch_p_value(*pair)
    numbers = {
        "difference": math.nan if found is None else found.mean,
        "difference low": math.nan if found is None else found.low,
        "difference high": math.nan if found is None else found.high,
        "p": p_value,
    }
    row: Row = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    return row, gain_text(found, p_value=p_value)


def gain(first: Arm, other: Arm, key: str) -> Interval | None:
    """Mean difference `first` minus `other` at the end, over the seeds they share.

    Returns:
        None without evaluations at the same step. With fewer than two shared seeds, the difference
        of the means; its bounds are then NaN, as they are where all differences are equal.
    """
    pair = _final_pair(first, other, key)
    if pair is None:
        return None
    by_seed = [
        dict(zip(arm.seeds, values, strict=True))
        for arm, values in zip((first, other), pair, strict=True)
    ]
    shared = [seed for seed in first.seeds if seed in by_seed[1]]
    ours, theirs = pair if len(shared) < 2 else [[one[s] for s in shared] for one in by_seed]
    if len(shared) > 1 and has_spread([a - b for a, b in zip(ours, theirs, strict=True)]):
        return paired_difference(theirs, ours)
    return Interval(mean(ours) - mean(theirs), math.nan, math.nan)


def gain_text(found: Interval | None, *, p_value: float = math.nan) -> str:
    """A gain in percentage points with half its interval's width and stars, if there are any."""
    if found is None:
        return NONE
    half = 50 * (found.high - found.low)
    spread = "" if math.isnan(half) else f"±{half:.2f}"
    return f"{100 * found.mean:+.2f}{spread}{stars(p_value)}"


def _final_pair(first: Arm, other: Arm, key: str) -> tuple[Sequence[float], Sequence[float]] | None:
    """Final values of both arms in seed order; None if they are of different steps."""
    ours, theirs = final(first, key), final(other, key)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return None
    return ours[1], theirs[1]


# -- ablation over k -------------------------------------------------------------------------------


def over_k(comparison: Comparison) -> Exhibit:
    """The paper's ablation: final pass@1 and pass@k of each method against k."""
    families = [arms for arms in comparison.over(K, *SIZES) if len({arm.k for arm in arms}) > 1]
    if not families:
        raise NoData("no method was run with two values of batch.rollouts_per_prompt")
    keys = pass_keys([arm for arms in families for arm in arms])
    rows: list[Row] = []
    for key in keys:
        for arms in families:
            for arm in sorted(arms, key=lambda arm: arm.k):
                if found := final(arm, key):
                    row: Row = {"method": arms[0].label, "metric": key.removeprefix("eval/")}
                    rows.append({**row, "k": arm.k, "step": found[0], **interval(found[1])})
    if not rows:
        raise NoData(NOT_EVALUATED)
    figure, axes = panels(len(keys), row_inches=1.5, share_y=False)
    names = [arms[0].label for arms in families]
    for axis, key in zip(axes, keys, strict=True):
        _draw_over_k(axis, select(rows, metric=key.removeprefix("eval/")), names)
        axis.set_ylabel(f"final {key.removeprefix('eval/')} (%)")
    legend_below(figure, axes[0])
    seeds = sorted({row["seeds"] for row in rows})
    return Exhibit(
        aid="Final accuracy on held-out problems against k, the number of rollouts per group; one "
        "line per method.",
        rows=rows,
        figure=figure,
        notes=[
            f"Bars: 95 % Student-t intervals of the mean over seeds ({' or '.join(map(str, seeds))}"
            " of them); methods stand beside each other so that bars do not hide one another."
        ],
    )


def _draw_over_k(axis: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    axis.set_xlabel("k (rollouts per group)")
    axis.set_xscale("log", base=2)
    for place, name in enumerate(names):
        if line := select(rows, method=name):
            x = 2 ** (0.12 * (place - (len(names) - 1) / 2)) * column(line, "k")
            look = {"label": name, "capsize": 2, **arm_style(place)}
            draw_bars(axis, x, line, limits=SHARE_LIMITS, **look)
    ks = sorted({row["k"] for row in rows})
    axis.set_xticks(ks)
    axis.set_xlim(ks[0] / 2**0.4, ks[-1] * 2**0.4)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()


# -- sweep of the clip -----------------------------------------------------------------------------


def clip_sweep(comparison: Comparison) -> Exhibit:
    """The paper's table of `eps_high_max`: adaptive against uniform clip, level by level."""
    families: dict[Hashable, list[Arm]] = {}
    for arm in (arm for arms in comparison.over(CLIP) for arm in arms):
        families.setdefault(_family(arm), []).append(arm)
    swept = [arms for arms in families.values() if len({_clip(arm) for arm in arms}) > 1]
    if not swept:
        raise NoData("no method was run with two values of objective.eps_high_max")
    key = pass_keys([arm for arms in swept for arm in arms])[0]
    levels = sorted({_clip(arm) for arms in swept for arm in arms})
    rows: list[Row] = []
    at_level: list[dict[float, Arm]] = []
    for arms in swept:
        at_level.append({})
        for arm in sorted(arms, key=_clip):
            if found := final(arm, key):
                at_level[-1].setdefault(_clip(arm), arm)
                row: Row = {"methods": _name(arms), "arm": arm.label, "eps_high_max": _clip(arm)}
                rows.append({**row, "step": found[0], **interval(found[1])})
    if not rows:
        raise NoData(NOT_EVALUATED)
    lines = []
    for arms, by_level in zip(swept, at_level, strict=True):
        finals = [final(by_level[level], key) if level in by_level else None for level in levels]
        lines.append([_name(arms), *(with_interval(one[1]) if one else NONE for one in finals)])
    ours = at_level[0]
    for arms, theirs in zip(swept[1:], at_level[1:], strict=True):
        gains = [
            gain(ours[level], theirs[level], key) if level in ours and level in theirs else None
            for level in levels
        ]
        lines.append([f"{_name(swept[0])} over {_name(arms)} (points)", *map(gain_text, gains)])
    return Exhibit(
        aid="Final pass@1 of each method at each eps_high_max; the last rows are differences "
        "between methods at the same eps_high_max.",
        rows=rows,
        table=Table(
            f"final held-out {key.removeprefix('eval/')} in % by eps_high_max",
            ["eps_high_max", *(f"{level:g}" for level in levels)],
            lines,
            notes=[INTERVALS],
        ),
    )


def _clip(arm: Arm) -> float:
    return arm.method.eps_high_max


def _name(family: Sequence[Arm]) -> str:
    """Name of a family: the usual arms of its methods, as in "gspo, gspo_asym"."""
    usual = {arm.method.name: arm.label for arm in reversed(family)}
    return ", ".join(dict.fromkeys(usual[arm.method.name] for arm in family))


def _family(arm: Arm) -> Hashable:
    """Key of arms that differ in the upper clip alone: gspo and gspo_asym are one family."""
    method = astuple(replace(arm.method, name="", eps_high_max=0.0))
    # Settings of the objective that are not the method's (kl_coef) still tell families apart.
    compared = {"objective.method", *(f"objective.{field.name}" for field in fields(Method))}
    rest = [pair for pair in arm.settings.items() if pair[0] not in compared]
    return (method, tuple(rest))
