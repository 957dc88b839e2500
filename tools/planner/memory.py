"""Memory of one GPU by part, and whether a layout fits: for planner, dry run and doctor.

State is exact except for padding (`state.state_bytes`), activations follow what layers keep
(`activations`). The other parts are estimates; each function states its rule. None of it has been
compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.fp8 import check_capability
from gapo_tools.planner.activations import Kernels, head_bytes, kept_activations, working_bytes
from gapo_tools.planner.engine import (
    engine_bytes,
    holds_one_sequence,
    kept_asleep_bytes,
    kv_cache_bytes,
    kv_cache_tokens,
)
from gapo_tools.planner.flops import Shape, element_bytes
from gapo_tools.planner.hardware import GIB, GPUS, Gpu
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import (
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
workspaces, compiled kernels. Assumed. Its NCCL communicator is counted with the others."""
BUCKET_BYTES = 256 * _MIB
"""A bucket in which weights travel to generation ranks: a copy of the size in `rollout.transfer`,
which imports torch."""
RECEIVED_BUCKETS = 4
"""Buckets that a generation rank needs at once, beside what vLLM holds: see `rollout.transfer`."""
SENT_BUFFERS = 2
"""A trainer's buffers, of at most a bucket: see `rollout.transfer`."""
FRAGMENTATION = 0.1
"""Share of activations and head memory lost to fragmentation, since their sizes vary: assumed."""
STATE_PARTS = ("weights", "optimizer", "communication")
STEP_PARTS = ("gradients", "fp8_copies", "activations", "layer", "head")
ROLLOUT_PARTS = ("rollout_weights", "kv_cache")
PARTS = STATE_PARTS + STEP_PARTS + ROLLOUT_PARTS + ("engine_asleep", "fragmentation", "exact_copy")

HOST_SHARE = 0.9
"""Usable share of a node's host memory; system, verifiers and page cache need the rest: assumed."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes by part on one GPU of a pipeline rank, all its virtual stages together."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    offloaded: int = 0
    """Bytes of weights and optimizer state that are in host memory while vLLM is awake."""
    activations: int = 0
    """Kept for the backward pass, and buffers that the schedule exchanges with other stages."""
    layer: int = 0
    """Workspace of one layer's backward pass, including its recomputed activations."""
    fp8_copies: int = 0
    """Transformer Engine's fp8 copies of the weights; freed together with the gradients."""
    exact_copy: int = 0
    """The weights of the model that measures rounding, of an adapter's run (`exact_copy_bytes`)."""
    head: int = 0
    """Activations and workspace of the log-probs. Never in use at the same time as `layer`."""
    rollout_weights: int = 0
    """vLLM's weights and its room for an adapter's factors."""
    kv_cache: int = 0
    """`rollout.memory_fraction` less `rollout_weights`; with vLLM's workspace and CUDA graphs."""
    engine_asleep: int = 0
    """Memory that a sleeping vLLM keeps; while it is awake, `kv_cache` includes it."""
    communication: int = 0
    """NCCL's buffers, and the CUDA context."""
    fragmentation: int = 0

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
    def step(self) -> int:
        """Peak bytes of a step's own: the head's backward pass ends before that of the layers."""
        return self.activations + max(self.layer, self.head)

    @property
    def updating(self) -> int:
        """Peak bytes of an update."""
        return self.state + self.fp8_copies + self.engine_asleep + self.step + self.fragmentation

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
    kv_tokens = kv_cache_tokens(shape, config, gpu, rollout_tp_size=layout.rollout_tp_size)
    moves, most, stages = config.optimizer.offload, most_microbatches(config, layout), []
    states, copies = state_bytes(rules, config, layout), fp8_copy_bytes(rules, config, layout)
    exact = exact_copy_bytes(rules, config, layout)
    # Every stage, since another one may need most while training than while generating.
    for stage, (weights, gradients, optimizer) in enumerate(states):
        step = step_bytes(
            hf_config, config, layout, stage=stage, num_microbatches=most, kernels=kernels
        )
        stages.append(
            replace(
                step,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                offloaded=(moves != "none") * optimizer + (moves == "all") * weights,
                fp8_copies=copies[stage],
                exact_copy=exact[stage],
                rollout_weights=0 if is_apart else generator.rollout_weights,
                kv_cache=0 if is_apart else generator.kv_cache,
                engine_asleep=0 if is_apart else ENGINE_ASLEEP_BYTES,
                communication=_communication_bytes(layout),
                fragmentation=int(FRAGMENTATION * step.step),
            )
        )
    precision, copied = config.model.precision, config.checkpoint.background
    loaded = max(loaded_bytes(one.gradients, precision) for one in stages)
    saved = max(saved_bytes(one.optimizer, precision, copied=copied) for one in stages)
    return Memory(
        trainer=max(stages, key=lambda one: one.training),
        engine=generator if is_apart else max(stages, key=lambda one: one.generating),
        checkpoint=max(loaded, saved),
        offloaded=max(one.offloaded for one in stages)
        + int(kept_asleep_bytes(shape, config, layout)),
        cache_holds_sequence=holds_one_sequence(kv_tokens, config),
    )


