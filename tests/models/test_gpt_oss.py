"""gpt-oss: published models are accepted, and whatever vLLM would compute otherwise is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.config_json import facts_of
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.models.published import find_model, shipped_fields
from gapo_megatron.models.quantization import quantization_of
from gapo_megatron.models.rules import find_rule
from gapo_megatron.models.tables import rules_for
from gapo_tools.planner.flops import Shape
from tests.configs import config_of
from tests.distributed.conversion_setup import hf_config
from tests.messages import mentions

YARN = shipped_fields("gpt-oss-20b")["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "total", "active"), [("gpt-oss-20b", 20.9e9, 3.6e9), ("gpt-oss-120b", 116.8e9, 5.1e9)]
)
def test_published_sizes_have_the_parameters_of_their_model_card(
    name: str, total: float, active: float
) -> None:
    facts, _ = find_model(name)
    assert facts is not None and quantization_of(facts) == "mxfp4"
    check_shapes(facts, config_of({}, {}).parallel)
    shape = Shape.of(facts)
    assert shape.num_parameters == pytest.approx(total, rel=1e-3)
    # The card leaves the embedding out, which is a look-up.
    used = shape.active_weights + shape.head_weights
    assert used == pytest.approx(active, rel=0.01)
    full = GptOssConfig(**shipped_fields(name))
    assert Shape.of(full) == shape


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": False}, ["attention_bias (False)"]),
        ({"rms_norm_eps": 1e-6}, ["rms_norm_eps (1e-06)", "1e-05"]),
        ({"swiglu_alpha": 1.5}, ["swiglu_alpha (1.5)", "1.702"]),
        ({"swiglu_limit": 8.0}, ["swiglu_limit (8.0)", "7.0"]),
        ({"swiglu_limit": None}, ["swiglu_limit (null)"]),
        ({"hidden_act": "gelu"}, ["hidden_act ('gelu')"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings (True)"]),
        ({"sliding_window": None}, ["sliding_window (null)"]),
        ({"sliding_window": 0}, ["sliding_window (0)"]),
        ({"rope_scaling": YARN | {"beta_fast": None}}, ["beta_fast"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 12},
            ["layer_types", "alternat"],
        ),
        ({"num_experts_per_tok": 33}, ["num_experts_per_tok (33)", "(32)"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["rope_type ('linear')", "yarn"],
        ),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, ["mscale (1.0)"]),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, ["attention_factor (1.0)"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"quantization_config": {}}, []),
    ],
    ids=str,
)
def test_what_vllm_computes_otherwise_is_refused(change: dict[str, Any], named: list[str]) -> None:
    fields = shipped_fields("gpt-oss-20b") | change
    if not named:
        assert quantization_of(facts_of(fields, source="config.json")) is None
        return
    with pytest.raises(ConfigError, match=mentions(*named)):
        facts_of(fields, source="config.json")


def test_one_expert_a_token_is_not_trained() -> None:
    with pytest.raises(ConfigError, match=mentions("num_experts_per_tok (1)")):
        check_shapes(hf_config("gpt_oss", num_experts_per_tok=1), config_of({}, {}).parallel)


def test_factors_beside_experts_are_refused_by_name() -> None:
    config = hf_config("gpt_oss")
    for refused, adapter in (
        ("experts", AdapterConfig(kind="lora", targets=("qkv", "experts"))),
        ("fc1", AdapterConfig(kind="lora")),
    ):
        named = mentions(f"adapter.targets ({refused!r})", 'adapter.targets = ["qkv", "proj"]')
        with pytest.raises(ConfigError, match=named):
            check_adapter(config, adapter)
    beside = AdapterConfig(kind="lora", rank=2, targets=("qkv", "proj"))
    assert check_adapter(config, beside) == {"qkv": 4, "proj": 4}


def test_columns_of_gate_and_up_alternate_on_disk() -> None:
    rules = rules_for(hf_config("gpt_oss"))
    experts = "decoder.layers.1.mlp.experts"
    rule, place = find_rule(rules, f"{experts}.local_experts.2.linear_fc1.weight")
    assert rule.hf_names(place) == ("model.layers.1.mlp.experts.2.gate_up_proj",)
    assert find_rule(rules, f"{experts}.linear_fc1.weight2") == (rule, place)
    stored = torch.randn(48, 2 * 56)
    full = rule.merge([stored], place)
    assert torch.equal(full[:56], stored[:, 0::2].T) and torch.equal(full[56:], stored[:, 1::2].T)
    # Each rank has its part of gate above its part of up.
    second = rule.shard(full, 1, 2)
    assert torch.equal(second, torch.cat([full[28:56], full[84:]]))
    assert torch.equal(rule.split(full, place)[0], stored)
