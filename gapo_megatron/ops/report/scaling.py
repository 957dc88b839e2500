"""Tables of a scaling study: tokens/s, MFU, efficiency and the seconds of a step, run by run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from rich.table import Table

from gapo_megatron.config.roles import flat, role_of
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.ops.launch.status import read_statuses
from gapo_megatron.ops.plan.flops import step_flops
from gapo_megatron.ops.plan.hardware import CPU_NAME, Gpu
from gapo_megatron.ops.plan.tables import pipeline_ranks
from gapo_megatron.ops.plan.times import STAGES
from gapo_megatron.ops.report.arms import SIZES, learned_settings
from gapo_megatron.ops.report.measured import Measured
from gapo_megatron.ops.report.runs import find_trained
from gapo_megatron.ops.report.series import Row

_NAME_LETTERS = 20
"""Smallest width of the column with a run's name."""


def read_runs(
    folders: Sequence[Path], read: Callable[[Path, str], Measured]
) -> tuple[list[Measured], list[str]]:
    """Read runs, and leave out those that cannot be read.

    Args:
        folders: run folders, or folders of run folders.
        read: reads a run's folder; its second argument is the name to give it, or "" for the
            folder's own.

    Returns:
        Measured runs, sorted by model (smaller first), response limit, prompts, GPUs and layout;
        a line for each run left out, with its state and the reason.

    Raises:
        DataError: see `find_trained`.
        ConfigError: no run can be read; lists all reasons.
    """
    ready, waiting = find_trained(folders)
    reasons = dict.fromkeys(waiting, "no step yet")
    names = [folder.name for folder in ready]
    found = []
    for folder in ready:
        try:
            found.append(read(folder, str(folder) if names.count(folder.name) > 1 else ""))
        except GapoError as error:
            reasons[folder] = str(error)
    statuses = read_statuses(list(reasons))
    left_out = [
        f"not measured: {folder.name} ({status.state}): {' '.join([reason, status.why]).strip()}"
        for (folder, reason), status in zip(reasons.items(), statuses, strict=True)
    ]
    if not found:
        raise ConfigError("no run can be measured\n" + "\n".join(left_out))
    found.sort(
        key=lambda one: (
            one.shape.num_parameters,
            model_name(one),
            one.config.rollout.max_response_tokens,
            one.config.batch.rollout_prompts,
            one.layout.num_ranks,
            layout_items(one),
        )
    )
    return found, left_out


def scaling_rows(runs: Sequence[Measured], *, gpu: Gpu) -> list[Row]:
    """One row per run; shares and ratios are fractions of 1, None where undefined.

        tokens/s/GPU = response tokens of a step / (step seconds x GPUs)
        MFU          = model operations / (seconds x GPUs x peak), of a step and of its updates
        strong       = (t1 x n1) / (t x n), among runs with the same batch
        weak         = t1 / t, among runs with the same sequences per GPU and the same updates

    t1 is the fastest step on the fewest GPUs, n1, over all layouts; runs that differ in the seed
    alone count by their median. No efficiency if all runs have the same number of GPUs, and no MFU
    on a CPU, whose peak is measured instead of taken from a data sheet.

    Args:
        runs: measured steps of the runs.
        gpu: the device that they ran on.
    """
    strong = _relative(runs, same_batch, cost=lambda one: one.step_s * one.layout.num_ranks)
    weak = _relative(runs, same_share, cost=lambda one: one.step_s)
    return [
        _row(one, gpu) | {"strong_efficiency": s, "weak_efficiency": w}
        for one, s, w in zip(runs, strong, weak, strict=True)
    ]


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
    split = {f"{stage}_s": (stage.replace("_", " "), ".3g") for stage in (*STAGES, "other")}
    return [
        _table(rows, reached, title=f"Measured on {gpu.name}"),
        _table(rows, split | {"step_s": ("step", ".3g")}, title="Seconds of a step"),
    ]


def _table(rows: Sequence[Row], columns: dict[str, tuple[str, str]], *, title: str) -> Table:
    """Make a table; `columns`: key -> heading and format. Numbers are not wrapped."""
    table = Table(title=title, title_justify="left")
    table.add_column("run", overflow="fold", min_width=_NAME_LETTERS)
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


