"""The supported architectures, by config.json's `model_type`, and functions on all of them."""

from __future__ import annotations

from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.llama import LLAMA
from gapo_megatron.models.mistral import MISTRAL
from gapo_megatron.models.parts import Geometry, refuse_set
from gapo_megatron.models.qwen2 import QWEN2
from gapo_megatron.models.qwen3 import QWEN3
from gapo_megatron.models.qwen3_moe import QWEN3_MOE
from gapo_megatron.models.rules import Rule

ARCHITECTURES: dict[str, Architecture] = {
    one.model_type: one for one in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)
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


def rules_for(config: Any) -> list[Rule]:
    """The conversion rules of a model: all its parameters, in the order of the model.

    Args:
        config: see `architecture_of`.

    Raises:
        ConfigError: the architecture, or one of its settings, is not supported.
    """
    architecture = architecture_of(config)
    refuse_set(config, "quantization_config")
    architecture.check(config)
    return architecture.rules(architecture.geometry(config))
