"""Seconds of one mini-batch in the trainer: a roofline model, each term with its equation.

Parameter gather, tensor parallel collectives and the experts' all-to-all do not overlap with
computation, nor does the gradient reduction without `parallel.overlap_grad_reduce`. Transformer
Engine's ring of keys and values does in reality, but counts in full. The hidden states that
pipeline stages send each other are left out: thousandths of what a stage computes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from gapo_megatron.config import AdapterConfig, Config
from gapo_tools.planner.flops import (
    ForwardFlops,
    Shape,
    adapter_flops,
    element_bytes,
    forward_flops,
)
from gapo_tools.planner.hardware import Efficiency, Gpu
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import others_and_experts, trained_rules
from gapo_tools.planner.workload import Load, Workload, load_of

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
        slowest_s = max(self.optimizer_s(content) for content in set(self.contents))
        return self.pass_s(backward=True) + slowest_s + self.efficiency.update_s

    @property
    def load(self) -> Load:
        """Load of the busiest data-parallel rank: an even share, at least the longest sequence."""
        batch, dp_size = self.config.batch, self.layout.dp_size
        needs_all = self.config.objective.needs_every_sequence
        share = 1.0 if needs_all else self.workload.trained_share(batch)
        num_sequences = batch.minibatch_prompts * batch.rollouts_per_prompt * share
        return load_of(self.workload, num_sequences / dp_size, dp_size)

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
    def _recomputed(self) -> tuple[float, float, int]:
        """What a layer's backward pass recomputes; see `gapo_tools.planner.activations.LayerBytes`.

        Shares of the products with the layer's weights and of the core attention, and tensor
        parallel collectives.
        """
        shape, recompute = self.shape, self.layout.recompute
        if recompute == "full":
            return 1, 1, 4
        if recompute == "selective" and self.config.model.precision == "fp32":
            return 0, 1, 0  # layers without Transformer Engine
        if recompute == "selective" and not shape.num_experts:
            attention = 2 * shape.hidden * (shape.heads_width + shape.kv_heads * shape.head_dim)
            return 1 - attention / shape.layer_weights, 0, 2
        return 0, 0, 0

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
        and the collectives of `_tensor_s`, `_context_s`, `_experts_s`
        """
        layout, flops, efficiency = self.layout, self._flops(), self.efficiency
        num_layers = content.num_layers
        layers, attention, _ = self._recomputed
        factor, attention_factor = (3 + layers, 3.5 + attention) if backward else (1.0, 1.0)
        own = adapter_flops(self.shape, self.config, num_tokens=self._tokens_per_rank)
        saved = backward and self.config.adapter.kind != "none"
        seconds = (factor - saved) * flops.layers / self._products(may_be_fp8=True)
        seconds += factor * own / self._products(may_be_fp8=False)
        seconds += attention_factor * flops.attention / self._products(may_be_fp8=False)
        seconds *= num_layers / (self.shape.num_layers * layout.tp_size)
        seconds += factor * num_layers * efficiency.layer_s
        if backward:
            streamed = _ACCUMULATE_BYTES * (content.others + content.experts)
            seconds += streamed / (self.gpu.bandwidth * efficiency.bandwidth)
        collectives = (self._tensor_s, self._context_s, self._experts_s)
        return seconds + num_layers * sum(collective(backward) for collective in collectives)

    def head_s(self, *, backward: bool) -> float:
        """Seconds of the log-probs of a micro-batch's responses.

            head = (1 + 3 x (1 - clipped share)) x logits' flops / t / (peak x matmul), forward 1

        The backward pass recomputes the logits and has two products of that size, for active rows;
        one with an adapter, whose head is frozen.
        """
        products = 3 if self.config.adapter.kind == "none" else 2
        factor = 1 + products * (1 - self.workload.clipped_share) if backward else 1.0
        flops, rate = self._flops().head, self._products(may_be_fp8=False)
        return factor * flops / self.layout.tp_size / rate

    def optimizer_s(self, content: Content) -> float:
        """Seconds of gradient reduction, optimizer and parameter gather of a pipeline rank.

        reduce   = 4 bytes of every weight x (d - 1) / d / network, d the ranks that share it
        gather   = the weights' bytes likewise
        optimize = (8 bytes of every weight + 28 of the rank's 1/d) / bandwidth

        of trained weights. All wait for the slowest pipeline rank. With
        `parallel.overlap_grad_reduce` the last backward pass hides as much of `reduce` as it is
        long; that the embedding's gradient comes too late to be hidden is left out.
        """
        efficiency, layout = self.efficiency, self.layout
        seconds = reduce_s = 0.0
        for weights, size, stride in (
            (content.others, layout.copies, layout.tp_size),
            (content.experts, layout.expert_copies, layout.ep_size),
        ):
            sent_s = weights * (size - 1) / size / self.rate(size, stride)
            reduce_s += 4 * sent_s
            seconds += element_bytes(self.config) * sent_s
            streamed = weights * (_CLEAR_BYTES + _OPTIMIZER_BYTES / size)
            seconds += streamed / (self.gpu.bandwidth * efficiency.bandwidth)
        if self.config.parallel.overlap_grad_reduce:
            forward_s = self.stage_s(content, backward=False)
            backward_s = self.stage_s(content, backward=True) - forward_s
            reduce_s = max(0.0, reduce_s - backward_s)
        return seconds + reduce_s

    def rate(self, size: int, stride: int) -> float:
        """Reached bytes per second of a ring over a process group; see `Gpu.group_bandwidth`."""
        return self.gpu.group_bandwidth(size, stride=stride) * self.efficiency.communication

    def _products(self, *, may_be_fp8: bool) -> float:
        """Reached FLOP/s; fp8 covers products with the layers' weights, not attention and head."""
        precision = self.config.model.precision
        if precision == "fp8" and not may_be_fp8:
            precision = "bf16"
        return self.gpu.flops(precision) * self.efficiency.matmul

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
            units += self._recomputed[2]
        if self.shape.num_experts and not self.shape.has_shared_expert:
            units //= 2
        sent = self._hidden_bytes * (layout.tp_size - 1) / layout.tp_size
        return units * (sent / self.rate(layout.tp_size, 1) + self.efficiency.collective_s)

    def _context_s(self, backward: bool) -> float:
        """Seconds of the ring of keys and values of one layer and micro-batch.

            ring = passes x (c - 1) x (a rank's keys and values / link + collective_s)

        Passes: 1 forward, 2 backward (gradients travel too), 1 for recomputation.
        """
        layout, shape = self.layout, self.shape
        if layout.cp_size == 1:
            return 0.0
        passes = 1 if not backward else 3 if layout.recompute == "none" else 4
        width = 2 * shape.kv_heads * shape.head_dim / layout.tp_size
        sent = self._tokens_per_rank * width * element_bytes(self.config)
        each = sent / self.rate(layout.cp_size, layout.tp_size) + self.efficiency.collective_s
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


# The planner asks for it in every term of every layout.
@functools.lru_cache(maxsize=1024)
def _contents(shape: Shape, adapter: AdapterConfig, layout: Layout) -> list[Content]:
    layers = layout.layers_of_ranks(shape.num_layers)
    held = others_and_experts(trained_rules(shape.rules, adapter), layout)
    ranks = zip(layers, held, strict=True)
    return [Content(count, *both) for count, both in ranks]
