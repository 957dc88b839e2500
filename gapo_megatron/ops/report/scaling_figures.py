"""Figures of a scaling study: tokens/s over GPUs, and the seconds of a step by stage."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from gapo_megatron.io.files import check_overwritable
from gapo_megatron.ops.plan.hardware import Gpu
from gapo_megatron.ops.plan.times import STAGES
from gapo_megatron.ops.report.costs import SMALL, draw_time
from gapo_megatron.ops.report.measured import Measured
from gapo_megatron.ops.report.scaling import (
    layout_items,
    same_batch,
    same_share,
    same_way,
    unit_names,
)
from gapo_megatron.ops.report.series import Row
from gapo_megatron.ops.report.style import (
    KINDS,
    MARKERS,
    Exhibit,
    arm_style,
    column,
    csv_names,
    legend_below,
    outer_names,
    panels,
    style,
    wrapped,
)

_LABEL_LETTERS = 28
"""Width of a line of a bar's name."""
_LEGEND_LETTERS = 50
"""Width of a line of a curve's name in the legend."""
_LETTERS_INCHES, _GAP_INCHES = 0.115, 0.06
"""Height of a line of a bar's name, and between two names."""
NAMES = ("throughput", "step_split")
_NO_BREAK = "\N{NO-BREAK SPACE}"


