"""Buckets of parameters, and how to gather the policy's whole weights on every rank that trains.

A bucket holds parameters of a layer that are sharded over the same group. They are concatenated and
need one broadcast over the pipeline and one all-gather together. Which parameters are in which
bucket, and which ranks hold its shards, follows from names, shapes and parallel sizes alone:
`rollout.transfer` sends the same buckets to ranks that have no part of the policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.config import DTYPES, Config
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.rules import Place, Rule, Shape, find_rule, shard_size
from gapo_megatron.models.tables import rules_for
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
) -> dict[str, Location]:
    """Find the architecture's parameters on this rank, by the rules' names with global numbers.

    The names do not depend on the layer spec that built the stages.

    Args:
        stages: this rank's virtual stages.
        layers: global numbers of each stage's layers.
        groups: this rank's parallel groups.
    """
    locations, rules = {}, stages[0].rules
    num_experts = max((rule.num_experts or 0 for rule in rules), default=0)
    first_expert = groups.ep_rank * (num_experts // groups.ep_size)
    for stage, numbers in zip(stages, layers, strict=True):
        for name, parameter in stage.named_weights():
            rule, place = find_rule(rules, name, numbers=numbers)
            if place.expert is not None:
                place = place._replace(expert=place.expert + first_expert)
            locations[rule.megatron_name(place)] = Location(stage, name, parameter)
    return locations


Group = Literal["none", "tensor", "expert"]
"""Ranks that share a parameter. `tensor`: tensor parallel ranks; `expert`: each expert parallel
rank has other experts; `none`: whole on every rank of the stage."""


@dataclass(frozen=True)
class Exported:
    """Parameters that are spread over the ranks that train; the same on every rank of a job."""

    rules: Sequence[Rule]
    """The architecture's name rules, or those of an adapter's factors."""
    layers: Layers
    """The layers of all pipeline stages."""
    tp_size: int
    ep_size: int
    num_ranks: int
    """Ranks that train."""
    dtype: torch.dtype
    """Dtype of all tensors but buffers, which are float32."""

    def dtype_of(self, rule: Rule) -> torch.dtype:
        """Dtype of a rule's parameters."""
        return torch.float32 if rule.is_buffer else self.dtype

    def num_shards(self, group: Group) -> int:
        """Number of different shards of a parameter."""
        return {"none": 1, "tensor": self.tp_size, "expert": self.ep_size}[group]

    def holders(self, stage: int, group: Group) -> list[list[int]]:
        """Ranks that hold each shard of a stage's parameters, in ascending order, by shard.

        Stages are consecutive ranks; tensor parallel ranks are neighbours, and so are expert
        parallel ranks (the order in which Megatron-core deals ranks).
        """
        per_stage, size = self.num_ranks // len(self.layers), self.num_shards(group)
        return [
            [*range(stage * per_stage + shard, (stage + 1) * per_stage, size)]
            for shard in range(size)
        ]

    def check(self, groups: ParallelGroups) -> None:
        """Assert that this rank holds what `holders` says."""
        shards: dict[Group, int] = {"tensor": groups.tp_rank, "expert": groups.ep_rank}
        for group, shard in shards.items():
            there = self.holders(groups.pp_rank, group)[shard]
            assert groups.rank in there, f"rank {groups.rank} is no holder: {group} {shard} {there}"


def exported_by(config: Config, hf_config: PretrainedConfig, *, num_ranks: int) -> Exported:
    """The model's weights in a run.

    Args:
        config: the run's settings.
        hf_config: the model's Hugging Face config.
        num_ranks: ranks that train.
    """
    return Exported(
        rules_for(hf_config),
        layers_of_stages(config.parallel, hf_config.num_hidden_layers),
        config.parallel.tensor_model_parallel_size,
        config.parallel.expert_model_parallel_size,
        num_ranks,
        getattr(torch, DTYPES[config.model.precision]),
    )


