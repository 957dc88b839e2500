"""A wrong config is named by field, value, and the tensor that says otherwise."""

import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.config_check import check_config, compare_configs
from gapo_megatron.formats.megatron_args import to_args
from gapo_megatron.formats.weights import Entry
from gapo_megatron.models.rope import Rope, read_rope
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import ARCHITECTURES, rope_of, rules_for
from tests.convert_setup import make_config

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
V4 = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
V5 = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}}
CONFIGS = {
    "qwen2": make_config("qwen2", tie_word_embeddings=True),
    "qwen3": make_config("qwen3"),
    "qwen3_moe": make_config("qwen3_moe"),
    "llama": make_config("llama", max_position_embeddings=131072, **V5),
    "mistral": make_config("mistral", sliding_window=None),
    "phi3": make_config("phi3", sliding_window=16),
    "seed_oss": make_config("seed_oss", attention_bias=False),
    "olmo2": make_config("olmo2"),
    "gemma3_text": make_config("gemma3_text", sliding_window=16),
    "glm4_moe": make_config("glm4_moe"),
    "gpt_oss": make_config("gpt_oss", sliding_window=16),
    "deepseek_v3": make_config("deepseek_v3"),
}


FILE = "model-00001-of-00002.safetensors"


def entry(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Entry:
    return Entry(shape, dtype, FILE)


def headers(config: PretrainedConfig) -> dict[str, Entry]:
    return {name: entry(*shape) for name, shape in hf_shapes(rules_for(config)).items()}


def write_config(root: Path, config: PretrainedConfig, **changes: Any) -> Path:
    """A change to None takes the field away."""
    fields = config.to_dict() | {"architectures": [ARCHITECTURES[config.model_type].hf_class]}
    fields |= {"layer_types": None} | changes  # one per layer: it says the number a second time
    fields = {name: value for name, value in fields.items() if value is not None}
    (root / "config.json").write_text(json.dumps(fields))
    return root


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_right_config_passes(tmp_path, model_type):
    config = CONFIGS[model_type]
    read = check_config(write_config(tmp_path, config), headers(config))
    assert read.model_type == model_type
    assert hf_shapes(rules_for(read)) == hf_shapes(rules_for(config))


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("qwen2", {"num_hidden_layers": 2}, "num_hidden_layers is 2, .* number 2 .model.layers.2."),
        ("llama", {"hidden_size": 60}, r"hidden_size is 60, .*input_layernorm.* \[48\]"),
        ("qwen2", {"vocab_size": 64}, r"vocab_size is 64, .*embed_tokens.* \[61, 48\]"),
        ("qwen2", {"head_dim": None}, r"heads \(6\) x head_dim \(8\) is 48, .*q_proj.* \[60, 48\]"),
        ("mistral", {"num_key_value_heads": 3}, r"key_value_heads \(3\) .* is 30, .*k_proj"),
        ("qwen3", {"head_dim": 12}, r"head_dim is 12, but \S*0.self_attn.q_norm.weight .* \[10\]"),
        (
            "mistral",
            {"intermediate_size": 80},
            r"intermediate_size is 80, .*gate_proj.* \[64, 48\]",
        ),
        (
            "qwen3_moe",
            {"num_local_experts": 8},
            r"num_experts is 8, .*mlp.gate.weight .* \[4, 48\]",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 64}, r"is 64, .*experts.0.gate_proj.* \[20, 48\]"),
        (
            "gpt_oss",
            {"intermediate_size": 96},
            r"intermediate_size is 96, .*experts.0.down_proj .* \[64, 48\]",
        ),
        (
            "deepseek_v3",
            {"qk_nope_head_dim": 12},
            r"heads \(6\) x \(qk_nope_head_dim \(12\) \+ qk_rope_head_dim \(8\)\) is 120, "
            r"but \S*q_b_proj.* \[108, 14\]",
        ),
        ("qwen2", {"tie_word_embeddings": False}, r"tie_word_embeddings is false, .* lm_head"),
    ],
)
def test_a_wrong_size_is_named(tmp_path, model_type, changes, said):
    entries = headers(CONFIGS[model_type])
    root = write_config(tmp_path, CONFIGS[model_type], **changes)
    with pytest.raises(ConversionError, match=f"config.json contradicts the weights: .*{said}"):
        check_config(root, entries)


