"""Low-rank factors beside the linear layers of a model: names, shapes and shards. Imports no torch.

Beside W [out, in] stand A [rank, in] and B [out, rank]; the layer computes W x + scale * B A x
(LoRA, arXiv 2106.09685). Megatron-core fuses query, key and value, and gate and up projection:
these share A, and B has their rows one below the other, as W has.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gapo_megatron.config import AdapterConfig, Config, ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.config.rules import why_merged
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.models.tables import geometry_of, rules_for

if TYPE_CHECKING:
    from torch import Tensor

    from gapo_megatron.config.adapter_section import Target

_TARGETS: dict[str, Target] = {
    "self_attention.linear_qkv": "qkv",
    # Of latent attention, what makes the heads' queries, keys and values; and the down projections,
    # which are whole on every rank.
    "self_attention.linear_q_proj": "qkv",
    "self_attention.linear_q_up_proj": "qkv",
    "self_attention.linear_kv_up_proj": "qkv",
    "self_attention.linear_q_down_proj": "latent",
    "self_attention.linear_kv_down_proj": "latent",
    "self_attention.linear_proj": "proj",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "mlp.shared_experts.linear_fc1": "fc1",
    "mlp.shared_experts.linear_fc2": "fc2",
    "mlp.experts.local_experts.{expert}.linear_fc1": "experts",
    "mlp.experts.local_experts.{expert}.linear_fc2": "experts",
}
_LAYER = "decoder.layers.{layer}."


class FactorRules(NamedTuple):
    """Rules of a linear layer's weight and of the two factors beside it.

    The factors of a column-parallel weight (`tp_dim` 0): A is whole on every tensor parallel rank
    and B is sharded like the weight. Of a row-parallel one (`tp_dim` 1): A is sharded like the
    weight and B is whole. Of a whole one (None) both are whole. So every rank can add its shard of
    B A to its shard of the weight.
    """

    target: Target
    weight: Rule
    a: Rule
    b: Rule


def factors_of(rules: Sequence[Rule], *, targets: Sequence[str], rank: int) -> list[FactorRules]:
    """The factors beside the named layers, in the order of the model.

    Args:
        rules: the model's rules.
        targets: `adapter.targets`.
        rank: number of rows of A and columns of B.
    """
    found = []
    for rule in rules:
        module = rule.megatron.removesuffix(".weight")
        target = _TARGETS.get(module.removeprefix(_LAYER))
        if target is None or target not in targets or module == rule.megatron:
            continue
        if rule.shape is not None:  # stored with its input dimension first
            continue
        a = replace(
            rule,
            megatron=f"{module}.lora_a",
            hf=rule.hf[:1],
            hf_shapes=((rank, rule.hf_shapes[0][1]),),
            tp_dim=1 if rule.tp_dim == 1 else None,
            join=lambda tensors: tensors[0],
            part=lambda full: (full,),
            te_name=None,
            glu=False,
        )
        b = replace(
            rule,
            megatron=f"{module}.lora_b",
            hf_shapes=tuple((rows, rank) for rows, _ in rule.hf_shapes),
            tp_dim=0 if rule.tp_dim == 0 else None,
            te_name=None,
        )
        found.append(FactorRules(target, rule, a, b))
    return found


def rules_of(factors: Sequence[FactorRules]) -> list[Rule]:
    """The rules of the factors themselves."""
    return [rule for one in factors for rule in (one.a, one.b)]


def in_pairs(
    factors: Sequence[FactorRules], whole: Iterable[tuple[Rule, Place, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Convert whole factors to those of the Hugging Face model's linear layers.

    Args:
        factors: what there is.
        whole: every factor once, in any order.

    Yields:
        Module name, such as `model.layers.0.self_attn.q_proj`, then A [rank, in] and B [out, rank].
        Query, key and value (gate and up projection) have the same A. Tensors may share memory with
        `whole`.
    """
    by_name = {rule.megatron: one for one in factors for rule in (one.a, one.b)}
    waiting: dict[tuple[str, Place], Tensor] = {}
    for rule, place, tensor in whole:
        one = by_name[rule.megatron]
        key = (one.weight.megatron, place)
        if key not in waiting:  # a layer's two factors may be in different buckets
            waiting[key] = tensor
            continue
        other = waiting.pop(key)
        a, b = (other, tensor) if rule.megatron == one.b.megatron else (tensor, other)
        names = (name.removesuffix(".weight") for name in one.weight.hf_names(place))
        for name, rows in zip(names, one.b.split(b, place), strict=True):
            yield name, a, rows
    assert not waiting, f"only one factor of {[*waiting]}"


def check_adapter(
    hf_config: Any, adapter: AdapterConfig, parallel: ParallelConfig | None = None
) -> dict[str, int]:
    """Count the linear layers that get factors, by target; refuse a target that the model lacks.

    Args:
        hf_config: the model's Hugging Face config.
        adapter: section `adapter`.
        parallel: also check that every stage of this layout has something to train.

    Returns:
        Megatron-core's linear layers in the whole model, every expert's counted; empty without an
        adapter.

    Raises:
        ConfigError: names the target and those that can be set, or the stage.
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
                f"({hf_config.model_type}) that can have factors: set adapter.targets = "
                f"{json.dumps([*counts])}, or some of these"
            )
    bound = [one for one in everywhere if one.target in adapter.targets]
    stages = layers_of_stages(parallel, bound[0].weight.num_layers or 0) if parallel else []
    for layers in itertools.chain(*stages):
        if not any({*layers} & {*one.weight.layers} for one in bound):
            raise ConfigError(
                f"adapter.targets ({', '.join(adapter.targets)}) name nothing in layers "
                f"{layers[0]} to {layers[-1]}, a pipeline stage of "
                f"parallel.pipeline_model_parallel_size "
                f"({parallel and parallel.pipeline_model_parallel_size}): it would train nothing"
            )
    return {target: counts[target] for target in adapter.targets}


def why_merged_on(device: str, config: Config, hf_config: Any) -> str:
    """Why vLLM gets weights with the adapter merged in, for this model: `config.rules.why_merged`.

    Args:
        device: type of the engine's device, "cuda" or "cpu".
        config: the run's settings.
        hf_config: the model's Hugging Face config.
    """
    g = geometry_of(hf_config)
    has_experts, has_latent = g.num_experts > 0, g.latent is not None
    return why_merged(config, has_experts=has_experts, has_latent=has_latent, device=device)
