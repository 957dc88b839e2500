"""Parameters and state that one rank holds in a layout.

State bytes leave out the padding of Megatron-core's buffers: a parameter starts at a multiple of 64
elements (those of real models also end at one), a buffer ends at a multiple of 128 and of the
number of ranks that shard it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gapo_megatron.config import AdapterConfig, Config, ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.models.fp8 import is_quantised
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import Rule, shard_size
from gapo_tools.planner.layout import Layout

BYTES_PER_PARAMETER = {"fp32": (4, 4, 8), "bf16": (2, 4, 12), "fp16": (2, 4, 12), "fp8": (2, 4, 12)}
"""Bytes by precision: weight, gradient (both on every rank), optimizer state (sharded over data
parallel ranks)."""
FP8_COPY_BYTES = 2
"""Bytes of a weight's fp8 copies in Transformer Engine: one for the forward pass, one for the
backward pass. (On Blackwell `tensorwise` and `delayed` use the same copy for both.)"""
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint, in every precision: float32 master weight and two
moments."""


def trained_rules(rules: Sequence[Rule], adapter: AdapterConfig) -> Sequence[Rule]:
    """Rules of the parameters that are trained: the model's, or those of the adapter's factors."""
    if adapter.kind == "none":
        return rules
    factors = factors_of(rules, targets=adapter.targets, rank=adapter.rank)
    return [rule for one in factors for rule in (one.a, one.b)]


def most_microbatches(config: Config, layout: Layout) -> int:
    """Micro-batches of an update on a rank if every sequence has the maximum length."""
    batch = config.batch
    per_microbatch = batch.max_tokens_per_microbatch // config.max_sequence_tokens
    num_sequences = batch.minibatch_prompts * batch.rollouts_per_prompt
    return math.ceil(num_sequences / layout.dp_size / per_microbatch)


def per_rank_parameters(rules: Sequence[Rule], parallel: ParallelConfig) -> list[int]:
    """Number of parameters on one rank of each pipeline stage.

    Raises:
        ConfigError: the stages do not divide the layers.
        ConversionError: a parameter does not divide into tensor parallel shards.
    """
    totals = [0] * parallel.pipeline_model_parallel_size
    for rule in rules:
        size = shard_size(rule, parallel.tensor_model_parallel_size)
        for stage, count in placement(rule, parallel):
            totals[stage] += count * math.prod(rule.shard_shape(size))
    return totals


def placement(rule: Rule, parallel: ParallelConfig) -> Iterator[tuple[int, int]]:
    """(pipeline stage, how many of the rule's parameters one rank of that stage holds)."""
    pp_size, ep_size = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    if rule.num_layers is not None:
        for stage, virtual in enumerate(layers_of_stages(parallel, rule.num_layers)):
            here = sum(map(rule.count_in, virtual))
            yield stage, here * (rule.num_experts or ep_size) // ep_size
    elif rule.tied and pp_size == 1:
        return  # the embedding itself serves as the output layer
    else:
        yield (0 if rule.megatron.startswith("embedding.") else pp_size - 1), 1


def others_and_experts(rules: Sequence[Rule], layout: Layout) -> list[tuple[int, int]]:
    """`per_rank_parameters` of each stage as (others, experts): their data parallel groups differ.

    Raises:
        ConfigError, ConversionError: see `per_rank_parameters`.
    """
    totals = per_rank_parameters(rules, layout.parallel)
    experts = per_rank_parameters([rule for rule in rules if rule.num_experts], layout.parallel)
    return [(total - expert, expert) for total, expert in zip(totals, experts, strict=True)]


def state_bytes(
    rules: Sequence[Rule], config: Config, layout: Layout
) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer state of one rank of each stage, without padding.

    With an adapter the weights are the model's and the factors; only factors have the other two.
    Step counters, 4 bytes of host memory per parameter tensor, are not counted.

    Args:
        rules: the model's name rules.
        config: the run's settings, for `model.precision` and `adapter`.
        layout: how the run is divided.

    Returns:
        (weights, gradients, optimizer) per pipeline stage.

    Raises:
        ConfigError, ConversionError: see `per_rank_parameters`.
    """
    weight, gradient, state = BYTES_PER_PARAMETER[config.model.precision]
    trained = others_and_experts(trained_rules(rules, config.adapter), layout)
    frozen = [0] * layout.pp_size
    if config.adapter.kind != "none":
        frozen = per_rank_parameters(rules, layout.parallel)
    return [
        (
            (frozen[stage] + others + experts) * weight,
            (others + experts) * gradient,
            math.ceil((others / layout.copies + experts / layout.expert_copies) * state),
        )
        for stage, (others, experts) in enumerate(trained)
    ]


def fp8_copy_bytes(rules: Sequence[Rule], config: Config, layout: Layout) -> list[int]:
    """Bytes of the weights' fp8 copies on a rank of each stage; 0 in other precisions."""
    size = FP8_COPY_BYTES if config.model.precision == "fp8" else 0
    quantised = per_rank_parameters(list(filter(is_quantised, rules)), layout.parallel)
    return [count * size for count in quantised]


def exact_copy_bytes(rules: Sequence[Rule], config: Config, layout: Layout) -> list[int]:
    """Bytes of the second model that measures rounding (`policy.exact`), on a rank of each stage.

    Four bytes a weight. 0 where nothing is measured (`checks.rounding.is_due`), as in fp32 on a
    GPU; also without an adapter, because the gradients, whose memory is free then, take as much.
    """
    is_quadratic = config.model.precision == "fp32" or layout.cp_size > 1
    is_behind = config.objective.old_log_probs == "rollout" and config.rollout.max_staleness > 0
    is_measured = config.metrics.rounding_every(config.model.precision) > 0 and not is_behind
    if config.adapter.kind == "none" or not is_measured or is_quadratic:
        return [0] * layout.pp_size
    return [count * 4 for count in per_rank_parameters(rules, layout.parallel)]


def loaded_bytes(gradients: int, precision: str) -> int:
    """Host bytes of a rank while a checkpoint is loaded.

    The rank reads the float32 optimizer state of all parameters that it trains, including the
    shards of other data parallel ranks, and keeps its own shard of it. Where Megatron-core
    concatenates the two halves of gated layers, it takes up to 60 % more.

    Args:
        gradients: bytes of the rank's gradients.
        precision: `model.precision`.
    """
    return gradients // BYTES_PER_PARAMETER[precision][1] * _CHECKPOINT_BYTES


def saved_bytes(optimizer: int, precision: str, *, copied: bool) -> int:
    """Host bytes of a rank for what it writes of a checkpoint.

    That is its share of the float32 optimizer state that the ranks with equal weights have, and
    with `checkpoint.background`, which keeps the memory from save to save, its share of the
    weights. The shares are as even as tensors are small (Megatron-core's distribution).

    Args:
        optimizer: bytes of the rank's optimizer state.
        precision: `model.precision`.
        copied: `checkpoint.background`.
    """
    weight, _, state = BYTES_PER_PARAMETER[precision]
    return optimizer // state * (_CHECKPOINT_BYTES + copied * weight)