def test_one_odd_tensor_is_no_wrong_config(tmp_path):
    entries = headers(CONFIGS["qwen2"])
    entries["model.layers.1.self_attn.k_proj.weight"] = entry(19, 48)
    check_config(write_config(tmp_path, CONFIGS["qwen2"]), entries)


@pytest.mark.parametrize(
    "output", [entry(61, 48, dtype=torch.float32), entry(64, 48), entry(61, 48)]
)
def test_a_tied_model_may_store_its_output_layer_as_it_is_only(tmp_path, output):
    entries = headers(CONFIGS["qwen2"]) | {"lm_head.weight": output}
    root = write_config(tmp_path, CONFIGS["qwen2"])
    if output == entry(61, 48):
        check_config(root, entries)
        return
    with pytest.raises(ConversionError, match=r"tie_word_embeddings is true, but lm_head.weight"):
        check_config(root, entries)


def test_quantized_weights_are_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    entries = headers(CONFIGS["llama"]) | {name: entry(64, 48, dtype=torch.float8_e4m3fn)}
    root = write_config(tmp_path, CONFIGS["llama"])
    with pytest.raises(ConversionError, match=f"{FILE}: {name} is .*float8"):
        check_config(root, entries)
    write_config(tmp_path, CONFIGS["llama"], quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantization_config"):
        check_config(root, headers(CONFIGS["llama"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*Qwen2ForCausalLM"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "qwen9"}, "qwen9"),
        ({"hidden_size": "48"}, "hidden_size"),
    ],
)
def test_an_unusable_config_is_named(tmp_path, changes, said):
    root = write_config(tmp_path, CONFIGS["qwen2"], **changes)
    with pytest.raises(ConfigError, match=f"config.json.*{said}"):
        check_config(root, headers(CONFIGS["qwen2"]))


# --- rope ----------------------------------------------------------------------------------------


def test_rope_of_either_version_of_transformers():
    expected = Rope(500000.0, "llama3", LLAMA3)
    assert read_rope(V4) == read_rope(V5) == read_rope({**V4, **V5}) == expected
    assert read_rope(CONFIGS["llama"].to_dict()) == expected
    old = {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}}
    assert read_rope(old) == expected
    assert read_rope({"rope_theta": 1e6, "rope_scaling": None}) == Rope(1e6, "default", {})
    nulls = {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "factor": None}}
    assert read_rope(nulls) == Rope(1e6, "default", {})
    assert read_rope({}) == Rope(10000.0, "default", {})


def test_yarn_is_read_with_every_readers_defaults():
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    numbers = {name: value for name, value in YARN.items() if name != "rope_type"}
    plain = read_rope({"rope_scaling": YARN})
    assert plain == Rope(10000.0, "yarn", {**numbers, **defaults})
    assert plain.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    # DeepSeek-V3's: the weights cancel out, and its attention has a factor of its own.
    weights = {"mscale": 0.7, "mscale_all_dim": 0.7}
    weighted = read_rope({"rope_scaling": {**YARN, **weights}})
    assert weighted.scaling == {**numbers, **defaults, **weights} and weighted.magnitude == 1.0
    assert read_rope({"rope_scaling": {**YARN, "attention_factor": 3.0}}).magnitude == 3.0
    assert read_rope({"rope_parameters": weighted.fields}) == weighted


def without(name: str) -> dict[str, Any]:
    scaling = {key: value for key, value in V4["rope_scaling"].items() if key != name}
    return {**V4, "rope_scaling": scaling}


