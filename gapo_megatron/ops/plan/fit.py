"""Which GPUs a run fits in the layout that its config has, by the planner's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.ops.plan.hardware import GIB, GPUS, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import memory
from gapo_megatron.ops.plan.search import HOST_SHARE


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a run fits one kind of GPU, and the nodes that such GPUs are in."""

    gpu: str
    fits: bool
    shown: str
    """Name of the GPU, and in brackets what is needed of what there is, or why it does not run."""


def fits(hf_config: Any, config: Config, layout: Layout) -> list[Fit]:
    """Compare what a run needs with every GPU that the planner knows.

    Of a GPU's memory, what training or generation needs, whichever is more; of a node's own, what
    is offloaded and what a checkpoint takes while it is saved, of all ranks of a node.
    """
    return [_fit(hf_config, config, layout, gpu) for gpu in GPUS.values()]


def fit_note(hf_config: Any, config: Config, layout: Layout) -> str:
    """The GPUs that the run fits, and those that it does not, in a sentence."""
    found = fits(hf_config, config, layout)
    good = ", ".join(one.shown for one in found if one.fits)
    bad = ", ".join(one.shown for one in found if not one.fits)
    text = f"Predicted to fit {good or 'none of the GPUs that the planner knows'}"
    if not bad:
        return f"{text}."
    return (
        f"{text}; NOT {bad}: there, lower batch.max_tokens_per_microbatch, set model.recompute, or "
        "ask tools/plan.py --gpu for a layout."
    )


def _fit(hf_config: Any, config: Config, layout: Layout, gpu: Gpu) -> Fit:
    try:
        check_capability(config.model, gpu.compute_capability, device=gpu.name)
    except ConfigError as error:
        return Fit(gpu.name, False, f"{gpu.name} ({error})")
    predicted = memory(hf_config, config, layout, gpu)
    needed = max(predicted.training, predicted.generating)
    shown = f"{needed / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB"
    host = (predicted.offloaded + predicted.checkpoint) * min(gpu.gpus_per_node, layout.num_ranks)
    has_room = host <= HOST_SHARE * gpu.host_memory_bytes
    if not has_room:
        shown += (
            f"; of a node's own {host / GIB:,.0f}, where {HOST_SHARE:.0%} of "
            f"{gpu.host_memory_bytes / GIB:,.0f} GiB can be used"
        )
    return Fit(gpu.name, needed <= gpu.memory_bytes and has_room, f"{gpu.name} ({shown})")
