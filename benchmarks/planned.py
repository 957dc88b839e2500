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
from gapo_megatron.ops.plan.calibration import seconds
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.hardware import GPUS
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import memory
from gapo_megatron.ops.plan.planner import gib, read_model
from gapo_megatron.ops.plan.times import step_time
from gapo_megatron.ops.plan.workload import default_workload

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LAYOUTS = sorted(CONFIGS.glob("*/h?00_*.toml"))
COMMAND = "python benchmarks/planned.py > docs/planned_layouts.md"
HEADINGS = (
    *("config", "GPUs", "TP", "PP", "CP", "DP", "EP", "recompute", "vLLM TP", "micro-batch"),
    *("generation", "old log-probs", "update", "sync", "step", "training", "generating"),
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

## Against published step times

All rows are predicted with the same default efficiencies, nothing tuned by row.

{_markdown(("run", "stage", "published, s", "predicted, s", "ratio"), _published())}

Assumed where the source does not say:
""")
    for anchor in ANCHORS:
        print(f"- {anchor.name}: {anchor.assumed}. Source: {anchor.source}")


def nodes_of(path: Path) -> int:
    """Nodes that a config's first line says it is for; one where it says nothing."""
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


def _published() -> Iterator[Sequence[str]]:
    for anchor in ANCHORS:
        predicted = anchor.predict(Efficiency())
        for stage, published in anchor.published.items():
            value, low_high = seconds(predicted, stage), anchor.published_range
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
