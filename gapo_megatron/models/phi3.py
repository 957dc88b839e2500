"""Phi-3 and Phi-4 (text): query, key and value in one tensor, gate and up projection in another.

The 4k versions of Phi-3 attend within a sliding window in every layer. Versions with rope_type
"longrope" (128k, Phi-3.5, Phi-4-mini) are refused, see `rope`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gapo_megatron.models import llama, parts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.rules import Rule, concatenate

if TYPE_CHECKING:
    from torch import Tensor


def _geometry(config: Any) -> Geometry:
    window = config.sliding_window or 0
    windowed = (True,) * config.num_hidden_layers if window else ()
    return Geometry.of(config, window=window, windowed=windowed)


def _rules(g: Geometry) -> list[Rule]:
    return [_on_disk(rule) for rule in parts.decoder(g)]


def _on_disk(rule: Rule) -> Rule:
    """The rule with one Hugging Face tensor, whose rows are those of the decoder's, in order."""
    if len(rule.hf) == 1:
        return rule
    rows = [shape[0] for shape in rule.hf_shapes]
    fused = "self_attn.qkv_proj" if len(rule.hf) == 3 else "mlp.gate_up_proj"

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return rule.join(tensors[0].split(rows))

    def part(full: Tensor) -> tuple[Tensor, ...]:
        return (concatenate(rule.part(full)),)

    return replace(
        rule,
        hf=(f"model.layers.{{layer}}.{fused}.weight",),
        hf_shapes=((sum(rows), *rule.hf_shapes[0][1:]),),
        join=join,
        part=part,
    )


PHI3 = Architecture(
    model_type="phi3",
    hf_class="Phi3ForCausalLM",
    published={
        "Phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
        "phi-4": "microsoft/phi-4",
    },
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    fields={"sliding_window": ("null or a whole number of 1 or more", parts.COUNT[1])},
    refused_fields=llama.VLLM_BIASES
    | {"layer_types": "transformers has the window in every layer, vLLM by this list"},
    rope_kinds=("default",),
    partial_rotary=True,
    geometry=_geometry,
    rules=_rules,
    check=lambda config: parts.refuse_set(config, "attention_bias", "mlp_bias"),
    check_computed=partial(parts.check_computed, windows=True),
)
