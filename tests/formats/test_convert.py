"""Hugging Face -> Megatron names -> Hugging Face: every tensor, every shard, bit for bit."""

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.models.rules import checked, find_rule, hf_shapes, to_megatron
from gapo_megatron.models.tables import ARCHITECTURES, rules_for
from tests.convert_setup import assert_equal, make_config, make_model, to_hf, written_weights
from tests.messages import mentions

NEVER_TIED = {"gpt_oss"}
every_model = pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        (name, tied)
        for name in ARCHITECTURES
        for tied in (False, True)
        if not tied or name not in NEVER_TIED
    ],
)


def random_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in hf_shapes(rules_for(config)).items()}


@every_model
def test_table_is_what_transformers_writes(tmp_path, model_type, tied):
    model = make_model(make_config(model_type, tie_word_embeddings=tied))
    rules, written = rules_for(model.config), written_weights(model, tmp_path)
    assert hf_shapes(rules) == {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert_equal(dict(to_hf(rules, to_megatron(rules, written.items()))), written)


@every_model
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_round_trip_is_bitwise_through_shards(model_type, tied, tp_size):
    # Latent attention has keys and values for every head.
    kv_heads = 12 if model_type == "deepseek_v3" else 4
    heads = {"num_attention_heads": 12, "num_key_value_heads": kv_heads}
    config = make_config(model_type, tie_word_embeddings=tied, **heads)
    rules, expected = rules_for(config), random_tensors(config)
    whole = {}
    for name, full in to_megatron(rules, expected.items()):
        rule, place = find_rule(rules, name)
        assert rule.megatron_name(place) == name
        shards = [rule.shard(full, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {rule.shard_shape(tp_size)}
        whole[name] = rule.unshard(shards)
    assert whole.keys() == {rule.megatron_name(place) for rule in rules for place in rule.places}
    assert_equal(dict(to_hf(rules, whole.items())), expected)


def test_qkv_is_interleaved_by_key_value_group():
    # Megatron-core's layout: per key/value head its query heads, then its key, then its value.
    rules = rules_for(make_config("qwen2", num_attention_heads=8, num_key_value_heads=4))
    rule, place = find_rule(rules, "decoder.layers.0.self_attention.linear_qkv.weight")
    q = torch.arange(8).repeat_interleave(10)[:, None].expand(80, 48)
    k = 100 + torch.arange(4).repeat_interleave(10)[:, None].expand(40, 48)
    heads = rule.merge([q, k, k + 100], place)[::10, 0].tolist()
    assert heads == [0, 1, 100, 200, 2, 3, 101, 201, 4, 5, 102, 202, 6, 7, 103, 203]
    second = rule.shard(rule.merge([q, k, k + 100], place), 1, 2)
    assert second[::10, 0].tolist() == heads[8:]


@pytest.mark.parametrize(
    ("model_type", "name", "size"),
    [
        ("qwen2", "decoder.layers.1.mlp.linear_fc1.weight", 64),
        ("qwen3_moe", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", 20),
    ],
)
def test_gated_mlp_shard_holds_its_gate_and_its_up(model_type, name, size):
    rule, place = find_rule(rules_for(make_config(model_type)), name)
    gate = torch.arange(size)[:, None].expand(size, 48)
    shard = rule.shard(rule.merge([gate, gate + 1000], place), 1, 2)[:, 0].tolist()
    assert shard == [*range(size // 2, size), *range(1000 + size // 2, 1000 + size)]


def test_vocabulary_is_padded_with_zeros():
    rule, _ = find_rule(rules_for(make_config("llama")), "embedding.word_embeddings.weight")
    last = rule.shard(torch.ones(61, 48), 3, 4)
    assert last.shape == (16, 48)
    assert last.sum(1).tolist() == [48.0] * 13 + [0.0] * 3


def test_what_the_config_determines_may_be_stored_too():
    config = make_config("llama", tie_word_embeddings=True)
    rules, expected = rules_for(config), random_tensors(config)
    more = {
        "lm_head.weight": expected["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5),
    }
    whole = to_megatron(rules, (more | expected).items())
    assert_equal(dict(to_hf(rules, whole)), expected)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_tied_output_layer_of_its_own_is_refused(is_first):
    config = make_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(config)
    output = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    stored = output | tensors if is_first else tensors | output
    named = mentions("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings")
    with pytest.raises(ConversionError, match=named):
        list(to_megatron(rules_for(config), stored.items()))


# --- places --------------------------------------------------------------------------------------

FC1 = "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"


@pytest.mark.parametrize(
    ("model_type", "te_name", "name"),
    [
        ("qwen2", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("qwen3_moe", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        (
            "qwen3_moe",
            "mlp.experts.linear_fc1.weight3",
            "mlp.experts.local_experts.3.linear_fc1.weight",
        ),
    ],
)
def test_transformer_engine_names(model_type, te_name, name):
    rule, place = find_rule(rules_for(make_config(model_type)), f"decoder.layers.1.{te_name}")
    assert rule.megatron_name(place) == f"decoder.layers.1.{name}"


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen2", "decoder.layers.3.input_layernorm.weight"),
        ("llama", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("qwen3_moe", FC1.replace("experts.3", "experts.4")),
        ("qwen3_moe", "decoder.layers.2.mlp.experts.linear_fc1.weight4"),
    ],
)
def test_unknown_megatron_parameter_is_named(model_type, name):
    with pytest.raises(ConversionError, match=name):
        find_rule(rules_for(make_config(model_type)), name)


# --- damage --------------------------------------------------------------------------------------

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
UP_PROJ = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("convert", [to_megatron, checked])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop(UP_PROJ), ("missing", UP_PROJ)),
        (lambda w: w.update(extra=torch.zeros(1)), ("extra has", "config.json")),
        (
            lambda w: w.update({UP_PROJ.replace("experts.3", "experts.4"): torch.zeros(20, 48)}),
            ("experts.4.up_proj.weight", "config.json"),
        ),
        (lambda w: w.update({K_PROJ: torch.zeros(7, 48)}), (K_PROJ, "[7, 48]")),
        # An untied model's output layer is a tensor like any other.
        (lambda w: w.pop("lm_head.weight"), ("missing", "lm_head.weight")),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(convert, change, named):
    config = make_config("qwen3_moe")
    tensors = random_tensors(config)
    change(tensors)
    with pytest.raises(ConversionError, match=mentions(*named)):
        list(convert(rules_for(config), tensors.items()))


@pytest.mark.parametrize("convert", [to_megatron, checked])
def test_a_tensor_that_comes_twice_is_named(convert):
    config = make_config("mistral")
    tensors = [*random_tensors(config).items(), ("model.norm.weight", torch.zeros(48))]
    with pytest.raises(ConversionError, match=mentions("model.norm.weight", "twice")):
        list(convert(rules_for(config), tensors))


def test_missing_misshapen_and_repeated_megatron_parameters_are_named():
    config = make_config("qwen3")
    rules = rules_for(config)
    whole = dict(to_megatron(rules, random_tensors(config).items()))
    name = "decoder.final_layernorm.weight"
    with pytest.raises(ConversionError, match=mentions(name, "twice")):
        list(to_hf(rules, [*whole.items(), (name, whole[name])]))
    with pytest.raises(ConversionError, match=mentions(name, "[47]")):
        list(to_hf(rules, (whole | {name: torch.zeros(47)}).items()))
    del whole[name]
    with pytest.raises(ConversionError, match=mentions("missing", "model.norm.weight")):
        list(to_hf(rules, whole.items()))


def test_shards_of_wrong_shape_or_number_are_named():
    rule, _ = find_rule(rules_for(make_config("llama")), "decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(ConversionError, match=mentions("rank 1", "[48, 31]", "[48, 32]")):
        rule.unshard([torch.zeros(48, 32), torch.zeros(48, 31)])
    with pytest.raises(ConversionError, match=mentions("linear_fc2.weight", "(48, 64)", 3)):
        rule.shard(torch.zeros(48, 64), 0, 3)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"attention_bias": True}, ("attention_bias", True)),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ("mlp_only_layers", [0])),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step", 2)),
        ("qwen2", {"num_key_value_heads": 4}, ("num_key_value_heads (4)", "num_attention_heads")),
        ("mistral", {"quantization_config": {"bits": 4}}, ("quantization_config", 4)),
        ("seed_oss", {"attention_out_bias": True}, ("attention_out_bias", True)),
        ("gemma3_text", {"sliding_window": None}, ("sliding_window (null)", "sliding_attention")),
    ],
)
def test_settings_without_a_table_are_config_errors(model_type, changes, named):
    with pytest.raises(ConfigError, match=mentions(*named)):
        rules_for(make_config(model_type, **changes))
