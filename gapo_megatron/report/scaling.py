"""A scaling study: tokens a second, MFU, efficiency and the split of a step, run by run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.table import Table

from gapo_megatron.report.arms import SIZES, learned_settings
from gapo_megatron.report.costs import draw_time
from gapo_megatron.report.exhibit import Exhibit
from gapo_megatron.report.series import Row
from gapo_megatron.report.style import (
    MARKERS,
    arm_style,
    column,
    legend_below,
    outer_names,
    panels,
    style,
    wrapped,
)
from gapo_megatron.scaling.arithmetic import step_flops
from gapo_megatron.scaling.calibration import STAGES, Observation, seconds
from gapo_megatron.scaling.efficiency import Efficiency
from gapo_megatron.scaling.hardware import CPU_NAME, Gpu
from gapo_megatron.scaling.layout import Layout

_LABEL_LETTERS = 24
"""Of a bar's name, a line."""


def scaling_rows(
    observations: Sequence[Observation], *, gpu: Gpu, efficiency: Efficiency
) -> list[Row]:
    """One row a run; shares and ratios are of 1, None where there is nothing to divide by.

        tokens/s/GPU = response tokens of a step / (step seconds x GPUs)
        MFU          = model operations / (seconds x GPUs x peak), of a step and of its updates
        strong       = (t1 x n1) / (t x n), of runs with one batch
        weak         = t1 / t, of runs with as many sequences a GPU and as many updates

    t1 is the quickest step on the fewest GPUs, n1, among all layouts of runs that learn the same;
    where all of them have as many GPUs there is no efficiency. A CPU's peak is measured, and no
    data sheet's: there is no MFU.

    Args:
        observations: of the runs.
        gpu: the device that they ran on.
        efficiency: what the prediction takes to be reached of it.
    """
    strong = _relative(observations, _same_batch, cost=lambda one: one.step_s * _gpus(one))
    weak = _relative(observations, _same_share, cost=lambda one: one.step_s)
    return [
        _row(one, gpu, efficiency) | {"strong_efficiency": s, "weak_efficiency": w}
        for one, s, w in zip(observations, strong, weak, strict=True)
    ]


def write_scaling(
    observations: Sequence[Observation], rows: Sequence[Row], *, gpu: Gpu, folder: Path
) -> list[Path]:
    """Write `throughput` (its data: all of `rows`) and `step_split` as PNG, PDF and CSV.

    Args:
        observations: as of `scaling_rows`.
        rows: what that made of them.
        gpu: the device.
        folder: for the files; made when missing.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        exhibits = {
            "throughput": _throughput(observations, rows, gpu),
            "step_split": _step_split(rows, gpu),
        }
        return [path for name, one in exhibits.items() for path in one.write(folder / name)]


def scaling_table(rows: Sequence[Row], *, gpu: Gpu) -> Table:
    """The rows for people; columns in which no run has a value are left out."""
    unit, units = _units(gpu)
    columns = {
        "gpus": (units, ","),
        "layout": ("layout", ""),
        "model": ("model", ""),
        "max_response_tokens": ("limit", ","),
        "rollout_prompts": ("prompts", ","),
        "tokens_per_gpu_s": (f"tokens/s/{unit}", ",.0f"),
        "mfu": ("MFU", ".1%"),
        "update_mfu": ("of updates", ".1%"),
        **{f"{stage}_s": (stage.split("_")[0], ".3g") for stage in (*STAGES, "other")},
        "step_s": ("step", ".3g"),
        "predicted_step_s": ("predicted", ".3g"),
        "predicted_over_measured": ("ratio", ".2f"),
        "strong_efficiency": ("strong", ".0%"),
        "weak_efficiency": ("weak", ".0%"),
    }
    table = Table(title=f"Measured on {gpu.name} (seconds of a step)", title_justify="left")
    table.add_column("run", overflow="fold")
    shown = [key for key in columns if any(row[key] is not None for row in rows)]
    for key in shown:
        heading, form = columns[key]
        table.add_column(heading, justify="right" if form else "left", no_wrap=True)
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], columns[key][1]) for key in shown]
        table.add_row(str(row["run"]), *cells)
    return table


def _row(one: Observation, gpu: Gpu, efficiency: Efficiency) -> Row:
    """All but the efficiencies, which take other runs."""
    config, batch, num_gpus = one.config, one.config.batch, _gpus(one)
    predicted = one.predict(gpu, efficiency)
    flops = step_flops(one.shape, config, one.workload)
    tokens = batch.rollout_prompts * batch.rollouts_per_prompt * one.workload.mean_response_tokens
    peak = math.nan if gpu.name == CPU_NAME else num_gpus * gpu.flops(config.model.precision)
    update_s = one.seconds("update") or math.nan  # 0 where no group had A != 0
    values = {
        "tokens_per_gpu_s": tokens / (one.step_s * num_gpus),
        "predicted_tokens_per_gpu_s": tokens / (predicted.total_s * num_gpus),
        "mfu": flops.total / (one.step_s * peak),
        "update_mfu": flops.update / (update_s * peak),
        **{f"{stage}_s": one.seconds(stage) for stage in STAGES},
        "other_s": max(one.step_s - one.measured.total_s, 0.0),
        "step_s": one.step_s,
        **{f"predicted_{stage}_s": seconds(predicted, stage) for stage in STAGES},
        "predicted_step_s": predicted.total_s,
        "predicted_over_measured": predicted.total_s / one.step_s,
    }
    if math.isinf(predicted.total_s):  # nothing can be generated, by the model
        values["predicted_tokens_per_gpu_s"] = math.nan
    return {
        "run": one.name,
        "model": Path(config.model.hf_dir).name,
        "gpus": num_gpus,
        "layout": _cut(one.layout, with_data_parallel=True),
        "max_response_tokens": config.rollout.max_response_tokens,
        "rollout_prompts": batch.rollout_prompts,
        "max_tokens_per_microbatch": batch.max_tokens_per_microbatch,
        **{key: value if math.isfinite(value) else None for key, value in values.items()},
    }


def _relative(
    observations: Sequence[Observation],
    alike: Callable[[Observation], Hashable],
    *,
    cost: Callable[[Observation], float],
) -> list[float | None]:
    """Among runs that are alike, the least cost on the fewest GPUs over each one's."""
    groups: dict[Hashable, list[Observation]] = {}
    keys = [alike(one) for one in observations]
    for key, one in zip(keys, observations, strict=True):
        groups.setdefault(key, []).append(one)
    found: list[float | None] = []
    for key, one in zip(keys, observations, strict=True):
        counts = {_gpus(other) for other in groups[key]}
        least = min(cost(other) for other in groups[key] if _gpus(other) == min(counts))
        found.append(least / cost(one) if len(counts) > 1 else None)
    return found


