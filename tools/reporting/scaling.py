"""A scaling study: tokens/s, MFU, efficiency and the seconds of a step, in tables and a figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from rich.table import Table

from gapo_megatron.config.roles import flat, role_of
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats.folder import claim
from gapo_tools.planner.flops import step_flops
from gapo_tools.planner.hardware import CPU_NAME, Gpu
from gapo_tools.reporting.arms import SIZES, learned_settings
from gapo_tools.reporting.measured import STAGES, Measured, read_measured
from gapo_tools.reporting.runs import find_trained
from gapo_tools.reporting.series import Row, distinct, select
from gapo_tools.reporting.style import (
    KINDS,
    Exhibit,
    arm_style,
    column,
    legend_below,
    outer_names,
    panels,
    style,
    wrapped,
)

FIGURE_NAME = "throughput"


def read_runs(
    folders: Sequence[Path], *, mean_prompt_tokens: float | None
) -> tuple[list[Measured], list[str]]:
    """Read runs, and leave out those that cannot be read.

    Args:
        folders: run folders, or folders of run folders.
        mean_prompt_tokens: see `read_measured`.

    Returns:
        Measured runs, sorted by model (smaller first), response limit, prompts, GPUs and layout;
        a line for each run left out, with the reason.

    Raises:
        DataError: see `find_trained`.
        ConfigError: no run can be read; lists all reasons.
    """
    ready, waiting = find_trained(folders)
    left_out = [f"not measured: {folder.name}: no step yet" for folder in waiting]
    names = [folder.name for folder in ready]
    found = []
    for folder in ready:
        name = str(folder) if names.count(folder.name) > 1 else folder.name
        try:
            found.append(read_measured(folder, mean_prompt_tokens=mean_prompt_tokens, name=name))
        except GapoError as error:
            left_out.append(f"not measured: {folder.name}: {error}")
    if not found:
        raise ConfigError("no run can be measured\n" + "\n".join(left_out))
    found.sort(
        key=lambda one: (
            one.shape.num_parameters,
            one.config.model.hf_dir,
            one.config.rollout.max_response_tokens,
            one.config.batch.rollout_prompts,
            one.num_ranks,
            layout_items(one),
        )
    )
    return found, left_out


def layout_items(one: Measured, *, with_data_parallel: bool = True) -> list[str]:
    """Parallel sizes above 1, generation ranks, recomputation: `TP 2 SP`, `PP 4 x 2`; `uncut`."""
    config, parallel = one.config, one.config.parallel
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vpp_size = parallel.virtual_pipeline_model_parallel_size
    dp_size = one.num_training // (parallel.ranks_per_layer * pp_size)
    items = {
        f"TP {tp_size}" + " SP" * parallel.sequence_parallel: tp_size > 1,
        f"PP {pp_size}" + f" x {vpp_size}" * (vpp_size > 1): pp_size > 1,
        f"CP {parallel.context_parallel_size}": parallel.context_parallel_size > 1,
        f"EP {parallel.expert_model_parallel_size}": parallel.expert_model_parallel_size > 1,
        f"DP {dp_size}": with_data_parallel and dp_size > 1,
        f"vLLM TP {config.rollout.tensor_parallel_size}": config.rollout.tensor_parallel_size > 1,
        f"{one.num_generation} generate": one.num_generation > 0,
        f"recompute {config.model.recompute}": config.model.recompute != "none",
    }
    return [item for item, is_shown in items.items() if is_shown] or ["uncut"]


# -- rows and tables -------------------------------------------------------------------------------


def unit_names(gpu: Gpu) -> tuple[str, str]:
    """Name of a rank's device, singular and plural."""
    return ("process", "processes") if gpu.name == CPU_NAME else ("GPU", "GPUs")


def scaling_rows(runs: Sequence[Measured], *, gpu: Gpu) -> list[Row]:
    """One row per run; shares and ratios are fractions of 1, None where undefined.

        tokens/s/GPU = response tokens of a step / (step seconds x GPUs)
        MFU          = model operations / (seconds x GPUs x peak), of a step and of its updates
        strong       = (t1 x n1) / (t x n), among runs with the same batch
        weak         = t1 / t, among runs with the same sequences per GPU and the same updates

    t1 is the fastest step on the fewest GPUs, n1, over all layouts; runs that differ in the seed
    alone count by their median. No efficiency if all runs have the same number of GPUs. No MFU
    without a mean prompt length, nor on a CPU, which has no data sheet's peak.

    Args:
        runs: measured steps of the runs.
        gpu: the device that they ran on.
    """
    strong = _relative(runs, same_batch, cost=lambda one: one.step_s * one.num_ranks)
    weak = _relative(runs, same_share, cost=lambda one: one.step_s)
    return [
        _row(one, gpu) | {"strong_efficiency": s, "weak_efficiency": w}
        for one, s, w in zip(runs, strong, weak, strict=True)
    ]


