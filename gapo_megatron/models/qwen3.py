"""Qwen3: no biases; a norm over every query and key head."""

from __future__ import annotations

from typing import Any

from gapo_megatron.models import qwen2
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import refuse_set


def _check(config: Any) -> None:
    refuse_set(config, "attention_bias")


QWEN3 = Architecture(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    defaults=qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False},
    nullable=("num_key_value_heads",),
    complete=qwen2.complete,
    geometry=lambda config: Geometry.of(config, head_norms=True),
    check=_check,
)
