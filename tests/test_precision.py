"""Number formats: what Megatron-core is told, and what is refused before anything is built."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.policy.model import transformer_config
from gapo_megatron.policy.precision import (
    check_fp8,
    check_head,
    fp8_settings,
    precision_settings,
    token_multiple,
)
from tests.distributed.policy_setup import save_model

RECIPES = get_args(ModelConfig.model_fields["fp8_recipe"].annotation)
CPU = torch.device("cpu")
ONE_RANK = SimpleNamespace(tp_size=1, pp_size=1, vpp_size=1, cp_size=1, ep_size=1)
GPUS = {  # what Transformer Engine 2.20 answers for compute capability and CUDA
    "NVIDIA A100": (False, False, False),
    "NVIDIA L40S": (True, False, False),
    "NVIDIA H200": (True, True, False),
    "NVIDIA B200": (True, True, True),
}
QUESTIONS = ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available")


def megatron_config(folder: Path, number_format: dict[str, Any]) -> TransformerConfig:
    return transformer_config(
        AutoConfig.from_pretrained(folder),
        ONE_RANK,  # type: ignore[arg-type]
        CPU,
        number_format=number_format,
        recompute="none",
        parallel=ParallelConfig(),
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends to be a machine with a GPU and a Transformer Engine that knows it."""

    def pretend(gpu: str) -> None:
        answers = {
            question: lambda can_run=can_run, question=question: (can_run, f"{question}: no")
            for question, can_run in zip(QUESTIONS, GPUS[gpu], strict=True)
        }
        for name in ("", ".pytorch", ".pytorch.fp8"):
            module = ModuleType(f"transformer_engine{name}")
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        module.FP8GlobalStateManager = SimpleNamespace(**answers)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)

    return pretend


def test_recipes_are_megatron_cores() -> None:
    """All of its names, but for recipes that come as a Python path."""
    theirs = get_type_hints(TransformerConfig)["fp8_recipe"]
    names = {name for kind in get_args(theirs) for name in get_args(kind)}
    assert names == {*RECIPES, "custom"}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("delayed", ("hybrid", 1024, "max")),
        ("tensorwise", ("hybrid", 1, "most_recent")),  # the other two are Megatron-core's own
        ("blockwise", ("e4m3", 1, "most_recent")),
        ("mxfp8", ("e4m3", 1, "most_recent")),
    ],
)
def test_megatron_core_takes_every_recipe(
    tmp_path: Path, on_gpu: Any, recipe: str, expected: tuple[str, int, str]
) -> None:
    save_model(tmp_path, "qwen2_untied")
    on_gpu("NVIDIA B200")
    number_format = precision_settings("fp8", fp8_recipe=recipe)
    assert number_format == precision_settings("bf16", fp8_recipe=recipe) | fp8_settings(recipe)
    config = megatron_config(tmp_path, number_format)
    assert config.fp8_recipe == recipe
    found = (config.fp8, config.fp8_amax_history_len, config.fp8_amax_compute_algo)
    assert found == expected
    # Weights and what flows between the layers stay bf16, attention is not quantised.
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert not config.fp8_param and not config.fp8_dot_product_attention


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_without_fp8_there_is_no_recipe(tmp_path: Path, precision: str) -> None:
    save_model(tmp_path, "qwen2_untied")
    number_format = precision_settings(precision, fp8_recipe="tensorwise")
    assert not any(name.startswith("fp8") for name in number_format)
    assert megatron_config(tmp_path, number_format).fp8 is None


def test_fp8_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in RECIPES:
        with pytest.raises(ConfigError, match=r"model\.precision \('fp8'\) needs a GPU and"):
            check_fp8(recipe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Transformer Engine"):
        check_fp8("tensorwise")


@pytest.mark.parametrize("gpu", GPUS)
def test_what_a_gpu_cannot_do_is_refused_with_its_reason(on_gpu: Any, gpu: str) -> None:
    on_gpu(gpu)
    asked = {"delayed": 0, "tensorwise": 0, "blockwise": 1, "mxfp8": 2}
    assert set(asked) == set(RECIPES)
    for recipe, question in asked.items():
        config = ModelConfig(hf_dir="unused", precision="fp8", fp8_recipe=recipe)
        if GPUS[gpu][question]:
            check_head(config, CPU)
            continue
        with pytest.raises(ConfigError) as caught:
            check_head(config, CPU)
        assert str(caught.value) == (
            f"model.precision ('fp8') with model.fp8_recipe ('{recipe}') does not run on {gpu}: "
            f"{QUESTIONS[question]}: no"
        )


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
    assert token_multiple(config) == expected