def _row(one: Measured, gpu: Gpu) -> Row:
    """A run's row without the efficiencies, which compare it with others."""
    config, number = one.config, one.num_ranks
    mfu = update_mfu = None
    if one.workload is not None and gpu.name != CPU_NAME:
        flops = step_flops(one.shape, config, one.workload, num_prompts=one.num_prompts)
        peak = number * gpu.flops(config.model.precision)
        mfu = flops.total / (one.step_s * peak)
        if update_s := one.stages["update"]:  # 0 if no group had A != 0
            update_mfu = flops.update / (update_s * peak)
    return {
        "run": one.name,
        "model": Path(config.model.hf_dir).name,
        "gpus": number,
        "layout": " ".join(layout_items(one)),
        "max_response_tokens": config.rollout.max_response_tokens,
        "rollout_prompts": config.batch.rollout_prompts,
        "max_tokens_per_microbatch": config.batch.max_tokens_per_microbatch,
        "tokens_per_gpu_s": one.tokens_per_s / number,
        "mfu": mfu,
        "update_mfu": update_mfu,
        **{f"{stage}_s": one.stages[stage] for stage in STAGES},
        "other_s": one.other_s,
        "step_s": one.step_s,
    }


def _relative(
    runs: Sequence[Measured],
    alike: Callable[[Measured], Hashable],
    *,
    cost: Callable[[Measured], float],
) -> list[float | None]:
    """Efficiency of each run: least cost on the fewest GPUs among comparable runs, over its own."""
    groups: dict[Hashable, list[Measured]] = {}
    keys = [alike(one) for one in runs]
    for key, one in zip(keys, runs, strict=True):
        groups.setdefault(key, []).append(one)
    found: list[float | None] = []
    for key, one in zip(keys, runs, strict=True):
        counts = {other.num_ranks for other in groups[key]}
        costs: dict[Hashable, list[float]] = {}
        for other in groups[key]:
            if other.num_ranks == min(counts):
                costs.setdefault(same_way(other), []).append(cost(other))
        least = min(map(statistics.median, costs.values()))
        found.append(least / cost(one) if len(counts) > 1 else None)
    return found


def same_batch(one: Measured) -> Hashable:
    """Key of runs that learn the same, in whatever layout."""
    return tuple(sorted(learned_settings(one.config).items()))


def same_share(one: Measured) -> Hashable:
    """Key of runs whose batch grows with the GPUs; otherwise as `same_batch`."""
    settings = [pair for pair in learned_settings(one.config).items() if pair[0] not in SIZES]
    batch = one.config.batch
    return (*sorted(settings), batch.rollout_prompts / one.num_ranks, batch.num_minibatches)


def same_way(one: Measured) -> Hashable:
    """Key of runs that compute in the same way, on any number of data-parallel ranks.

    It leaves out the batch's sizes (`same_batch`, `same_share`) and what no step depends on.
    """
    settings = {
        name: value
        for name, value in flat(one.config).items()
        if role_of(name).step and name not in SIZES
    }
    # Paths inside the run's folder make no difference.
    return json.dumps(settings).replace(one.config.run.output_dir, "")


def scaling_tables(rows: Sequence[Row], *, gpu: Gpu) -> list[Table]:
    """Two tables for the terminal: throughput and efficiency; seconds of a step by stage.

    Columns without a value are left out.
    """
    unit, units = unit_names(gpu)
    reached = {
        "gpus": (units, ","),
        "layout": ("layout", ""),
        "model": ("model", ""),
        "max_response_tokens": ("limit", ","),
        "rollout_prompts": ("prompts", ","),
        "tokens_per_gpu_s": (f"tokens/s/{unit}", ",.0f"),
        "mfu": ("MFU", ".1%"),
        "update_mfu": ("of updates", ".1%"),
        "step_s": ("step, s", ".3g"),
        "strong_efficiency": ("strong", ".0%"),
        "weak_efficiency": ("weak", ".0%"),
    }
    split = {f"{stage}_s": (stage.replace("_", " "), ".3g") for stage in (*STAGES, "other", "step")}
    return [
        _table(rows, reached, title=f"Measured on {gpu.name}"),
        _table(rows, split, title="Seconds of a step"),
    ]


