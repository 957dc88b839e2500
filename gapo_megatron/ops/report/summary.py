"""Tables of what each arm reached, and whether it differs from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapo_megatron.evaluate.statistics import (
    Interval,
    has_spread,
    paired_difference,
    stars,
    welch_p_value,
)
from gapo_megatron.evaluate.table import NONE, Table, mean, with_interval
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.costs import waiting_notes
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.series import NoData, Row, final, interval, pass_keys

INTERVALS = (
    "± is half the width of the 95 % Student-t interval: of a mean over seeds, or of the "
    "difference between runs with the same seed. There is none for a single seed, or where all "
    "seeds have the same value."
)


def summary(comparison: Comparison) -> Exhibit:
    """Final pass@1 and pass@k of the curves' arms, differences from the first, costs."""
    first = comparison.first
    notes = ["Values are those of the last evaluation that all seeds of a row have."]
    if any(len(arm.runs) > 1 for arm in comparison.curves):
        notes.insert(0, INTERVALS)
    if len(comparison.curves) > 1:
        notes.append(
            f"{first.label} - row: by how many percentage points {first.label} is better than the "
            "method of the row, where both were evaluated at the same step. Stars: Welch's t-test "
            "over seeds, * p < 0.05, ** p < 0.01, *** p < 0.001, not corrected for the number of "
            "tests."
        )
    notes += waiting_notes(comparison.curves)
    is_compared = len(comparison.curves) > 1
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
    return Exhibit(
        aid="Final accuracy of the runs that the curves do not show: other settings, and branches.",
        rows=rows,
        table=Table(
            "final accuracy on held-out problems, other settings",
            columns,
            lines,
            notes=[INTERVALS],
        ),
    )


def gain(first: Arm, other: Arm, key: str) -> Interval | None:
    """Gain of `first` over `other` at the end: the mean difference over the seeds they share.

    Returns:
        None without evaluations at one step. Where they share fewer than two seeds, the difference
        of the means, with bounds of NaN; likewise where the differences do not spread.
    """
    pair = _pair(first, other, key)
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
    """Gain in percentage points, with half its interval's width and stars, where there are any."""
    if found is None:
        return NONE
    half = 50 * (found.high - found.low)
    spread = "" if math.isnan(half) else f"±{half:.2f}"
    return f"{100 * found.mean:+.2f}{spread}{stars(p_value)}"


def _content(
    arms: Sequence[Arm], *, first: Arm | None
) -> tuple[list[Row], list[str], list[list[str]]]:
    """Rows of an exhibit; columns and lines of its table."""
    try:
        keys = pass_keys(arms)
    except NoData:
        keys = []
    rows, lines = [], []
    for arm in arms:
        row, line = _costs(arm)
        cells = []
        for key in keys:
            name = key.removeprefix("eval/")
            found = final(arm, key)
            values = found[1] if found else []
            result = interval(values) if values else {"mean": None, "low": None, "high": None}
            row |= {f"{name} {bound}": result[bound] for bound in ("mean", "low", "high")}
            row |= {f"{name} step": found[0] if found else None}
            cells.append(with_interval(values))
            if first is not None:
                more, cell = _difference(first, arm, key)
                row |= {f"{name} {head}": value for head, value in more.items()}
                cells.append(cell)
        rows.append(row)
        lines.append([*line[:-1], *cells, line[-1]])
    heads = []
    for key in keys:
        heads.append(f"{key.removeprefix('eval/')} (%)")
        heads += [f"{first.label} - row"] if first is not None else []
    columns = ["method", "k", "eps_low", "eps_high_max", "seeds", "steps", *heads, "hours"]
    return rows, columns, lines


def _costs(arm: Arm) -> tuple[Row, list[str]]:
    method, steps = arm.method, [run.num_steps for run in arm.runs]
    wanted = max(run.config.run.num_steps for run in arm.runs)
    hours = mean([run.hours for run in arm.runs])
    row: Row = {
        "method": arm.label,
        "k": arm.k,
        "eps_low": method.eps_low,
        "eps_high_max": method.eps_high_max,
        "seeds": " ".join(map(str, arm.seeds)),
        "steps": min(steps),
        "steps wanted": wanted,
        "hours": hours,
    }
    done = f"{min(steps)}" if min(steps) == wanted else f"{min(steps)} of {wanted}"
    cells = [arm.label, f"{arm.k}", f"{method.eps_low:g}", f"{method.eps_high_max:g}"]
    return row, [*cells, f"{len(arm.runs)}", done, f"{hours:.2f}"]


def _difference(first: Arm, arm: Arm, key: str) -> tuple[Row, str]:
    pair = None if arm is first else _pair(first, arm, key)
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


def _pair(first: Arm, other: Arm, key: str) -> tuple[Sequence[float], Sequence[float]] | None:
    """Final values of both, by seed, where they stand at the same step."""
    ours, theirs = final(first, key), final(other, key)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return None
    return ours[1], theirs[1]
