"""Results of the planner, as tables for people and as plain values for programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.calibration import STAGES, Calibration, Observation, seconds
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.hardware import Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.planner import Plan, gib, leave_out, overrides
from gapo_megatron.ops.plan.refusal import (
    LARGER_FRACTION,
    PARTS,
    ROLLOUT_PARTS,
    SMALLER_FRACTION,
)
from gapo_megatron.ops.plan.search import Candidate
from gapo_megatron.ops.plan.sides import quickest_ahead, sides_of
from gapo_megatron.ops.plan.times import StepTime
from gapo_megatron.ops.plan.workload import Workload

_REASONS_SHOWN = 12
_OWN = ("yours", "yours *")
"""Names of the config's own layout: it runs, it does not."""


def layouts_table(plan: Plan, config: Config, *, top: int) -> Table:
    """The quickest layouts, those with generation nodes, and the config's own as the last row."""
    steps = config.run.num_steps
    table = Table(
        title=f"Layouts of {plan.num_gpus:,} x {plan.gpu.name}, quickest first (seconds of a step)",
        title_justify="left",
    )
    for heading in (
        *("", "nodes", "TP", "PP", "CP", "DP", "EP", "SP", "recompute", "vLLM TP", "tokens"),
        *("generate", "reward", "old", "update", "sync", "step", f"GPU-h of {steps:,}"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, (name, candidate) in enumerate(_rows(plan, top)):
        if place and name in ("s1", *_OWN):
            table.add_section()
        cells = (_nodes(plan, candidate), *_layout_cells(candidate))
        table.add_row(name, *cells, *_time_cells(plan, candidate, steps))
    return table


def _rows(plan: Plan, top: int) -> list[tuple[str, Candidate]]:
    """Candidates that tables show: the quickest, the quickest splits (`s1`, ...), the config's."""
    rows = [(str(place), one) for place, one in enumerate(plan.ranked[:top], start=1)]
    rows += [(f"s{place}", one) for place, one in enumerate(plan.best_splits[:top], start=1)]
    if plan.current is not None:
        rows.append((_OWN[bool(plan.current_refusal)], plan.current))
    return rows


def _nodes(plan: Plan, candidate: Candidate) -> str:
    """Nodes of all ranks; of a split those that train + those that only generate."""
    layout, size = candidate.layout, plan.gpu.gpus_per_node
    if layout.num_generation % size:  # ranks of a node are split
        return f"{layout.world_size} + {layout.num_generation} GPUs"
    train = f"{layout.world_size // size:,}"
    return f"{train} + {layout.num_generation // size:,}" if layout.num_generation else train


def has_sides(plan: Plan) -> bool:
    """Whether `sides_table` has rows."""
    return bool(_split_rows(plan, 1))


def sides_table(plan: Plan, *, top: int) -> Table:
    """What each side of the splits waits for, in seconds and as a share of the step."""
    staleness = sorted({sides_of(one).max_staleness for _, one in _split_rows(plan, top)})
    shown = ", ".join(map(str, staleness))
    table = Table(
        title="What each side waits for, nodes that train + nodes that only generate, "
        f"max_staleness {shown} (seconds of a step; both take part in the sync)",
        title_justify="left",
    )
    for heading in (
        *("", "nodes", "train", "wait for a batch", "share", "generate", "wait for weights"),
        *("share", "sync", "step"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, candidate in _split_rows(plan, top):
        times = sides_of(candidate)
        cells = [
            *(times.learning_s, times.training_waits_s, times.training_waits_s / times.total_s),
            *(times.generating_s, times.generation_waits_s),
            *(times.generation_waits_s / times.total_s, times.sync_s, times.total_s),
        ]
        forms = (".1f", ".1f", ".0%", ".1f", ".1f", ".0%", ".1f", ".1f")
        shown_cells = [
            "-" if math.isnan(value) or math.isinf(value) else format(value, form)
            for value, form in zip(cells, forms, strict=True)
        ]
        table.add_row(name, _nodes(plan, candidate), *shown_cells)
    return table


def _split_rows(plan: Plan, top: int) -> list[tuple[str, Candidate]]:
    return [(name, one) for name, one in _rows(plan, top) if one.layout.num_generation]


def ahead_hint(plan: Plan) -> str:
    """What generation that runs a step ahead would gain; empty where it does, or cannot."""
    found = quickest_ahead(plan.splits)
    if found is None or plan.best is None:
        return ""
    candidate, seconds = found
    gain = plan.best.times.total_s / seconds
    return (
        f"With generation one step ahead (--max-staleness 1) {_nodes(plan, candidate)} nodes would "
        f"take {seconds:.1f} s a step, {gain:.2f} times as quick as the quickest here; but then "
        "older weights sample what is learned from (docs/objective.md): it is not chosen for you."
    )


def memory_table(plan: Plan, *, top: int) -> Table:
    """Rows of memory by part, for the stage that needs most while training.

    `generating` is of the stage that needs most then, `checkpoint_host` and `offload_host` are of a
    node's own memory.
    """
    table = Table(
        title=f"Memory of one GPU by part, GiB (a {plan.gpu.name} has "
        f"{gib(plan.gpu.memory_bytes):.1f}); of layer and head the larger counts; host: of a "
        "node's own memory, while a checkpoint is saved, and of what is offloaded",
        title_justify="left",
    )
    values = {name: _memory_values(plan, candidate) for name, candidate in _rows(plan, top)}
    is_fp8 = any(sizes["fp8_copies"] for sizes in values.values())
    sums = ("training", "generating", "checkpoint_host", "offload_host")
    parts = [part for part in (*PARTS, *sums) if is_fp8 or part != "fp8_copies"]
    names = {"rollout_weights": "vLLM_weights", "engine_asleep": "vLLM_asleep"}
    headings = [names.get(part, part).replace("_", " ") for part in parts]
    for heading in ("", *headings):
        table.add_column(heading, justify="right")
    for name, sizes in values.items():
        table.add_row(name, *(f"{gib(sizes[part]):.1f}" for part in parts))
    return table


def refusals_table(plan: Plan) -> Table:
    """Why the others do not run: reasons, commonest first, with the leanest layout of each."""
    table = Table(title="Why others do not run", title_justify="left")
    table.add_column("layouts", justify="right")
    table.add_column("reason", overflow="fold")
    table.add_column("the leanest of them", overflow="fold")
    rows = sorted(plan.refusals.items(), key=lambda item: -item[1].count)
    for reason, refused in rows[:_REASONS_SHOWN]:
        example = refused.example
        shown = ""
        if example is not None:
            layout = example.layout
            shown = (
                f"TP {layout.tp_size} PP {layout.pp_size} CP {layout.cp_size} EP "
                f"{layout.ep_size}, "
                f"{layout.recompute}: {gib(refused.num_bytes):,.0f} GiB"
            )
        table.add_row(f"{refused.count:,}", reason, shown)
    rest = rows[_REASONS_SHOWN:]
    if rest:
        table.add_row(f"{sum(r.count for _, r in rest):,}", f"{len(rest)} more reasons", "")
    return table


def nothing_fits(plan: Plan, config: Config) -> str:
    """That, and what the commonest of the reasons asks for, if it is memory."""
    fraction = (
        f"rollout.memory_fraction than {config.rollout.memory_fraction:g}, which the planner never "
        "varies"
    )
    of_fraction = {
        SMALLER_FRACTION: f"a smaller {fraction}",
        LARGER_FRACTION: f"a larger {fraction}, or shorter sequences",
    }
    counts: Counter[str] = Counter()
    for reason, refused in plan.refusals.items():
        if "out of memory" in reason:
            counts[of_fraction.get(reason, "more nodes, or shorter sequences")] += refused.count
    hint = f": {counts.most_common(1)[0][0]}" if counts else ""
    return f"Nothing fits{hint}."


def comparison_table(
    observations: Sequence[tuple[Observation, bool]], *, gpu: Gpu, efficiency: Efficiency
) -> Table:
    """Predicted against measured seconds by stage; of each, whether it was part of the fit."""
    table = Table(title="Predicted against measured", title_justify="left")
    for heading in ("run", "fitted", "stage", "measured, s", "predicted, s", "ratio"):
        table.add_column(heading, justify="left" if heading in ("run", "stage") else "right")
    for one, is_fitted in observations:
        predicted = one.predict(gpu, efficiency)
        for stage in (*STAGES, "total"):
            measured, value = one.seconds(stage), seconds(predicted, stage)
            table.add_row(
                one.name if stage == STAGES[0] else "",
                ("yes" if is_fitted else "no") if stage == STAGES[0] else "",
                stage.replace("_", " "),
                f"{measured:.3g}",
                f"{value:.3g}",
                f"{value / measured:.2f}" if measured > 0 else "-",
            )
        table.add_section()
    return table


def times_rest_on(calibration: Calibration) -> str:
    """Basis of the predicted times, in a sentence or two."""
    if not calibration.worst:
        return "Efficiencies are assumed, not measured: see tools/plan.py calibrate."
    worst = ", ".join(f"{stage} {miss:.0%}" for stage, miss in calibration.worst.items())
    names = [field.name for field in dataclasses.fields(Efficiency)]
    measured = calibration.measured
    assumed = [name for name in names if name not in measured]
    return (
        f"Measured: {', '.join(measured) or 'nothing'}; assumed: {', '.join(assumed) or 'nothing'}."
        f" Largest miss where they were fitted: {worst}."
    )


def fp8_caveat(config: Config) -> str:
    """Caveat of predicted times in fp8; empty where nothing is in fp8."""
    if config.model.precision != "fp8" and not config.rollout.quantization:
        return ""
    return (
        "fp8: products are taken to reach the same share of the doubled peak as in bf16, and casts "
        "to cost nothing; no published step time behind the efficiencies is in fp8. Slower is "
        "likelier than quicker, unless a calibration was measured in fp8."
    )


def efficiencies_table(calibration: Calibration) -> Table:
    """All efficiencies; of each, whether the fit has moved it or it is assumed."""
    table = Table(title="Efficiencies", title_justify="left")
    for heading in ("name", "value", "default", ""):
        table.add_column(heading, justify="right" if heading in ("value", "default") else "left")
    measured = calibration.measured
    for name, default in dataclasses.asdict(Efficiency()).items():
        value = getattr(calibration.efficiency, name)
        basis = "measured" if name in measured else "assumed"
        table.add_row(name, f"{value:.3g}", f"{default:.3g}", basis)
    return table


def to_json(
    plan: Plan,
    config: Config,
    workload: Workload,
    efficiency: Efficiency,
    *,
    top: int,
    note: str = "",
) -> dict[str, Any]:
    """Everything of the tables as plain values. Bytes and seconds. `note`: where shapes are from.

    `leave_out` names the config's settings that have to go before a layout's overrides are added.
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
        "split_refusal": plan.split_refusal,
        "ahead": _ahead_values(plan),
        "current": plan.current and _values(plan, plan.current, config),
        "current_refusal": plan.current_refusal,
        "leave_out": leave_out(config),
        "refusals": {reason: refused.count for reason, refused in plan.refusals.items()},
    }


def _values(plan: Plan, candidate: Candidate, config: Config) -> dict[str, Any]:
    times = {f"{stage}_s": _finite(seconds(candidate.times, stage)) for stage in (*STAGES, "total")}
    if candidate.layout.num_generation:
        sides = sides_of(candidate)
        waits = (sides.training_waits_s, sides.generation_waits_s)
        names = ("training_waits_s", "generation_waits_s")
        times |= {name: _finite(value) for name, value in zip(names, waits, strict=True)}
    return {
        "layout": dataclasses.asdict(candidate.layout),
        "max_tokens_per_microbatch": candidate.max_tokens_per_microbatch,
        "overrides": overrides(candidate),
        "memory_bytes": _memory_values(plan, candidate),
        "times": times,
        "gpu_hours": _finite(plan.gpu_hours(candidate, config.run.num_steps)),
    }


def _ahead_values(plan: Plan) -> dict[str, Any] | None:
    """What `ahead_hint` says."""
    found = quickest_ahead(plan.splits)
    if found is None:
        return None
    candidate, total_s = found
    return {"num_generation": candidate.layout.num_generation, "total_s": total_s}


def _memory_values(plan: Plan, candidate: Candidate) -> dict[str, int]:
    """Bytes by part of the stage that needs most while training; the most of both phases.

    And of a node's own memory, as `checkpoint_host` while a checkpoint is saved, and as
    `offload_host` what is offloaded.
    """
    found = candidate.memory
    parts = {part: getattr(found.trainer, part) for part in PARTS}
    if candidate.layout.num_generation:  # the engine has a GPU of its own
        parts |= {part: getattr(found.engine, part) for part in ROLLOUT_PARTS}
    return parts | {
        "training": found.training,
        "generating": found.generating,
        "checkpoint_host": found.checkpoint * plan.gpu.gpus_per_node,
        "offload_host": found.offloaded * plan.gpu.gpus_per_node,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: a stage that cannot run has no time."""
    return value if math.isfinite(value) else None


def pipeline_ranks(layout: Layout) -> str:
    """Pipeline ranks and their stages: `4`, `4 x 2` for two virtual ones each, `4, unequal`."""
    ranks = str(layout.pp_size) + (f" x {layout.vpp_size}" if layout.vpp_size > 1 else "")
    return ranks + (", unequal" if layout.first_layers or layout.last_layers else "")


def _layout_cells(candidate: Candidate) -> list[str]:
    layout = candidate.layout
    return [
        *(str(layout.tp_size), pipeline_ranks(layout)),
        *map(str, (layout.cp_size, layout.dp_size, layout.ep_size)),
        "yes" if layout.sequence_parallel else "no",
        layout.recompute,
        str(layout.rollout_tp_size),
        f"{candidate.max_tokens_per_microbatch:,}",
    ]


def _time_cells(plan: Plan, candidate: Candidate, num_steps: int) -> list[str]:
    times: StepTime = candidate.times
    values = [(seconds(times, stage), ".1f") for stage in (*STAGES, "total")]
    values.append((plan.gpu_hours(candidate, num_steps), ",.0f"))
    return ["-" if _finite(value) is None else format(value, form) for value, form in values]
