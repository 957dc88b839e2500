"""Gather the policy's whole weights on every rank; sharded parameters are sent in buckets.

A bucket holds parameters of a layer that are sharded over the same group. They are concatenated and
need one broadcast over the pipeline and one all-gather together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.models.rules import Place, Rule, find_rule, shard_size
from gapo_megatron.policy.adapters import FULL_WEIGHTS, Adapter
from gapo_megatron.policy.model import PolicyModel
from gapo_megatron.policy.parallel import ParallelGroups

BUCKET_BYTES = 2**28
"""Largest size of a bucket in bytes of whole parameters, unless a parameter is larger; reaches full
bandwidth."""

Layers = Sequence[Sequence[Sequence[int]]]
"""Global numbers of the layers of every virtual stage of every pipeline rank."""


class Location(NamedTuple):
    """One of the architecture's parameters on this rank."""

    stage: PolicyModel
    name: str
    """Name of the parameter in that stage."""
    parameter: Tensor


def find_locations(
    stages: Sequence[PolicyModel],
    layers: Sequence[Sequence[int]],
    groups: ParallelGroups,
    *,
    adapter: Adapter = FULL_WEIGHTS,
) -> dict[str, Location]:
    """Find the architecture's parameters on this rank, by the rules' names with global numbers.

    The names do not depend on the layer spec that built the stages.

    Args:
        stages: this rank's virtual stages.
        layers: global numbers of each stage's layers.
        groups: this rank's parallel groups.
        adapter: attached to the stages; its own parameters are left out.
    """
    locations, rules = {}, stages[0].rules
    num_experts = max((rule.num_experts or 0 for rule in rules), default=0)
    first_expert = groups.ep_rank * (num_experts // groups.ep_size)
    for stage, numbers in zip(stages, layers, strict=True):
        for name, parameter in stage.named_parameters():
            if (base_name := adapter.base_name(name)) is None:
                continue
            rule, place = find_rule(rules, base_name)
            if place.layer is not None:
                place = place._replace(layer=numbers[place.layer])
            if place.expert is not None:
                place = place._replace(expert=place.expert + first_expert)
            locations[rule.megatron_name(place)] = Location(stage, name, parameter)
    return locations


class _Sharing(NamedTuple):
    """How a parameter is distributed over ranks."""

    layer: int | None
    pipeline_rank: int
    group: str
    """`tensor`: sharded over tensor parallel ranks; `expert`: each expert parallel rank has other
    experts; `none`: whole on every rank of the stage."""


@torch.no_grad()
def whole_parameters(
    rules: Sequence[Rule],
    parameters: Mapping[str, Tensor],
    groups: ParallelGroups,
    layers: Layers,
    *,
    merge: Callable[[str], Tensor],
) -> Iterator[tuple[Rule, Place, Tensor]]:
    """Yield every parameter once, whole, without tied copies.

    Args:
        rules: the architecture's name rules.
        parameters: this rank's parameters, under the rules' names with global numbers.
        groups: this rank's parallel groups.
        layers: the layers of all stages.
        merge: returns the tensor to export for a name; see `adapters.Adapter.merge`.

    Yields:
        Rule, place and tensor, layer after layer. Tensors are on the parameters' device, and may
        share memory with them or with each other: any tensor keeps its whole bucket alive.

    Collectives: per bucket a broadcast over the pipeline group, then an all-gather over the tensor
    or expert parallel group; neither in a group of one rank. Every rank must consume the iterator
    to its end.
    """
    element_bytes = next(iter(parameters.values())).element_size()
    for sharing, parts in _buckets(rules, groups, layers, element_bytes=element_bytes):
        by_rank = _exchange(sharing, parts, parameters, groups, merge)
        if sharing.group == "expert":
            for rank, tensors in enumerate(by_rank):
                for (rule, place), tensor in zip(parts, tensors, strict=True):
                    yield rule, _of_rank(rank, rule, place, groups), tensor
        else:
            for (rule, place), shards in zip(parts, zip(*by_rank, strict=True), strict=True):
                yield rule, place, rule.unshard(shards)


def _exchange(
    sharing: _Sharing,
    parts: list[tuple[Rule, Place]],
    parameters: Mapping[str, Tensor],
    groups: ParallelGroups,
    merge: Callable[[str], Tensor],
) -> list[list[Tensor]]:
    """Gather the parts of a bucket from the ranks that share it, in rank order. Collective."""
    group = {"tensor": groups.tp_group, "expert": groups.ep_group, "none": None}[sharing.group]
    mine: list[Tensor] = []
    if groups.pp_rank == sharing.pipeline_rank:
        places = [_of_rank(groups.ep_rank, *part, groups) for part in parts]
        names = [rule.megatron_name(place) for (rule, _), place in zip(parts, places, strict=True)]
        mine = [merge(name) for name in names]
        if groups.pp_size == 1 and group is None:
            return [mine]
    shapes = [rule.shard_shape(shard_size(rule, groups.tp_size)) for rule, _ in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if len(mine) == 1:
        flat = mine[0].reshape(-1)
    elif mine:
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
    else:  # receives from the stage that has the parameters
        flat = next(iter(parameters.values())).new_empty(sum(sizes))
    if groups.pp_size > 1:
        dist.broadcast(flat, group=groups.pp_group, group_src=sharing.pipeline_rank)
    if group is None:
        by_rank = flat[None]
    else:
        whole = flat.new_empty(group.size() * len(flat))
        dist.all_gather_into_tensor(whole, flat, group=group)
        by_rank = whole.view(group.size(), -1)
    return [
        [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
        for row in by_rank
    ]


def _buckets(
    rules: Sequence[Rule], groups: ParallelGroups, layers: Layers, *, element_bytes: int
) -> Iterator[tuple[_Sharing, list[tuple[Rule, Place]]]]:
    """Put every parameter into a bucket, layer after layer; experts are the first rank's.

    Within a layer, only parameters of different `_Sharing` change their order, so those of one
    engine module stay adjacent.
    """
    # A parameter's distribution over ranks decides which buckets it can join.
    num_ranks = {"none": 1, "tensor": groups.tp_size, "expert": groups.ep_size}
    in_turn = list(num_ranks)
    owner = {
        layer: rank for rank, stages in enumerate(layers) for layer in itertools.chain(*stages)
    }

    def sharing(part: tuple[Rule, Place]) -> _Sharing:
        rule, place = part
        group = "expert" if rule.num_experts else "none" if rule.tp_dim is None else "tensor"
        if num_ranks[group] == 1:
            group = "none"
        if place.layer is None:
            rank = 0 if rule.megatron.startswith("embedding.") else len(layers) - 1
        else:
            rank = owner[place.layer]
        return _Sharing(place.layer, rank, group)

    # Fill buckets in turn, up to their size.
    for in_layer in _by_layer(rules, groups):
        in_order = sorted(in_layer, key=lambda part: in_turn.index(sharing(part).group))
        for key, parts in itertools.groupby(in_order, sharing):
            bucket: list[tuple[Rule, Place]] = []
            num_bytes = 0
            for rule, place in parts:
                shape = rule.shard_shape(shard_size(rule, groups.tp_size))
                size = torch.Size(shape).numel() * num_ranks[key.group] * element_bytes
                if bucket and num_bytes + size > BUCKET_BYTES:
                    yield key, bucket
                    bucket, num_bytes = [], 0
                bucket.append((rule, place))
                num_bytes += size
            yield key, bucket


def _by_layer(rules: Sequence[Rule], groups: ParallelGroups) -> Iterator[list[tuple[Rule, Place]]]:
    """Parameters by layer, and single parameters outside layers; experts are the first rank's."""
    own = [rule for rule in rules if not rule.tied]
    for num_layers, in_layer in itertools.groupby(own, lambda rule: rule.num_layers):
        if num_layers is None:
            yield from ([(rule, Place())] for rule in in_layer)
            continue
        repeated = list(in_layer)
        for layer in range(num_layers):
            dense = [(rule, Place(layer)) for rule in repeated if rule.num_experts is None]
            experts = [rule for rule in repeated if rule.num_experts is not None]
            num_experts = (experts[0].num_experts or 0) // groups.ep_size if experts else 0
            yield dense + [
                (rule, Place(layer, expert)) for expert in range(num_experts) for rule in experts
            ]


def _of_rank(rank: int, rule: Rule, place: Place, groups: ParallelGroups) -> Place:
    """Translate the place of the first expert parallel rank's parameter to that of `rank`."""
    if place.expert is None or rule.num_experts is None:
        return place
    return place._replace(expert=place.expert + rank * (rule.num_experts // groups.ep_size))
