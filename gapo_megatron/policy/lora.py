"""LoRA: the base is frozen, and two thin factors beside each linear layer are trained."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from gapo_megatron.compat.megatron_checkpoint import sharded_factor
from gapo_megatron.compat.transformer_engine import (
    fuse_weight_gradients,
    return_normed_input,
    split_output,
)
from gapo_megatron.config import AdapterConfig, Config
from gapo_megatron.models.lora import FactorRules, check_adapter, factors_of, in_pairs, rules_of
from gapo_megatron.models.rules import Place, Rule, find_rule, shard_size
from gapo_megatron.policy.adapters import FULL_WEIGHTS, Adapter
from gapo_megatron.policy.export import (
    Exported,
    Group,
    exported_by,
    find_locations,
    whole_parameters,
)
from gapo_megatron.policy.low_rank import (
    LowRank,
    Parallel,
    merge,
    merge_squares,
    relative_rounding,
)
from gapo_megatron.policy.model import OWN, PolicyModel
from gapo_megatron.policy.parallel import ParallelGroups

logger = logging.getLogger(__name__)

_PARALLEL: dict[int | None, Parallel] = {0: "column", 1: "row", None: "whole"}
"""Kind of parallel layer by the dimension in which tensor parallelism shards its weight."""


def make_adapter(config: Config, hf_config: PretrainedConfig, groups: ParallelGroups) -> Adapter:
    """The adapter of section `adapter`.

    Raises:
        ConfigError: see `models.lora.check_adapter`.
    """
    if config.adapter.kind == "none":
        return FULL_WEIGHTS
    check_adapter(hf_config, config.adapter, config.parallel)
    exported = exported_by(config, hf_config, num_ranks=groups.world_size)
    return Lora(config.adapter, hf_config, groups, exported, seed=config.run.seed)


class Lora:
    """`adapters.Adapter` of low-rank factors.

    The base keeps its modules and names. A hook behind every bound linear layer adds the product
    of the factors, and the factors of a stage are in a submodule of the stage, `adapter`.
    """

    def __init__(
        self,
        settings: AdapterConfig,
        hf_config: PretrainedConfig,
        groups: ParallelGroups,
        exported: Exported,
        *,
        seed: int,
    ) -> None:
        """Decide what is bound, and log it on the first rank.

        Args:
            settings: section `adapter`.
            hf_config: the model's Hugging Face config.
            groups: this rank's parallel groups.
            exported: the model's weights.
            seed: seed of the initial A.

        Raises:
            ConfigError: see `models.lora.check_adapter`.
        """
        counts = check_adapter(hf_config, settings)
        self.num_bound = sum(counts.values())
        rules = exported.rules
        found = factors_of(rules, targets=settings.targets, rank=settings.rank)
        self._factors = {one.weight.megatron: one for one in found}
        self.exported = replace(exported, rules=rules_of(found))
        self.scale = settings.scale
        self._groups, self._seed = groups, seed
        self._num_experts = max((one.num_experts or 0 for one in rules), default=0)
        self._is_on = True
        if groups.rank == 0:
            logger.info(
                "adapter: LoRA of rank %d and scale %g beside %d linear layers (%s)",
                settings.rank,
                settings.scale,
                self.num_bound,
                ", ".join(f"{target}: {count}" for target, count in counts.items()),
            )

    # --- binding -----------------------------------------------------------------------------

    def attach(self, stage: PolicyModel) -> None:
        """Freeze the stage, and bind factors to its linear layers: A random, B zero.

        A is uniform in +-1 / sqrt(in) (Kaiming's with a slope of sqrt 5, as in PEFT). It is drawn
        whole on the CPU, from a seed of its own for each layer and expert, and then sharded: every
        parallel layout starts from the same factors.
        """
        stage.requires_grad_(False)
        if stage.uses_transformer_engine:
            fuse_weight_gradients(stage, fuse=False)
        bound = _Bound(self._groups)
        by_module: dict[str, list[LowRank]] = {}
        numbers = self.exported.layers[self._groups.pp_rank][stage.vp_stage or 0]
        experts_per_rank = self._num_experts // self._groups.ep_size
        locations = find_locations([stage], [numbers], self._groups)
        for name, location in locations.items():
            rule, place = find_rule(stage.rules, name)
            if (factors := self._factors.get(rule.megatron)) is not None:
                low_rank = self._factors_at(factors, place, location.parameter, stage)
                bound.add(location.name, factors, place, low_rank)
                by_module.setdefault(location.name.rpartition(".")[0], []).append(low_rank)
        expected = sum(
            len({*numbers} & {*one.weight.layers})
            * (experts_per_rank if one.weight.num_experts else 1)
            for one in self._factors.values()
        )
        assert len(bound) == expected > 0, f"{len(bound)} of {expected} linear layers are bound"
        for module_name, parts in by_module.items():
            module = stage.get_submodule(module_name)
            return_normed_input(module)
            module.register_forward_hook(functools.partial(self._add, parts))
        stage.add_module(OWN, bound)
        if stage.pre_process and stage.config.recompute_granularity is not None:
            # A recomputed part has a backward pass only if its input asks for a gradient, and no
            # weight in front of the first one does.
            stage.embedding.register_forward_hook(_ask_for_gradient)

    def _factors_at(
        self, factors: FactorRules, place: Place, weight: Tensor, stage: PolicyModel
    ) -> LowRank:
        groups = self._groups
        size = shard_size(factors.weight, groups.tp_size)
        rank, num_columns = factors.a.full_shape
        name = factors.a.megatron_name(place)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)
        whole = torch.empty(rank, num_columns, device="cpu")
        whole.uniform_(-(num_columns**-0.5), num_columns**-0.5, generator=generator)
        is_expert = factors.weight.num_experts is not None
        made = LowRank(
            factors.a.shard(whole, groups.tp_rank % size, size).to(weight),
            weight.new_zeros(factors.b.shard_shape(size)),
            scale=self.scale,
            parallel="expert" if is_expert else _PARALLEL[factors.weight.tp_dim],
            tp_group=groups.tp_group,
            sequence_parallel=stage.config.sequence_parallel and not is_expert,
        )
        for factor in made.parameters():
            # Megatron-core's mark of experts that other ranks do not have.
            factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        return made

    def _add(
        self, parts: Sequence[LowRank], _: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Forward hook of a linear layer, or of the grouped layer of a rank's experts."""
        x, y, bias = split_output(inputs, output)
        if not self._is_on:
            return y, bias
        if len(parts) == 1:
            return parts[0].added_to(y, x), bias
        shares = zip(parts, y.split(inputs[1]), x.split(inputs[1]), strict=True)
        return torch.cat([part.added_to(of_y, of_x) for part, of_y, of_x in shares]), bias

    # --- the seam ----------------------------------------------------------------------------

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        """W + scale * B A, computed in float32 or more and rounded once; W if switched off."""
        low_rank = _bound(stage).by_weight.get(name)
        if low_rank is None or not self._is_on:
            return weight
        return merge(weight, low_rank.lora_a, low_rank.lora_b, scale=self.scale)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Let all stages compute, and `merge` return, the base alone within the block."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def whole_factors(self, stages: Sequence[PolicyModel]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the factors of every linear layer of the Hugging Face model, unrounded.

        The sum W + scale * B A of a layer is what the policy computes with.

        Args:
            stages: this rank's virtual stages.

        Yields:
            As `models.lora.in_pairs`, in the dtype that is trained, on the factors' device, on
            every rank. Tensors may share memory with the factors and with each other: use or copy
            them before the next update.

        Collectives: those of `export.whole_parameters`. Every rank must consume the iterator.
        """
        shards = self.factor_shards(stages)
        whole = whole_parameters(self.exported, shards, self._groups, merge=shards.__getitem__)
        yield from in_pairs([*self._factors.values()], whole)

    def factor_shards(self, stages: Sequence[PolicyModel]) -> dict[str, Tensor]:
        """This rank's shards of all factors, by the rules' names; they are the factors' memory."""
        return {name: tensor.detach() for stage in stages for name, tensor in _bound(stage).named()}

    def merge_rounding(self, stages: Sequence[PolicyModel]) -> float:
        """Size of the rounding errors of merged weights relative to the update's, over all ranks.

        The root of sum (round(W + scale * B A) - (W + scale * B A)) ** 2 / sum (scale * B A) ** 2;
        0 without an update. At 1 the rounding is as large as the update.

        Args:
            stages: this rank's virtual stages.

        Collectives: a sum over all ranks.
        """
        device = next(stages[0].parameters()).device
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for stage in stages:
            bound = _bound(stage)
            pairs = zip(bound.by_weight.items(), bound.weight_rules(), strict=True)
            for (name, low_rank), rule in pairs:
                if self._is_first_holder(rule):  # the others have the same shard
                    weight, a, b = stage.get_parameter(name), low_rank.lora_a, low_rank.lora_b
                    squares += merge_squares(weight, a, b, scale=self.scale)
        dist.all_reduce(squares)
        return relative_rounding(squares)

    def _is_first_holder(self, weight: Rule) -> bool:
        """Whether this rank is the first of those with its shard of an adapted weight."""
        groups = self._groups
        group: Group = "none" if weight.tp_dim is None else "tensor"
        group = "expert" if weight.num_experts else group
        shard = {"none": 0, "tensor": groups.tp_rank, "expert": groups.ep_rank}[group]
        return self.exported.holders(groups.pp_rank, group)[shard][0] == groups.rank


class _Bound(nn.ModuleList):
    """All factors of a stage, in the order of its layers.

    Attributes:
        by_weight: factors by the name of the weight in the stage.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self._groups = groups
        self._places: list[tuple[FactorRules, Place]] = []
        self.by_weight: dict[str, LowRank] = {}

    def add(self, weight_name: str, factors: FactorRules, place: Place, low_rank: LowRank) -> None:
        """Append the factors beside a weight of the stage; `place` has global numbers."""
        self.append(low_rank)
        self._places.append((factors, place))
        self.by_weight[weight_name] = low_rank

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every factor by the name that its rule has."""
        pairs = zip(self._places, self.by_weight.values(), strict=True)
        for (factors, place), low_rank in pairs:
            yield factors.a.megatron_name(place), low_rank.lora_a
            yield factors.b.megatron_name(place), low_rank.lora_b

    def weight_rules(self) -> list[Rule]:
        """The rule of each weight of `by_weight`."""
        return [factors.weight for factors, _ in self._places]

    def sharded_state_dict(self, prefix: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Megatron-core's description of the shards on disk, the same in every parallel layout.

        A key has the layer's global number; the experts of a layer are stacked under one key.
        """
        parts: dict[str, Any] = {}
        for number, (factors, place) in enumerate(self._places):
            for rule, name in ((factors.a, "lora_a"), (factors.b, "lora_b")):
                factor = getattr(self[number], name)
                parts[f"{prefix}{number}.{name}"] = self._sharded(rule, place, factor)
        return parts

    def _sharded(self, rule: Rule, place: Place, factor: Tensor) -> Any:
        groups = self._groups
        key = f"{OWN}.{place.fill(rule.megatron.replace('local_experts.{expert}.', ''))}"
        if rule.num_experts is not None and place.expert is not None:
            stacked = (0, place.expert, rule.num_experts)
            return sharded_factor(
                key, factor, stacked=stacked, replica=(0, 0, groups.expert_dp_rank), glu=rule.glu
            )
        cut = None if rule.tp_dim is None else (rule.tp_dim, groups.tp_rank, groups.tp_size)
        copy = groups.tp_rank if cut is None else 0
        replica = (0, copy, groups.dp_cp_group.rank())
        return sharded_factor(key, factor, cut=cut, replica=replica, glu=rule.glu)


def _bound(stage: nn.Module) -> _Bound:
    bound = stage.get_submodule(OWN)
    assert isinstance(bound, _Bound)
    return bound


def _ask_for_gradient(_: nn.Module, __: Any, hidden: Tensor) -> None:
    if torch.is_grad_enabled():
        hidden.requires_grad_()
