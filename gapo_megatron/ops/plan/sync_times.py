"""Seconds of a weight sync, and of what it moves to the host and back."""

from __future__ import annotations

import math
from typing import NamedTuple

from gapo_megatron.config import VERIFIED_SEQUENCES
from gapo_megatron.ops.plan.flops import element_bytes, kept_asleep_bytes, sends_factors
from gapo_megatron.ops.plan.layout import state_bytes, trained_rules
from gapo_megatron.ops.plan.memory import BUCKET_BYTES
from gapo_megatron.ops.plan.training import Training

_PROBE_STEPS = 2
"""Engine steps that score the sequences which verify a weight sync."""


def offload_s(training: Training) -> float:
    """Offload in one direction: bytes of the fullest rank / host bandwidth; 0 if nothing moves.

    State moves to the host at every sync and back for the first pass and update.
    """
    config, offload = training.config, training.config.optimizer.offload
    if offload == "none":
        return 0.0
    states = state_bytes(training.shape.rules, config, training.layout)
    size = max(optimizer + (offload == "all") * weights for weights, _, optimizer in states)
    return size / (training.gpu.host_bandwidth * training.efficiency.communication)


def sync_s(training: Training) -> float:
    """Weight sync: every rank gathers every tensor, one after another, and copies it.

    sync = gather + 2 W / bandwidth (copy) + tensors x tensor_s
           + verified sequences one by one through the layers + engine steps

    W: bytes of the weights, or of an adapter's factors if a sync brings these alone
    (`flops.sends_factors`); the base, sent once at the start, is in no step. A colocated engine
    then keeps its weights in host memory while it sleeps: they move there and back.
    """
    return _gather_s(training, _sent(training)) + _load_s(training)


def _load_s(training: Training) -> float:
    """What `sync_s` takes after the gather: copies into the engine, and the check."""
    gpu, efficiency = training.gpu, training.efficiency
    shape, config, layout, sent = training.shape, training.config, training.layout, _sent(training)
    seconds = 2 * sent.num_bytes / (gpu.bandwidth * efficiency.bandwidth)
    seconds += sent.num_tensors * efficiency.tensor_s
    moved = 2 * kept_asleep_bytes(shape, config, layout, gpu)
    seconds += moved / (gpu.host_bandwidth * efficiency.communication)
    seconds += VERIFIED_SEQUENCES * shape.num_layers * efficiency.layer_s
    return seconds + _PROBE_STEPS * efficiency.decode_step_s


def send_s(training: Training) -> float:
    """One transfer of the weights from the training side to the generation ranks.

    send = max(W p / T / network,
               W / G / network + W (G - 1) / G / exchange + buckets (G - 1) x ring_step_s)
           + 2 W / bandwidth (shards are put together) + sync without its gather

    T ranks train in p stages, of which one sends at a time; G generate. Every rank has a network
    adapter of its own; within one node the link takes its place. The exchange is a ring over the
    ranks that generate (`Gpu.group_bandwidth`), one for each bucket. A receiver's two parts share
    its adapter, so they add up; sender and receiver work at the same time, so the slower counts.
    """
    gpu, efficiency, layout = training.gpu, training.efficiency, training.layout
    in_node = layout.num_ranks <= gpu.gpus_per_node
    rate = gpu.link_bandwidth if in_node else gpu.network_bandwidth
    size, num_receivers = _sent(training).num_bytes, layout.num_generation
    sending = size * layout.pp_size / layout.world_size / rate
    exchange = gpu.group_bandwidth(num_receivers, stride=1)
    receiving = size / num_receivers / rate
    receiving += size * (num_receivers - 1) / num_receivers / exchange
    # A layer's last bucket is not full, and what is not sharded has one of its own.
    num_buckets = size / BUCKET_BYTES + 2 * training.shape.num_layers
    steps_s = num_buckets * (num_receivers - 1) * efficiency.ring_step_s
    seconds = max(
        sending / efficiency.communication, receiving / efficiency.communication + steps_s
    )
    return _load_s(training) + seconds + 2 * size / (gpu.bandwidth * efficiency.bandwidth)


class _Sent(NamedTuple):
    """What a sync brings: the model's weights, or an adapter's factors."""

    others: float
    """Bytes without experts."""
    experts: float
    num_tensors: int

    @property
    def num_bytes(self) -> float:
        return self.others + self.experts


def _sent(training: Training) -> _Sent:
    shape, config = training.shape, training.config
    size = element_bytes(config)
    if sends_factors(shape, config, training.gpu):
        rules = trained_rules(shape.rules, config.adapter)
        counts = [(rule, len(rule.layers) or 1) for rule in rules]
        elements = sum(count * math.prod(rule.full_shape) for rule, count in counts)
        return _Sent(elements * size, 0.0, sum(count * len(rule.hf) for rule, count in counts))
    experts = shape.num_sparse * shape.num_experts * shape.expert_weights
    others = shape.num_parameters - experts
    return _Sent(float(others * size), float(experts * size), shape.num_tensors)


def _gather_s(training: Training, sent: _Sent) -> float:
    """Seconds in which a rank gathers every tensor, one after another.

    gather = W / t / network (broadcast over p stages) + W (t - 1) / t / link
             + W_experts (e - 1) / e / link

    One factor of each layer is whole on every tensor parallel rank, and is counted all the same.
    """
    layout, gpu = training.layout, training.gpu
    others, experts = sent.others, sent.experts
    ways = [
        (others * (layout.tp_size - 1) / layout.tp_size, layout.tp_size, 1),
        (experts * (layout.ep_size - 1) / layout.ep_size, layout.ep_size, 1),
    ]
    if layout.pp_size > 1:
        shard = others / layout.tp_size + experts / layout.ep_size
        ways.append((shard, layout.pp_size, layout.ranks_per_stage))
    efficiency = training.efficiency
    return sum(
        size / (gpu.group_bandwidth(group, stride=stride) * efficiency.communication)
        for size, group, stride in ways
    )
