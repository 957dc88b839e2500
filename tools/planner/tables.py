"""A plan, printed for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gapo_megatron.config import Config
from gapo_tools.planner.hardware import GIB
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import PARTS, ROLLOUT_PARTS
from gapo_tools.planner.plans import Candidate, Plan
from gapo_tools.planner.times import STAGES
from gapo_tools.planner.workload import Workload

_NUM_SHOWN = 10
"""Layouts that are shown, the quickest ones."""


def print_whole(console: Console, table: Table) -> None:
    """Print a table without cutting a word; its lines may be longer than the terminal is wide."""
    unlimited = console.options.update(max_width=10_000)
    needed = Measurement.get(console, unlimited, table).minimum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width


def print_plan(console: Console, result: Plan, config: Config, workload: Workload) -> None:
    """Print what is assumed, the quickest layouts, and why others do not run.

    Args:
        console: where to print.
        result: the plan.
        config: the config that was planned.
        workload: lengths of a step.
    """
    console.print(
        f"One step: {config.batch.rollout_prompts} prompts (mean {workload.mean_prompt_tokens:g} "
        f"tokens) x {config.batch.rollouts_per_prompt} responses (mean "
        f"{workload.mean_response_tokens:g}, at most {workload.longest_response_tokens:,} tokens), "
        f"{workload.active_share:.0%} of them with A != 0. Efficiencies are assumed, not measured; "
        "those of fp8 least of all.",
        highlight=False,
    )
    rows = [(str(place), one) for place, one in enumerate(result.ranked[:_NUM_SHOWN], start=1)]
    if result.current is not None:
        rows.append(("yours *" if result.current_refusal else "yours", result.current))
    if rows:
        print_whole(console, _layouts_table(result, rows, config.run.num_steps))
        print_whole(console, _memory_table(result, rows))
    if result.current_refusal:
        console.print(f"* Your layout does not run: {result.current_refusal}")
    for reason, count in result.refusals.most_common(12):
        console.print(f"{count:,} layouts do not run: {reason}", highlight=False, soft_wrap=True)
    if not result.ranked:
        console.print(
            "Nothing fits. Try more nodes, a smaller batch.max_tokens_per_microbatch, a larger "
            "parallel.context_parallel_size, or another rollout.memory_fraction: none of these is "
            "varied."
        )
        return
    given = result.ranked[0].layout.settings
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    console.print(f"Overrides of layout 1: {' '.join(settings).lower()}", soft_wrap=True)
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    if any(getattr(config.parallel, name) for name in ends):
        console.print(f"Remove {' and '.join(ends)} from the config: its stages are equal.")


def _layouts_table(plan: Plan, rows: list[tuple[str, Candidate]], num_steps: int) -> Table:
    table = Table(
        *("", "step", *(stage.replace("_", " ") for stage in STAGES), f"GPU-h of {num_steps:,}"),
        *("TP", "PP", "CP", "DP", "EP", "recompute", "vLLM TP"),
        title=f"Layouts on {plan.num_gpus:,} x {plan.gpu.name}, quickest first (seconds per step)",
        title_justify="left",
    )
    for name, one in rows:
        layout, total_s = one.layout, one.times.total_s
        seconds = [one.times.seconds(stage) for stage in ("total", *STAGES)]
        table.add_row(
            name,
            *(f"{value:.1f}" if math.isfinite(value) else "-" for value in seconds),
            f"{total_s * num_steps * plan.num_gpus / 3600:,.0f}" if math.isfinite(total_s) else "-",
            *(str(layout.tp_size), pipeline_ranks(layout), str(layout.cp_size)),
            *(str(layout.dp_size), str(layout.ep_size), layout.recompute),
            str(layout.rollout_tp_size),
        )
    return table


def _memory_table(plan: Plan, rows: list[tuple[str, Candidate]]) -> Table:
    """Memory by part of the pipeline stage that needs most while training.

    With generation nodes vLLM's parts are those of a GPU that generates.
    """
    parts = [part for part in PARTS if any(getattr(one.memory.trainer, part) for _, one in rows)]
    parts += [part for part in ROLLOUT_PARTS if part not in parts]
    table = Table(
        *("", *(part.replace("_", " ") for part in parts)),
        *("training", "generating", "host: offloaded", "host: checkpoint"),
        title=f"Memory of one GPU, GiB ({plan.gpu.name}: {plan.gpu.memory_bytes / GIB:.1f}). Only "
        "the larger of layer and head counts. Host: of a node",
        title_justify="left",
    )
    for name, one in rows:
        found = one.memory
        apart = one.layout.num_generation > 0
        sizes = [
            getattr(found.engine if apart and part in ROLLOUT_PARTS else found.trainer, part)
            for part in parts
        ]
        sizes += [found.training, found.generating]
        sizes += [plan.gpu.gpus_per_node * size for size in (found.offloaded, found.checkpoint)]
        table.add_row(name, *(f"{size / GIB:.1f}" for size in sizes))
    return table


def pipeline_ranks(layout: Layout) -> str:
    """Pipeline ranks and stages: `4`; `4 x 2` with two virtual stages each; `4, unequal`."""
    ranks = str(layout.pp_size) + (f" x {layout.vpp_size}" if layout.vpp_size > 1 else "")
    return ranks + (", unequal" if layout.first_layers or layout.last_layers else "")
