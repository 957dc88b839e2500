"""How a folder stores weights (`quantization_config`); `formats.quantized` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.errors import ConfigError

MXFP4, FP8 = "mxfp4", "fp8"
"""Values of quant_method that are read; `Architecture.quantizations` says for which models."""


def quantization_of(config: Any) -> str | None:
    """The quant_method of a model's weights on disk; None if it states none.

    Args:
        config: config.json as `ModelFacts`, or as transformers' `PretrainedConfig`.
    """
    method = _stated(config).get("quant_method")
    return getattr(method, "value", method)


def block_size(config: Any) -> tuple[int, int]:
    """Rows and columns of a weight in FP8 that have one scale; see `check_quantization`."""
    rows, columns = _stated(config)["weight_block_size"]
    return rows, columns


def check_quantization(config: Any) -> None:
    """Refuse a kind of FP8 that is not read.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    if quantization_of(config) != FP8:
        return
    stated = _stated(config)
    for field, rule in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if (value := stated.get(field, rule)) != rule:
            raise ConfigError(
                f"config.json: {field} ({value!a:.80}) of quantization_config must be {rule!r}"
            )
    size = stated.get("weight_block_size")
    sizes = size if isinstance(size, list | tuple) else ()
    if len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise ConfigError(
            f"config.json: weight_block_size ({size!a:.80}) of quantization_config must be two "
            "whole numbers of 1 or more, the rows and columns of a weight that have one scale"
        )


def _stated(config: Any) -> Mapping[str, Any]:
    stated = getattr(config, "quantization_config", None)
    # transformers has an object of its own.
    return stated if isinstance(stated, Mapping) else getattr(stated, "__dict__", {})
