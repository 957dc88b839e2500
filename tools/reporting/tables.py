"""Tables of a report: final accuracy of each arm, and rounding beside the clip's widths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapo_tools.evaluation.statistics import has_spread, paired_difference
from gapo_tools.evaluation.table import NONE, Table, mean, with_interval
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.series import NoData, Row, final, interval, pass_keys
from gapo_tools.reporting.style import Exhibit


def summary(comparison: Comparison) -> Exhibit:
    """Settings, final pass@1 and pass@k, differences from the first arm, and hours of each arm."""
    first = comparison.first
    is_compared = len(comparison.arms) > 1
    notes = ["Values are those of the last evaluation that all seeds of a row have."]
    if any(len(arm.runs) > 1 for arm in comparison.arms):
        notes.append(
            "± is half the width of the 95 % Student-t interval: of a mean over seeds, or of the "
            "difference between runs with the same seed. There is none for a single seed, or "
            "where all seeds have the same value."
        )
    if is_compared:
        notes.append(
            f"{first.label} - row: by how many percentage points {first.label} is better than the "
            "method of the row, where both were evaluated at the same step. Intervals are not "
            "corrected for their number."
        )
    keys = pass_keys(comparison.arms)
    columns = ["method", "k", "eps_low", "eps_high_max", "seeds", "steps"]
    for key in keys:
        columns += [f"{key.removeprefix('eval/')} (%)", *[f"{first.label} - row"] * is_compared]
    rows, lines = [], []
    for arm in comparison.arms:
        row, line = _settings(arm)
        for key in keys:
            name = key.removeprefix("eval/")
            step, values = final(arm, key) or (None, [])
            found = interval(values) if values else dict.fromkeys(("mean", "low", "high"))
            row |= {f"{name} {bound}": found[bound] for bound in ("mean", "low", "high")}
            row[f"{name} step"] = step
            line.append(with_interval(values))
            if is_compared:
                gain = dict.fromkeys(("mean", "low", "high")) if arm is first else None
                gain = gain or difference(first, arm, key)
                row |= {f"{name} difference {bound}": value for bound, value in gain.items()}
                line.append(_points(gain))
        hours = mean([run.hours for run in arm.runs])
        rows.append(row | {"hours": hours})
        lines.append([*line, f"{hours:.2f}"])
    return Exhibit(
        aid="Settings, final accuracy on held-out problems and hours of each method.",
        rows=rows,
        table=Table("final accuracy on held-out problems", [*columns, "hours"], lines, notes=notes),
    )


def _settings(arm: Arm) -> tuple[Row, list[str]]:
    """First columns of the CSV, and cells of the table."""
    method, steps = arm.method, min(run.num_steps for run in arm.runs)
    wanted = max(run.config.run.num_steps for run in arm.runs)
    row: Row = {
        "method": arm.label,
        "k": arm.k,
        "eps_low": method.eps_low,
        "eps_high_max": method.eps_high_max,
        "seeds": " ".join(map(str, arm.seeds)),
        "steps": steps,
        "steps wanted": wanted,
    }
    done = f"{steps}" if steps == wanted else f"{steps} of {wanted}"
    clips = [f"{method.eps_low:g}", f"{method.eps_high_max:g}"]
    return row, [arm.label, f"{arm.k}", *clips, f"{len(arm.runs)}", done]


def difference(first: Arm, other: Arm, key: str) -> dict[str, float | None]:
    """Mean and bounds of `first` minus `other` at the end, over the seeds that both have.

    All None without evaluations at the same step. With fewer than two shared seeds, the difference
    of the means without bounds; nor are there bounds where all differences are equal.
    """
    ours, theirs = final(first, key), final(other, key)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return dict.fromkeys(("mean", "low", "high"))
    by_seed = [
        dict(zip(arm.seeds, values, strict=True))
        for arm, (_, values) in ((first, ours), (other, theirs))
    ]
    pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in first.seeds if seed in by_seed[1]]
    if len(pairs) > 1:
        before, after = [there for _, there in pairs], [here for here, _ in pairs]
        found = paired_difference(before, after)
        if has_spread([here - there for here, there in pairs]):
            return {"mean": found.mean, "low": found.low, "high": found.high}
        return {"mean": found.mean, "low": None, "high": None}
    return {"mean": mean(ours[1]) - mean(theirs[1]), "low": None, "high": None}


def _points(gain: dict[str, float | None]) -> str:
    """A difference in percentage points with half its interval's width, if there are any."""
    if gain["mean"] is None:
        return NONE
    if gain["low"] is None or gain["high"] is None:
        return f"{100 * gain['mean']:+.2f}"
    return f"{100 * gain['mean']:+.2f}±{50 * (gain['high'] - gain['low']):.2f}"


# -- rounding --------------------------------------------------------------------------------------


def rounding(comparison: Comparison) -> Exhibit:
    """How far a step moves its ratios, and how far rounding does, beside the clip's widths."""
    rows = [row for arm in comparison.arms if (row := _rounding_row(arm))]
    if not rows:
        raise NoData("no run measured rounding (metrics.rounding_every_steps)")
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    lines = [[_cell(row[name]) for name in columns] for row in rows]
    notes = [
        "Root mean squares over sequences (for token ratios, over tokens), measured steps and "
        "seeds. The log-ratio is computed twice on the same weights, in the run's arithmetic and "
        "without its rounding; rounding is the difference. changed: share of the clip's decisions "
        "(A not 0) that differ between the two.",
        "Of models with experts: routes, how far log-ratios move if tokens may go to other experts "
        "than before the step.",
    ]
    return Exhibit(
        aid="How far a step moves the log-ratio of a sequence (signal), and how far rounding does, "
        "beside the widths of the clip. Where rounding is as wide as the clip, it decides part of "
        "what is clipped.",
        rows=rows,
        table=Table("log-ratios and their rounding", columns, lines, notes=notes),
    )


def _cell(value: str | float | None) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else f"{value:.2g}"


def _rounding_row(arm: Arm) -> Row | None:
    """Signal and rounding over all seeds and measured steps; None if nothing was measured."""

    def values(name: str) -> np.ndarray:
        return np.array([value for run in arm.runs for value in run.series(name).values()])

    def rms(values: Sequence[float] | np.ndarray) -> float | None:
        return float(np.sqrt(np.mean(np.square(values)))) if len(values) else None

    rounded, changed = values("numerics/ratio_rounding"), values("numerics/clip_decisions_changed")
    if not len(rounded):
        return None
    method = arm.method
    return {
        "method": arm.label,
        "signal": rms(values("numerics/ratio_signal")),
        "rounding": rms(rounded),
        "changed": float(np.mean(changed)) if len(changed) else None,
        "routes": rms(values("experts/ratio_by_routes")),
        "eps_low": method.eps_low if method.is_band else None,
        "eps_high_max": method.eps_high_max if method.is_band else None,
    }
