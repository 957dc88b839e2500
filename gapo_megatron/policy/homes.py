"""Where the architecture's parameters are on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gapo_megatron.models.rules import Rule, find_rule
from gapo_megatron.policy.adapters import Adapter
from gapo_megatron.policy.model import PolicyModel


class Home(NamedTuple):
    """Location of one of the architecture's parameters on this rank."""

    stage: PolicyModel
    name: str
    """Name of the parameter in that stage."""
    parameter: Tensor


def find_homes(
    stages: Sequence[PolicyModel],
    layers: Sequence[Sequence[int]],
    rules: Sequence[Rule],
    *,
    first_expert: int,
    adapter: Adapter,
) -> dict[str, Home]:
    """The architecture's parameters of this rank, under the rules' names.

    These have global numbers, and are the same whichever layer spec built the stages.

    Args:
        stages: this rank's virtual stages.
        layers: global numbers of each stage's layers.
        rules: the architecture's.
        first_expert: global number of this rank's first expert.
        adapter: of the stages; its own parameters are left out.
    """
    homes = {}
    for stage, numbers in zip(stages, layers, strict=True):
        for name, parameter in stage.named_parameters():
            if (base_name := adapter.base_name(name)) is None:
                continue
            rule, place = find_rule(rules, base_name)
            if place.layer is not None:
                place = place._replace(layer=numbers[place.layer])
            if place.expert is not None:
                place = place._replace(expert=place.expert + first_expert)
            homes[rule.megatron_name(place)] = Home(stage, name, parameter)
    return homes
