"""A plan, printed for people and as plain values for programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from gapo_megatron.config import Config
from gapo_megatron.io.whole_table import print_whole
from gapo_megatron.ops.plan.fit import LARGER_FRACTION, SMALLER_FRACTION
from gapo_megatron.ops.plan.hardware import Efficiency
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import PARTS, ROLLOUT_PARTS
from gapo_megatron.ops.plan.planner import (
    Plan,
    gib,
    leave_out,
    overrides,
    roomy_candidates,
    sides_of,
)
from gapo_megatron.ops.plan.search import Candidate
from gapo_megatron.ops.plan.times import STAGES
from gapo_megatron.ops.plan.workload import Workload

_REASONS_SHOWN = 12
_OWN = ("yours", "yours *")
"""Row names of the config's own layout: it runs, it does not run."""


def print_plan(
    console: Console,
    result: Plan,
    config: Config,
    workload: Workload,
    *,
    note: str,
    top: int,
) -> None:
    """Print the plan's assumptions, its layouts, why others do not run, and the one to choose.

    Args:
        console: where to print.
        result: the plan.
        config: the config that was planned.
        workload: lengths of a step.
        note: where the model's shapes come from; may be empty.
        top: how many layouts of each kind to show.
    """
    if note:
        console.print(note, highlight=False, soft_wrap=True)
    _print_assumptions(console, config, workload)

    # Layouts, and why others do not run.
    print_whole(console, layouts_table(result, config, top=top))
    if _split_rows(result, top):
        print_whole(console, sides_table(result, top=top))
    print_whole(console, memory_table(result, top=top))
    if result.current_refusal:
        console.print(f"* Your layout does not run: {result.current_refusal}")
    if result.refusals:
        print_whole(console, refusals_table(result))
    if result.best is None:
        console.print(nothing_fits(result, config))
        return

    # The layout to choose.
    roomy = roomy_candidates(result)
    if not roomy:
        console.print("No layout leaves 5 % of a GPU free: plan with more nodes.")
        return
    best = roomy[0]
    console.print(
        f"Overrides of the quickest layout that leaves 5 % of a GPU free ({_row_of(result, best)}; "
        f"--write writes it to a file): {' '.join(overrides(best))}",
        soft_wrap=True,
    )
    if unset := leave_out(config):
        console.print(
            f"Remove {' and '.join(unset)} from the config first: this layout's stages are equal.",
            soft_wrap=True,
        )


def _print_assumptions(console: Console, config: Config, workload: Workload) -> None:
    console.print(
        f"One step: {config.batch.rollout_prompts} prompts (mean {workload.mean_prompt_tokens:g} "
        f"tokens) x {config.batch.rollouts_per_prompt} responses (mean "
        f"{workload.mean_response_tokens:g}, at most {workload.longest_response_tokens:,} tokens), "
        f"{workload.active_share:.0%} of them with A != 0. Efficiencies are assumed, not measured.",
        highlight=False,
    )
    if config.model.precision == "fp8" or config.rollout.quantization:
        console.print(
            "fp8 times assume that matrix products reach the same share of the doubled peak as in "
            "bf16, and that casts are free. The assumed efficiencies rest on no fp8 measurement: "
            "expect slower steps rather than faster.",
            highlight=False,
        )


def layouts_table(plan: Plan, config: Config, *, top: int) -> Table:
    """The quickest layouts, the quickest with generation nodes, and the config's own.

    Seconds and GPU hours first; sizes that all layouts share are in the title.
    """
    steps, rows = config.run.num_steps, _rows(plan, top)
    cells = [_layout_cells(plan, candidate, steps) for _, candidate in rows]
    first = cells[0] if cells else {}
    shared = {
        heading: value
        for heading, value in first.items()
        if len(rows) > 1 and all(one[heading] == value for one in cells)
    }
    title = f"Layouts on {plan.num_gpus:,} x {plan.gpu.name}, quickest first (seconds per step)"
    if shared:
        title += "; all have " + ", ".join(f"{name} {value}" for name, value in shared.items())
    table = Table(title=title, title_justify="left")
    shown = [heading for heading in first if heading not in shared]
    for heading in ("", *shown):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, ((name, _), values) in enumerate(zip(rows, cells, strict=True)):
        if place and name in ("s1", *_OWN):
            table.add_section()
        table.add_row(name, *(values[heading] for heading in shown))
    return table


