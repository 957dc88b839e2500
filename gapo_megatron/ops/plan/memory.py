"""Memory of one GPU, by part: what a planner compares layouts by.

State is exact but for padding (`state`); activations follow what layers keep (`activations`); the
rest is estimated, each by the rule that stands beside it. Nothing here has been compared with a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.activations import (
    kept_activations,
    neighbour_bytes,
    tokens_per_rank,
    working_bytes,
)
from gapo_megatron.ops.plan.flops import Shape, element_bytes, engine_bytes
from gapo_megatron.ops.plan.generation import (
    holds_one_sequence,
    kv_cache_bytes,
    kv_cache_tokens,
)
from gapo_megatron.ops.plan.hardware import CPU_NAME
from gapo_megatron.ops.plan.layout import Layout, most_microbatches
from gapo_megatron.ops.plan.state import checkpoint_bytes, fp8_copy_bytes, state_bytes

if TYPE_CHECKING:
    from gapo_megatron.ops.plan.hardware import Gpu

MIB = 2**20
_TILE_COLUMNS, _TILE_LOGITS = 8192, 2**24
_TILES_PER_BLOCK, _BLOCK_ROWS = 8, 4096
"""Tile and block sizes of the head on an accelerator: those of `logprob.tiles.block_shape`, which
needs torch."""
CONTEXT_BYTES = 1024 * MIB
"""CUDA context and the kernels of the libraries: assumed."""
COMMUNICATOR_BYTES = 256 * MIB
"""NCCL's buffers of one process group of more than one rank: assumed."""
ENGINE_ASLEEP_BYTES = 3072 * MIB
"""Bytes that a sleeping vLLM keeps on a device outside the pools that it gives back: rests of its
CUDA graphs, buffers of its all-reduce, its inputs and workspaces, compiled kernels. Assumed; its
NCCL communicator counts with the others. 0 on a CPU."""
BUCKETS_BYTES = 2 * 256 * MIB
"""The two buckets by which weights reach ranks that only generate: those of `rollout.broadcast`,
which needs torch."""
FRAGMENTATION = 0.1
"""Share lost of activations and head, whose pieces change in size: assumed."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one GPU of a pipeline rank, all its virtual stages together, by part."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    offloaded: int
    """Bytes of weights and optimizer that are in host memory while vLLM is awake."""
    activations: int
    """Kept between forward and backward pass, and what the schedule holds for neighbours."""
    layer: int
    """Working memory of one layer's backward pass, its recomputed activations included."""
    fp8_copies: int
    """Weights as Transformer Engine multiplies by them; given up with the gradients."""
    head: int
    """Memory that the log-probs keep and work with. Never at the same time as `layer`."""
    rollout_weights: int
    kv_cache: int
    """Rest of `rollout.memory_fraction` after vLLM's weights; its own workspace and graphs come out
    of it."""
    engine_asleep: int
    """Memory of a sleeping vLLM; awake, its share of the memory includes it."""
    communication: int
    """NCCL's buffers, and the CUDA context."""
    fragmentation: int

    @property
    def state(self) -> int:
        """Bytes that are there as long as the trainer works."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def training(self) -> int:
        """Bytes while the trainer works and vLLM sleeps: the worse of two phases."""
        step = self.activations + max(self.layer, self.head) + self.fragmentation
        return self.state + self.fp8_copies + self.engine_asleep + step

    @property
    def receiving(self) -> int:
        """Bytes while vLLM receives weights: the trainer has its own, but no gradients."""
        kept = self.state - self.gradients - min(self.offloaded, self.optimizer)
        return kept + self.rollout_weights + self.engine_asleep

    @property
    def awake(self) -> int:
        """Bytes while vLLM generates: the trainer's weights have left, if they do."""
        kept = self.state - self.gradients - self.offloaded
        return kept + self.rollout_weights + self.kv_cache

    @property
    def generating(self) -> int:
        """Bytes from the sync to the end of generation: the worse of the two phases."""
        return max(self.receiving, self.awake)


@dataclass(frozen=True, slots=True)
class Memory:
    """The stages of a layout that need most; in an untied model often not the same one."""

    trainer: StageMemory
    """The stage that needs most while training."""
    engine: StageMemory
    """The stage that needs most while generating. Where some ranks only generate: one of these."""
    checkpoint: int
    """Host memory on one rank of the stage that needs most, while it saves."""
    offloaded: int
    """Host memory on such a rank, from the first sync to the end."""
    cache_holds_sequence: bool
    """Whether an engine's KV cache holds one sequence of the greatest length."""

    @property
    def training(self) -> int:
        return self.trainer.training

    @property
    def generating(self) -> int:
        return self.engine.generating


