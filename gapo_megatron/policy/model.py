"""Build the Megatron-core model of a Hugging Face config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat.megatron import (
    HiddenStatesModel,
    combine_experts_in_order,
    fill_gaps,
    leave_undefined,
    local_layers,
    set_rotary_frequencies,
    share_rotary_tables,
)
from gapo_megatron.compat.transformer_engine import (
    forbid_unfused_attention,
    fuse_weight_gradients,
    is_installed,
)
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import ConfigError
from gapo_megatron.hf.config_check import read_config
from gapo_megatron.models.rope import read_rope
from gapo_megatron.models.tables import architecture_of, geometry_of, rules_for
from gapo_megatron.policy.attention import PackedAttention, RMSNorm, pack_sequences
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import precision_settings
from gapo_megatron.types import Microbatch


def read_hf_config(hf_dir: str) -> PretrainedConfig:
    """Read config.json of `model.hf_dir`.

    Raises:
        ConfigError: see `hf.config_check.read_config`.
    """
    try:
        return read_config(Path(hf_dir))
    except ConfigError as error:
        raise ConfigError(f"model.hf_dir ({hf_dir}): {error}") from None


def build_model(
    hf_config: PretrainedConfig,
    groups: ParallelGroups,
    device: torch.device,
    *,
    precision: str,
    fp8_recipe: str = "",
    recompute: str = "none",
    parallel: ParallelConfig | None = None,
) -> list[PolicyModel]:
    """Build this rank's virtual stages, with undefined weights.

    Call it within `compat.cpu.device_scope()`.

    Args:
        hf_config: the model's Hugging Face config.
        groups: this rank's parallel groups.
        device: device of the parameters.
        precision: `model.precision`.
        fp8_recipe: `model.fp8_recipe`; used with fp8 only.
        recompute: `model.recompute`.
        parallel: settings of stages and sequence parallelism; None: one stage.
    """
    parallel = parallel or ParallelConfig()
    config = transformer_config(
        hf_config,
        groups,
        device,
        number_format=precision_settings(precision, fp8_recipe=fp8_recipe),
        recompute=recompute,
        parallel=parallel,
    )
    fill_gaps()
    # Megatron-core requires a seed; nothing is drawn, since weights are loaded without dropout.
    model_parallel_cuda_manual_seed(0)
    mine = layers_of_stages(parallel, hf_config.num_hidden_layers)[groups.pp_rank]
    return [
        PolicyModel(config, hf_config, groups, device, virtual_stage=i, num_layers=len(layers))
        for i, layers in enumerate(mine)
    ]


def transformer_config(
    hf_config: PretrainedConfig,
    groups: ParallelGroups,
    device: torch.device,
    *,
    number_format: dict[str, Any],
    recompute: str,
    parallel: ParallelConfig,
) -> TransformerConfig:
    """Megatron-core's config: fields of architecture, layout, precision and recomputation."""
    architecture = architecture_of(hf_config)
    geometry = architecture.geometry(hf_config)
    fused = has_transformer_engine(device, number_format["params_dtype"])
    settings = {
        **architecture.transformer_fields(hf_config, geometry),
        **_layout_settings(groups, parallel),
        **number_format,
        **_recompute_settings(recompute, fused=fused, has_experts=geometry.num_experts > 0),
        **(_expert_settings(fused=fused) if geometry.num_experts else {}),
    }
    return TransformerConfig(
        **settings,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Our losses are divided by global denominators: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # Every weight is loaded; nothing is drawn.
        init_method=leave_undefined,
        output_layer_init_method=leave_undefined,
        embedding_init_method=leave_undefined,
        gradient_accumulation_fusion=False,  # see `fuse_weight_gradients`
        masked_softmax_fusion=False,
        bias_activation_fusion=fused,
        persist_layer_norm=fused,
        apply_rope_fusion=fused,
    )


