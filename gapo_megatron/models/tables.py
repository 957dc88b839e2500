"""The supported architectures, by config.json's `model_type`, and functions on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.deepseek_v3 import DEEPSEEK_V3
from gapo_megatron.models.gemma3_text import GEMMA3_TEXT
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.glm4_moe import GLM4_MOE
from gapo_megatron.models.gpt_oss import GPT_OSS
from gapo_megatron.models.llama import LLAMA
from gapo_megatron.models.mistral import MISTRAL
from gapo_megatron.models.olmo2 import OLMO2
from gapo_megatron.models.parts import refuse_set
from gapo_megatron.models.phi3 import PHI3
from gapo_megatron.models.quantization import check_quantization, quantization_of
from gapo_megatron.models.qwen2 import QWEN2
from gapo_megatron.models.qwen3 import QWEN3
from gapo_megatron.models.qwen3_moe import QWEN3_MOE
from gapo_megatron.models.rope import Rope
from gapo_megatron.models.rules import Rule
from gapo_megatron.models.seed_oss import SEED_OSS

ARCHITECTURES: dict[str, Architecture] = {
    one.model_type: one
    for one in (
        *(QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, PHI3),
        *(SEED_OSS, OLMO2, GEMMA3_TEXT, GLM4_MOE, GPT_OSS, DEEPSEEK_V3),
    )
}
"""All supported architectures, by model_type."""


def architecture_of(config: Any, *, source: str = "config.json") -> Architecture:
    """The architecture of a model.

    Args:
        config: config.json as `ModelFacts`, as transformers' `PretrainedConfig`, or any object with
            the same attributes.
        source: its name, for the error.

    Raises:
        ConfigError: the architecture is not supported.
    """
    if (found := ARCHITECTURES.get(config.model_type)) is None:
        raise ConfigError(
            f"{source}: model_type {config.model_type!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return found


def geometry_of(config: Any) -> Geometry:
    """Sizes and features of a model; see `architecture_of`."""
    return architecture_of(config).geometry(config)


def left_out_layers(config: Any) -> range:
    """Numbers of the layers in a model folder that are not part of the model.

    Args:
        config: config.json as `ModelFacts`.
    """
    field = architecture_of(config).left_out
    first = config.num_hidden_layers
    return range(first, first + getattr(config, field)) if field else range(0)


def left_out_field(fields: Mapping[str, Any]) -> str:
    """`Architecture.left_out` of a config.json; empty if its architecture has none."""
    architecture = ARCHITECTURES.get(str(fields.get("model_type")))
    return architecture.left_out if architecture else ""


def rope_of(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """Rotary settings of a model, if its architecture has them.

    Args:
        fields: the fields of config.json with its model_type, or `hf_config.to_dict()`.
        source: their origin, for errors.

    Raises:
        ConfigError: see `rope.read_rope`; or the architecture has no such rotary positions.
    """
    architecture = architecture_of(SimpleNamespace(model_type=fields["model_type"]), source=source)
    rope = architecture.read_rope(fields, source=source)
    if rope.kind not in architecture.rope_kinds:
        raise ConfigError(
            f"{source}: rope_type ({rope.kind!r}) is not supported for {architecture.model_type} "
            f"models: must be one of {', '.join(architecture.rope_kinds)}"
        )
    if rope.share != 1.0 and not architecture.partial_rotary:
        raise ConfigError(f"{source}: partial_rotary_factor ({rope.share}) must be 1: whole heads")
    return rope


def rules_for(config: Any) -> list[Rule]:
    """The conversion rules of a model: all its parameters, in the order of the model.

    Args:
        config: see `architecture_of`.

    Raises:
        ConfigError: the architecture, or one of its settings, is not supported.
    """
    architecture = architecture_of(config)
    if quantization_of(config) not in architecture.quantizations:
        refuse_set(config, "quantization_config")
    check_quantization(config)
    architecture.check(config)
    return architecture.rules(architecture.geometry(config))