def _layout_cells(plan: Plan, candidate: Candidate, steps: int) -> dict[str, str]:
    """A row of `layouts_table`, by heading."""
    layout = candidate.layout
    values = [(candidate.times.seconds(stage), ".1f") for stage in ("total", *STAGES)]
    values.append((plan.gpu_hours(candidate, steps), ",.0f"))
    step, *stages, hours = (
        "-" if _finite(value) is None else format(value, form) for value, form in values
    )
    return {
        "nodes": _nodes(plan, candidate),
        "step": step,
        f"GPU-h of {steps:,}": hours,
        "TP": str(layout.tp_size),
        "PP": pipeline_ranks(layout),
        "CP": str(layout.cp_size),
        "DP": str(layout.dp_size),
        "EP": str(layout.ep_size),
        "SP": "yes" if layout.sequence_parallel else "no",
        "recompute": layout.recompute,
        "vLLM TP": str(layout.rollout_tp_size),
        "micro-batch": f"{candidate.max_tokens_per_microbatch:,}",
        **dict(zip(("generate", "reward", "old pass", "update", "sync"), stages, strict=True)),
    }


def sides_table(plan: Plan, *, top: int) -> Table:
    """How long each side of a split works and waits, in seconds and as a share of the step."""
    staleness = sorted({sides_of(one).max_staleness for _, one in _split_rows(plan, top)})
    table = Table(
        title="Work and waiting of training nodes + generation nodes at max_staleness "
        f"{', '.join(map(str, staleness))} (seconds per step; both sides take part in the sync)",
        title_justify="left",
    )
    for heading in (
        *("", "nodes", "train", "wait for a batch", "share", "generate", "wait for weights"),
        *("share", "sync", "step"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, candidate in _split_rows(plan, top):
        # What each side does and waits for, with the wait's share of the step.
        times = sides_of(candidate)
        cells = [
            *(times.learning_s, times.training_waits_s, times.training_waits_s / times.total_s),
            *(times.generating_s, times.generation_waits_s),
            *(times.generation_waits_s / times.total_s, times.sync_s, times.total_s),
        ]
        forms = (".1f", ".1f", ".0%", ".1f", ".1f", ".0%", ".1f", ".1f")
        shown_cells = [
            "-" if _finite(value) is None else format(value, form)
            for value, form in zip(cells, forms, strict=True)
        ]
        table.add_row(name, _nodes(plan, candidate), *shown_cells)
    return table


def memory_table(plan: Plan, *, top: int) -> Table:
    """Memory by part, for the pipeline stage that needs most while training.

    `generating` is for the stage that needs most while generating; the host columns are per node.
    """
    table = Table(
        title=f"Memory of one GPU by part, GiB ({plan.gpu.name}: {gib(plan.gpu.memory_bytes):.1f})."
        " Totals count the larger of layer and head. Host columns: per node, during a save / "
        "offloaded",
        title_justify="left",
    )
    values = {name: _memory_values(plan, candidate) for name, candidate in _rows(plan, top)}
    rare = {"fp8_copies", "exact_copy"}
    unused = {part for part in rare if not any(sizes[part] for sizes in values.values())}
    sums = ("training", "generating", "checkpoint_host", "offload_host")
    parts = [part for part in (*PARTS, *sums) if part not in unused]
    names = {"rollout_weights": "vLLM_weights", "engine_asleep": "vLLM_asleep"}
    headings = [names.get(part, part).replace("_", " ") for part in parts]
    for heading in ("", *headings):
        table.add_column(heading, justify="right")
    for name, sizes in values.items():
        table.add_row(name, *(f"{gib(sizes[part]):.1f}" for part in parts))
    return table


def refusals_table(plan: Plan) -> Table:
    """Why layouts do not run: the most frequent reasons first, each with its smallest layout."""
    table = Table(title="Layouts that do not run", title_justify="left")
    table.add_column("layouts", justify="right")
    table.add_column("reason", overflow="fold")
    table.add_column("smallest of them", overflow="fold")
    rows = sorted(plan.refusals.items(), key=lambda item: -item[1].count)
    for reason, refused in rows[:_REASONS_SHOWN]:
        shown = ""
        if refused.example is not None:
            layout = refused.example.layout
            shown = (
                f"TP {layout.tp_size} PP {layout.pp_size} CP {layout.cp_size} EP "
                f"{layout.ep_size}, {layout.recompute}: {gib(refused.num_bytes):,.0f} GiB"
            )
        table.add_row(f"{refused.count:,}", reason, shown)
    rest = rows[_REASONS_SHOWN:]
    if rest:
        table.add_row(f"{sum(r.count for _, r in rest):,}", f"{len(rest)} more reasons", "")
    return table


def nothing_fits(plan: Plan, config: Config) -> str:
    """Says that nothing fits, and what the most frequent memory refusal asks for."""
    fraction = f"rollout.memory_fraction than {config.rollout.memory_fraction:g}"
    fixed = "(the planner does not vary it)"
    of_fraction = {
        SMALLER_FRACTION: f"a smaller {fraction} {fixed}",
        LARGER_FRACTION: f"a larger {fraction} {fixed}, or shorter sequences",
    }
    counts: Counter[str] = Counter()
    for reason, refused in plan.refusals.items():
        if "out of memory" in reason:
            counts[of_fraction.get(reason, "more nodes, or shorter sequences")] += refused.count
    return "Nothing fits." + (f" Try {counts.most_common(1)[0][0]}." if counts else "")


def to_json(
    plan: Plan,
    config: Config,
    workload: Workload,
    efficiency: Efficiency,
    *,
    top: int,
    note: str = "",
) -> dict[str, Any]:
    """The tables as plain values, in bytes and seconds.

    `leave_out` names settings to remove from the config before adding a layout's overrides.

    Args:
        plan: the plan.
        config: the config that was planned.
        workload: lengths of a step.
        efficiency: efficiencies behind the times.
        top: how many layouts of each kind to list.
        note: where the model's shapes come from.
    """
    return {
        "gpu": dataclasses.asdict(plan.gpu),
        "num_gpus": plan.num_gpus,
        "model": config.model.hf_dir,
        "model_note": note,
        "workload": dataclasses.asdict(workload),
        "efficiency": dataclasses.asdict(efficiency),
        "layouts": [_values(plan, one, config) for one in plan.ranked[:top]],
        "splits": [_values(plan, one, config) for one in plan.best_splits[:top]],
        "current": plan.current and _values(plan, plan.current, config),
        "current_refusal": plan.current_refusal,
        "leave_out": leave_out(config),
        "refusals": {reason: refused.count for reason, refused in plan.refusals.items()},
    }


def pipeline_ranks(layout: Layout) -> str:
    """Pipeline ranks and stages: `4`; `4 x 2` with two virtual stages each; `4, unequal`."""
    ranks = str(layout.pp_size) + (f" x {layout.vpp_size}" if layout.vpp_size > 1 else "")
    return ranks + (", unequal" if layout.first_layers or layout.last_layers else "")


def _rows(plan: Plan, top: int) -> list[tuple[str, Candidate]]:
    """(name, candidate) of the tables' rows: `1`, ... colocated; `s1`, ... splits; `yours`."""
    rows = [(str(place), one) for place, one in enumerate(plan.ranked[:top], start=1)]
    rows += [(f"s{place}", one) for place, one in enumerate(plan.best_splits[:top], start=1)]
    if plan.current is not None:
        rows.append((_OWN[bool(plan.current_refusal)], plan.current))
    return rows


def _row_of(plan: Plan, candidate: Candidate) -> str:
    """Name of a candidate's row; only the best split of each number of nodes has one."""
    if any(candidate is one for one in plan.ranked):
        return f"layout {plan.ranked.index(candidate) + 1}"
    if any(candidate is one for one in plan.best_splits):
        return f"layout s{plan.best_splits.index(candidate) + 1}"
    return f"another layout of {_nodes(plan, candidate)} nodes"


def _split_rows(plan: Plan, top: int) -> list[tuple[str, Candidate]]:
    return [(name, one) for name, one in _rows(plan, top) if one.layout.num_generation]


def _nodes(plan: Plan, candidate: Candidate) -> str:
    """Number of nodes; of a split: training + generation nodes."""
    layout, size = candidate.layout, plan.gpu.gpus_per_node
    if layout.num_generation % size:  # both sides share a node
        return f"{layout.world_size} + {layout.num_generation} GPUs"
    train = f"{layout.world_size // size:,}"
    return f"{train} + {layout.num_generation // size:,}" if layout.num_generation else train


def _values(plan: Plan, candidate: Candidate, config: Config) -> dict[str, Any]:
    times = {f"{stage}_s": _finite(candidate.times.seconds(stage)) for stage in (*STAGES, "total")}
    if candidate.layout.num_generation:
        sides = sides_of(candidate)
        times["training_waits_s"] = _finite(sides.training_waits_s)
        times["generation_waits_s"] = _finite(sides.generation_waits_s)
    return {
        "layout": dataclasses.asdict(candidate.layout),
        "max_tokens_per_microbatch": candidate.max_tokens_per_microbatch,
        "overrides": overrides(candidate),
        "memory_bytes": _memory_values(plan, candidate),
        "times": times,
        "gpu_hours": _finite(plan.gpu_hours(candidate, config.run.num_steps)),
    }


def _memory_values(plan: Plan, candidate: Candidate) -> dict[str, int]:
    """Bytes by part and in total; `checkpoint_host` and `offload_host` are host bytes of a node."""
    found = candidate.memory
    parts = {part: getattr(found.trainer, part) for part in PARTS}
    if candidate.layout.num_generation:  # the engine is on other GPUs than the trainer
        parts |= {part: getattr(found.engine, part) for part in ROLLOUT_PARTS}
    return parts | {
        "training": found.training,
        "generating": found.generating,
        "checkpoint_host": found.checkpoint * plan.gpu.gpus_per_node,
        "offload_host": found.offloaded * plan.gpu.gpus_per_node,
    }


def _finite(value: float) -> float | None:
    """The value, or None for infinity and NaN (a stage that cannot run), which JSON lacks."""
    return value if math.isfinite(value) else None
