"""Number formats: what Megatron-core is told, and what is refused before anything is built."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from gapo_megatron.compat import cpu
from gapo_megatron.compat.transformer_engine import free_fp8_copies, why_not
from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.fp8 import RECIPES, fp8_multiple
from gapo_megatron.models.rules import find_rule
from gapo_megatron.policy import destroy, initialize, model
from gapo_megatron.policy.export import exported_by
from gapo_megatron.policy.model import build_model, transformer_config
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import check_fp8, precision_settings
from tests.configs import config_of
from tests.dist import single_rank
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import SinksInFloat32, save_model
from tests.messages import mentions

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ONE_RANK = SimpleNamespace(tp_size=1, pp_size=1, vpp_size=1, cp_size=1, ep_size=1)
QUESTIONS = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def megatron_config(folder: Path, number_format: dict[str, Any]) -> TransformerConfig:
    return transformer_config(
        AutoConfig.from_pretrained(folder),
        ONE_RANK,  # type: ignore[arg-type]
        CPU,
        number_format=number_format,
        recompute="none",
        parallel=ParallelConfig(),
    )


def test_recipes_are_megatron_cores() -> None:
    """All of its names, but for recipes that come as a Python path."""
    theirs = get_type_hints(TransformerConfig)["fp8_recipe"]
    names = {name for kind in get_args(theirs) for name in get_args(kind)}
    assert names == {*RECIPES, "custom"}
    assert set(get_args(ModelConfig.model_fields["fp8_recipe"].annotation)) == set(RECIPES)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        # The last one: in the backward pass the largest values are exchanged, and data parallel
        # ranks may leave it out one by one.
        ("delayed", ("hybrid", 1024, "max", True)),
        ("tensorwise", ("hybrid", 1, "most_recent", False)),  # the others are Megatron-core's own
        ("blockwise", ("e4m3", 1, "most_recent", False)),
        ("mxfp8", ("e4m3", 1, "most_recent", False)),
    ],
)
def test_megatron_core_takes_every_recipe(
    tmp_path: Path, recipe: str, expected: tuple[str, int, str, bool]
) -> None:
    save_model(tmp_path, "qwen2_untied")
    config = megatron_config(tmp_path, precision_settings("fp8", fp8_recipe=recipe))
    assert config.fp8_recipe == recipe
    history = (config.fp8_amax_history_len, config.fp8_amax_compute_algo)
    assert (config.fp8, *history, config.tp_only_amax_red) == expected
    # Weights and what flows between the layers stay bf16, attention is not quantised.
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert not config.fp8_param and not config.fp8_dot_product_attention


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_without_fp8_there_is_no_recipe(tmp_path: Path, precision: str) -> None:
    save_model(tmp_path, "qwen2_untied")
    number_format = precision_settings(precision, fp8_recipe="tensorwise")
    assert not any(name.startswith("fp8") for name in number_format)
    assert megatron_config(tmp_path, number_format).fp8 is None


def test_fp8_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in RECIPES:
        with pytest.raises(ConfigError, match=mentions("model.precision", "'fp8'", "GPU")):
            check_fp8(recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Transformer Engine"):
        check_fp8("tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("can_run", [True, False])
def test_transformer_engine_is_asked_about_the_recipe(
    monkeypatch: pytest.MonkeyPatch, recipe: str, can_run: bool
) -> None:
    """A stand-in for it, which answers the recipe's own question alone."""
    for name in ("", ".pytorch"):
        module = ModuleType(f"transformer_engine{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, QUESTIONS[recipe], lambda *, return_reason: (can_run, "too old"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    if can_run:
        check_fp8(recipe)
        return
    named = mentions("model.precision", "'fp8'", "model.fp8_recipe", recipe, "NVIDIA X", "too old")
    with pytest.raises(ConfigError, match=named):
        check_fp8(recipe)


@pytest.mark.parametrize("question", sorted(set(QUESTIONS.values())))
def test_transformer_engine_has_the_questions(question: str) -> None:
    pytest.importorskip("transformer_engine")
    import transformer_engine.pytorch as te

    can_run, reason = getattr(te, question)(return_reason=True)
    assert isinstance(can_run, bool) and isinstance(reason, str)
    assert why_not(question) == reason or can_run


@pytest.mark.parametrize(
    ("fields", "recipe", "tp_size", "multiple", "matrix"),
    [
        ({}, "blockwise", 1, 0, ()),
        ({}, "blockwise", 2, 0, ()),
        ({}, "mxfp8", 1, 0, ()),
        ({}, "mxfp8", 2, 32, ("decoder.layers.{layer}.mlp.linear_fc2.weight", 64, 48)),
        ({"intermediate_size": 72}, "tensorwise", 1, 16, ("linear_fc2.weight", 64, 72)),
        ({"hidden_size": 72}, "tensorwise", 1, 16, ("linear_qkv.weight", 128, 72)),
        ({"head_dim": 10}, "tensorwise", 1, 16, ("linear_proj.weight", 64, 40)),
        (EXPERTS, "mxfp8", 1, 0, ()),
        (EXPERTS, "mxfp8", 2, 0, ()),
        ({**EXPERTS, "moe_intermediate_size": 48}, "tensorwise", 2, 0, ()),
        (
            {**EXPERTS, "moe_intermediate_size": 48},
            "mxfp8",
            1,
            32,
            ("local_experts.{expert}.linear_fc2.weight", 64, 48),
        ),
    ],
)
def test_matrices_that_fp8_cannot_multiply_are_refused(
    fields: dict[str, Any], recipe: Any, tp_size: int, multiple: int, matrix: tuple[Any, ...]
) -> None:
    """A router of three experts, and biases, are none."""
    model_type = "qwen3_moe" if "num_experts" in fields else "qwen2"
    hf_config = AutoConfig.for_model(model_type, **SIZES | fields)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp_size,
        expert_model_parallel_size=3 if tp_size > 1 and "num_experts" in fields else 1,
        sequence_parallel=tp_size > 1,
    )
    model = ModelConfig(hf_dir="unused", precision="fp8", fp8_recipe=recipe)
    settings = ("model.precision", "model.fp8_recipe", "parallel.tensor_model_parallel_size")
    named = mentions(*settings, "'fp8'", recipe, multiple, *matrix)
    refused = pytest.raises(ConfigError, match=named) if multiple else contextlib.nullcontext()
    with refused:
        check_shapes(hf_config, parallel, model)
    check_shapes(hf_config, parallel, ModelConfig(hf_dir="unused", precision="bf16"))


