"""Seconds of one mini-batch in the trainer: a roofline model, each term with its equation.

Parameter gather, tensor parallel collectives and the experts' all-to-all do not overlap with
computation, nor does the gradient reduction without `parallel.overlap_grad_reduce`. Two things
overlap in reality but count in full here: Transformer Engine's ring of keys and values, and the
hidden states that virtual stages send between warm-up and flush of an update.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from gapo_megatron.config import AdapterConfig, Config
from gapo_megatron.ops.plan.flops import (
    ForwardFlops,
    Shape,
    adapter_flops,
    element_bytes,
    forward_flops,
)
from gapo_megatron.ops.plan.hardware import Efficiency, Gpu
from gapo_megatron.ops.plan.layout import Layout, others_and_experts, trained_rules
from gapo_megatron.ops.plan.workload import Load, Workload, load_of

_ACCUMULATE_BYTES = 10
"""Bytes per weight and micro-batch: the gradient (2) is added to a float32 buffer (4 + 4)."""
_CLEAR_BYTES = 8
"""Bytes per weight: the float32 buffer is cleared, and read for the grad norm."""
_OPTIMIZER_BYTES = 28
"""Bytes per weight of the optimizer's shard: gradient, master weight and two moments are read (16),
master weight and moments written (12)."""


class Content(NamedTuple):
    """Layers and trained parameters on one rank of a pipeline stage."""

    num_layers: int
    others: int
    """Parameters except experts."""
    experts: int
    has_embedding: bool


class _Recomputed(NamedTuple):
    """Parts of a layer's forward pass that its backward pass recomputes."""

    layers: float
    """Share of the matrix products with the layer's weights."""
    attention: float
    """Share of the core attention."""
    collectives: int
    """Tensor parallel collectives; see `Training._tensor_s`."""


