"""Number formats: parameters, activations, and what Megatron-core calls them."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size

from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.convert import Rule
from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import choose_implementation


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What Megatron-core makes of a `model.fp8_recipe`, and what that takes."""

    settings: dict[str, Any]
    """TransformerConfig fields. `hybrid`: E4M3 forward, E5M2 gradients."""
    question: str
    """Method of Transformer Engine's that says whether this GPU runs it, and why not."""
    capabilities: tuple[float, float]
    """What it then asks for: a compute capability of the first or more, and below the second."""


_RECIPES = {
    "delayed": _Recipe(
        # As is usual. Megatron-core's default is the last pass alone: a micro-batch without a
        # sequence would set the scales of the next one. Largest values are exchanged in backward
        # passes, so only among ranks that go back together: data parallel ranks do not.
        {
            "fp8": "hybrid",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
            "tp_only_amax_red": True,
        },
        "is_fp8_available",
        (8.9, math.inf),
    ),
    "tensorwise": _Recipe({"fp8": "hybrid"}, "is_fp8_available", (8.9, math.inf)),
    # Blocks are small enough for gradients in E4M3, which has a bit of precision more.
    "blockwise": _Recipe({"fp8": "e4m3"}, "is_fp8_block_scaling_available", (9.0, math.inf)),
    "mxfp8": _Recipe({"fp8": "e4m3"}, "is_mxfp8_available", (10.0, 12.0)),
}
RECIPES = tuple(_RECIPES)
"""All values of `model.fp8_recipe`."""


def precision_settings(precision: str, *, fp8_recipe: str) -> dict[str, Any]:
    """TransformerConfig fields of `model.precision` and `model.fp8_recipe`.

    bf16 and fp8 hold bf16 parameters beside fp32 master weights in the optimizer, and sum
    gradients in fp32; fp8 runs the layers' matrix products in Transformer Engine, which quantises
    both factors for each. The head is apart: it accumulates logits in fp32 always.

    Whether this machine runs it is not asked: see `check_fp8`.
    """
    if precision == "fp32":
        return {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    if precision == "bf16":
        return settings
    return settings | {"fp8_recipe": fp8_recipe} | _RECIPES[fp8_recipe].settings


def check_fp8(fp8_recipe: str) -> None:
    """Ask Transformer Engine whether it runs fp8 by this recipe here.

    Raises:
        ConfigError: no GPU, no Transformer Engine, or a GPU or CUDA that cannot.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "model.precision ('fp8') needs a GPU and Transformer Engine; use 'bf16' or 'fp32' here"
        )
    # Where Megatron-core, too, looks for it.
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    can_run, reason = getattr(FP8GlobalStateManager, _RECIPES[fp8_recipe].question)()
    if not can_run:
        raise ConfigError(
            f"model.precision ('fp8') with model.fp8_recipe ('{fp8_recipe}') does not run on "
            f"{torch.cuda.get_device_name()}: {reason}"
        )


def check_capability(config: ModelConfig, capability: float, *, device: str) -> None:
    """Raise ConfigError if no such device runs the config's fp8: for plans, made without one.

    Args:
        config: has precision and recipe.
        capability: the device's compute capability, as NVIDIA writes it; 0: it has none.
        device: its name.
    """
    least, below = _RECIPES[config.fp8_recipe].capabilities
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
    multiple: int = get_fp8_align_size(config.fp8_recipe) if config.precision == "fp8" else 1
    return multiple


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


def free_fp8_copies(model: torch.nn.Module) -> None:
    """Give back the copies of weights that Transformer Engine keeps in fp8.

    It makes them in the first micro-batch of a pass, again in every pass.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def check_head(config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError if `model.head` names code that does not serve this device."""
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    try:
        choose_implementation(device, dtype, config.head)
    except ValueError as error:
        raise ConfigError(f"model.head ('{config.head}'): {error}") from None
