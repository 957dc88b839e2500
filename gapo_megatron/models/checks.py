"""Check that this package supports a model and its parallel sizes. Imports no torch.

A model is given by its config.json: `models.config_json.ModelFacts`, transformers'
`PretrainedConfig`, or any object with the same attributes.
"""

from __future__ import annotations

from typing import Any

from gapo_megatron.config import ModelConfig, ObjectiveConfig, ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.fp8 import check_fp8_shapes
from gapo_megatron.models.parts import EXPERTS
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of, rules_for

MOST_ENGINE_EXPERTS = 256
"""Experts per layer that `rollout.engine.Completion.routes` can name: uint8."""


def num_experts(hf_config: Any) -> int | None:
    """Experts per layer; None for a dense model, even if its config.json has such a field."""
    return geometry_of(hf_config).num_experts or None


def check_shapes(
    hf_config: Any, parallel: ParallelConfig, model: ModelConfig | None = None
) -> None:
    """Refuse a model that this package does not compute, or that the parallel sizes do not divide.

    Args:
        hf_config: the model's Hugging Face config.
        parallel: the parallel sizes.
        model: also check its precision: fp8 needs certain matrix sizes and excludes some
            recomputation; windows exclude context parallelism in 16 bits. None: neither.

    Raises:
        ConfigError: names the field and its value, and for sizes both numbers.
    """
    # Sizes that are cut must be multiples of the parallel sizes.
    tp, ep = "tensor_model_parallel_size", "expert_model_parallel_size"
    g = geometry_of(hf_config)
    cuts = [
        ("num_attention_heads", g.heads, tp),
        ("num_key_value_heads", g.kv_heads, tp),
        (EXPERTS[g.sigmoid_router], g.num_experts, ep),
        ("intermediate_size", 0 if all(g.has_experts) else g.intermediate, tp),
        ("moe_intermediate_size x n_shared_experts", g.shared_intermediate, tp),
    ]
    for field, value, where in cuts:
        size = getattr(parallel, where)
        if value % size:
            raise ConfigError(
                f"parallel.{where} ({size}) must divide the model's {field} ({value})"
            )
    layers_of_stages(parallel, hf_config.num_hidden_layers)
    # Features that the model in Megatron-core does not have, or not in this layout.
    architecture_of(hf_config).check_computed(hf_config)
    rope_of(hf_config.to_dict())
    if num_experts(hf_config):
        _check_experts(parallel)
    elif parallel.expert_model_parallel_size > 1:
        raise ConfigError(
            f"parallel.{ep} ({parallel.expert_model_parallel_size}) must be 1: "
            f"the model ({hf_config.model_type}) has no experts"
        )
    if model is not None:
        _check_fp8_layers(hf_config, model)
        check_fp8_shapes(rules_for(hf_config), parallel, model)
        _check_recompute(hf_config, model)
        _check_window(hf_config, parallel, model)


def check_replay(hf_config: Any, objective: ObjectiveConfig) -> None:
    """Raise ConfigError if `objective.routing_replay` has no experts to replay, or too many."""
    count, field = num_experts(hf_config), "objective.routing_replay"
    if objective.routing_replay is not None and not count:
        raise ConfigError(
            f"{field} ({objective.routing_replay!r}) does nothing: the model "
            f"({hf_config.model_type}) has no experts"
        )
    if objective.replayed_routes == "rollout" and count and count > MOST_ENGINE_EXPERTS:
        raise ConfigError(
            f"{field} ('rollout') supports at most {MOST_ENGINE_EXPERTS} experts per layer, but "
            f"the model ({hf_config.model_type}) has {count}: routes of the engine have 8 bits"
        )


def _check_recompute(hf_config: Any, model: ModelConfig) -> None:
    """Refuse what Megatron-core refuses: a recomputed input would get another input's scale."""
    if (
        num_experts(hf_config)
        and (model.precision, model.fp8_recipe) == ("fp8", "delayed")
        and model.recompute == "selective"
    ):
        raise ConfigError(
            f"model.recompute ({model.recompute!r}) of a model with experts does not support "
            f"model.fp8_recipe ({model.fp8_recipe!r}): use another recipe, or 'full' or 'none'"
        )


def _check_fp8_layers(hf_config: Any, model: ModelConfig) -> None:
    if model.precision == "fp8" and not architecture_of(hf_config).megatron_layers:
        raise ConfigError(
            f"model.precision ('fp8') is not supported for {hf_config.model_type} models: their "
            "layers are not Transformer Engine's"
        )


def _check_window(hf_config: Any, parallel: ParallelConfig, model: ModelConfig) -> None:
    """Refuse what Transformer Engine's ring of keys and values does not compute: windows.

    Nor has it sinks (NVIDIA/TransformerEngine#2541, #3551, open); models with sinks have windows.
    """
    window, size = geometry_of(hf_config).window, parallel.context_parallel_size
    has_ring = model.precision != "fp32" and architecture_of(hf_config).megatron_layers
    if window and size > 1 and has_ring:
        raise ConfigError(
            f"parallel.context_parallel_size ({size}) must be 1 at model.precision "
            f"({model.precision!r}) for a model with a sliding_window ({window})"
        )


def check_engine_heads(hf_config: Any, size: int) -> None:
    """Raise ConfigError unless `rollout.tensor_parallel_size` divides the model's heads."""
    if hf_config.num_attention_heads % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({size}) must divide the model's num_attention_heads "
            f"({hf_config.num_attention_heads})"
        )


def check_positions(hf_config: Any, max_sequence_tokens: int) -> None:
    """Refuse sequences that are longer than vLLM's table of rotary positions.

    With YaRN the table has factor x original_max_position_embeddings rows; with other kinds as
    many as are needed.

    Raises:
        ConfigError: names the settings, their sum, and the number of positions.
    """
    rope = rope_of(hf_config.to_dict())
    if rope.kind != "yarn":
        return
    positions = int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"])
    if max_sequence_tokens > positions:
        raise ConfigError(
            "data.max_prompt_tokens + rollout.max_response_tokens "
            f"({max_sequence_tokens}) must be at most {positions}, the model's factor x "
            "original_max_position_embeddings (YaRN): vLLM has no rotary positions beyond"
        )


def _check_experts(parallel: ParallelConfig) -> None:
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel:
        # Every tensor parallel rank would send all tokens to the experts, instead of its part.
        raise ConfigError(
            f"parallel.sequence_parallel must be true for a model with experts at "
            f"parallel.tensor_model_parallel_size ({tp}) > 1"
        )