def memory(hf_config: Any, config: Config, layout: Layout, gpu: Gpu) -> Memory:
    """Predict the memory of the stages that need most, with Transformer Engine's layers.

    (Those of fp32 runs are our own: no Transformer Engine there.)

    Args:
        hf_config: the model's config.
        config: the run's settings: precision, micro-batches, head, `rollout.memory_fraction`.
        layout: how it is cut; replaces what `config` says about it.
        gpu: for its memory.

    Raises:
        ConversionError: a parameter cannot be cut.
    """
    shape, fused = Shape.of(hf_config), config.model.precision != "fp32"
    rules, generator = shape.rules, _generator_memory(shape, config, layout, gpu)
    is_apart = layout.num_generation > 0
    asleep = 0 if is_apart or gpu.name == CPU_NAME else ENGINE_ASLEEP_BYTES
    kv_tokens = kv_cache_tokens(shape, config, gpu, rollout_tp_size=layout.rollout_tp_size)
    moves, most, stages = config.optimizer.offload, most_microbatches(config, layout), []
    states, copies = state_bytes(rules, config, layout), fp8_copy_bytes(rules, config, layout)
    for stage, (weights, gradients, optimizer) in enumerate(states):
        step = step_bytes(
            hf_config, config, layout, stage=stage, num_microbatches=most, fused=fused
        )
        stages.append(
            StageMemory(
                stage=stage,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                offloaded=(moves != "none") * optimizer + (moves == "all") * weights,
                activations=step.activations,
                layer=step.layer,
                fp8_copies=copies[stage],
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
        checkpoint=checkpoint_bytes(max(one.weights for one in stages), config.model.precision),
        offloaded=max(one.offloaded for one in stages),
        cache_holds_sequence=holds_one_sequence(kv_tokens, config),
    )


def _generator_memory(shape: Shape, config: Config, layout: Layout, gpu: Gpu) -> StageMemory:
    """A GPU with an engine alone: weights, cache, communicators and buckets."""
    size = layout.rollout_tp_size
    groups = 1 + (size > 1) + (layout.num_generation > 1)
    nothing = {field.name: 0 for field in fields(StageMemory)}
    engine = {
        "rollout_weights": int(engine_bytes(shape, config, rollout_tp_size=size)),
        "kv_cache": int(kv_cache_bytes(shape, config, gpu, rollout_tp_size=size)),
        "communication": CONTEXT_BYTES
        + groups * COMMUNICATOR_BYTES
        + received_bytes(shape, config),
    }
    return StageMemory(**nothing | engine)


def received_bytes(shape: Shape, config: Config) -> int:
    """Weights on their way into a rank that only generates: two buckets, and what vLLM holds.

    It holds the tensors of a fused module until the last has come: at most those of a layer's
    matrices, of all its experts, or the embedding.
    """
    experts = shape.num_experts * shape.expert_weights
    held = max(shape.head_weights, shape.layer_weights, experts)
    return BUCKETS_BYTES + held * element_bytes(config)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a step needs on one rank beside its state; see `StageMemory`."""

    activations: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        """The head's backward pass is over when that of the layers begins."""
        return self.activations + max(self.layer, self.head)


def step_bytes(
    hf_config: Any,
    config: Config,
    layout: Layout,
    *,
    stage: int,
    num_microbatches: int,
    fused: bool,
) -> StepBytes:
    """Bytes that a step needs on one rank beside its state.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how it is cut.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        fused: Transformer Engine's layers.
    """
    kept = kept_activations(
        hf_config, config, layout, stage=stage, num_microbatches=num_microbatches, fused=fused
    )
    held = neighbour_bytes(
        hf_config, config, layout, stage=stage, num_microbatches=num_microbatches
    )
    is_last = stage == layout.pp_size - 1
    return StepBytes(
        activations=kept.layers + held,
        layer=kept.recomputed + working_bytes(hf_config, config, layout, fused=fused),
        head=kept.head + head_bytes(hf_config, config, layout) if is_last else 0,
    )


def head_bytes(hf_config: Any, config: Config, layout: Layout) -> int:
    """Workspace of `logprob.token_log_probs` in its backward pass, the larger of the two.

    The gradient of the hidden states, all positions gathered under sequence parallelism, and one
    block of active rows: its states, its float32 gradient twice (one is summed over ranks while the
    next is computed), the gradient of a tile of logits, and that tile in float32.
    """
    tokens, h = tokens_per_rank(config, layout), hf_config.hidden_size
    e = element_bytes(config)
    sp = layout.tp_size if layout.sequence_parallel else 1
    vocab = -(-hf_config.vocab_size // layout.tp_size)
    block_rows, columns = block_shape(vocab)
    rows, columns = min(block_rows, tokens), min(columns, vocab)
    gathered = 2 * tokens * h * e if layout.sequence_parallel else 0  # shards, and joined
    block = rows * (h * (e + 2 * 4) + columns * e)
    tile = 4 * min(block_rows // _TILES_PER_BLOCK, rows) * columns
    return tokens * h * e // sp + gathered + block + tile


def block_shape(num_columns: int) -> tuple[int, int]:
    """`logprob.tiles.block_shape` of so many columns on any accelerator, Triton's kernels too."""
    num_rows = _TILE_LOGITS // max(min(_TILE_COLUMNS, num_columns), 64)
    return max(_TILES_PER_BLOCK * num_rows, _BLOCK_ROWS), _TILE_COLUMNS


def _communication_bytes(layout: Layout) -> int:
    sizes = [layout.tp_size, layout.pp_size, layout.cp_size, layout.copies, layout.ep_size]
    sizes += [layout.dp_size] * (layout.cp_size > 1)  # else it is the group of the copies
    if not layout.num_generation:
        sizes.append(layout.rollout_tp_size)
    groups = sum(size > 1 for size in (*sizes, layout.world_size))
    bridge = COMMUNICATOR_BYTES + BUCKETS_BYTES if layout.num_generation else 0
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + bridge
