"""config.json read without transformers: the same values, and no fewer refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.config_check import read_config
from gapo_megatron.models.config_json import facts_of, read_facts
from gapo_megatron.models.published import find_model, shipped_names
from gapo_megatron.models.tables import ARCHITECTURES, geometry_of, rope_of, rules_for
from tests.formats.test_convert_models import CONFIGS
from tests.messages import mentions

# Everything that this package asks of a model's config, beside rope.
USED = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("tie_word_embeddings", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "n_group", "topk_group", "routed_scaling_factor"),
)
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COMPLETE = SMALL | {
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["full_attention", "full_attention"],
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64, **ROPE},
}
# Of values that no field takes, those that one or the other might.
DAMAGE = (None, "48", 48.0, -1, 0, True, [], {}, 0.5, [-1], ["nothing"])


def write(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    named = {"model_type": model_type, "architectures": [ARCHITECTURES[model_type].hf_class]}
    (folder / "config.json").write_text(json.dumps(named | fields))
    return folder


# Of COMPLETE, what an architecture refuses.
REFUSED = {
    "mistral": ("layer_types",),
    "phi3": ("layer_types", "rope_scaling"),
    "gemma3_text": ("rope_scaling", "rope_parameters", "sliding_window"),
    "gpt_oss": (
        *("rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
        *("attention_bias", "tie_word_embeddings"),
    ),
    "deepseek_v3": ("rope_scaling", "head_dim", "num_key_value_heads"),
}


# Of GLM's default sizes half of a head is an odd number; DeepSeek's are of many heads and layers.
NEEDED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "deepseek_v3": {"num_key_value_heads": None, "first_k_dense_replace": 1},
}


def of_type(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    own = {n: fields[n] for n in fields if n not in REFUSED.get(model_type, ())}
    return NEEDED.get(model_type, {}) | own


def agree(folder: Path) -> None:
    """Both readers see the same model in a folder that both accept."""
    facts, full = read_facts(folder), AutoConfig.from_pretrained(folder)
    for name in USED:
        ours, theirs = getattr(facts, name, None), getattr(full, name, None)
        # An attribute that an architecture does not have, and one that is null, are the same to us.
        assert (ours, type(ours)) == (theirs, type(theirs)), name
    assert rope_of(facts.to_dict()) == rope_of(full.to_dict())
    assert geometry_of(facts) == geometry_of(full)
    table, expected = rules_for(facts), rules_for(full)
    assert [(one.megatron, one.hf_shapes) for one in table] == [
        (one.megatron, one.hf_shapes) for one in expected
    ]


SPARSE: list[dict[str, Any]] = [
    {},
    SMALL,
    COMPLETE,
    {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
    SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    SMALL | {"rope_theta": None, "layer_types": None, "sliding_window": None},
    SMALL | {"sliding_window": 32, "use_sliding_window": False, "layer_types": None},
    SMALL | {"sliding_window": 32, "use_sliding_window": True, "layer_types": None},
]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("fields", SPARSE, ids=range(len(SPARSE)))
def test_it_says_what_transformers_says(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    agree(write(tmp_path, model_type, of_type(model_type, fields)))


@pytest.mark.parametrize("name", CONFIGS)
def test_it_says_what_transformers_says_of_published_models(name: str, tmp_path: Path) -> None:
    fields = dict(CONFIGS[name])
    agree(write(tmp_path, fields.pop("model_type"), fields))


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """Version 5 renames fields: num_local_experts, rope_parameters."""
    for number, model_type in enumerate(ARCHITECTURES):
        folder = tmp_path / str(number)
        folder.mkdir()
        fields = of_type(model_type, COMPLETE)
        full = AutoConfig.from_pretrained(write(folder, model_type, fields))
        full.save_pretrained(folder)
        agree(folder)


def transformers_accepts(folder: Path) -> PretrainedConfig | None:
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception:  # of many kinds: division by zero is one of them
        return None


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_transformers_refuses_is_refused(model_type: str, tmp_path: Path) -> None:
    num_accepted = num_refused = 0
    for name in (*COMPLETE, "num_local_experts", "rope_parameters"):
        for value in DAMAGE:
            usual = of_type(model_type, SMALL) if model_type in NEEDED else SMALL
            folder = write(tmp_path, model_type, usual | {name: value})
            try:
                read_facts(folder)
            except ConfigError as error:
                num_refused += 1
                assert str(folder / "config.json") in str(error) or "config.json: " in str(error)
                assert name in str(error) or name in ("rope_scaling", "num_local_experts")
                # The full reader runs the same checks, in the same words.
                with pytest.raises(ConfigError) as caught:
                    read_config(folder)
                assert str(caught.value) == str(error)
            else:
                num_accepted += 1
                assert transformers_accepts(folder) is not None, (name, value)
                agree(folder)
    assert num_accepted > 10 and num_refused > 100


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 0}, ["hidden_size (0)"]),
        ({"vocab_size": "50"}, ['vocab_size ("50")']),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings (1)"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", 1, "num_hidden_layers (2)"]),
        (
            {"head_dim": None, "hidden_size": 2},
            ["hidden_size (2)", "num_attention_heads (4)"],
        ),
        ({"num_experts": 4, "num_local_experts": 8}, ["num_experts", 4, "num_local_experts", 8]),
        ({"architectures": "Qwen2"}, ["architectures", "'Qwen2'", "Qwen2ForCausalLM"]),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": []},
            ["layer_types", "mistral"],
        ),
        ({"model_type": "qwen9"}, ["model_type", "qwen9", *ARCHITECTURES]),
        *(
            ({"model_type": name, "architectures": [ARCHITECTURES[name].hf_class], **bias}, [*bias])
            for name in ("llama", "mistral", "phi3")
            for bias in ({"bias": True}, {"qkv_bias": True})
        ),
        (
            # transformers and vLLM prefer the one outside.
            {"rope_scaling": COMPLETE["rope_scaling"], "original_max_position_embeddings": 128},
            ["original_max_position_embeddings", 64, 128],
        ),
        ({"rotary_pct": 0.5}, ["rotary_pct (0.5)"]),
        ({"rotary_emb_base": 5e5}, ["rotary_emb_base (500000.0)"]),
    ],
)
def test_errors_name_file_field_and_value(fields: dict[str, Any], named: list[object]) -> None:
    whole = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | SMALL | fields
    with pytest.raises(ConfigError, match=mentions("config.json", *named)):
        facts_of(whole, source="config.json")


def test_shipped_shapes_are_used_where_the_folder_is_not_there(tmp_path: Path) -> None:
    for name in shipped_names():
        facts, note = find_model(f"models/{name}")
        assert facts is not None
        assert f"models/{name} " in note and f"/{name}.json" in note
    assert find_model("models/another") == (None, "")
    here = tmp_path / "Qwen2.5-7B"
    here.mkdir()
    facts, note = find_model(str(write(here, "qwen2", SMALL)))
    assert (facts and facts.hidden_size, note) == (64, "")
    (here / "config.json").unlink()
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", here / "config.json")):
        find_model(str(here))
