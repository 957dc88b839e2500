"""Why a layout does not fit: one rule for the planner, the dry run and the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gapo_megatron.ops.plan.hardware import Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import Memory, StageMemory

_STATE_PARTS = ("weights", "optimizer")
_STEP_PARTS = ("gradients", "fp8_copies", "activations", "layer", "head")
ROLLOUT_PARTS = ("rollout_weights", "kv_cache")
PARTS = (
    *(*_STATE_PARTS, *_STEP_PARTS, *ROLLOUT_PARTS),
    *("engine_asleep", "communication", "fragmentation"),
)
_GENERATING = "out of memory while generating"
SMALLER_FRACTION = f"{_GENERATING}: a smaller rollout.memory_fraction would fit"
HOST_SHARE = 0.9
"""Usable share of a node's own memory; system, verifiers and page cache need the rest: assumed."""
OUT_OF_HOST = "out of a node's own memory: what is offloaded, and a checkpoint being saved"
LARGER_FRACTION = f"{_GENERATING}: no room for the KV cache of one sequence"


class Refusal(NamedTuple):
    """Why a layout does not fit."""

    reason: str
    """A few words, alike for alike layouts."""
    num_bytes: int
    """Needed on one GPU in that phase, or on a node's own memory."""


def find_refusal(predicted: Memory, layout: Layout, gpu: Gpu) -> Refusal | None:
    """Why a layout that needs so much does not fit; None: it fits.

    Of a GPU's memory, what training or generation needs, and room for the KV cache; of a node's
    own, what is offloaded and what a checkpoint takes while it is saved, of all ranks of a node.
    """
    needed = predicted.training
    if needed > gpu.memory_bytes:
        parts = (*_STATE_PARTS, *_STEP_PARTS)
        return Refusal(_most_of_all("training", predicted.trainer, parts), needed)
    needed, engine = predicted.generating, predicted.engine
    state = ("weights",) if engine.offloaded else _STATE_PARTS
    if engine.receiving > gpu.memory_bytes:
        parts = (*state, "rollout_weights")
        return Refusal(_most_of_all("the engine receives weights", engine, parts), needed)
    if needed - engine.kv_cache > gpu.memory_bytes:
        parts = (*(() if engine.offloaded > engine.optimizer else state), *ROLLOUT_PARTS)
        return Refusal(_most_of_all("generating", engine, parts), needed)
    if needed > gpu.memory_bytes:
        return Refusal(SMALLER_FRACTION, needed)
    if not predicted.cache_holds_sequence:
        return Refusal(LARGER_FRACTION, needed)
    host = (predicted.offloaded + predicted.checkpoint) * min(gpu.gpus_per_node, layout.num_ranks)
    if host > HOST_SHARE * gpu.host_memory_bytes:
        return Refusal(OUT_OF_HOST, host)
    return None


def _most_of_all(phase: str, stage: StageMemory, parts: Sequence[str]) -> str:
    largest = max(parts, key=lambda part: getattr(stage, part))
    return f"out of memory while {phase}: {largest.replace('_', ' ')} most of all"