@pytest.mark.parametrize(
    ("precision", "recipe", "expected"),
    [
        ("bf16", "tensorwise", 1),
        ("fp8", "delayed", 16),
        ("fp8", "tensorwise", 16),
        ("fp8", "blockwise", 16),
        ("fp8", "mxfp8", 32),
    ],
)
def test_tokens_are_as_many_as_a_product_takes(
    precision: Literal["bf16", "fp8"], recipe: Any, expected: int
) -> None:
    config = ModelConfig(hf_dir="unused", precision=precision, fp8_recipe=recipe)
    assert fp8_multiple(config) == expected
    if precision == "fp8":
        assert get_fp8_align_size(recipe) == expected


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    with single_rank():
        yield initialize(ParallelConfig())
        destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", conversion_setup.ARCHITECTURES)
def test_every_weight_has_the_dtype_in_which_it_is_sent(
    name: str, precision: str, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_cuda_transformer_engine.py` has the same of Transformer Engine's layers."""
    monkeypatch.setattr(model, "PackedAttention", SinksInFloat32)
    hf_config = conversion_setup.hf_config(name)
    with cpu.device_scope():
        (stage,) = build_model(hf_config, groups, CPU, precision=precision)
    exported = exported_by(config_of({"model": {"precision": precision}}), hf_config, num_ranks=1)
    kept = set()
    for weight_name, weight in stage.named_weights():
        rule, _ = find_rule(stage.rules, weight_name)
        assert weight.dtype == exported.dtype_of(rule), weight_name
        if weight.dtype != exported.dtype:
            kept.add(rule.megatron.rpartition("layer}.")[2])
    is_sigmoid = name in ("glm4_moe", "deepseek_v3") and precision != "fp32"
    assert kept == ({"mlp.router.expert_bias"} if is_sigmoid else set())


def test_copies_in_fp8_are_given_back() -> None:
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.zeros(2)}  # type: ignore[assignment]
    free_fp8_copies(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(layer)))
    assert layer._fp8_workspaces == {}
