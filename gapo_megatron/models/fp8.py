"""Requirements of fp8: recipes, GPUs and matrix sizes. Imports no torch.

`policy.precision` applies the recipes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Rule


@dataclass(frozen=True, slots=True)
class Recipe:
    """Megatron-core's settings for a `model.fp8_recipe`, and their requirements."""

    settings: dict[str, Any]
    """TransformerConfig fields. `hybrid`: E4M3 forward, E5M2 gradients."""
    question: str
    """Transformer Engine's function that tells whether this GPU supports it, and why not."""
    capabilities: tuple[float, float]
    """Supported compute capabilities: at least the first, below the second."""
    multiple: int = 16
    """Divides the number of tokens and both sizes of a weight; as in Megatron-core's
    `fp8_utils.get_fp8_align_size`."""


RECIPES = {
    "delayed": Recipe(
        # The usual history. Megatron-core's default is a single pass, so an empty micro-batch
        # would set the scales of the next one. Maxima are exchanged in backward passes, so only
        # among tensor parallel ranks: data parallel ranks may skip different passes.
        {
            "fp8": "hybrid",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
            "tp_only_amax_red": True,
        },
        "is_fp8_available",
        (8.9, math.inf),
    ),
    "tensorwise": Recipe({"fp8": "hybrid"}, "is_fp8_available", (8.9, math.inf)),
    # Blocks are small enough for gradients in E4M3, which is more precise by a bit.
    "blockwise": Recipe({"fp8": "e4m3"}, "is_fp8_block_scaling_available", (9.0, math.inf)),
    "mxfp8": Recipe({"fp8": "e4m3"}, "is_mxfp8_available", (10.0, 12.0), multiple=32),
}
"""Recipes by the value of `model.fp8_recipe`."""


def check_capability(config: ModelConfig, capability: float, *, device: str) -> None:
    """Raise ConfigError if a device does not support the config's fp8; for plans without a GPU.

    Args:
        config: with precision and recipe.
        capability: the device's compute capability in NVIDIA's notation; 0: none.
        device: its name.
    """
    least, below = RECIPES[config.fp8_recipe].capabilities
    if config.precision == "fp8" and not least <= capability < below:
        limit = f" and below {below}" if below < math.inf else ""
        raise ConfigError(
            f"model.fp8_recipe ('{config.fp8_recipe}') needs a GPU of compute capability {least} "
            f"or more{limit}: {device} has {capability or 'none'}"
        )


def fp8_multiple(config: ModelConfig) -> int:
    """Divisor of a rank's tokens and of both sizes of a weight in an fp8 product; 1 without fp8."""
    return RECIPES[config.fp8_recipe].multiple if config.precision == "fp8" else 1


def is_quantised(rule: Rule) -> bool:
    """Whether fp8 quantises a weight: all matrices of layers but the router."""
    return bool(rule.num_layers) and len(rule.full_shape) > 1 and ".router." not in rule.megatron


def check_fp8_shapes(rules: list[Rule], parallel: ParallelConfig, config: ModelConfig) -> None:
    """Raise ConfigError unless `fp8_multiple` divides the sizes of every matrix on a rank."""
    multiple, tp_size = fp8_multiple(config), parallel.tensor_model_parallel_size
    for rule in filter(is_quantised, rules):
        shape = rule.shard_shape(1 if rule.num_experts else tp_size)
        if any(size % multiple for size in shape):
            raise ConfigError(
                f"model.precision ('fp8') with model.fp8_recipe ('{config.fp8_recipe}') needs "
                f"multiples of {multiple}: at parallel.tensor_model_parallel_size ({tp_size}) "
                f"a rank's {rule.megatron} is {' x '.join(map(str, shape))}"
            )
