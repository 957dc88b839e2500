"""Bytes of weights, gradients and optimizer, exactly as Megatron-core allocates them.

Its distributed optimizer puts parameters into buffers, one for what all data and context parallel
ranks share and one for experts, and their float32 gradients into another of each: every parameter
starts at a multiple of 64 elements, and a bucket ends at a multiple of 128 and of the number of
ranks that cut it. A buffer is one bucket, or several on the first pipeline rank with
`parallel.overlap_grad_reduce`, and one of its own for a shared embedding (tied, on several stages).
Virtual stages have buffers of their own, all of these. Every rank keeps moments, and masters of
bfloat16 weights, of the parameters in its part of each bucket, padding left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapo_megatron.config import Config, counts
from gapo_megatron.models.rules import Rule, shard_size
from gapo_megatron.ops.dry_run import BYTES_PER_PARAMETER
from gapo_megatron.ops.plan.layout import Layout

# Of a layer's parameters, as our layer spec registers them. It decides which rank's part has the
# padding: nothing at all where parameters are multiples of 64 elements, as in real models.
_ORDER = (
    "input_layernorm",
    "linear_proj",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "q_layernorm",
    "k_layernorm",
    "pre_mlp_layernorm",
    "router",
    "linear_fc1",
    "linear_fc2",
)
_CHECKPOINT_BYTES = 12
"""Of a parameter, in every precision: master weight and two moments."""


@dataclass(frozen=True, slots=True)
class StageState:
    """The buffers of one pipeline rank, of all its virtual stages."""

    buffer_elements: int
    """Of the weights' buffers, and of the gradients'; the same on every rank of the stage."""
    owned_elements: tuple[int, ...]
    """By rank within the stage (tensor parallel fastest, data parallel slowest): parameters whose
    state it keeps."""


def state_bytes(rules: list[Rule], config: Config, layout: Layout) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer state, of the rank of each stage that needs most.

    Ranks of a stage differ by the padding that their part of the optimizer leaves out. Step
    counters, 4 bytes of host memory a parameter, are not counted.

    Args:
        rules: of the model.
        config: for its precision, and whether gradients are reduced in several buckets.
        layout: how the run is cut.

    Returns:
        (weights, gradients, optimizer) per pipeline stage.

    Raises:
        ConversionError: a parameter cannot be cut.
    """
    weight, gradient, state = BYTES_PER_PARAMETER[config.model.precision]
    return [
        (
            stage.buffer_elements * weight,
            stage.buffer_elements * gradient,
            max(stage.owned_elements) * state,
        )
        for stage in stage_states(rules, config, layout)
    ]


