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
from gapo_megatron.ops.plan.refusal import HOST_SHARE, OUT_OF_HOST, find_refusal


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a run fits one kind of GPU, and the nodes that such GPUs are in."""

    gpu: str
    fits: bool
    shown: str
    """Name of the GPU, and in brackets what is needed of what there is, and why it does not run."""


def fits(hf_config: Any, config: Config, layout: Layout) -> list[Fit]:
    """Compare what a run needs with every GPU that the planner knows, by `find_refusal`."""
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
        f"{text}; NOT {bad}: there, lower batch.max_tokens_per_microbatch, set model.recompute, "
        "change rollout.memory_fraction, or ask tools/plan.py --gpu for a layout."
    )


def _fit(hf_config: Any, config: Config, layout: Layout, gpu: Gpu) -> Fit:
    try:
        check_capability(config.model, gpu.compute_capability, device=gpu.name)
    except ConfigError as error:
        return Fit(gpu.name, False, f"{gpu.name} ({error})")
    predicted = memory(hf_config, config, layout, gpu)
    needed = max(predicted.training, predicted.generating)
    shown = f"{needed / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB"
    refusal = find_refusal(predicted, layout, gpu)
    if refusal:
        shown += f"; {refusal.reason}"
    if refusal and refusal.reason == OUT_OF_HOST:
        usable = HOST_SHARE * gpu.host_memory_bytes
        shown += f": {refusal.num_bytes / GIB:,.0f} of {usable / GIB:,.0f} usable GiB"
    return Fit(gpu.name, refusal is None, f"{gpu.name} ({shown})")
