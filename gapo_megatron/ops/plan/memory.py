"""Memory of one GPU by part, for the planner, the dry run and the doctor (`fit`: is it enough).

State is exact except for padding (`layout.state_bytes`), activations follow what layers keep
(`activations`). The other parts are estimates; each function states its rule. None of it has been
compared with a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.activations import (
    Kernels,
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
from gapo_megatron.ops.plan.hardware import CPU_NAME, Gpu
from gapo_megatron.ops.plan.head import head_bytes
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
STATE_PARTS = ("weights", "optimizer")
STEP_PARTS = ("gradients", "fp8_copies", "activations", "layer", "head", "exact_copy")
ROLLOUT_PARTS = ("rollout_weights", "kv_cache")
PARTS = (
    *(*STATE_PARTS, *STEP_PARTS, *ROLLOUT_PARTS),
    *("engine_asleep", "communication", "fragmentation"),
)


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
