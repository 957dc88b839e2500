"""Which architecture has which table."""

from __future__ import annotations

from typing import Any

from gapo_megatron.convert import llama, qwen2
from gapo_megatron.convert.rules import Rule
from gapo_megatron.errors import ConfigError

_TABLES = {"qwen2": qwen2.rules, "llama": llama.rules}


def rules_for(hf_config: Any) -> list[Rule]:
    """The conversion table of a model.

    Args:
        hf_config: `transformers.PretrainedConfig`, or any object with its attributes.

    Raises:
        ConfigError: the architecture has no table.
    """
    if hf_config.model_type not in _TABLES:
        raise ConfigError(
            f"config.json: model_type {hf_config.model_type!r} is not supported; "
            f"supported are {', '.join(_TABLES)}"
        )
    return _TABLES[hf_config.model_type](hf_config)
