"""A wrong config is named by field, value, and the tensor that says otherwise."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.config_check import check_config, compare_configs
from gapo_megatron.formats.megatron_record import from_args, to_args
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"apply_layernorm_1p": True}, r"apply_layernorm_1p \(True\) .* must be False"),
        ({"rotary_seq_len_interpolation_factor": 4}, r"factor \(4\) .* must be None"),
        ({"swiglu": True, "activation_func_clamp_value": 7.0}, r"swiglu \(True\) .* must be False"),
        ({"softmax_type": "off-by-one"}, r"softmax_type \('off-by-one'\) .* 'learnable'"),
        ({"normalization": "LayerNorm"}, r"normalization \('LayerNorm'\) .* must be 'RMSNorm'"),
        ({"window_size": (4096, -1)}, r"window_size \(\(4096, -1\)\) .* must be \(N, 0\)"),
        (
            {"window_size": (15, 0), "window_attn_skip_freq": [1, 0]},
            r"window_attn_skip_freq \(\[1, 0\]\) .* each of 3 layers",
        ),
        (
            {"window_size": (15, 0), "window_attn_skip_freq": "all"},
            r"window_attn_skip_freq \('all'\)",
        ),
        (
            {"moe_router_score_function": "sigmoid"},
            r"moe_router_enable_expert_bias \(False\) .* must be True for .* \('sigmoid'\)",
        ),
    ],
)
def test_arguments_that_no_name_or_shape_shows_are_refused(changes, said):
    args = vars(to_args(CONFIGS["qwen3_moe"]))
    with pytest.raises(ConversionError, match=f"^common.pt: .*{said}"):
        from_args(args | changes, source="common.pt")


def test_arguments_say_what_is_rotated_and_seen():
    config = CONFIGS["phi3"]
    args = vars(to_args(config))
    assert (args["window_size"], args["rotary_percent"]) == ((15, 0), 1.0)
    compare_configs(config, from_args(args))
    with pytest.raises(ConversionError, match="sliding_window is 17 there and 16 here"):
        compare_configs(config, from_args(args | {"window_size": [16, 0]}))
    with pytest.raises(ConversionError, match=r"factor is 0\.5 there and not stated"):
        compare_configs(config, from_args(args | {"rotary_percent": 0.5}))
    with pytest.raises(ConversionError, match="sliding_window is 16 there and not stated here"):
        compare_configs(CONFIGS["llama"], {"sliding_window": from_args(args)["sliding_window"]})
    with pytest.raises(ConversionError, match="sliding_window is 0 there and 16 here"):
        compare_configs(config, from_args(args | {"window_size": None}))
    del args["window_size"]  # of a version that does not state it
    compare_configs(config, from_args(args))


@pytest.mark.parametrize(
    ("model_type", "equal", "other"),
    [("phi3", None, 2), ("gemma3_text", 3, None), ("gemma3_text", [1, 1, 0], [1, 0, 1])],
)
def test_arguments_say_which_layers_have_the_window(model_type, equal, other):
    layers = {"sliding_window_pattern": 3} if model_type == "gemma3_text" else {}
    config = make_config(model_type, sliding_window=16, **layers)
    args = vars(to_args(config))
    compare_configs(config, from_args(args | {"window_attn_skip_freq": equal}))
    with pytest.raises(ConversionError, match="layer_types is "):
        compare_configs(config, from_args(args | {"window_attn_skip_freq": other}))


def test_arguments_leave_out_a_rotary_base_beside_another():
    """They have one base; config.json beside them says both."""
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = make_config("gemma3_text", rope_parameters=ropes)
    compare_configs(config, from_args(vars(to_args(config))))
    with pytest.raises(ConversionError, match=r"sliding_attention is .* 10000\.0.* 20000\.0"):
        compare_configs(config, {"rope_theta": 1e6})


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


SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7}
ROTARY = {
    "gpt_oss": (CONFIGS["gpt_oss"], {"yarn_rotary_scaling_factor": 9.0}),
    "latent": (CONFIGS["deepseek_v3"], {"rope_type": "yarn", "rotary_scaling_factor": 40}),
    "latent, scaled": (
        make_config("deepseek_v3", rope_parameters=SCALED),
        {"mscale_all_dim": 0.5},
    ),
    "latent, of YaRN's own magnitude": (
        make_config(
            "deepseek_v3",
            rope_parameters={k: v for k, v in SCALED.items() if not k.startswith("mscale")},
        ),
        {"original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", ROTARY)
def test_arguments_say_how_positions_are_scaled(name: str) -> None:
    """Also where Megatron-core's default is another kind, or config.json's."""
    config, change = ROTARY[name]
    args = vars(to_args(config))
    compare_configs(config, from_args(args))
    with pytest.raises((ConfigError, ConversionError)):
        compare_configs(config, from_args(args | change))
    of_kind = "position_embedding_type" if name == "gpt_oss" else "rope_type"
    other = "rope" if args[of_kind] == "yarn" else "yarn"
    with pytest.raises((ConfigError, ConversionError), match="rope_type"):
        compare_configs(config, from_args(args | {of_kind: other}))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3_moe", {"moe_router_pre_softmax": False}, "norm_topk_prob is True there and False"),
        ("gpt_oss", {"softmax_type": "vanilla"}, "softmax_type is 'vanilla' there"),
        ("glm4_moe", {"softmax_type": "learnable"}, "softmax_type is 'learnable' there"),
    ],
)
def test_arguments_say_how_experts_and_attention_are_weighted(name, change, said):
    args = vars(to_args(CONFIGS[name]))
    compare_configs(CONFIGS[name], from_args(args))
    with pytest.raises(ConversionError, match=said):
        compare_configs(CONFIGS[name], from_args(args | change))
