"""OLMo 2: norms behind attention and MLP, none before; those of queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from gapo_megatron.models import llama
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import refuse_set


def _geometry(config: Any) -> Geometry:
    return Geometry.of(config, input_norms=False, output_norms=True, joint_head_norms=True)


OLMO2 = Architecture(
    model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    published={
        "OLMo-2-0425-1B": "allenai/OLMo-2-0425-1B",
        "OLMo-2-1124-7B": "allenai/OLMo-2-1124-7B",
    },
    defaults=llama.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
    rotates_in_float32=True,
    megatron_layers=False,
    geometry=_geometry,
    check=lambda config: refuse_set(config, "attention_bias"),
)