def _table(rows: Sequence[Row], columns: dict[str, tuple[str, str]], *, title: str) -> Table:
    """Make a table; `columns`: key -> heading and format. Numbers are not wrapped."""
    table = Table(title=title, title_justify="left")
    table.add_column("run", overflow="fold", min_width=20)
    shown = [key for key in columns if any(row[key] is not None for row in rows)]
    for key in shown:
        heading, form = columns[key]
        if form:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], columns[key][1]) for key in shown]
        table.add_row(row["run"], *cells)
    return table


# -- the figure ------------------------------------------------------------------------------------


def write_scaling(
    runs: Sequence[Measured], rows: Sequence[Row], *, gpu: Gpu, folder: Path
) -> list[Path]:
    """Write `throughput` as PNG, PDF and CSV (all of `rows`); errors as `claim_folder`."""
    claim_folder(folder)
    with style():
        return throughput(runs, rows, gpu).write(folder / FIGURE_NAME)


def claim_folder(folder: Path) -> None:
    """Make the folder; refuse to overwrite files that `write_scaling` did not write.

    Raises:
        ConfigError: names the folder and what is in the way.
    """
    claim(folder, [f"{FIGURE_NAME}{kind}" for kind in KINDS], field="--output", made_by="scaling")


def throughput(runs: Sequence[Measured], rows: Sequence[Row], gpu: Gpu) -> Exhibit:
    """Tokens/s per GPU over GPUs: a panel per model and response limit, a line per `lines`."""
    unit, units = unit_names(gpu)
    drawn = lines(runs, rows, unit=unit)
    titles = distinct(drawn, "title")
    labels = distinct(drawn, "label")
    counts = sorted({row["gpus"] for row in rows})
    figure, axes = panels(len(titles), row_inches=1.7, share_y=False)
    for axis, title in zip(axes, titles, strict=True):
        for line in select(drawn, title=title):
            x, y = column(line["rows"], "gpus"), column(line["rows"], "tokens_per_gpu_s")
            axis.plot(x, y, label=line["label"], **arm_style(labels.index(line["label"])))
        axis.set(title=wrapped(title), xlabel=units, ylabel=f"tokens/s/{unit}", xscale="log")
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.minorticks_off()
        axis.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
        axis.set_ylim(0, 1.08 * axis.dataLim.y1)
    outer_names(axes, share_y=False)
    legend_below(figure, *axes)
    return Exhibit(
        aid=f"Throughput per {unit}, which stays constant under perfect scaling.",
        rows=list(rows),
        figure=figure,
    )


def lines(runs: Sequence[Measured], rows: Sequence[Row], *, unit: str) -> list[Row]:
    """Title of the panel, label and rows of each line.

    A line joins runs of one layout with the same batch, or with the same batch per GPU, that
    compute in the same way; a run on neither is a line of its own.
    """
    groups: dict[Hashable, Row] = {}
    for one, row in zip(runs, rows, strict=True):
        title = f"{row['model']}, {row['max_response_tokens']:,} tokens"
        cut = " ".join(layout_items(one, with_data_parallel=False))
        prompts = one.config.batch.rollout_prompts
        for is_batch, key, label in (
            (True, same_batch(one), f"{prompts:,} prompts, {cut}"),
            (False, same_share(one), f"{prompts / one.num_ranks:g} prompts a {unit}, {cut}"),
        ):
            line: Row = {"title": title, "label": label, "is_batch": is_batch, "rows": []}
            groups.setdefault((key, same_way(one)), line)["rows"].append(row)
    found = [line for line in groups.values() if len({row["gpus"] for row in line["rows"]}) > 1]
    joined = [id(row) for line in found for row in line["rows"]]
    found += [
        line
        for line in groups.values()
        if line["is_batch"] and not any(id(row) in joined for row in line["rows"])
    ]
    for line in found:
        line["rows"].sort(key=lambda row: row["gpus"])
    names = [(line["title"], line["label"]) for line in found]
    for line, name in zip(found, names, strict=True):
        if names.count(name) > 1:  # they differ in a setting that the label does not show
            line["label"] += f" ({line['rows'][0]['run']})"
    return found
