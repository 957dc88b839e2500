"""Build the Megatron-core model of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat.megatron import (
    HiddenStatesModel,
    combine_experts_in_order,
    leave_grad_mode,
    set_rotary_frequencies,
    share_rotary_tables,
)
from gapo_megatron.compat.megatron_experts import repair_expert_biases, uncompiled
from gapo_megatron.compat.megatron_latent import PackedAngles
from gapo_megatron.compat.megatron_layers import (
    LayerModules,
    local_layers,
    transformer_engine_layers,
)
from gapo_megatron.compat.megatron_router import keep_biases, open_routers, set_choice
from gapo_megatron.compat.transformer_engine import (
    forbid_unfused_attention,
    fuse_weight_gradients,
    is_installed,
)
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.config_check import read_config
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of, rules_for
from gapo_megatron.policy.attention import PackedAttention
from gapo_megatron.policy.latent import LatentAttention
from gapo_megatron.policy.norms import HeadsNorm, KeyNorm, NormedAdd, QueryNorm, RMSNorm
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.policy.precision import precision_settings
from gapo_megatron.policy.rotary import Rotary
from gapo_megatron.policy.sequences import has_fused_kernel, pack_sequences
from gapo_megatron.policy.sinks import mark_sinks
from gapo_megatron.types import Microbatch


def read_hf_config(hf_dir: str) -> PretrainedConfig:
    """Read config.json of `model.hf_dir`.

    Raises:
        ConfigError: see `formats.config_check.read_config`.
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
    # Megatron-core requires a seed; nothing is drawn, since weights are loaded without dropout.
    model_parallel_cuda_manual_seed(0)
    mine = layers_of_stages(parallel, hf_config.num_hidden_layers)[groups.pp_rank]
    stages = [
        PolicyModel(config, hf_config, groups, device, virtual_stage=i, layers=layers)
        for i, layers in enumerate(mine)
    ]
    keep_biases(stages)
    return stages


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
    dtype = number_format["params_dtype"]
    fused = uses_transformer_engine(hf_config, device, dtype)
    flash = fused or (groups.cp_size == 1 and has_fused_kernel(device, dtype))
    settings = {
        **architecture.transformer_fields(hf_config, geometry),
        **_layout_settings(groups, parallel),
        **number_format,
        **_recompute_settings(
            recompute, fused=fused, flash=flash, kinds=frozenset(geometry.has_experts)
        ),
        **(_expert_settings(fused=fused) if geometry.num_experts else {}),
    }
    magnitude = rope_of(hf_config.to_dict()).magnitude
    if fused and not geometry.latent and magnitude != 1.0:
        # Transformer Engine's kernel takes angles, not cosines and sines.
        scale = settings.get("softmax_scale") or geometry.head_dim**-0.5
        settings["softmax_scale"] = scale * magnitude**2
    if not fused:
        settings["activation_func"] = uncompiled(settings["activation_func"])
    kind = MLATransformerConfig if geometry.latent else TransformerConfig
    return kind(
        **settings,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Our losses are divided by global denominators: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        perform_initialization=False,  # every weight is loaded
        gradient_accumulation_fusion=False,  # see `fuse_weight_gradients`
        masked_softmax_fusion=False,
        bias_activation_fusion=fused,
        persist_layer_norm=fused,
        apply_rope_fusion=fused and geometry.latent is None,
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


def _recompute_settings(
    recompute: str, *, fused: bool, flash: bool, kinds: frozenset[bool]
) -> dict[str, Any]:
    """TransformerConfig fields of `model.recompute`.

    Args:
        recompute: the setting.
        fused: layers are Transformer Engine's.
        flash: attention reads packed sequences as they are, and stores no matrix of scores.
        kinds: whether layers have experts; both if they differ.
    """
    if recompute == "none":
        return {}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if not flash or (True in kinds and not fused):
        # Attention stores padded copies and masks. (For experts Megatron-core recomputes what the
        # other branches name in Transformer Engine's layers only.)
        modules = ["core_attn"]
    else:
        # An MLP stores most: twice its inner width after the first product, once after the
        # activation, and the norm's output. Recomputing it stores only [T, H]. Where there are
        # experts, that would dispatch every token again. "layernorm" and "moe_act" take only
        # elementwise kernels, and free the input of the experts' second product (a third of the
        # inner widths) and the norm's output.
        modules = ["layernorm", "moe_act"] if True in kinds else []
        modules += ["mlp"] if False in kinds else []
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


def uses_transformer_engine(
    hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a model's layers are Transformer Engine's; otherwise they are ours."""
    return architecture_of(hf_config).megatron_layers and has_transformer_engine(device, dtype)


def has_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to use Transformer Engine's layers: if it is installed, on a GPU, in 16 bits.

    It has no fp32 attention for packed sequences.
    """
    return device.type == "cuda" and dtype.itemsize == 2 and is_installed()


OWN = "adapter"
"""Submodule of a stage with all that an adapter adds; also the first part of its keys on disk."""


def is_own(name: str) -> bool:
    """Whether a parameter of a stage is an adapter's own, not the architecture's."""
    return name.startswith(f"{OWN}.")


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
        layers: Sequence[int],
    ) -> None:
        self.uses_transformer_engine = uses_transformer_engine(
            hf_config, device, config.params_dtype
        )
        self.hf_config = hf_config
        self.geometry = geometry_of(hf_config)
        self.rules = rules_for(hf_config)
        self.unpadded_vocab_size = vocab_size = hf_config.vocab_size
        super().__init__(
            config=config,
            transformer_layer_spec=_layer_spec(
                config,
                self.geometry,
                layers,
                transformer_engine=self.uses_transformer_engine,
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
        self.rotary = Rotary.of(hf_config, device, config.params_dtype)
        if self.uses_transformer_engine:
            if self.geometry.latent is None:  # else the layers have their own
                set_rotary_frequencies(self, self.rotary.frequencies)
                share_rotary_tables(self.rotary_pos_emb)
            fuse_weight_gradients(self)
        else:
            combine_experts_in_order(self)
            leave_grad_mode(self)
        repair_expert_biases(self)
        mark_sinks(self)
        open_routers(self)
        for module in self.modules():
            if isinstance(module, HeadsNorm):
                module.tp_group = groups.tp_group
        if self.pre_process and (scale := self.geometry.embedding_scale) != 1.0:
            # Rounded as the weights are, as in transformers and vLLM.
            factor = torch.tensor(scale, dtype=config.params_dtype, device=device)
            self.embedding.register_forward_hook(lambda _, __, hidden: hidden * factor)
        self.to(device)
        for parameter in self.parameters():
            # Transformer Engine makes sinks in float32, in a model of 16 bits, too.
            parameter.data = parameter.data.to(config.params_dtype)

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

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The architecture's parameters, and the buffers that its rules name (`Rule.is_buffer`)."""
        for name, parameter in self.named_parameters():
            if not is_own(name):
                yield name, parameter
        rules = [rule for rule in self.rules if rule.is_buffer]
        for name, buffer in self.named_buffers():
            if any(rule.place_in(name) is not None for rule in rules):
                yield name, buffer

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set this rank's rows of vocabulary padding to zero."""
        for name, parameter in self.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                first_row = self.tp_group.rank() * len(parameter)
                parameter[max(self.unpadded_vocab_size - first_row, 0) :].zero_()

    def packing(self, microbatch: Microbatch) -> PackedSeqParams:
        """The layout of a micro-batch in the form that this model's layers expect."""
        if self.uses_transformer_engine:
            angles = None
            if self.geometry.latent is not None:
                angles = self.rotary.angles(microbatch.position_ids)
            packed: PackedSeqParams = PackedAngles(
                qkv_format="thd",
                cu_seqlens_q=microbatch.cu_seqlens,
                cu_seqlens_kv=microbatch.cu_seqlens,
                max_seqlen_q=microbatch.max_seqlen,
                max_seqlen_kv=microbatch.max_seqlen,
                angles=angles,
                magnitude=self.rotary.magnitude,
            )
        else:
            packed = pack_sequences(
                microbatch.cu_seqlens,
                max_seqlen=microbatch.max_seqlen,
                position_ids=microbatch.position_ids,
                rotary=self.rotary,
                dtype=self.config.params_dtype,
                cp_group=self.cp_group,
                window=self.geometry.window,
            )
        if microbatch.choose_experts is not None:
            set_choice(packed, microbatch.choose_experts)
        return packed


def _layer_spec(
    config: TransformerConfig, g: Geometry, layers: Sequence[int], *, transformer_engine: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of a stage; `layers`: their global numbers."""
    has_experts = [g.has_experts[number] for number in layers]
    if transformer_engine:
        return transformer_engine_layers(config, has_experts)
    modules = LayerModules(
        norm=RMSNorm,
        attention=PackedAttention,
        query_norm=QueryNorm if g.joint_head_norms else RMSNorm,
        key_norm=KeyNorm if g.joint_head_norms else RMSNorm,
        has_input_norms=g.input_norms,
        latent_attention=LatentAttention if g.latent else None,
        normed_add=NormedAdd if g.output_norms else None,
    )
    return local_layers(config, has_experts, modules)