class Bucket(NamedTuple):
    """Parameters that travel together."""

    stage: int
    """Pipeline rank that has them."""
    group: Group
    num_shards: int
    dtype: torch.dtype
    parts: list[tuple[Rule, Place]]
    """Experts are the first expert parallel rank's."""

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of a shard of each part."""
        size = self.num_shards if self.group == "tensor" else 1
        return [rule.shard_shape(size) for rule, _ in self.parts]

    @property
    def shard_numel(self) -> int:
        """Elements of a shard of all parts."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def pieces(
        self, shard: int, merge: Callable[[str], Tensor], *, start: int = 0, stop: int | None = None
    ) -> list[Tensor]:
        """Elements of a shard of all parts, one after another: flat tensors, one for each part.

        Args:
            shard: number of the shard.
            merge: see `whole_parameters`; called only for parts that have some of the elements.
            start: first element.
            stop: end; None: all.

        Raises:
            WeightSyncError: `merge` returns another dtype or number of elements.
        """
        stop, first, pieces = self.shard_numel if stop is None else stop, 0, []
        for (rule, place), shape in zip(self.parts, self.shapes, strict=True):
            numel = torch.Size(shape).numel()
            low, high = max(start - first, 0), min(stop - first, numel)
            if low < high:
                name = rule.megatron_name(self._place(shard, rule, place))
                tensor = merge(name)
                if (tensor.dtype, tensor.numel()) != (self.dtype, numel):
                    raise WeightSyncError(
                        f"weights: the shard of {name} is {tensor.numel()} elements of "
                        f"{tensor.dtype}; it must be {numel} of {self.dtype}"
                    )
                pieces.append(tensor.detach().reshape(-1)[low:high])
            first += numel
        return pieces

    def whole(self, shards: Sequence[Tensor]) -> Iterator[tuple[Rule, Place, Tensor]]:
        """Yield the whole parameters.

        Args:
            shards: [shard_numel] of every shard, in order.
        """
        shapes = self.shapes
        sizes = [torch.Size(shape).numel() for shape in shapes]
        by_shard = [
            [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            for flat in shards
        ]
        if self.group == "expert":
            for shard, tensors in enumerate(by_shard):
                for (rule, place), tensor in zip(self.parts, tensors, strict=True):
                    yield rule, self._place(shard, rule, place), tensor
        else:
            for (rule, place), pieces in zip(self.parts, zip(*by_shard, strict=True), strict=True):
                yield rule, place, rule.unshard(pieces)

    def _place(self, shard: int, rule: Rule, place: Place) -> Place:
        """Translate the place of the first expert parallel rank's parameter to a shard's."""
        if self.group != "expert" or place.expert is None or rule.num_experts is None:
            return place
        return place._replace(expert=place.expert + shard * (rule.num_experts // self.num_shards))


@torch.no_grad()
def whole_parameters(
    exported: Exported,
    parameters: Mapping[str, Tensor],
    groups: ParallelGroups,
    *,
    merge: Callable[[str], Tensor],
) -> Iterator[tuple[Rule, Place, Tensor]]:
    """Yield every parameter once, whole, without tied copies.

    Args:
        exported: what there is.
        parameters: this rank's parameters, under the rules' names with global numbers.
        groups: this rank's parallel groups.
        merge: returns the shard to export for a name; see `adapters.Adapter.merge`.

    Yields:
        Rule, place and tensor, layer after layer. Tensors are on the parameters' device, and may
        share memory with them or with each other: any tensor keeps its whole bucket alive.

    Collectives: per bucket a broadcast over the pipeline group, then an all-gather over the tensor
    or expert parallel group; neither in a group of one rank. Every rank must consume the iterator
    to its end.
    """
    for bucket in buckets(exported, bucket_bytes=BUCKET_BYTES):
        if groups.pp_size == 1 and bucket.num_shards == 1:
            for rule, place in bucket.parts:  # nothing is copied
                yield rule, place, merge(rule.megatron_name(place))
        else:
            yield from bucket.whole([*_exchange(bucket, parameters, groups, merge)])


def _exchange(
    bucket: Bucket,
    parameters: Mapping[str, Tensor],
    groups: ParallelGroups,
    merge: Callable[[str], Tensor],
) -> Tensor:
    """Gather a bucket: [shards, shard_numel]. Collective."""
    group, shard = {
        "tensor": (groups.tp_group, groups.tp_rank),
        "expert": (groups.ep_group, groups.ep_rank),
        "none": (None, 0),
    }[bucket.group]
    if groups.pp_rank == bucket.stage:
        pieces = bucket.pieces(shard, merge)
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    else:  # receives from the stage that has the parameters
        like = next(iter(parameters.values()))
        flat = like.new_empty(bucket.shard_numel, dtype=bucket.dtype)
    if groups.pp_size > 1:
        dist.broadcast(flat, group=groups.pp_group, group_src=bucket.stage)
    if group is None:
        return flat[None]
    whole = flat.new_empty(group.size() * len(flat))
    dist.all_gather_into_tensor(whole, flat, group=group)
    return whole.view(group.size(), -1)


def buckets(exported: Exported, *, bucket_bytes: int) -> Iterator[Bucket]:
    """Put every parameter into a bucket, layer after layer.

    Within a layer, only parameters of different stages or groups change their order, so those of
    one engine module stay adjacent.

    Args:
        exported: what there is.
        bucket_bytes: largest size of a bucket in bytes of whole parameters; a larger parameter is
            alone.
    """
    owner = {
        layer: rank
        for rank, stages in enumerate(exported.layers)
        for layer in itertools.chain(*stages)
    }

    # A parameter's distribution over ranks decides which buckets it can join.
    def sharing(part: tuple[Rule, Place]) -> tuple[int, Group, torch.dtype]:
        rule, place = part
        group: Group = "expert" if rule.num_experts else "none" if rule.tp_dim is None else "tensor"
        if exported.num_shards(group) == 1:
            group = "none"
        dtype = exported.dtype_of(rule)
        if place.layer is not None:
            return owner[place.layer], group, dtype
        is_first = rule.megatron.startswith("embedding.")
        return (0 if is_first else len(exported.layers) - 1), group, dtype

    in_turn = ("none", "tensor", "expert")
    for in_layer in _by_layer(exported):
        in_order = sorted(
            in_layer, key=lambda part: (in_turn.index(sharing(part)[1]), part[0].is_buffer)
        )
        for (stage, group, dtype), parts in itertools.groupby(in_order, sharing):
            num_shards = exported.num_shards(group)
            bucket = Bucket(stage, group, num_shards, dtype, [])
            num_bytes = 0
            for rule, place in parts:
                shape = rule.shard_shape(shard_size(rule, exported.tp_size))
                size = torch.Size(shape).numel() * num_shards * dtype.itemsize
                if bucket.parts and num_bytes + size > bucket_bytes:
                    yield bucket
                    bucket, num_bytes = Bucket(stage, group, num_shards, dtype, []), 0
                bucket.parts.append((rule, place))
                num_bytes += size
            yield bucket


def _by_layer(exported: Exported) -> Iterator[list[tuple[Rule, Place]]]:
    """Parameters by layer, and single parameters outside layers; experts are the first rank's."""
    own = [rule for rule in exported.rules if not rule.tied]
    for num_layers, in_layer in itertools.groupby(own, lambda rule: rule.num_layers):
        if num_layers is None:
            yield from ([(rule, Place())] for rule in in_layer)
            continue
        repeated = list(in_layer)
        for layer in range(num_layers):
            here = [rule for rule in repeated if layer in rule.layers]
            dense = [(rule, Place(layer)) for rule in here if rule.num_experts is None]
            experts = [rule for rule in here if rule.num_experts is not None]
            num_experts = (experts[0].num_experts or 0) // exported.ep_size if experts else 0
            yield dense + [
                (rule, Place(layer, expert)) for expert in range(num_experts) for rule in experts
            ]