def write_scaling(
    runs: Sequence[Measured], rows: Sequence[Row], *, gpu: Gpu, folder: Path
) -> list[tuple[Exhibit, list[Path]]]:
    """Write `throughput` (its data: all of `rows`) and `step_split` as PNG, PDF and CSV.

    Args:
        runs: see `scaling_rows`.
        rows: the result of `scaling_rows`.
        gpu: the device.
        folder: folder of the files; made when missing.

    Returns:
        Each exhibit with its files.

    Raises:
        ConfigError: the folder holds files with these names that no earlier call wrote.
    """
    check_scaling(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        exhibits = {
            name: draw(runs, rows, gpu)
            for name, draw in zip(NAMES, (throughput, step_split), strict=True)
        }
        return [(one, one.write(folder / name)) for name, one in exhibits.items()]


def check_scaling(folder: Path) -> None:
    """Refuse to overwrite files that `write_scaling` did not write, judged by its first CSV."""
    is_ours = {"mfu", "tokens_per_gpu_s"} <= csv_names(folder / f"{NAMES[0]}.csv")
    names = [f"{name}{kind}" for name in NAMES for kind in KINDS]
    check_overwritable(folder, names, field="--output", is_ours=is_ours)


# -- tokens a second ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Runs of one layout with the same batch, or the same batch per GPU; or a single run."""

    label: str
    rows: list[Row]
    """Rows of the runs, by number of GPUs."""
    efficiency: str
    """Column with the efficiency of this line."""


def throughput(runs: Sequence[Measured], rows: Sequence[Row], gpu: Gpu) -> Exhibit:
    """Tokens/s per GPU: a panel per model and response limit, a line per batch and layout."""
    unit, units = unit_names(gpu)
    every = lines(runs, rows, unit=unit)
    titles = list(dict.fromkeys(_title(row) for row in rows))
    labels = list(dict.fromkeys(line.label for line in every))
    # Colours repeat after seven, with other markers.
    looks = {
        label: arm_style(n) | {"marker": MARKERS[(n + n // len(MARKERS)) % len(MARKERS)]}
        for n, label in enumerate(labels)
    }
    figure, axes = panels(len(titles), row_inches=1.7, share_y=False)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(wrapped(title))
        for line in every:
            if _title(line.rows[0]) == title:
                _draw_line(axis, line, looks[line.label])
        _dress(axis, rows, unit, units)
    outer_names(axes, share_y=False)
    if any(len(_counts(line.rows)) > 1 for line in every):
        axes[-1].plot([], [], color="0.6", linestyle=":", label="ideal")
    legend_below(figure, *axes)
    return Exhibit(
        aid=f"Throughput per {unit}, which stays constant under perfect scaling. Dots: measured. "
        "Dotted: the fastest layout on the "
        f"fewest {units} with the same batch, or with the same batch per {unit}.",
        rows=list(rows),
        figure=figure,
    )


def _title(row: Row) -> str:
    return f"{row['model']}, " + _whole(f"{row['max_response_tokens']:,} tokens")


def lines(runs: Sequence[Measured], rows: Sequence[Row], *, unit: str) -> list[Line]:
    """Group runs into lines: same batch and layout, and same batch per GPU and layout.

    Runs that compute in another way (micro-batches, vLLM's memory, ...) are another line. A run may
    be on one line of each kind; a run on neither is a line of its own.
    """
    of_batch: dict[Hashable, list[tuple[str, Row]]] = {}
    of_share: dict[Hashable, list[tuple[str, Row]]] = {}
    for one, row in zip(runs, rows, strict=True):
        cut = " ".join(layout_items(one, with_data_parallel=False))
        prompts = one.config.batch.rollout_prompts
        same = same_way(one)
        label = f"{prompts:,} prompts, {cut}"
        of_batch.setdefault((same_batch(one), same), []).append((label, row))
        label = f"{prompts / one.layout.num_ranks:g} prompts a {unit}, {cut}"
        of_share.setdefault((same_share(one), same), []).append((label, row))
    groups = [("strong_efficiency", group) for group in of_batch.values()]
    groups += [("weak_efficiency", group) for group in of_share.values()]
    several = [one for one in groups if len(_counts([row for _, row in one[1]])) > 1]
    drawn = [id(row) for _, group in several for _, row in group]
    alone = [one for group in of_batch.values() for one in group if id(one[1]) not in drawn]
    found: list[Line] = []
    for efficiency, group in [*several, *(("strong_efficiency", [one]) for one in alone)]:
        members = sorted((row for _, row in group), key=lambda row: row["gpus"])
        found.append(Line(group[0][0], members, efficiency))
    called = [(line.label, _title(line.rows[0])) for line in found]
    return [
        replace(line, label=f"{line.label} ({line.rows[0]['run']})")
        if called.count(name) > 1  # they differ in a setting that the label does not show
        else line
        for line, name in zip(found, called, strict=True)
    ]


def _counts(rows: Sequence[Row]) -> set[object]:
    return {row["gpus"] for row in rows}


def _draw_line(axis: Axes, line: Line, look: dict[str, Any]) -> None:
    gpus, measured = column(line.rows, "gpus"), column(line.rows, "tokens_per_gpu_s")
    if gpus[0] < gpus[-1]:
        ideal = measured[0] / column(line.rows, line.efficiency)[0]
        axis.plot(gpus[[0, -1]], [ideal, ideal], color="0.6", linestyle=":")
    # Do not break a line between "TP" and its size.
    label = textwrap.fill(re.sub(r"(?<=[A-Z]) (?=\d)", _NO_BREAK, line.label), _LEGEND_LETTERS)
    axis.plot(gpus, measured, label=label, **look | {"linestyle": "-"})


def _dress(axis: Axes, rows: Sequence[Row], unit: str, units: str) -> None:
    """Label the axes; ticks are the numbers of GPUs that were measured."""
    counts = sorted({row["gpus"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.minorticks_off()
    axis.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
    axis.set_ylim(0, 1.08 * axis.dataLim.y1)
    axis.set(xlabel=units, ylabel=f"tokens/s/{unit}")


# -- seconds of a step ----------------------------------------------------------------------------


def step_split(runs: Sequence[Measured], rows: Sequence[Row], gpu: Gpu) -> Exhibit:
    """Seconds of a step: a bar per run, cut into stages."""
    names = _short_names(runs, rows, gpu)
    split: list[Row] = []
    for name, row in zip(names, rows, strict=True):
        for stage in (*STAGES, "other"):
            measured = row[f"{stage}_s"] or 0.0
            split.append(
                {
                    "run": row["run"],
                    "arm": name,
                    "stage": stage,
                    "seconds": measured,
                    "share": measured / (row["step_s"] or 1),
                }
            )
    num_lines = max(len(name.splitlines()) for name in names)
    heights = len(names) * (_GAP_INCHES + _LETTERS_INCHES * num_lines)
    figure, (axis,) = panels(1, row_inches=0.6 + heights)
    draw_time(axis, split)
    axis.set(ylabel="run", xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
    legend_below(figure, axis, handle_length=1.4)
    notes = [
        f"`other` is time in no stage, and stages below {100 * SMALL:.0f} % of every step, which "
        "the table lists separately."
    ]
    if any(one.layout.num_generation and one.config.rollout.max_staleness for one in runs):
        notes.append(
            "With generation a step ahead, a bar adds up stages that ran at the same time."
        )
    return Exhibit(
        aid="Measured median seconds of a step by stage.",
        notes=notes,
        rows=[{key: value for key, value in row.items() if key != "arm"} for row in split],
        figure=figure,
    )


def _short_names(runs: Sequence[Measured], rows: Sequence[Row], gpu: Gpu) -> list[str]:
    """Name each run by what differs, wrapped; by its own name if that does not tell them apart."""
    unit, units = unit_names(gpu)
    parts = [
        (
            _whole(row["model"]),
            _whole(f"{row['max_response_tokens']:,} tokens"),
            _whole(f"{row['rollout_prompts']:,} prompts"),
            _whole(f"{row['gpus']:,} {unit if row['gpus'] == 1 else units}"),
            " ".join(map(_whole, layout_items(one))),
        )
        for one, row in zip(runs, rows, strict=True)
    ]
    differing = [n for n, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    names = [", ".join(part[n] for n in differing) for part in parts]
    if len(set(names)) < len(rows) or not differing:
        names = [row["run"] for row in rows]
    return [textwrap.fill(name, _LABEL_LETTERS, break_on_hyphens=False) for name in names]


def _whole(item: str) -> str:
    """Prevent a line break inside an item."""
    return item.replace(" ", _NO_BREAK)
