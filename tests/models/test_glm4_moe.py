"""GLM-4.5: what is refused by name, layers that are left out, and the routers' constants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapo_megatron.config import AdapterConfig, ParallelConfig
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.config_json import ModelFacts, facts_of
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.tables import geometry_of, rope_of, rules_for
from gapo_tools.conversion.directions import Options, hf_to_megatron, megatron_to_hf
from tests.distributed.conversion_setup import hf_config, save_model
from tests.messages import mentions

BIAS = "e_score_correction_bias"


def read(**changes: Any) -> ModelFacts:
    return facts_of({**shipped_fields("GLM-4.5"), **changes}, source="config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, ["n_group (3)", "n_routed_experts (160)"]),
        ({"n_group": 160}, ["n_group (160)", "two experts"]),
        ({"topk_group": 2}, ["topk_group (2)", "n_group (1)"]),
        ({"n_group": 80, "topk_group": 3}, ["num_experts_per_tok (8)", 6, "topk_group (3)"]),
        ({"first_k_dense_replace": 92}, ["first_k_dense_replace (92)", "num_hidden_layers (92)"]),
        ({"routed_scaling_factor": 0.0}, ["routed_scaling_factor (0.0)"]),
        ({"n_shared_experts": 0}, ["n_shared_experts (0)", "1 or more"]),
        ({"num_local_experts": 160}, ["num_local_experts", "n_routed_experts"]),
        ({"num_mtp_layers": 1}, ["num_mtp_layers", "num_nextn_predict_layers"]),
        ({"partial_rotary_factor": None}, ["partial_rotary_factor (null)"]),
        ({"rope_parameters": {"partial_rotary_factor": None}}, ["partial_rotary_factor (null)"]),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    changes: dict[str, Any], named: list[object]
) -> None:
    with pytest.raises(ConfigError, match=mentions("config.json", *named)):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_topk_prob": False}, ["norm_topk_prob (false)"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok (1)"]),
        # Megatron-core would count a group by its best four.
        (
            {"n_group": 4, "topk_group": 2},
            ["topk_group (2)", "n_group (4)", "num_experts_per_tok (8)", "from 4 to 5"],
        ),
        ({"head_dim": None, "num_attention_heads": 80}, ["head_dim"]),
        ({"hidden_act": "gelu"}, ["hidden_act ('gelu')"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings (true)"]),
    ],
)
def test_what_would_be_computed_differently_is_refused(
    changes: dict[str, Any], named: list[object]
) -> None:
    with pytest.raises(ConfigError, match=mentions(*named)):
        check_shapes(read(**changes), ParallelConfig())


def test_two_experts_of_a_group_or_all_groups_are_computed() -> None:
    for best in (4, 8):
        check_shapes(read(n_group=8, topk_group=best), ParallelConfig())
    for chosen in (4, 5):
        changes = {"n_group": 8, "topk_group": 2, "num_experts_per_tok": chosen}
        check_shapes(read(**changes), ParallelConfig())


def test_sizes_that_are_cut_are_those_of_its_layers() -> None:
    sizes = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}
    parallel = ParallelConfig(**sizes, sequence_parallel=True)
    check_shapes(read(), parallel)
    for field, changes in (
        ("intermediate_size", {"intermediate_size": 12290}),
        ("moe_intermediate_size x n_shared_experts", {"moe_intermediate_size": 1538}),
        ("n_routed_experts", {"n_routed_experts": 162}),
    ):
        with pytest.raises(ConfigError, match=mentions(f"the model's {field}")):
            check_shapes(read(**changes), parallel)
    check_shapes(read(intermediate_size=12290, first_k_dense_replace=0), parallel)


def test_a_stage_without_experts_has_nothing_for_their_factors() -> None:
    experts = AdapterConfig(kind="lora", targets=("experts",))
    check_adapter(read(), experts, ParallelConfig(pipeline_model_parallel_size=23))
    stages = ParallelConfig(pipeline_model_parallel_size=46)
    with pytest.raises(ConfigError, match=mentions("adapter.targets (experts)", "layers 0 to 1")):
        check_adapter(read(), experts, stages)
    check_adapter(read(), AdapterConfig(kind="lora", targets=("experts", "fc1")), stages)


def test_half_of_a_head_is_rotated_unless_the_config_says_otherwise() -> None:
    for fields, share in (
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        # transformers fills in 0.5 beside it, and takes this one.
        ({"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}, 0.25),
    ):
        assert rope_of({"model_type": "glm4_moe", **fields}).share == share


# --- layers that are left out --------------------------------------------------------------------


@pytest.fixture
def with_more_layers(tmp_path: Path) -> Path:
    """As published: 16-bit weights, constants in float32, a layer that predicts further tokens."""
    folder = tmp_path / "hf"
    save_model(folder, "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors = {
        name: tensor if name.endswith(BIAS) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    for name in ("eh_proj.weight", "shared_head.norm.weight", f"mlp.gate.{BIAS}"):
        tensors[f"model.layers.4.{name}"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 1
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    return folder


def test_predicting_layers_are_left_out_and_said_to_be(
    with_more_layers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_model_folder(with_more_layers)
    kept = dict(read_hf(with_more_layers))
    assert not [name for name in kept if name.startswith("model.layers.4.")]
    assert re.search(mentions("3 tensors", "model.layers.4.eh_proj.weight"), caplog.text)
    there = hf_to_megatron(with_more_layers, tmp_path / "megatron", Options(mode="full"))
    assert "3 tensors" in there.checks["predicting layers"]
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", Options(mode="full"))
    assert "predicting layers" not in back.checks
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert (fields["num_nextn_predict_layers"], fields["dtype"]) == (0, "bfloat16")
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    # One more layer than it says is no such layer.
    fields = json.loads((with_more_layers / "config.json").read_text())
    (with_more_layers / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 3}))
    with pytest.raises(ConversionError, match="contradicts"):
        check_model_folder(with_more_layers)


def test_a_cast_leaves_the_routers_constants_in_float32(
    with_more_layers: Path, tmp_path: Path
) -> None:
    options = Options(mode="full", dtype=torch.float16)
    hf_to_megatron(with_more_layers, tmp_path / "megatron", options)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", options)
    found = load_file(tmp_path / "back/model.safetensors")
    dtypes = {tensor.dtype for name, tensor in found.items() if name.endswith(BIAS)}
    assert dtypes == {torch.float32}
    assert sum(tensor.dtype != torch.float16 for tensor in found.values()) == 3
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float16"
    original = load_file(with_more_layers / "model.safetensors")
    assert all(torch.equal(found[name], original[name]) for name in found if name.endswith(BIAS))


def test_every_layer_has_the_rules_of_its_kind() -> None:
    rules = rules_for(hf_config("glm4_moe"))
    names = {name for rule in rules for at in rule.places for name in rule.hf_names(at)}
    assert geometry_of(hf_config("glm4_moe")).has_experts == (False, True, True, True)
    assert {"model.layers.0.mlp.up_proj.weight", f"model.layers.3.mlp.gate.{BIAS}"} <= names
    assert not [name for name in names if name.startswith("model.layers.0.mlp.experts.")]
    assert not [name for name in names if name.startswith("model.layers.1.mlp.up_proj.")]
