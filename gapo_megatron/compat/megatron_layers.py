"""Layers of Megatron-core's model: its own specs, with our modules or Transformer Engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from gapo_megatron.compat.megatron_latent import PackedLatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModules:
    """Our classes of a layer without Transformer Engine; Megatron-core builds them."""

    # Uses: what `local_layers` uses, with these arguments of each constructor
    # Versions: megatron-core 0.19.2
    # Upstream: as of `local_layers`

    norm: type
    """Norm of hidden states."""
    attention: type
    query_norm: type
    key_norm: type
    has_input_norms: bool
    """Whether `norm` precedes attention and MLP."""
    latent_attention: type | None
    """In place of query, key and value projections and their norms."""
    normed_add: type | None
    """Residual addition behind attention and MLP, made from the TransformerConfig; None:
    Megatron-core's own."""


def transformer_engine_layers(
    config: TransformerConfig, has_experts: Sequence[bool]
) -> TransformerBlockSubmodules:
    """Transformer Engine's layers; `has_experts`: of each of a stage."""
    # Uses: get_gpt_layer_with_transformer_engine_spec, transformer_block.LayerNormImpl
    # Versions: megatron-core 0.19.2
    # Upstream: none found (get_gpt_decoder_block_spec counts the stage's layers by itself)
    specs = {
        has: gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if has else None,
            moe_grouped_gemm=config.moe_grouped_gemm and has,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        for has in set(has_experts)
    }
    if config.multi_latent_attention:
        for layer in specs.values():
            layer.submodules.self_attention.module = PackedLatentAttention
    return TransformerBlockSubmodules([specs[has] for has in has_experts], LayerNormImpl)


def local_layers(
    config: TransformerConfig, has_experts: Sequence[bool], modules: LayerModules
) -> TransformerBlockSubmodules:
    """Layers without Transformer Engine, of our modules; `has_experts`: of each of a stage."""
    # Uses: the submodules of the local layer spec, and their sharded_state_dict_keys_map
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#1448 (open: WrappedTorchNorm and sequence parallelism)
    specs = {has: _local_layer(config, has, modules) for has in set(has_experts)}
    return TransformerBlockSubmodules([specs[has] for has in has_experts], modules.norm)


def _local_layer(config: TransformerConfig, has_experts: bool, modules: LayerModules) -> ModuleSpec:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    input_norm = modules.norm if modules.has_input_norms else IdentityOp
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = input_norm
    if modules.normed_add is not None:
        add = ModuleSpec(module=modules.normed_add, params={"config": config})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    if modules.latent_attention is not None:
        layer.submodules.self_attention = ModuleSpec(module=modules.latent_attention)
        layer.submodules.sharded_state_dict_keys_map = {
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    else:
        parts = layer.submodules.self_attention.submodules
        parts.core_attention = modules.attention
        if config.qk_layernorm:
            parts.q_layernorm, parts.k_layernorm = modules.query_norm, modules.key_norm
    if has_experts:
        # On disk the norm keeps the name of Transformer Engine's layer, in which it is part of the
        # next linear only if a single linear follows.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer
