"""Memory of one GPU by part, and whether a layout fits: for the planner, the dry run, the doctor.

State is exact except for padding (`layout.state_bytes`), activations follow what layers keep
(`activations`). The other parts are estimates; each function states its rule. None of it has been
compared with a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.ops.plan.activations import (
    Kernels,
    head_bytes,
    kept_activations,
    neighbour_bytes,
    routes_bytes,
    working_bytes,
)
from gapo_megatron.ops.plan.flops import (
    Shape,
    element_bytes,
    engine_bytes,
    holds_one_sequence,
    kept_asleep_bytes,
    kv_cache_bytes,
    kv_cache_tokens,
)
from gapo_megatron.ops.plan.hardware import CPU_NAME, GIB, GPUS, Gpu
from gapo_megatron.ops.plan.layout import (
    Layout,
    exact_copy_bytes,
    fp8_copy_bytes,
    loaded_bytes,
    most_microbatches,
    saved_bytes,
    state_bytes,
)

_MIB = 2**20
CONTEXT_BYTES = 1024 * _MIB
"""CUDA context and the libraries' kernels: assumed."""
COMMUNICATOR_BYTES = 256 * _MIB
"""NCCL's buffers of one process group of more than one rank: assumed."""
ENGINE_ASLEEP_BYTES = 3072 * _MIB
"""Device memory that a sleeping vLLM does not release: CUDA graphs, all-reduce buffers, inputs,
workspaces, compiled kernels. Assumed. Its NCCL communicator is counted with the others. 0 on a
CPU."""
BUCKET_BYTES = 256 * _MIB
"""A bucket in which weights travel to generation ranks: a copy of the size in `rollout.transfer`,
which imports torch."""
RECEIVED_BUCKETS = 4
"""Buckets that a generation rank needs at once, beside what vLLM holds: see `rollout.transfer`."""
SENT_BUFFERS = 2
"""A trainer's buffers, of at most a bucket: see `rollout.transfer`."""
FRAGMENTATION = 0.1
"""Share of activations and head memory lost to fragmentation, since their sizes vary: assumed."""
HOST_SHARE = 0.9
"""Usable share of a node's host memory; system, verifiers and page cache need the rest: assumed."""

_STATE_PARTS = ("weights", "optimizer")
_STEP_PARTS = ("gradients", "fp8_copies", "activations", "layer", "head", "exact_copy")
ROLLOUT_PARTS = ("rollout_weights", "kv_cache")
PARTS = (
    *(*_STATE_PARTS, *_STEP_PARTS, *ROLLOUT_PARTS),
    *("engine_asleep", "communication", "fragmentation"),
)
SMALLER_FRACTION = "out of memory while generating: a smaller rollout.memory_fraction would fit"
NO_ROOM_TO_MEASURE = "out of memory while rounding is measured (metrics.rounding_every_steps)"
LARGER_FRACTION = "out of memory while generating: the KV cache does not hold one sequence"
OUT_OF_HOST = "out of host memory: offloaded state, and a checkpoint while it is loaded or saved"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes by part on one GPU of a pipeline rank, all its virtual stages together."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    offloaded: int
    """Bytes of weights and optimizer state that are in host memory while vLLM is awake."""
    activations: int
    """Kept for the backward pass, buffers that the schedule exchanges with other stages, and the
    routes of tokens to experts (`routes_bytes`)."""
    layer: int
    """Workspace of one layer's backward pass, including its recomputed activations."""
    fp8_copies: int
    """Transformer Engine's fp8 copies of the weights; freed together with the gradients."""
    exact_copy: int
    """The weights of the model that measures rounding, of an adapter's run (`exact_copy_bytes`)."""
    head: int
    """Activations and workspace of the log-probs. Never in use at the same time as `layer`."""
    rollout_weights: int
    """vLLM's weights and its room for an adapter's factors."""
    kv_cache: int
    """`rollout.memory_fraction` less `rollout_weights`; with vLLM's workspace and CUDA graphs."""
    engine_asleep: int
    """Memory that a sleeping vLLM keeps; while it is awake, `kv_cache` includes it."""
    communication: int
    """NCCL's buffers, and the CUDA context."""
    fragmentation: int

    @property
    def state(self) -> int:
        """Bytes that are allocated throughout training."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def training(self) -> int:
        """Peak bytes while the trainer works and vLLM sleeps."""
        return max(self.updating, self.measuring)

    @property
    def measuring(self) -> int:
        """Peak bytes while rounding is measured; without an adapter an update needs more.

        There are no gradients, and offloaded optimizer state is in host memory. The pass keeps
        nothing; its workspace, wider and without gradients, is taken as an update's.
        """
        kept = self.state - self.gradients - min(self.offloaded, self.optimizer)
        return kept + self.engine_asleep + self.exact_copy + max(self.layer, self.head)

    @property
    def updating(self) -> int:
        """Peak bytes of an update."""
        step = self.activations + max(self.layer, self.head) + self.fragmentation
        return self.state + self.fp8_copies + self.engine_asleep + step

    @property
    def receiving(self) -> int:
        """Bytes while vLLM receives weights: the trainer holds its weights, but no gradients."""
        kept = self.state - self.gradients - min(self.offloaded, self.optimizer)
        return kept + self.rollout_weights + self.engine_asleep

    @property
    def awake(self) -> int:
        """Bytes while vLLM generates: offloaded state is in host memory."""
        kept = self.state - self.gradients - self.offloaded
        return kept + self.rollout_weights + self.kv_cache

    @property
    def generating(self) -> int:
        """Peak bytes from the sync to the end of generation."""
        return max(self.receiving, self.awake)


@dataclass(frozen=True, slots=True)
class Memory:
    """The pipeline stages of a layout that need most memory, in training and in generation."""

    trainer: StageMemory
    """The stage that needs most while training."""
    engine: StageMemory
    """The stage that needs most while generating; with generation ranks, one of those."""
    checkpoint: int
    """Host bytes of a rank of the largest stage while a checkpoint is loaded or saved, copies
    included."""
    offloaded: int
    """Host bytes pinned on a rank of the largest stage from the first sync on: what is offloaded,
    and a sleeping engine's weights if a sync does not bring them (`kept_asleep_bytes`)."""
    cache_holds_sequence: bool
    """Whether an engine's KV cache holds one sequence of the maximum length."""

    @property
    def training(self) -> int:
        return self.trainer.training

    @property
    def generating(self) -> int:
        return self.engine.generating


def memory(hf_config: Any, config: Config, layout: Layout, gpu: Gpu) -> Memory:
    """Predict the memory of the stages that need most.

    The layers are those of a run on GPUs, see `Kernels.of`.

    Args:
        hf_config: the model's config.
        config: the run's settings: precision, micro-batches, head, `rollout.memory_fraction`.
        layout: how the run is divided; replaces the parallel sizes of `config`.
        gpu: the device.

    Raises:
        ConversionError: a parameter does not divide into shards.
    """
    shape = Shape.of(hf_config)
    kernels = Kernels.of(hf_config, config, layout)
    rules, generator = shape.rules, _generator_memory(shape, config, layout, gpu)
    is_apart = layout.num_generation > 0
    asleep = 0 if is_apart or gpu.name == CPU_NAME else ENGINE_ASLEEP_BYTES
    kv_tokens = kv_cache_tokens(shape, config, gpu, rollout_tp_size=layout.rollout_tp_size)
    moves, most, stages = config.optimizer.offload, most_microbatches(config, layout), []
    states, copies = state_bytes(rules, config, layout), fp8_copy_bytes(rules, config, layout)
    exact = exact_copy_bytes(rules, config, layout, on_gpu=gpu.name != CPU_NAME)
    in_host = int(kept_asleep_bytes(shape, config, layout, gpu))
    # Every stage, since another one may need most while training than while generating.
    for stage, (weights, gradients, optimizer) in enumerate(states):
        step = step_bytes(
            hf_config, config, layout, stage=stage, num_microbatches=most, kernels=kernels
        )
        stages.append(
            StageMemory(
                stage=stage,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                offloaded=(moves != "none") * optimizer + (moves == "all") * weights,
                activations=step.activations + routes_bytes(hf_config, config, layout, stage=stage),
                layer=step.layer,
                fp8_copies=copies[stage],
                exact_copy=exact[stage],
                head=step.head,
                rollout_weights=0 if is_apart else generator.rollout_weights,
                kv_cache=0 if is_apart else generator.kv_cache,
                engine_asleep=asleep,
                communication=_communication_bytes(layout),
                fragmentation=int(FRAGMENTATION * step.peak),
            )
        )
    return Memory(
        trainer=max(stages, key=lambda one: one.training),
        engine=generator if is_apart else max(stages, key=lambda one: one.generating),
        checkpoint=max(_checkpoint_bytes(one, config) for one in stages),
        offloaded=max(one.offloaded for one in stages) + in_host,
        cache_holds_sequence=holds_one_sequence(kv_tokens, config),
    )


def _generator_memory(shape: Shape, config: Config, layout: Layout, gpu: Gpu) -> StageMemory:
    """Memory of a GPU that only generates: weights, cache, communicators and buckets."""
    size = layout.rollout_tp_size
    groups = 1 + (size > 1) + 2 * (layout.num_generation > 1)
    nothing = {field.name: 0 for field in fields(StageMemory)}
    engine = {
        "rollout_weights": int(engine_bytes(shape, config, gpu, rollout_tp_size=size)),
        "kv_cache": int(kv_cache_bytes(shape, config, gpu, rollout_tp_size=size)),
        "communication": CONTEXT_BYTES
        + groups * COMMUNICATOR_BYTES
        + received_bytes(shape, config),
    }
    return StageMemory(**nothing | engine)


def received_bytes(shape: Shape, config: Config) -> int:
    """Bytes of weights in transit to a generation rank: four buckets, and what vLLM holds.

    A parameter that is larger than a bucket takes the place of one. vLLM holds the tensors of a
    fused module until the last one arrives: at most one layer's matrices, all its experts, or the
    embedding, each beside its bucket, since a parameter of several shards is a copy.
    """
    size = element_bytes(config)
    largest = max(math.prod(rule.full_shape) for rule in shape.rules) * size
    of_layers = max(shape.first_weights, shape.layer_weights)
    held = max(shape.head_weights, of_layers, shape.num_experts * shape.expert_weights)
    return (RECEIVED_BUCKETS - 1) * BUCKET_BYTES + max(BUCKET_BYTES, largest) + held * size


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a step needs on one rank in addition to its state; see `StageMemory`."""

    activations: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        """Peak: the head's backward pass ends before that of the layers begins."""
        return self.activations + max(self.layer, self.head)


def step_bytes(
    hf_config: Any,
    config: Config,
    layout: Layout,
    *,
    stage: int,
    num_microbatches: int,
    kernels: Kernels,
) -> StepBytes:
    """Bytes that a step needs on one rank in addition to its state.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how the run is divided.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        kernels: what computes the layers.
    """
    at = {"stage": stage, "num_microbatches": num_microbatches}
    kept = kept_activations(hf_config, config, layout, **at, kernels=kernels)
    held = neighbour_bytes(hf_config, config, layout, **at)
    is_last = stage == layout.pp_size - 1
    return StepBytes(
        activations=kept.layers + held,
        layer=kept.recomputed + working_bytes(hf_config, config, layout, kernels=kernels),
        head=kept.head + head_bytes(hf_config, config, layout) if is_last else 0,
    )


def _communication_bytes(layout: Layout) -> int:
    sizes = [layout.tp_size, layout.pp_size, layout.cp_size, layout.copies, layout.ep_size]
    sizes += [layout.dp_size] * (layout.cp_size > 1)  # else the group equals that of the copies
    if not layout.num_generation:
        sizes.append(layout.rollout_tp_size)
    groups = sum(size > 1 for size in (*sizes, layout.world_size))
    bridge = COMMUNICATOR_BYTES + SENT_BUFFERS * BUCKET_BYTES if layout.num_generation else 0
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + bridge


def _checkpoint_bytes(stage: StageMemory, config: Config) -> int:
    """Host bytes of a rank of the stage to load a checkpoint, or to save one: the greater."""
    precision, copied = config.model.precision, config.checkpoint.background
    saved = saved_bytes(stage.optimizer, precision, copied=copied)
    return max(loaded_bytes(stage.gradients, precision), saved)


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
        parts = (*_STATE_PARTS, *_STEP_PARTS)
        return Refusal(_out_of_memory("training", predicted.trainer, parts), needed)
    # Weight sync and generation.
    needed, engine = predicted.generating, predicted.engine
    state = ("weights",) if engine.offloaded else _STATE_PARTS
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