def rank_bytes(
    rules: list[Rule], config: Config, layout: Layout, *, rank: int
) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state of one rank; see `state_bytes`."""
    weight, gradient, state = BYTES_PER_PARAMETER[config.model.precision]
    stage = stage_states(rules, config, layout)[rank // layout.ranks_per_stage]
    return (
        stage.buffer_elements * weight,
        stage.buffer_elements * gradient,
        stage.owned_elements[rank % layout.ranks_per_stage] * state,
    )


def checkpoint_bytes(weights: int, precision: str) -> int:
    """Host bytes of a rank while a checkpoint is saved.

    Of all in its buffers the optimizer's state, in float32, that of its neighbours too
    (`policy.optimizer`). Loading takes up to 60 % more: Megatron-core joins the two halves of gated
    layers anew.

    Args:
        weights: bytes of its weights' buffers.
        precision: of the model.
    """
    return weights // BYTES_PER_PARAMETER[precision][0] * _CHECKPOINT_BYTES


def stage_states(rules: list[Rule], config: Config, layout: Layout) -> list[StageState]:
    """Buffers of every pipeline stage; stages with the same parameters share the computation."""
    bucket_size = None
    if config.parallel.overlap_grad_reduce:
        bucket_size = counts.bucket_size(layout.copies)
    first = _stage(rules, layout, 0, bucket_size=bucket_size)
    last = _stage(rules, layout, layout.pp_size - 1)
    if layout.pp_size <= 2:
        return [first, last][: layout.pp_size]
    return [first, *[_stage(rules, layout, 1)] * (layout.pp_size - 2), last]


def _stage(
    rules: list[Rule], layout: Layout, stage: int, *, bucket_size: int | None = None
) -> StageState:
    sizes = {rule: math.prod(rule.shard_shape(shard_size(rule, layout.tp_size))) for rule in rules}
    layer = sorted((rule for rule in rules if rule.num_layers), key=_place_in_layer)
    num_layers = layout.layers_of_ranks(layer[0].num_layers or 0)[stage] // layout.vpp_size
    one_layer = [sizes[rule] for rule in layer if not rule.num_experts]
    one_expert = [sizes[rule] for rule in layer if rule.num_experts]
    num_experts = max(rule.num_experts or 0 for rule in layer) // layout.ep_size
    experts = one_expert * num_experts
    if layout.ep_size == 1:  # parameters like any other
        one_layer, experts = one_layer + experts, []

    ranks = np.arange(layout.ranks_per_stage)
    owned, num_elements = np.zeros_like(ranks), 0
    is_shared = layout.pp_size > 1 and any(rule.tied for rule in rules)
    for virtual in range(layout.vpp_size):
        bucket, own_buckets = one_layer * num_layers, []
        for rule in rules:
            is_embedding = rule.megatron.startswith("embedding.")
            place = (0, 0) if is_embedding else (layout.pp_size - 1, layout.vpp_size - 1)
            if rule.num_layers or (stage, virtual) != place:
                continue
            if is_shared and (is_embedding or rule.tied):
                own_buckets.append([sizes[rule]])
            elif not rule.tied:  # on one stage the embedding itself serves as the output layer
                bucket = [sizes[rule], *bucket] if is_embedding else [*bucket, sizes[rule]]
        # Experts have no tensor parallelism: neighbours hold others, the rest copies of these.
        cuts = [(given, layout.copies, layout.tp_size) for given in (bucket, *own_buckets)]
        if experts:
            cuts.append((experts * num_layers, len(ranks) // layout.ep_size, layout.ep_size))
        for given, num_parts, ranks_per_part in cuts:
            for filled in _buckets(given, bucket_size):
                length, parts = _cut(filled, num_parts)
                owned += parts[ranks // ranks_per_part]
                num_elements += length
    return StageState(num_elements, tuple(int(count) for count in owned))


def _place_in_layer(rule: Rule) -> int:
    return next(i for i, part in enumerate(_ORDER) if part in rule.megatron)


def _buckets(sizes: Sequence[int], bucket_size: int | None) -> list[Sequence[int]]:
    """Parameters (as registered) of one bucket after the other, filled from the last one on."""
    if bucket_size is None:
        return [sizes]
    buckets, end, length = [], len(sizes), 0
    for first in reversed(range(len(sizes))):
        length = -(-length // 64) * 64 + sizes[first]
        if length >= bucket_size or first == 0:
            buckets.append(sizes[first:end])
            end, length = first, 0
    return buckets


def _cut(sizes: Sequence[int], num_parts: int) -> tuple[int, np.ndarray]:
    """Elements of a bucket of parameters (as registered), and how many real ones each part has."""
    sizes_backwards = np.array(sizes[::-1], dtype=np.int64)  # roughly the order of gradients
    starts = np.concatenate([[0], np.cumsum(-(-sizes_backwards // 64) * 64)[:-1]])
    multiple = math.lcm(num_parts, 128)
    length = -(-int(starts[-1] + sizes_backwards[-1]) // multiple) * multiple
    edges = np.arange(num_parts + 1, dtype=np.int64) * (length // num_parts)
    ends = np.cumsum(sizes_backwards)
    # Real elements before an edge: all of the parameters before, and a part of the one it is in.
    index = np.searchsorted(starts, edges, side="right") - 1
    before = ends[index] - sizes_backwards[index]
    before += np.minimum(edges - starts[index], sizes_backwards[index])
    return length, np.diff(before)