def _generator_memory(shape: Shape, config: Config, layout: Layout, gpu: Gpu) -> StageMemory:
    """Memory of a GPU that only generates: weights, cache, communicators, weights in transit.

    In transit are four buckets and what vLLM holds of a fused module until its last tensor arrives:
    at most the embedding, or one layer's matrices with all its experts.
    """
    size = layout.rollout_tp_size
    groups = 1 + (size > 1) + 2 * (layout.num_generation > 1)
    of_layer = max(shape.first_weights, shape.layer_weights)
    held = max(shape.head_weights, of_layer + shape.num_experts * shape.expert_weights)
    transit = RECEIVED_BUCKETS * BUCKET_BYTES + held * element_bytes(config)
    return StageMemory(
        rollout_weights=int(engine_bytes(shape, config, rollout_tp_size=size)),
        kv_cache=int(kv_cache_bytes(shape, config, gpu, rollout_tp_size=size)),
        communication=CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + transit,
    )


def step_bytes(
    hf_config: Any,
    config: Config,
    layout: Layout,
    *,
    stage: int,
    num_microbatches: int,
    kernels: Kernels,
) -> StageMemory:
    """Bytes that a step needs on one rank in addition to its state: activations, layer and head.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how the run is divided.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        kernels: what computes the layers.
    """
    kept = kept_activations(
        hf_config, config, layout, stage=stage, num_microbatches=num_microbatches, kernels=kernels
    )
    is_last = stage == layout.pp_size - 1
    return StageMemory(
        activations=kept.layers + kept.neighbours,
        layer=kept.recomputed + working_bytes(hf_config, config, layout, kernels=kernels),
        head=kept.head + head_bytes(hf_config, config, layout) if is_last else 0,
    )


def _communication_bytes(layout: Layout) -> int:
    sizes = [layout.tp_size, layout.pp_size, layout.cp_size, layout.copies, layout.ep_size]
    sizes += [layout.dp_size] * (layout.cp_size > 1)  # else the group equals that of the copies
    sizes += [layout.world_size] + [layout.rollout_tp_size] * (not layout.num_generation)
    groups = sum(size > 1 for size in sizes)
    bridge = COMMUNICATOR_BYTES + SENT_BUFFERS * BUCKET_BYTES if layout.num_generation else 0
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + bridge


def find_refusal(predicted: Memory, layout: Layout, gpu: Gpu) -> str:
    """Why a layout does not fit: the same text for every layout that fails in the same way.

    Checked on a GPU: training, generation, and room for the KV cache. Checked on the host: the
    offloaded state, a sleeping engine's weights, and a checkpoint while it is loaded or saved, of
    all ranks of a node. Empty: it fits.
    """
    limit, engine = gpu.memory_bytes, predicted.engine
    if predicted.training > limit:
        if predicted.trainer.updating <= limit:
            return "out of memory while rounding is measured (metrics.rounding_every_steps)"
        largest = _largest(predicted.trainer, (*STATE_PARTS, *STEP_PARTS))
        return f"out of memory while training; largest part: {largest}"
    if predicted.generating - engine.kv_cache > limit or engine.receiving > limit:
        largest = _largest(engine, (*STATE_PARTS, *ROLLOUT_PARTS))
        return f"out of memory while generating; largest part: {largest}"
    if predicted.generating > limit:
        return "out of memory while generating: a smaller rollout.memory_fraction would fit"
    if not predicted.cache_holds_sequence:
        return "out of memory while generating: the KV cache does not hold one sequence"
    host = (predicted.offloaded + predicted.checkpoint) * min(gpu.gpus_per_node, layout.num_ranks)
    if host > HOST_SHARE * gpu.host_memory_bytes:
        return "out of host memory: offloaded state, and a checkpoint while it is loaded or saved"
    return ""


def _largest(stage: StageMemory, parts: Sequence[str]) -> str:
    return max(parts, key=lambda part: getattr(stage, part)).replace("_", " ")


def fits(hf_config: Any, config: Config, layout: Layout) -> tuple[list[str], list[str]]:
    """The GPUs that a run fits, as `h100 (52.5 of 79.1 GiB)`; those it does not, with reasons."""
    good, bad = [], []
    for gpu in GPUS.values():
        try:
            check_capability(config.model, gpu.compute_capability, device=gpu.name)
        except ConfigError as error:
            bad.append(f"{gpu.name} ({error})")
            continue
        predicted = memory(hf_config, config, layout, gpu)
        needed = max(predicted.training, predicted.generating)
        shown = f"{gpu.name} ({needed / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB"
        if refusal := find_refusal(predicted, layout, gpu):
            bad.append(f"{shown}; {refusal})")
        else:
            good.append(f"{shown})")
    return good, bad
