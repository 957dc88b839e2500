"""Low-rank factors beside the linear layers of a model: names, shapes and shards. Imports no torch.

Beside W [out, in] stand A [rank, in] and B [out, rank]; the layer computes W x + scale * B A x
(LoRA, arXiv 2106.09685). Megatron-core fuses query, key and value, and gate and up projection:
these share A, and B has their rows one below the other, as W has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Rule
from gapo_megatron.models.tables import rules_for

if TYPE_CHECKING:
    from gapo_megatron.config.adapter_section import Target

_TARGETS: dict[str, Target] = {
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "proj",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "mlp.experts.local_experts.{expert}.linear_fc1": "experts",
    "mlp.experts.local_experts.{expert}.linear_fc2": "experts",
}
_LAYER = "decoder.layers.{layer}."


class Factors(NamedTuple):
    """Rules of a linear layer's weight and of the two factors beside it.

    The factors of a column-parallel weight (`tp_dim` 0): A is whole on every tensor parallel rank
    and B is sharded like the weight. Of a row-parallel one (`tp_dim` 1): A is sharded like the
    weight and B is whole. So every rank can add its shard of B A to its shard of the weight.
    """

    target: Target
    weight: Rule
    a: Rule
    b: Rule


def factors_of(rules: Sequence[Rule], *, targets: Sequence[str], rank: int) -> list[Factors]:
    """The factors beside the named layers, in the order of the model.

    Args:
        rules: of the model.
        targets: `adapter.targets`.
        rank: number of rows of A and columns of B.
    """
    found = []
    for rule in rules:
        module = rule.megatron.removesuffix(".weight")
        target = _TARGETS.get(module.removeprefix(_LAYER))
        if target is None or target not in targets or module == rule.megatron:
            continue
        is_column = rule.tp_dim == 0
        a = replace(
            rule,
            megatron=f"{module}.lora_a",
            hf=rule.hf[:1],
            hf_shapes=((rank, rule.hf_shapes[0][1]),),
            tp_dim=None if is_column else 1,
            join=lambda tensors: tensors[0],
            part=lambda full: (full,),
            te_name=None,
            glu=False,
        )
        b = replace(
            rule,
            megatron=f"{module}.lora_b",
            hf_shapes=tuple((rows, rank) for rows, _ in rule.hf_shapes),
            tp_dim=0 if is_column else None,
            te_name=None,
        )
        found.append(Factors(target, rule, a, b))
    return found


def check_adapter(hf_config: Any, adapter: AdapterConfig) -> dict[str, int]:
    """Count the linear layers that get factors, by target; refuse a target that the model lacks.

    Args:
        hf_config: the model's Hugging Face config.
        adapter: section `adapter`.

    Returns:
        Megatron-core's linear layers in the whole model, every expert's counted; empty without an
        adapter.

    Raises:
        ConfigError: names the target and those that the model has.
    """
    if adapter.kind == "none":
        return {}
    rules = rules_for(hf_config)
    everywhere = factors_of(rules, targets=[*_TARGETS.values()], rank=adapter.rank)
    counts: dict[str, int] = {}
    for one in everywhere:
        counts[one.target] = counts.get(one.target, 0) + len(one.weight.places)
    for target in adapter.targets:
        if not counts.get(target):
            raise ConfigError(
                f"adapter.targets ({target!r}) names no layer of the model "
                f"({hf_config.model_type}): it has {', '.join(counts)}"
            )
    return {target: counts[target] for target in adapter.targets}