def _layout_settings(groups: ParallelGroups, parallel: ParallelConfig) -> dict[str, Any]:
    """TransformerConfig fields of the parallel sizes and the pipeline communication."""
    return {
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "virtual_pipeline_model_parallel_size": groups.vpp_size if groups.vpp_size > 1 else None,
        # With virtual stages and two ranks, each is both neighbours of the other, and batched
        # messages would be mixed up; overlapped ones also do not delay the computation.
        "overlap_p2p_comm": groups.vpp_size > 1,
        "batch_p2p_comm": groups.vpp_size == 1,
        # Only needed by versions of PyTorch that could reorder batched messages.
        "batch_p2p_sync": False,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "context_parallel_size": groups.cp_size,
        "expert_model_parallel_size": groups.ep_size,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel,
        # For micro-batches of different lengths Megatron-core requires this dispatcher, even dense.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _recompute_settings(recompute: str, *, fused: bool, has_experts: bool) -> dict[str, Any]:
    """TransformerConfig fields of `model.recompute`; `fused`: with Transformer Engine."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if not fused:
        modules = ["core_attn"]  # it stores a matrix of scores, and Transformer Engine's does not
    elif has_experts:
        # Recomputing the MLP would dispatch every token again. These take only elementwise kernels,
        # and free the input of the experts' second product (a third of the inner widths) and the
        # norm's output.
        modules = ["layernorm", "moe_act"]
    else:
        # The MLP stores most: twice its inner width after the first product, once after the
        # activation, and the norm's output. Recomputing it stores only [T, H].
        modules = ["mlp"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _expert_settings(*, fused: bool) -> dict[str, Any]:
    """TransformerConfig fields of experts; `fused`: with Transformer Engine."""
    return {
        "moe_router_dtype": "fp32",
        # No balancing loss: only the objective trains the weights.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,  # one kernel for all experts of a rank
        # Transformer Engine sums a token's experts in order, in fp32. Megatron-core's own kernel
        # uses atomics in bf16: see `combine_experts_in_order`.
        "moe_permute_fusion": fused,
    }


def has_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to use Transformer Engine's layers: if it is installed, on a GPU, in 16 bits.

    It has no fp32 attention for packed sequences.
    """
    return device.type == "cuda" and dtype.itemsize == 2 and is_installed()


class PolicyModel(HiddenStatesModel):
    """One virtual stage of the policy; the last returns hidden states for our own output layer."""

    def __init__(
        self,
        config: TransformerConfig,
        hf_config: PretrainedConfig,
        groups: ParallelGroups,
        device: torch.device,
        *,
        virtual_stage: int,
        num_layers: int,
    ) -> None:
        self.uses_transformer_engine = has_transformer_engine(device, config.params_dtype)
        self.hf_config = hf_config
        self.rules = rules_for(hf_config)
        self.unpadded_vocab_size = vocab_size = hf_config.vocab_size
        super().__init__(
            config=config,
            transformer_layer_spec=_layer_spec(
                config, num_layers, transformer_engine=self.uses_transformer_engine
            ),
            vocab_size=vocab_size + -vocab_size % groups.tp_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=groups.is_first_stage and virtual_stage == 0,
            post_process=groups.is_last_stage and virtual_stage == groups.vpp_size - 1,
            vp_stage=virtual_stage if groups.vpp_size > 1 else None,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            # Without Transformer Engine, `PackedAttention` rotates.
            position_embedding_type="rope" if self.uses_transformer_engine else "none",
        )
        self.inverse_frequencies = inverse_frequencies(hf_config).to(device)
        if self.uses_transformer_engine:
            set_rotary_frequencies(self, self.inverse_frequencies)
            fuse_weight_gradients(self)
            share_rotary_tables(self.rotary_pos_emb)
        else:
            combine_experts_in_order(self)
        self.to(device)

    def choose_attention(self) -> None:
        """Let Transformer Engine choose flash or fused attention, but not unfused attention.

        Unfused attention needs memory for every pair of tokens, and would be the fallback where the
        others do not support the inputs; an error is better. Megatron-core's own method allows all
        three, and rejects an environment that does not.
        """
        if self.uses_transformer_engine:
            forbid_unfused_attention()

    @property
    def head_weight(self) -> Tensor:
        """Output layer [padded vocabulary / tp, H] of the last stage; the embedding if tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set this rank's rows of vocabulary padding to zero."""
        for name, parameter in self.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                first_row = self.tp_group.rank() * len(parameter)
                parameter[max(self.unpadded_vocab_size - first_row, 0) :].zero_()

    def packing(self, microbatch: Microbatch) -> PackedSeqParams:
        """The layout of a micro-batch, in the form that this model's attention expects."""
        if self.uses_transformer_engine:
            return PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=microbatch.cu_seqlens,
                cu_seqlens_kv=microbatch.cu_seqlens,
                max_seqlen_q=microbatch.max_seqlen,
                max_seqlen_kv=microbatch.max_seqlen,
            )
        return pack_sequences(
            microbatch.cu_seqlens,
            max_seqlen=microbatch.max_seqlen,
            position_ids=microbatch.position_ids,
            inverse_frequencies=self.inverse_frequencies,
            dtype=self.config.params_dtype,
            cp_group=self.cp_group,
        )


def _layer_spec(
    config: TransformerConfig, num_layers: int, *, transformer_engine: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    return local_layers(config, num_layers, norm=RMSNorm, attention=PackedAttention)


def inverse_frequencies(hf_config: PretrainedConfig) -> Tensor:
    """Rotary frequencies [head_dim / 2] float32, with Llama 3's scaling if the model has it.

    Megatron-core's own version of the scaling has fixed wavelength limits.

    Raises:
        ConfigError: the model has another kind of rope scaling.
    """
    rope = read_rope(hf_config.to_dict())
    head_dim = geometry_of(hf_config).head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.base**exponents)
    if rope.kind == "default":
        return frequencies
    factor, low, high = (rope.scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    # Turns over the original context: many -> unchanged, few -> divided by `factor`, else between.
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