def _gpus(one: Observation) -> int:
    return one.layout.world_size


def _units(gpu: Gpu) -> tuple[str, str]:
    """What a rank has, one and many."""
    return ("process", "processes") if gpu.name == CPU_NAME else ("GPU", "GPUs")


def _same_batch(one: Observation) -> Hashable:
    """Equal for runs that learn the same, whatever their layouts."""
    return tuple(sorted(learned_settings(one.config).items()))


def _same_share(one: Observation) -> Hashable:
    """As `_same_batch`, but for a batch that grows with the GPUs."""
    settings = [pair for pair in learned_settings(one.config).items() if pair[0] not in SIZES]
    batch = one.config.batch
    return (*sorted(settings), batch.rollout_prompts / _gpus(one), batch.num_minibatches)


def _cut(layout: Layout, *, with_data_parallel: bool) -> str:
    """Sizes above 1: `TP 2 PP 4`."""
    sizes = {"TP": layout.tp_size, "PP": layout.pp_size, "CP": layout.cp_size}
    sizes |= {"EP": layout.ep_size, "DP": layout.dp_size if with_data_parallel else 1}
    sizes |= {"vLLM TP": layout.rollout_tp_size}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    parts += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    return " ".join(parts) or "uncut"


# -- tokens a second ------------------------------------------------------------------------------