def replaced(**changes: Any) -> dict[str, Any]:
    return {**V4, "rope_scaling": {**V4["rope_scaling"], **changes}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"rope_theta": 1e4, **V5},
            r"rope_theta is 10000.0, but rope_parameters.rope_theta is 500000.0",
        ),
        ({**replaced(factor=8.0), **V5}, r"scaling.factor is 8.0, but .*parameters.factor is 32.0"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
            r"rope_scaling.type is 'linear', but rope_scaling.rope_type is 'llama3'",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, r"rope_type \('ntk'\) must be one of"),
        ({"rope_scaling": YARN}, r"rope_type \('yarn'\) .* llama"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, r"truncate \(0\) must be true or false"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, r"rope_theta \(1.0\) must be above 1"),
        (replaced(truncate=True), r"'llama3' does not have truncate"),
        ({"rope_parameters": {"full_attention": V5}}, "full_attention"),
        (without("low_freq_factor"), "'llama3' needs low_freq_factor"),
        (without("rope_type"), "'default' does not have factor, low_freq_factor"),
        (replaced(low_freq_factor=4.0), r"low_freq_factor \(4.0\) must be below high_freq_factor"),
        (replaced(factor="8"), r"factor \('8'\) must be a positive number"),
        ({"rope_scaling": "llama3"}, r"rope_scaling \('llama3'\) must be a table"),
        ({"rope_theta": 0}, r"rope_theta \(0\) must be a positive number"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0.5\)"),
        ({"rope_scaling": {"type": "su"}}, r"rope_type \('su'\) is not supported: .* longrope"),
    ],
)
def test_rope_that_would_be_guessed_is_refused(tmp_path, fields, said):
    with pytest.raises(ConfigError, match=f"^here: .*{said}"):
        rope_of({"model_type": "llama", **fields}, source="here")
    root = write_config(tmp_path, CONFIGS["llama"], **{"rope_parameters": None, **fields})
    with pytest.raises(ConfigError, match=said):
        check_config(root, headers(CONFIGS["llama"]))


# --- two configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("view", [lambda c: c.to_dict(), lambda c: c.to_diff_dict(), lambda c: {}])
def test_a_config_is_its_own_record(model_type, view: Callable):
    compare_configs(CONFIGS[model_type], view(CONFIGS[model_type]))