@dataclass(frozen=True, slots=True)
class Training:
    """Inputs of the time model, and the terms of one mini-batch on the busiest DP rank."""

    shape: Shape
    config: Config
    layout: Layout
    workload: Workload
    gpu: Gpu
    efficiency: Efficiency

    def old_log_probs_s(self) -> float:
        """Seconds of the forward passes before and within the updates of a step.

        m mini-batches take m - 1 passes for old log-probs (the first mini-batch's update is its own
        old pass), or none if the engine's log-probs are the old ones; m more with a KL term. If
        each mini-batch finds its own bounds (`Method.bounds`), that takes m - 1 passes, or m with
        the engine's log-probs.
        """
        objective, num_minibatches = self.config.objective, self.config.batch.num_minibatches
        is_around_engine = objective.old_log_probs == "rollout"
        num_passes = 0 if is_around_engine else num_minibatches - 1
        if objective.resolve().bounds != "fixed":
            num_passes += num_minibatches if is_around_engine else num_minibatches - 1
        if objective.kl_coef > 0:
            num_passes += num_minibatches
        return num_passes * self.pass_s(backward=False)

    def update_s(self) -> float:
        """Seconds of an update: forward and backward passes, gradient reduction, optimizer."""
        return self.pass_s(backward=True) + self.optimizer_s() + self.efficiency.update_s

    @property
    def num_sequences(self) -> float:
        """Computed sequences of a mini-batch on one data-parallel rank."""
        batch = self.config.batch
        share = self.workload.trained_share(batch)
        if self.config.objective.needs_every_sequence:
            share = 1.0
        return batch.minibatch_prompts * batch.rollouts_per_prompt * share / self.layout.dp_size

    @property
    def load(self) -> Load:
        """Load of the busiest data-parallel rank: an even share, at least the longest sequence."""
        return load_of(self.workload, self.num_sequences, self.layout.dp_size)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches on that rank; the batching plan fills them evenly, up to the budget."""
        return max(1, math.ceil(self.load.tokens / self.config.batch.max_tokens_per_microbatch))

    def pass_s(self, *, backward: bool) -> float:
        """Seconds of a pass over a mini-batch's m micro-batches; p ranks with v stages each.

            pass   = sum over the other ranks of last + m x slowest last + (v - 1) x rounds
            rounds = sum over rounds of n of max(n x slowest first, sum over all ranks of first)

        `first` is the time of one micro-batch in a rank's first virtual stage, `last` in its last
        one, which includes the head on the last rank (the same stage if v = 1). The first
        micro-batch passes through all ranks, the others follow at the pace of the slowest: with
        equal stages a bubble of (p - 1) / (v m). Virtual stages take the micro-batches in rounds of
        p, the last round has m mod p: a micro-batch reaches its next virtual stage only after all
        ranks, which bounds a round from below. Filler micro-batches of that round cost nothing.
        """
        layout, num_microbatches = self.layout, self.num_microbatches
        seconds = {
            content: self.stage_s(content, backward=backward) / layout.vpp_size
            for content in set(self.contents)
        }
        first = [seconds[content] for content in self.contents]
        last = [*first[:-1], first[-1] + self.head_s(backward=backward)]
        *others, slowest_last_s = sorted(last)
        short = num_microbatches % layout.pp_size
        rounds_s = (num_microbatches - short) * max(first)
        rounds_s += max(short * max(first), sum(first)) if short else 0.0
        return sum(others) + num_microbatches * slowest_last_s + (layout.vpp_size - 1) * rounds_s

    @property
    def contents(self) -> list[Content]:
        """Layers and parameters of every pipeline rank."""
        return _contents(self.shape, self.config.adapter, self.layout)

    @property
    def _recomputed(self) -> _Recomputed:
        """What is recomputed; see `ops.plan.activations.LayerBytes`."""
        if self.layout.recompute == "full":
            return _Recomputed(1, 1, 4)
        if self.layout.recompute == "none":
            return _Recomputed(0, 0, 0)
        if self.config.model.precision == "fp32":  # layers without Transformer Engine
            return _Recomputed(0, 1, 0)
        shape = self.shape
        attention = 2 * shape.hidden * (shape.heads_width + shape.kv_heads * shape.head_dim)
        return (
            _Recomputed(0, 0, 0)
            if shape.num_experts
            else _Recomputed(1 - attention / shape.layer_weights, 0, 2)
        )

    def stage_s(self, content: Content, *, backward: bool) -> float:
        """Seconds of one micro-batch in l of L layers of a pipeline rank, without the head.

        products = (factor x layers' flops / peak + factor' x attention's / bf16 peak)
                   x l / L / t / matmul
        factor   = 1 forward, 3 with backward, 4 with full recomputation; selective recomputation
                   adds the MLP's share of a dense layer, and nothing for experts; with an adapter 1
                   less with backward (frozen weights), and its own products with the full factor
        (every layer counts as their average, whether it has experts or not)
        factor'  = 1 forward, 3.5 with backward (flash attention recomputes the scores: 2.5 forward
                   passes), 4.5 with full recomputation
        launches = factor x l x layer_s
        adding   = backward: 10 bytes of every trained weight / bandwidth
        and the collectives of `_tensor_s`, `_context_s`, `_experts_s`, `_pipeline_s`
        """
        layout, flops, efficiency = self.layout, self._flops(), self.efficiency
        num_layers = content.num_layers
        factor = attention_factor = 1.0
        if backward:
            again = self._recomputed
            factor, attention_factor = 3 + again.layers, 3.5 + again.attention
        own, saved = self._adapter_flops(), backward and self.config.adapter.kind != "none"
        seconds = (factor - saved) * flops.layers / self._products(self.config.model.precision)
        seconds += factor * own / self._products(self._without_fp8)
        seconds += attention_factor * flops.attention / self._products(self._without_fp8)
        seconds *= num_layers / (self.shape.num_layers * layout.tp_size)
        seconds += factor * num_layers * efficiency.layer_s
        if backward:
            streamed = _ACCUMULATE_BYTES * (content.others + content.experts)
            seconds += streamed / (self.gpu.bandwidth * efficiency.bandwidth)
        collectives = (self._tensor_s, self._context_s, self._experts_s)
        seconds += num_layers * sum(collective(backward) for collective in collectives)
        return seconds + self._pipeline_s(backward)

    def head_s(self, *, backward: bool) -> float:
        """Seconds of the log-probs of a micro-batch's responses.

            head = (1 + 3 x (1 - clipped share)) x logits' flops / t / (peak x matmul), forward 1

        The backward pass recomputes the logits and has two products of that size, for active rows;
        one with an adapter, whose head is frozen.
        """
        products = 3 if self.config.adapter.kind == "none" else 2
        factor = 1 + products * (1 - self.workload.clipped_share) if backward else 1.0
        flops, rate = self._flops().head, self._products(self._without_fp8)
        return factor * flops / self.layout.tp_size / rate + self._head_collectives_s(backward)

    def _head_collectives_s(self, backward: bool) -> float:
        """Seconds of the head's tensor parallel collectives in one micro-batch.

            gather = hidden states x (t - 1) / t / link, forward and backward, if sequence parallel
            reduce = units x 4 x hidden x active rows x (t - 1) / t / link, units 1 (else 2)

        plus a latency each, which covers the three statistics of a row.
        """
        layout, share = self.layout, 1 - 1 / self.layout.tp_size
        if layout.tp_size == 1:
            return 0.0
        sent = self._hidden_bytes * layout.sequence_parallel * (2 if backward else 1)
        if backward:
            active = self.load.scored_tokens / self.num_microbatches / layout.cp_size
            active *= 1 - self.workload.clipped_share
            sent += (1 if layout.sequence_parallel else 2) * 4 * self.shape.hidden * active
        rate = self.gpu.group_bandwidth(layout.tp_size, stride=1) * self.efficiency.communication
        return share * sent / rate + (4 if backward else 2) * self.efficiency.collective_s

    def optimizer_s(self) -> float:
        """Seconds of gradient reduction, optimizer and parameter gather.

        reduce   = 4 bytes of every weight x (d - 1) / d / network, d the ranks that share it
        gather   = the weights' bytes likewise
        optimize = (8 bytes of every weight + 28 of the rank's 1/d) / bandwidth

        of trained weights. All wait for the slowest pipeline rank. With
        `parallel.overlap_grad_reduce` only a part of `reduce` counts: see `_exposed_s`.
        """
        return max(self._optimizer_s(content) for content in set(self.contents))

    def _optimizer_s(self, content: Content) -> float:
        efficiency = self.efficiency
        seconds = reduce_s = 0.0
        held = (content.others, content.experts)
        for weights, (size, stride) in zip(held, self._copies, strict=True):
            sent_s = self._sent_s(weights, size, stride)
            latency_s = efficiency.collective_s * (size > 1 and weights > 0)
            reduce_s += 4 * sent_s + latency_s
            seconds += element_bytes(self.config) * sent_s + latency_s
            streamed = weights * (_CLEAR_BYTES + _OPTIMIZER_BYTES / size)
            seconds += streamed / (self.gpu.bandwidth * efficiency.bandwidth)
        if self.config.parallel.overlap_grad_reduce:
            reduce_s = self._exposed_s(reduce_s, content)
        return seconds + reduce_s

    def _exposed_s(self, reduce_s: float, content: Content) -> float:
        """Seconds of the gradient reduction that the last backward pass does not hide.

            exposed = max(reduce - backward, reduce of the embedding)

        The embedding's gradient comes last. Later pipeline ranks reduce during the backward pass of
        earlier ones, which hides theirs too. Left out: the slowdown of overlapping work, what else
        is in the embedding's bucket, the latency of several buckets.
        """
        backward_s = self.stage_s(content, backward=True) - self.stage_s(content, backward=False)
        trains_embedding = content.has_embedding and self.config.adapter.kind == "none"
        embedding = trains_embedding * self.shape.head_weights / self.layout.tp_size
        return max(reduce_s - backward_s, 4 * self._sent_s(embedding, *self._copies[0]))

    @property
    def _copies(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(ranks with the same weights, their stride), for other weights and for experts."""
        layout = self.layout
        return (
            (layout.copies, layout.tp_size),
            (layout.expert_copies, layout.ep_size),
        )

    def _sent_s(self, weights: float, size: int, stride: int) -> float:
        """Seconds to reduce or gather one byte of each weight over `size` ranks."""
        rate = self.gpu.group_bandwidth(size, stride=stride) * self.efficiency.communication
        return weights * (size - 1) / size / rate

    def _products(self, precision: str) -> float:
        """Reached FLOP/s of matrix products."""
        return self.gpu.flops(precision) * self.efficiency.matmul

    @property
    def _without_fp8(self) -> str:
        """Precision of attention and head; fp8 covers only products with the layers' weights."""
        precision = self.config.model.precision
        return "bf16" if precision == "fp8" else precision

    def _flops(self) -> ForwardFlops:
        """FLOPs of one micro-batch on one context parallel rank."""
        share = 1 / (self.num_microbatches * self.layout.cp_size)
        load = self.load
        return forward_flops(
            self.shape,
            num_tokens=load.tokens * share,
            mean_squared_length=load.squared_tokens,
            num_sequences=share,
            num_scored=load.scored_tokens * share,
        )

    def _adapter_flops(self) -> float:
        """FLOPs of an adapter's factors for one micro-batch on one context parallel rank."""
        return adapter_flops(self.shape, self.config, num_tokens=self._tokens_per_rank)

    @property
    def _hidden_bytes(self) -> float:
        """Bytes of one micro-batch's hidden states on one context parallel rank."""
        return self._tokens_per_rank * self.shape.hidden * element_bytes(self.config)

    @property
    def _tokens_per_rank(self) -> float:
        return self.load.tokens / self.num_microbatches / self.layout.cp_size

    def _tensor_s(self, backward: bool) -> float:
        """Seconds of the tensor parallel collectives of one layer and micro-batch.

            tensor = units x (hidden states x (t - 1) / t / link + collective_s)

        An all-reduce is two units, an all-gather or reduce-scatter one. Forward takes 4, backward 4
        (6 with sequence parallelism, which gathers again), full recomputation 4 more, recomputing
        the MLP 2 more. With experts only attention and a shared expert have these collectives.
        """
        layout = self.layout
        if layout.tp_size == 1:
            return 0.0
        units = 4
        if backward:
            units += 6 if layout.sequence_parallel else 4
            units += self._recomputed.collectives
        if self.shape.num_experts and not self.shape.has_shared_expert:
            units //= 2
        sent = self._hidden_bytes * (layout.tp_size - 1) / layout.tp_size
        rate = self.gpu.group_bandwidth(layout.tp_size, stride=1) * self.efficiency.communication
        return units * (sent / rate + self.efficiency.collective_s)

    def _context_s(self, backward: bool) -> float:
        """Seconds of the ring of keys and values of one layer and micro-batch.

            ring = passes x (c - 1) x (a rank's keys and values / link + collective_s)

        Passes: 1 forward, 2 backward (gradients travel too), 1 for recomputation.
        """
        layout, shape = self.layout, self.shape
        if layout.cp_size == 1:
            return 0.0
        passes = 1
        if backward:
            passes = 3 if layout.recompute == "none" else 4
        width = 2 * shape.kv_heads * shape.head_dim / layout.tp_size
        sent = self._tokens_per_rank * width * element_bytes(self.config)
        rate = self.gpu.group_bandwidth(layout.cp_size, stride=layout.tp_size)
        each = sent / (rate * self.efficiency.communication) + self.efficiency.collective_s
        return passes * (layout.cp_size - 1) * each

    def _experts_s(self, backward: bool) -> float:
        """Seconds of the all-to-all to the experts and back, of one layer and micro-batch.

            experts = 2 x factor' x (tokens of the rank x k x hidden
                      x max((n - 1) / e / link, (e - n) / e / network) + collective_s)

        factor' = 1 forward, 2 with backward, 3 with recomputation. n of the e ranks share a node;
        traffic to other nodes uses each rank's own network adapter.
        """
        layout, gpu = self.layout, self.gpu
        if layout.ep_size == 1:
            return 0.0
        sent = self._hidden_bytes / layout.tp_size * self.shape.experts_per_token / layout.ep_size
        members = gpu.members_in_node(layout.ep_size, stride=1)
        inside_s = (members - 1) * sent / gpu.link_bandwidth
        outside_s = (layout.ep_size - members) * sent / gpu.network_bandwidth
        each = max(inside_s, outside_s) / self.efficiency.communication
        each += self.efficiency.collective_s
        times = 1 if not backward else 3 if layout.recompute == "full" else 2
        return 2 * times * each

    def _pipeline_s(self, backward: bool) -> float:
        """Seconds to send hidden states to the next rank, and their gradients back.

            pipeline = v x (1 forward, 2 with backward) x (bytes / network + 2 x collective_s)

        The shape is sent before each message, since micro-batches differ in length.
        """
        layout = self.layout
        if layout.pp_size == 1:
            return 0.0
        sent = self._hidden_bytes / (layout.tp_size if layout.sequence_parallel else 1)
        in_node = layout.world_size <= self.gpu.gpus_per_node
        rate = self.gpu.link_bandwidth if in_node else self.gpu.network_bandwidth
        each = sent / (rate * self.efficiency.communication) + 2 * self.efficiency.collective_s
        return layout.vpp_size * (2 if backward else 1) * each


# The planner asks for it in every term of every layout.
@functools.lru_cache(maxsize=1024)
def _contents(shape: Shape, adapter: AdapterConfig, layout: Layout) -> list[Content]:
    layers = layout.layers_of_ranks(shape.num_layers)
    held = others_and_experts(trained_rules(shape.rules, adapter), layout)
    ranks = zip(layers, held, strict=True)
    return [Content(count, *both, rank == 0) for rank, (count, both) in enumerate(ranks)]