def _row(one: Measured, gpu: Gpu) -> Row:
    """A run's row without the efficiencies, which compare it with others."""
    config, number = one.config, one.layout.num_ranks
    flops = step_flops(one.shape, config, one.workload, num_prompts=one.num_prompts)
    peak = math.nan if gpu.name == CPU_NAME else number * gpu.flops(config.model.precision)
    update_s = one.stages.update_s or math.nan  # 0 if no group had A != 0
    values = {
        "tokens_per_gpu_s": one.tokens_per_s / number,
        "mfu": flops.total / (one.step_s * peak),
        "update_mfu": flops.update / (update_s * peak),
        **{f"{stage}_s": one.stages.seconds(stage) for stage in STAGES},
        "other_s": one.other_s,
        "step_s": one.step_s,
    }
    return {
        "run": one.name,
        "model": model_name(one),
        "gpus": number,
        "layout": " ".join(layout_items(one)),
        "max_response_tokens": config.rollout.max_response_tokens,
        "rollout_prompts": config.batch.rollout_prompts,
        "max_tokens_per_microbatch": config.batch.max_tokens_per_microbatch,
        **{key: value if math.isfinite(value) else None for key, value in values.items()},
    }


def _relative(
    runs: Sequence[Measured],
    alike: Callable[[Measured], Hashable],
    *,
    cost: Callable[[Measured], float],
) -> list[float | None]:
    """For each run, the least cost on the fewest GPUs, among runs that are alike, over its own."""
    groups: dict[Hashable, list[Measured]] = {}
    keys = [alike(one) for one in runs]
    for key, one in zip(keys, runs, strict=True):
        groups.setdefault(key, []).append(one)
    found: list[float | None] = []
    for key, one in zip(keys, runs, strict=True):
        counts = {other.layout.num_ranks for other in groups[key]}
        costs: dict[Hashable, list[float]] = {}
        for other in groups[key]:
            if other.layout.num_ranks == min(counts):
                costs.setdefault(_all_but_seed(other), []).append(cost(other))
        least = min(map(statistics.median, costs.values()))
        found.append(least / cost(one) if len(counts) > 1 else None)
    return found


def model_name(one: Measured) -> str:
    """Name of the model's folder."""
    return Path(one.config.model.hf_dir).name


def unit_names(gpu: Gpu) -> tuple[str, str]:
    """Name of a rank's device, singular and plural."""
    return ("process", "processes") if gpu.name == CPU_NAME else ("GPU", "GPUs")


def same_batch(one: Measured) -> Hashable:
    """Key of runs that learn the same, in whatever layout."""
    return tuple(sorted(learned_settings(one.config).items()))


def same_share(one: Measured) -> Hashable:
    """Key of runs whose batch grows with the GPUs; otherwise as `same_batch`."""
    settings = [pair for pair in learned_settings(one.config).items() if pair[0] not in SIZES]
    batch = one.config.batch
    return (*sorted(settings), batch.rollout_prompts / one.layout.num_ranks, batch.num_minibatches)


def _all_but_seed(one: Measured) -> Hashable:
    """Key of runs on the same number of GPUs that differ in the seed alone."""
    settings = one.config.model_dump_json(exclude={"run"})
    return settings.replace(one.config.run.output_dir, "")  # paths in the run's own folder


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


def layout_items(one: Measured, *, with_data_parallel: bool = True) -> list[str]:
    """Parallel sizes above 1 and options that change speed: `TP 2 SP`, `PP 4 x 2`, `offload`."""
    layout, config = one.layout, one.config
    tp = f"TP {layout.tp_size}" + (" SP" if layout.sequence_parallel else "")
    items = {tp: layout.tp_size, f"PP {pipeline_ranks(layout)}": layout.pp_size}
    items |= {f"CP {layout.cp_size}": layout.cp_size, f"EP {layout.ep_size}": layout.ep_size}
    items |= {f"DP {layout.dp_size}": layout.dp_size if with_data_parallel else 1}
    items |= {f"vLLM TP {layout.rollout_tp_size}": layout.rollout_tp_size}
    parts = [item for item, size in items.items() if size > 1]
    if layout.num_generation:
        parts.append(f"{layout.num_generation} generate, staleness {config.rollout.max_staleness}")
    others = {
        f"recompute {layout.recompute}": layout.recompute != "none",
        "overlap": config.parallel.overlap_grad_reduce,
        "offload": config.optimizer.offload == "optimizer",
        "offload all": config.optimizer.offload == "all",
        f"fp8 {config.model.fp8_recipe}": config.model.precision == "fp8",
        f"vLLM {config.rollout.quantization}": config.rollout.quantization != "",
    }
    parts += [item for item, has_it in others.items() if has_it]
    return parts or ["uncut"]
