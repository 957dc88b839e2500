"""Accuracy of runs before and after training, with intervals over the held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gapo_megatron.evaluate.counts import Counts, read_counts
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_tools.evaluation.statistics import Interval, paired_difference
from gapo_tools.evaluation.table import Table
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.series import NoData, Row
from gapo_tools.reporting.style import Exhibit


def before_and_after(comparison: Comparison) -> Exhibit:
    """pass@1 and pass@k at a run's first and last evaluation, and the gain: a row per run."""
    rows: list[Row] = []
    lines = []
    for arm in comparison.arms:
        for run in arm.runs:
            if (found := read_first_and_last(run.folder)) is None:
                continue
            steps, pair = found
            k, of = run.config.evaluation.samples_per_prompt, gain(pair)
            assert of is not None  # `read_first_and_last` has seen to it
            row: Row = {"arm": arm.label, "seed": run.seed, "problems": len(pair[0])}
            row |= {"first step": steps[0], "last step": steps[1], "k": k}
            for name, size in {"pass@1": 1, "pass@k": k}.items():
                row |= {f"{name} before": pass_at(pair[0], size)}
                row |= {f"{name} after": pass_at(pair[1], size)}
            rows.append(row | {"gain": of.mean, "gain low": of.low, "gain high": of.high})
            settings = [arm.label, f"{run.seed}", f"{len(pair[0])}", f"{steps[0]} -> {steps[1]}"]
            lines.append([*settings, change(pair, 1), with_bounds(of), change(pair, k)])
    if not rows:
        raise NoData(
            "no run has been evaluated twice on the same problems, with verdicts of two or more"
        )
    columns = ["method", "seed", "problems", "steps"]
    ks = sorted({row["k"] for row in rows})
    columns += ["pass@1 (%)", "gain [95 %]", f"pass@{' or '.join(map(str, ks))} (%)"]
    notes = ["gain: of pass@1, in percentage points; the interval is Student's t over problems."]
    return Exhibit(
        aid="Accuracy on held-out problems at the first and the last evaluation of each run.",
        rows=rows,
        table=Table("before -> after", columns, lines, notes=notes),
    )


def read_first_and_last(folder: Path) -> tuple[tuple[int, int], tuple[Counts, Counts]] | None:
    """Steps and counts of a run's first and last evaluation; None if they cannot be compared.

    They can if both have the same problems, and `gain` exists.

    Raises:
        DataError: names the file and what is wrong in it.
    """
    numbered = {int(path.stem[5:]): path for path in folder.glob("evaluations/step_*.json")}
    steps = sorted(numbered)
    if len(steps) < 2:
        return None
    first, last = (read_counts(numbered[step]) for step in (steps[0], steps[-1]))
    if [one["id"] for one in first] != [one["id"] for one in last] or gain((first, last)) is None:
        return None
    return (steps[0], steps[-1]), (first, last)


def gain(pair: tuple[Counts, Counts]) -> Interval | None:
    """Difference of pass@1, after minus before, paired over the problems with verdicts in both.

    None if fewer than two problems have them: there is no interval.
    """
    known = [both for both in zip(*pair, strict=True) if all(one["num_samples"] for one in both)]
    if len(known) < 2:
        return None
    before, after = (
        [one["num_correct"] / one["num_samples"] for one in counts]
        for counts in zip(*known, strict=True)
    )
    return paired_difference(before, after)


def pass_at(counts: Counts, k: int) -> float:
    """Mean pass@k over problems, as a share."""
    return mean_pass_at_k([(one["num_samples"], one["num_correct"]) for one in counts], k)


def change(pair: Sequence[Counts], k: int) -> str:
    """pass@k before and after, in percent: `42.0 -> 59.0`."""
    return " -> ".join(f"{100 * pass_at(counts, k):.1f}" for counts in pair)


def with_bounds(interval: Interval | None) -> str:
    """A gain in percentage points with its bounds; `-` for none."""
    if interval is None:
        return "-"
    low, high = 100 * interval.low, 100 * interval.high
    return f"{100 * interval.mean:+.1f}  [{low:+.1f}, {high:+.1f}]"
