"""Requirements of fp8: recipes, the GPUs that run them, the sizes of matrices. Needs no torch.

`policy.precision` has what a run does with it.
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
    """Function of Transformer Engine's that says whether this GPU runs it, and why not."""
    capabilities: tuple[float, float]
    """Compute capabilities that it supports: from the first on, below the second."""
    multiple: int = 16
    """Tokens and both sides of a weight must be multiples of it: Megatron-core's
    `fp8_utils.get_fp8_align_size`."""


RECIPES = {
    "delayed": Recipe(
        # As is usual. Megatron-core's default is the last pass alone: a micro-batch without a
        # sequence would set the scales of the next one. Largest values are exchanged in backward
        # passes, so only among ranks that have them together: data parallel ranks do not.
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
    # Blocks are small enough for gradients in E4M3, which has a bit of precision more.
    "blockwise": Recipe({"fp8": "e4m3"}, "is_fp8_block_scaling_available", (9.0, math.inf)),
    "mxfp8": Recipe({"fp8": "e4m3"}, "is_mxfp8_available", (10.0, 12.0), multiple=32),
}
"""Recipes by `model.fp8_recipe`, one for each of its values."""


def check_capability(config: ModelConfig, capability: float, *, device: str) -> None:
    """Raise ConfigError if no such device runs the config's fp8: for plans, made without one.

    Args:
        config: has precision and recipe.
        capability: the device's compute capability, as NVIDIA writes it; 0: it has none.
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
    """Tokens of a rank and both sides of a weight must be multiples of it in an fp8 product.

    1 where there is none.
    """
    return RECIPES[config.fp8_recipe].multiple if config.precision == "fp8" else 1


def is_quantised(rule: Rule) -> bool:
    """A weight that fp8 multiplies by: of a layer's matrices all but the router."""
    return bool(rule.num_layers) and len(rule.full_shape) > 1 and ".router." not in rule.megatron


def check_fp8_shapes(rules: list[Rule], parallel: ParallelConfig, config: ModelConfig) -> None:
    """Raise ConfigError if a matrix of a rank is not of the sizes that `fp8_multiple` asks for."""
    multiple, tp_size = fp8_multiple(config), parallel.tensor_model_parallel_size
    for rule in filter(is_quantised, rules):
        shape = rule.shard_shape(1 if rule.num_experts else tp_size)
        if any(size % multiple for size in shape):
            raise ConfigError(
                f"model.precision ('fp8') with model.fp8_recipe ('{config.fp8_recipe}') takes "
                f"multiples of {multiple}: at parallel.tensor_model_parallel_size ({tp_size}) a "
                f"rank's {rule.megatron} is {' x '.join(map(str, shape))}"
            )
