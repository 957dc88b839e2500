"""Tables of the planner's predictions: the layouts in configs/, and published step times.

python benchmarks/planned.py > docs/planned_layouts.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from benchmarks.anchors import ANCHORS
from gapo_megatron.config import load_config
from gapo_megatron.ops.plan.hardware import GPUS, Efficiency
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import memory
from gapo_megatron.ops.plan.planner import gib, plan, read_model, sides_of
from gapo_megatron.ops.plan.times import step_time
from gapo_megatron.ops.plan.workload import default_workload

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LAYOUTS = sorted(CONFIGS.glob("*/h?00_*.toml"))
COMMAND = "python benchmarks/planned.py > docs/planned_layouts.md"
HEADINGS = (
    *("config", "GPUs", "TP", "PP", "CP", "DP", "EP", "recompute", "vLLM TP", "micro-batch"),
    *("generation", "old log-probs", "update", "sync", "step", "training", "generating"),
)


SPLITS = (
    ("qwen_math_1_5b/gapo", "h200", 2),
    ("ds_r1_1_5b/gapo", "h200", 6),
    ("llama_3_1_8b/base", "h100", 4),
    ("qwen2_5_32b/base", "h200", 6),
    ("qwen2_5_72b/base", "h200", 12),
    ("qwen3_30b_a3b/base", "h200", 6),
)
"""Config, device and nodes."""
SPLIT_HEADINGS = (
    *("config", "nodes", "GPU", "together, s", "on-policy", "step, s", "gain", "waits", "sync, s"),
    *("a step ahead", "step, s", "gain", "waits", "sync, s"),
)


def main() -> None:
    """Print the document."""
    sizes = [f"{gib(GPUS[name].memory_bytes):.0f} ({name})" for name in ("h100", "h200")]
    print(f"""\
# Planned layouts

Written by `{COMMAND}`; do not edit. All of it is
**predicted** with assumed efficiencies, and none of these layouts has run yet.
[scaling.md](scaling.md) says how predictions are made and how far off they are.

## Layouts of the larger models

A row is a file of [configs/](../configs), with its own batch and with the lengths that
`tools/plan.py` assumes where none are given. Micro-batches are in tokens, times in seconds, memory
in GiB of a GPU while it trains and while it generates, of {" or ".join(sizes)}.

{_markdown(HEADINGS, map(_cells, LAYOUTS))}

## Generation nodes

What [generation nodes](scaling.md#generation-nodes) would make of the same GPUs, with the config's
batch and lengths as above: the quickest layout in which every rank trains and generates, then the
quickest split (nodes that train + nodes that only generate) on-policy and with generation a step
ahead. Gains are against the first. Waiting is in percent of a step: of the nodes that train, and of
those that generate.

{_markdown(SPLIT_HEADINGS, map(_split_cells, SPLITS))}

## Against published step times

All rows are predicted with the same default efficiencies, nothing tuned by row.

{_markdown(("run", "stage", "published, s", "predicted, s", "ratio"), _published())}

Assumed where the source does not say:
""")
    for anchor in ANCHORS:
        print(f"- {anchor.name}: {anchor.assumed}. Source: {anchor.source}")


def nodes_of(path: Path) -> int:
    """Number of nodes in a config's first line; 1 if there is none."""
    found = re.search(r" on (one node|(\d+) nodes) of eight ", path.read_text().splitlines()[0])
    return int(found[2] or 1) if found else 1


def _cells(path: Path) -> list[str]:
    config, gpu = load_config(path), GPUS[path.stem.partition("_")[0]]
    hf_config, _ = read_model(config)
    layout = Layout.of(config, world_size=gpu.gpus_per_node * nodes_of(path))
    needed = memory(hf_config, config, layout, gpu)
    workload = default_workload(config)
    times = step_time(hf_config, config, layout, workload, gpu, Efficiency())
    return [
        f"`{path.parent.name}/{path.stem}`",
        *map(str, (layout.world_size, layout.tp_size, layout.pp_size, layout.cp_size)),
        *map(str, (layout.dp_size, layout.ep_size, layout.recompute, layout.rollout_tp_size)),
        f"{config.batch.max_tokens_per_microbatch:,}",
        *(f"{one:.1f}" for one in (times.generation_s, times.old_log_probs_s)),
        *(f"{one:.1f}" for one in (times.update_s, times.sync_s)),
        *(f"{one:.0f}" for one in (times.total_s, gib(needed.training), gib(needed.generating))),
    ]


def _split_cells(cluster: tuple[str, str, int]) -> list[str]:
    name, gpu_name, num_nodes = cluster
    config, gpu = load_config(CONFIGS / f"{name}.toml"), GPUS[gpu_name]
    hf_config, _ = read_model(config)
    plans = [
        plan(
            hf_config,
            config,
            num_nodes=num_nodes,
            gpu=gpu,
            workload=default_workload(config),
            efficiency=Efficiency(),
            max_staleness=staleness,
        )
        for staleness in (0, 1)
    ]
    together_s = plans[0].ranked[0].times.total_s
    cells = [f"`{name}`", str(num_nodes), gpu_name, f"{together_s:.1f}"]
    for found in plans:
        best = found.splits[0]
        sides, layout, size = sides_of(best), best.layout, gpu.gpus_per_node
        waits = (sides.training_waits_s, sides.generation_waits_s)
        cells += [
            f"{layout.world_size // size} + {layout.num_generation // size}",
            f"{sides.total_s:.1f}",
            f"{together_s / sides.total_s:.2f}",
            ", ".join(f"{100 * seconds / sides.total_s:.0f}" for seconds in waits),
            f"{sides.sync_s:.1f}",
        ]
    return cells


def _published() -> Iterator[Sequence[str]]:
    for anchor in ANCHORS:
        predicted = anchor.predict(Efficiency())
        for stage, published in anchor.published.items():
            value, low_high = predicted.seconds(stage), anchor.published_range
            yield (
                anchor.name if stage == "total" else "",
                stage.replace("_", " ") if stage != "total" else "step",
                "{:g}-{:g}".format(*low_high) if low_high else f"{published:g}",
                f"{value:.0f}",
                f"{value / published:.2f}",
            )


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