@pytest.mark.parametrize(
    ("model_type", "record"),
    [
        ("llama", V4),
        ("llama", {"rms_norm_eps": 0.000001, "head_dim": None, "mlp_bias": False}),
        ("qwen2", {"rope_theta": 10000, "attention_bias": False, "num_experts": 0}),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": False, "head_dim": 10}),
        ("qwen3_moe", {"num_experts": 4}),
        ("qwen3_moe", {"num_local_experts": 4, "mlp_only_layers": []}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_another_spelling_is_no_difference(model_type, record):
    compare_configs(CONFIGS[model_type], record)


@pytest.mark.parametrize(
    ("model_type", "record", "said"),
    [
        ("llama", {**V4, "rope_theta": 1e4}, "rope_theta is 10000.0 there and 500000.0 here"),
        (
            "llama",
            {"rope_theta": 5e5},
            "rope_type is 'default' there and 'llama3' here; factor is ",
        ),
        (
            "qwen2",
            V5,
            "rope_type is 'llama3' there and 'default' here; factor is 32.0 there and not",
        ),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0 there and 7.0 here"),
        ("qwen2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 there and 1e-06 here"),
        ("qwen2", {"num_hidden_layers": 2, "vocab_size": 64}, "layers is 2 .*; vocab_size is 64"),
        ("qwen2", {"model_type": "llama"}, "model_type is 'llama' there and 'qwen2' here"),
        ("qwen3_moe", {"norm_topk_prob": True}, "norm_topk_prob is True there and False here"),
        ("qwen2", {"num_experts": 4}, "num_experts is 4 there and not stated here"),
        ("mistral", {"sliding_window": 4096}, "sliding_window is 4096 there and not stated here"),
    ],
)
def test_a_record_of_another_model_is_refused(model_type, record, said):
    with pytest.raises(ConversionError, match=said):
        compare_configs(CONFIGS[model_type], record)


def test_a_period_of_windows_is_another_spelling_of_the_layers():
    config = make_config("gemma3_text", sliding_window_pattern=3)
    older = {"sliding_window": 4096, "sliding_window_pattern": 3}
    newer = {"sliding_window": 4096, "layer_types": config.layer_types}
    without_period = make_config("gemma3_text", layer_types=config.layer_types)
    for one in (config, without_period):
        compare_configs(one, older)
        compare_configs(one, newer)
        assert model_identity(one) == model_identity(config)
        with pytest.raises(ConversionError, match="layer_types is "):
            compare_configs(one, {"sliding_window_pattern": 2})


# --- Megatron-LM's arguments ---------------------------------------------------------------------

# What names and shapes tell, or has a meaning only beside another argument (see the tables below).
UNDECIDED = {
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "max_position_embeddings"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "ffn_hidden_size"),
    *("kv_channels", "group_query_attention", "num_query_groups", "rope_scaling_factor"),
    "window_attn_skip_freq",
}
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32}
WITH_ARGS = CONFIGS | {
    "gemma3_text": make_config("gemma3_text", sliding_window=16, sliding_window_pattern=3),
    "with a head of keys for each of queries": make_config("qwen2", num_key_value_heads=6),
    "latent, scaled": make_config(
        "deepseek_v3", rope_parameters=SCALED | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "latent, of YaRN's own magnitude": make_config("deepseek_v3", rope_parameters=SCALED),
}


def args_with(name: str, **changes: Any) -> Namespace:
    return Namespace(**vars(to_args(WITH_ARGS[name])) | changes)


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return "another"
        case list() | tuple():
            return [7 for _ in value]
        case _:
            return (value or 0) + 7


@pytest.mark.parametrize("name", WITH_ARGS)
def test_arguments_of_another_model_are_refused(name):
    """Each that changes what is computed, wherever Megatron-LM's own default is another."""
    compare_configs(WITH_ARGS[name], args_with(name))
    compare_configs(WITH_ARGS[name], Namespace())  # of a version that states none of them
    args = vars(args_with(name))
    of_experts = {one for one in args if one.startswith("moe_") and not args["num_experts"]}
    if args.get("moe_router_score_function") == "sigmoid":
        of_experts |= {"moe_router_pre_softmax"}
    for one in args.keys() - UNDECIDED - of_experts:
        changed = args_with(name, **{one: another(args[one])})
        with pytest.raises(ConversionError, match=f"^common.pt .*{one} is "):
            compare_configs(WITH_ARGS[name], changed, source="common.pt")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # Megatron-LM's defaults of what a model does not have.
        ("qwen2", {"moe_router_topk": 2, "rope_scaling_factor": 8.0}),
        ("qwen3_moe", {"ffn_hidden_size": 192, "moe_router_num_groups": None}),
        ("deepseek_v3", {"kv_channels": 8, "group_query_attention": True, "num_query_groups": 2}),
        ("with a head of keys for each of queries", {"num_query_groups": 1}),
        ("with a head of keys for each of queries", {"group_query_attention": True}),
        ("deepseek_v3", {"moe_router_pre_softmax": True, "moe_ffn_hidden_size": None}),
        ("latent, scaled", {"rope_type": None}),
        # Layers by a period, one by one, or all of them.
        ("qwen3_moe", {"moe_layer_freq": [1, 1, 1]}),
        ("phi3", {"window_size": [15, 0], "window_attn_skip_freq": None}),
        ("gemma3_text", {"window_attn_skip_freq": 3}),
        ("gemma3_text", {"window_attn_skip_freq": [1, 1, 0]}),
        ("llama", {"window_attn_skip_freq": 2}),
    ],
)
def test_another_spelling_of_an_argument_is_no_difference(name, changes):
    compare_configs(WITH_ARGS[name], args_with(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen2", {"ffn_hidden_size": 99}, "ffn_hidden_size is 99 there and 64 here"),
        ("qwen2", {"kv_channels": 8}, "kv_channels is 8"),
        ("qwen2", {"num_query_groups": 3}, "num_query_groups is 3"),
        ("qwen2", {"group_query_attention": False}, "group_query_attention is False there"),
        # Of what no argument builds, too.
        ("gemma3_text", {"apply_layernorm_1p": True}, "apply_layernorm_1p is True there and False"),
        ("olmo2", {"rotary_interleaved": True}, "rotary_interleaved is True"),
        ("llama", {"rope_scaling_factor": 8.0}, "rope_scaling_factor is 8.0 there and 32.0 here"),
        ("phi3", {"window_attn_skip_freq": 2}, "window_attn_skip_freq is 2"),
        ("gemma3_text", {"window_attn_skip_freq": [1, 0, 1]}, "window_attn_skip_freq is "),
        (
            "glm4_moe",
            {"moe_router_topk_scaling_factor": None},
            "factor is not stated there and 1.5",
        ),
        ("glm4_moe", {"moe_layer_freq": 1}, "moe_layer_freq is 1 there"),
        # The arguments have one base; config.json beside them says both.
        ("gemma3_text", {"rotary_base": 10000.0}, "rotary_base is 10000.0 there and 'one of sev"),
        ("qwen2", {"num_layers": object()}, "num_layers is <object"),
    ],
)
def test_arguments_that_mean_something_together_are_compared_together(name, changes, said):
    with pytest.raises(ConversionError, match=said):
        compare_configs(WITH_ARGS[name], args_with(name, **changes))
