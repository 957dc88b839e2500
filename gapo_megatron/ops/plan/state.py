"""Parameters of one rank, and the bytes of its weights, gradients and optimizer state.

Megatron-core's buffers are larger by their padding: a parameter starts at a multiple of 64 elements
(as those of real models end), a buffer ends at a multiple of 128 and of the ranks that cut it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.models.fp8 import is_quantised
from gapo_megatron.models.rules import Rule, shard_size
from gapo_megatron.ops.plan.layout import Layout

BYTES_PER_PARAMETER = {"fp32": (4, 4, 8), "bf16": (2, 4, 12), "fp16": (2, 4, 12), "fp8": (2, 4, 12)}
"""Bytes by precision: weight, gradient (on every rank), optimizer state (cut by data parallel)."""
FP8_COPY_BYTES = 2
"""Bytes of a weight's copies where Transformer Engine multiplies in fp8: one copy for the forward
pass, one for the backward pass. (On Blackwell `tensorwise` and `delayed` have one for both.)"""
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter, in every precision: master weight and two moments."""


def per_rank_parameters(rules: Sequence[Rule], parallel: ParallelConfig) -> list[int]:
    """Number of parameters that one rank of each pipeline stage holds.

    Raises:
        ConfigError: the stages do not divide the layers.
        ConversionError: a parameter cannot be cut into tensor parallel shards.
    """
    totals = [0] * parallel.pipeline_model_parallel_size
    for rule in rules:
        size = shard_size(rule, parallel.tensor_model_parallel_size)
        for stage, count in placement(rule, parallel):
            totals[stage] += count * math.prod(rule.shard_shape(size))
    return totals


def placement(rule: Rule, parallel: ParallelConfig) -> Iterator[tuple[int, int]]:
    """(pipeline stage, how often the rule's parameter occurs on a rank there)."""
    pp_size, ep_size = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    if rule.num_layers is not None:
        for stage, virtual in enumerate(layers_of_stages(parallel, rule.num_layers)):
            yield stage, sum(map(len, virtual)) * (rule.num_experts or ep_size) // ep_size
    elif rule.tied and pp_size == 1:
        return  # the embedding itself serves as the output layer
    else:
        yield (0 if rule.megatron.startswith("embedding.") else pp_size - 1), 1


def others_and_experts(rules: Sequence[Rule], layout: Layout) -> list[tuple[int, int]]:
    """`per_rank_parameters` of each stage in two: experts have copies on other ranks."""
    totals = per_rank_parameters(rules, layout.parallel)
    experts = per_rank_parameters([rule for rule in rules if rule.num_experts], layout.parallel)
    return [(total - expert, expert) for total, expert in zip(totals, experts, strict=True)]


def state_bytes(
    rules: Sequence[Rule], config: Config, layout: Layout
) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer state of one rank of each stage, without padding.

    Step counters, 4 bytes of host memory a parameter, are not counted.

    Args:
        rules: the model's name rules.
        config: for its precision.
        layout: how the run is cut.

    Returns:
        (weights, gradients, optimizer) per pipeline stage.

    Raises:
        ConversionError: a parameter cannot be cut.
    """
    weight, gradient, state = BYTES_PER_PARAMETER[config.model.precision]
    return [
        (
            (others + experts) * weight,
            (others + experts) * gradient,
            math.ceil((others / layout.copies + experts / layout.expert_copies) * state),
        )
        for others, experts in others_and_experts(rules, layout)
    ]


def fp8_copy_bytes(rules: Sequence[Rule], config: Config, layout: Layout) -> list[int]:
    """Copies in fp8 of the weights of a rank of each stage; 0 in other precisions."""
    size = FP8_COPY_BYTES if config.model.precision == "fp8" else 0
    quantised = per_rank_parameters(list(filter(is_quantised, rules)), layout.parallel)
    return [count * size for count in quantised]


def checkpoint_bytes(weights: int, precision: str) -> int:
    """Host bytes of a rank while a checkpoint is saved.

    Of all its parameters the optimizer's state, in float32, that of its neighbours too
    (`policy.optimizer`). Loading takes up to 60 % more: Megatron-core joins the two halves of gated
    layers anew.

    Args:
        weights: bytes of its weights.
        precision: `model.precision`.
    """
    return weights // BYTES_PER_PARAMETER[precision][0] * _CHECKPOINT_BYTES
