"""DeepSeek-V3 and Moonlight: what is refused by name, and Megatron-core's own rotary positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapo_megatron.compat import cpu
from gapo_megatron.config import AdapterConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.checks import check_positions, check_shapes
from gapo_megatron.models.config_json import ModelFacts, facts_of
from gapo_megatron.models.lora import check_adapter, factors_of
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of, rules_for
from gapo_megatron.policy.rotary import Rotary
from gapo_tools.planner.flops import Shape
from tests.messages import mentions

FP8 = shipped_fields("DeepSeek-V3")["quantization_config"]
YARN = shipped_fields("DeepSeek-V3")["rope_scaling"]


def read(name: str = "DeepSeek-V3", **changes: Any) -> ModelFacts:
    return facts_of({**shipped_fields(name), **changes}, source="config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, ["attention_bias"]),
        ({"num_key_value_heads": 64}, ["num_key_value_heads (64)", "num_attention_heads (128)"]),
        ({"head_dim": 192}, ["head_dim (192)", "qk_rope_head_dim (64)"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank (null)"]),
        ({"qk_rope_head_dim": 63}, ["63"]),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ["quantization_config", "mxfp4"]),
        ({"quantization_config": ["fp8"]}, ["quantization_config", "fp8"]),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, ["fmt ('e5m2')", "'e4m3'"]),
        (
            {"quantization_config": FP8 | {"activation_scheme": "static"}},
            ["activation_scheme ('static')", "'dynamic'"],
        ),
        *(
            ({"quantization_config": FP8 | {"weight_block_size": size}}, [f"block_size ({size})"])
            for size in (None, 128, [128], [128, 0], [128, 128.0], [True, 128])
        ),
        ({"rope_scaling": YARN | {"mscale_all_dim": None}}, ["mscale", "mscale_all_dim"]),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, ["attention_factor (1.0)"]),
        ({"rope_scaling": YARN | {"truncate": False}}, ["truncate (False)"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type ('linear')"]),
        ({"index_topk": 2048}, ["index_topk"]),
        ({"is_causal": False}, ["is_causal (false)"]),
    ],
)
def test_what_no_rule_covers_is_refused(changes: dict[str, Any], named: list[object]) -> None:
    with pytest.raises(ConfigError, match=mentions("config.json", *named)):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # vLLM would take a softmax, or no bias.
        ({"scoring_func": None}, ["scoring_func (None)", "sigmoid"]),
        ({"topk_method": "greedy"}, ["topk_method ('greedy')"]),
        # transformers has no such field, vLLM would have fewer layers with experts.
        ({"moe_layer_freq": 2}, ["moe_layer_freq (2)"]),
        # vLLM always has pairs of neighbours.
        ({"rope_interleave": False}, ["rope_interleave (False)"]),
        ({"v_head_dim": 193}, ["v_head_dim (193)", "(192)"]),
    ],
)
def test_what_readers_would_compute_differently_is_refused(
    changes: dict[str, Any], named: list[object]
) -> None:
    with pytest.raises(ConfigError, match=mentions("the model's", *named)):
        check_shapes(read(**changes), ParallelConfig())


def test_no_sequence_is_longer_than_vllms_rotary_table() -> None:
    def check(name: str, num_tokens: int) -> None:
        check_positions(read(name), num_tokens)

    check("DeepSeek-V3", 40 * 4096)
    with pytest.raises(ConfigError, match=mentions(f"({40 * 4096 + 1})", 40 * 4096)):
        check("DeepSeek-V3", 40 * 4096 + 1)
    check("Moonlight-16B-A3B", 40 * 4096 + 1)  # a table of any length


def test_published_models_are_computed_and_planned() -> None:
    for name, num_queries, in_cache in (("DeepSeek-V3", 1536, 576), ("Moonlight-16B-A3B", 0, 576)):
        facts = read(name)
        check_shapes(facts, ParallelConfig())
        g, shape = geometry_of(facts), Shape.of(facts)
        assert g.latent and (g.latent.query, g.head_dim, g.value_dim) == (num_queries, 192, 128)
        assert shape.heads_width == g.heads * 160
        found = shape.kv_bytes_per_token(element_bytes=2, tp_size=4)
        assert found == 2 * g.num_layers * in_cache


@pytest.mark.parametrize(("name", "made_of"), [("DeepSeek-V3", "q_b"), ("Moonlight-16B-A3B", "q")])
def test_factors_stand_beside_what_makes_heads(name: str, made_of: str) -> None:
    """The default targets: two of three projections that make queries, keys and values."""
    facts, adapter = read(name), AdapterConfig(kind="lora")
    num_layers = geometry_of(facts).num_layers
    assert check_adapter(facts, adapter) == {
        "qkv": 2 * num_layers, "proj": num_layers, "fc1": num_layers, "fc2": num_layers
    }  # fmt: skip
    downs = ["kv_a_proj_with_mqa.weight"] + ["q_a_proj.weight"] * (made_of == "q_b")
    latent = AdapterConfig(kind="lora", targets=("latent",))
    assert check_adapter(facts, latent) == {"latent": len(downs) * num_layers}
    for target, expected in (
        ("qkv", {f"{made_of}_proj.weight", "kv_b_proj.weight"}),
        ("latent", {*downs}),
    ):
        found = factors_of(rules_for(facts), targets=[target], rank=4)
        assert {one.weight.hf[0].rpartition("self_attn.")[2] for one in found} == expected


def test_every_reader_has_the_same_rotary_positions() -> None:
    """Ours, transformers' and Megatron-core's, which its layers with Transformer Engine have."""
    fields = shipped_fields("DeepSeek-V3")
    config = DeepseekV3Config(**{n: v for n, v in fields.items() if n != "model_type"})
    ours = Rotary.of(config, torch.device("cpu"), torch.float32)
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(ours.frequencies, expected, rtol=1e-6, atol=0)
    assert ours.magnitude == magnitude == 1.0
    settings = settings_of(architecture_of(config), config)
    assert settings["rope_type"] == "yarn"
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow")
    with cpu.device_scope():
        theirs = YarnRotaryEmbedding(
            64,
            rotary_base=settings["rotary_base"],
            scaling_factor=settings["rotary_scaling_factor"],
            mscale=settings["mscale"],
            mscale_all_dim=settings["mscale_all_dim"],
            **{name: settings[name] for name in names},
        )
        angles, factor = theirs(50)
    assert factor == 1.0
    whole = torch.outer(torch.arange(50.0), ours.frequencies)
    torch.testing.assert_close(angles[:, 0, 0, :32], whole, rtol=1e-5, atol=1e-5)
    moonlight = settings_of(architecture_of(read("Moonlight-16B-A3B")), read("Moonlight-16B-A3B"))
    assert (moonlight["rope_type"], moonlight["rotary_scaling_factor"]) == ("rope", 1.0)
    assert rope_of(read("Moonlight-16B-A3B").to_dict()).kind == "default"


def settings_of(architecture: Architecture, config: Any) -> dict[str, Any]:
    return architecture.transformer_fields(config, architecture.geometry(config))