def _throughput(observations: Sequence[Observation], rows: Sequence[Row], gpu: Gpu) -> Exhibit:
    """A panel for each model and response limit, in it a line for each batch and layout."""
    lines = _lines(observations, rows, unit=_units(gpu)[0])
    titles = list(dict.fromkeys(_title(row) for row in rows))
    labels = list(dict.fromkeys(label for label, _ in lines))
    # Colours come again after seven, then with other markers.
    looks = {
        label: arm_style(n) | {"marker": MARKERS[(n + n // len(MARKERS)) % len(MARKERS)]}
        for n, label in enumerate(labels)
    }
    figure, axes = panels(len(titles), row_inches=1.7, share_y=False)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(wrapped(title))
        for label, members in lines:
            if _title(members[0]) == title:
                _draw_line(axis, members, label, looks[label])
        _dress(axis, rows, *_units(gpu))
    outer_names(axes, share_y=False)
    axes[0].plot([], [], color="0.3", linestyle="--", label="predicted")
    axes[0].plot([], [], color="0.6", linestyle=":", label="ideal")
    legend_below(figure, *axes)
    return Exhibit(
        aid="Throughput of one GPU, which an ideal system would keep however many there are: dots "
        "are measured, dashes what the planner makes of the same lengths.",
        rows=list(rows),
        figure=figure,
    )


def _title(row: Row) -> str:
    return f"{row['model']}, {row['max_response_tokens']:,} tokens"


def _lines(
    observations: Sequence[Observation], rows: Sequence[Row], *, unit: str
) -> list[tuple[str, list[Row]]]:
    """(label, rows by GPUs): of one batch and layout, and of one share of a GPU and layout.

    A run may be on both, and is alone where it is on neither.
    """
    of_batch: dict[Hashable, list[tuple[str, Row]]] = {}
    of_share: dict[Hashable, list[tuple[str, Row]]] = {}
    for one, row in zip(observations, rows, strict=True):
        cut = _cut(one.layout, with_data_parallel=False)
        prompts = one.config.batch.rollout_prompts
        label = f"{prompts:,} prompts, {cut}"
        of_batch.setdefault((_same_batch(one), cut), []).append((label, row))
        label = f"{prompts / _gpus(one):g} prompts a {unit}, {cut}"
        of_share.setdefault((_same_share(one), cut), []).append((label, row))
    groups = [*of_batch.values(), *of_share.values()]
    lines = [group for group in groups if len({row["gpus"] for _, row in group}) > 1]
    drawn = [id(row) for line in lines for _, row in line]
    lines += [[one] for group in of_batch.values() for one in group if id(one[1]) not in drawn]
    found: list[tuple[str, list[Row]]] = []
    for line in lines:
        label, members = line[0][0], [row for _, row in line]
        if any(label == other and _title(members[0]) == _title(its[0]) for other, its in found):
            label += f" ({members[0]['run']})"  # they differ in something else
        found.append((label, sorted(members, key=lambda row: int(row["gpus"] or 0))))
    return found


def _draw_line(axis: Axes, rows: Sequence[Row], label: str, look: dict[str, Any]) -> None:
    num_gpus, measured = column(rows, "gpus"), column(rows, "tokens_per_gpu_s")
    if num_gpus[0] < num_gpus[-1]:
        first = measured[num_gpus == num_gpus[0]].max()
        axis.plot(num_gpus[[0, -1]], [first, first], color="0.6", linestyle=":")
    predicted = column(rows, "predicted_tokens_per_gpu_s")
    dashed = look | {"linestyle": "--", "markerfacecolor": "none", "linewidth": 0.8}
    axis.plot(num_gpus, predicted, **dashed)
    axis.plot(num_gpus, measured, label=label, **look | {"linestyle": ""})


def _dress(axis: Axes, rows: Sequence[Row], unit: str, units: str) -> None:
    """Names and ticks; ticks are the counts that there are."""
    counts = sorted({int(row["gpus"] or 0) for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.minorticks_off()
    axis.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
    axis.set_ylim(bottom=0)
    axis.set(xlabel=units, ylabel=f"tokens/s/{unit}")


# -- seconds of a step ----------------------------------------------------------------------------


def _step_split(rows: Sequence[Row], gpu: Gpu) -> Exhibit:
    """A bar for each run, cut into stages; a mark where the planner has its end."""
    names = _short_names(rows, units=_units(gpu)[1])
    split: list[Row] = []
    for name, row in zip(names, rows, strict=True):
        for stage in (*STAGES, "other"):
            measured = float(row[f"{stage}_s"] or 0)
            split.append(
                {
                    "run": row["run"],
                    "arm": name,
                    "stage": stage,
                    "seconds": measured,
                    "share": measured / float(row["step_s"] or 1),
                    "predicted_s": row.get(f"predicted_{stage}_s"),
                }
            )
    heights = sum(0.06 + 0.115 * len(name.splitlines()) for name in names)
    figure, (axis,) = panels(1, row_inches=0.6 + heights)
    draw_time(axis, split)
    axis.plot(
        column(rows, "predicted_step_s"),
        np.arange(len(rows)),
        label="predicted step",
        **arm_style(6) | {"linestyle": "", "marker": "D"},
    )
    axis.set(ylabel="run", xlim=(0, None))
    legend_below(figure, axis, handle_length=1.4)
    return Exhibit(
        aid="Seconds of a step by stage, medians of what was measured, and the whole step as the "
        "planner has it.",
        rows=[{key: value for key, value in row.items() if key != "arm"} for row in split],
        figure=figure,
    )


def _short_names(rows: Sequence[Row], *, units: str) -> list[str]:
    """What tells the runs apart, in lines; their own names where that does not."""
    parts = [
        (
            str(row["model"]),
            f"{row['max_response_tokens']:,} tokens",
            f"{row['rollout_prompts']:,} prompts",
            f"{row['gpus']:,} {units}",
            str(row["layout"]),
        )
        for row in rows
    ]
    differing = [n for n, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    names = [", ".join(part[n] for n in differing) for part in parts]
    if len(set(names)) < len(rows) or not differing:
        names = [str(row["run"]) for row in rows]
    return [textwrap.fill(name, _LABEL_LETTERS) for name in names]
