"""Whether a layout fits a kind of GPU and the host memory of its nodes, and why it does not.

The sizes are those of `memory`, exact, assumed or estimated as it says there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.ops.plan.hardware import GIB, GPUS, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import (
    ROLLOUT_PARTS,
    STATE_PARTS,
    STEP_PARTS,
    Memory,
    StageMemory,
    memory,
)

HOST_SHARE = 0.9
"""Usable share of a node's host memory; system, verifiers and page cache need the rest: assumed."""

SMALLER_FRACTION = "out of memory while generating: a smaller rollout.memory_fraction would fit"
NO_ROOM_TO_MEASURE = "out of memory while rounding is measured (metrics.rounding_every_steps)"
LARGER_FRACTION = "out of memory while generating: the KV cache does not hold one sequence"
OUT_OF_HOST = "out of host memory: offloaded state, and a checkpoint while it is loaded or saved"


class Refusal(NamedTuple):
    """Why a layout does not fit."""

    reason: str
    """A few words; the same text for every layout that fails in the same way."""
    num_bytes: int
    """Bytes needed on one GPU in that phase, or on the host for `OUT_OF_HOST`."""


def find_refusal(predicted: Memory, layout: Layout, gpu: Gpu) -> Refusal | None:
    """Why a layout does not fit; None: it fits.

    Checked on a GPU: training, generation, and room for the KV cache. Checked on the host: the
    offloaded state, a sleeping engine's weights, and a checkpoint while it is loaded or saved, of
    all ranks of a node.
    """
    # Training.
    needed = predicted.training
    if needed > gpu.memory_bytes:
        if predicted.trainer.updating <= gpu.memory_bytes:
            return Refusal(NO_ROOM_TO_MEASURE, needed)
        parts = (*STATE_PARTS, *STEP_PARTS)
        return Refusal(_out_of_memory("training", predicted.trainer, parts), needed)
    # Weight sync and generation.
    needed, engine = predicted.generating, predicted.engine
    state = ("weights",) if engine.offloaded else STATE_PARTS
    if engine.receiving > gpu.memory_bytes:
        parts = (*state, "rollout_weights")
        return Refusal(_out_of_memory("vLLM receives weights", engine, parts), needed)
    if needed - engine.kv_cache > gpu.memory_bytes:
        parts = (*(() if engine.offloaded > engine.optimizer else state), *ROLLOUT_PARTS)
        return Refusal(_out_of_memory("generating", engine, parts), needed)
    if needed > gpu.memory_bytes:
        return Refusal(SMALLER_FRACTION, needed)
    if not predicted.cache_holds_sequence:
        return Refusal(LARGER_FRACTION, needed)
    # The node's host memory.
    host = (predicted.offloaded + predicted.checkpoint) * min(gpu.gpus_per_node, layout.num_ranks)
    if host > HOST_SHARE * gpu.host_memory_bytes:
        return Refusal(OUT_OF_HOST, host)
    return None


def _out_of_memory(phase: str, stage: StageMemory, parts: Sequence[str]) -> str:
    largest = max(parts, key=lambda part: getattr(stage, part))
    return f"out of memory while {phase}; largest part: {largest.replace('_', ' ')}"


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a run fits one kind of GPU, and its nodes' host memory."""

    gpu: str
    fits: bool
    shown: str
    """`h100 (52.5 of 79.1 GiB)`, with the reason in the brackets if it does not fit."""


def fits(hf_config: Any, config: Config, layout: Layout) -> list[Fit]:
    """Whether a run fits each GPU that the planner knows, by `find_refusal`."""
    return [_fit(hf_config, config, layout, gpu) for gpu in GPUS.values()]


def fit_note(hf_config: Any, config: Config, layout: Layout) -> str:
    """The GPUs that a run fits and those it does not fit, as text for people."""
    found = fits(hf_config, config, layout)
    good = ", ".join(one.shown for one in found if one.fits)
    bad = ", ".join(one.shown for one in found if not one.fits)
    text = f"Predicted to fit: {good or 'none of the GPUs that the planner knows'}."
    if not bad:
        return text
    return (
        f"{text} Does NOT fit: {bad}. To make it fit, lower batch.max_tokens_per_microbatch, set "
        "model.recompute, change rollout.memory_fraction, or let tools/plan.py --gpu find a layout."
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
