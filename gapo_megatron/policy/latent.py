"""Latent attention without Transformer Engine: what makes queries, keys and values.

Megatron-core's own makes rotary tables of every layer, and shards what makes the latent vectors,
unlike with Transformer Engine. The parameters here have its names.

NOT YET RUN ON A GPU.

T packed tokens, H hidden size, N heads of this rank; under sequence parallelism hidden states and
latent vectors are of this rank's T / tp tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from gapo_megatron.models.rope import yarn_magnitude
from gapo_megatron.policy.attention import PackedAttention
from gapo_megatron.policy.norms import RMSNorm
from gapo_megatron.policy.sequences import PackedSequences


class WholeLinear(nn.Module):
    """x W^T with the whole weight on every tensor parallel rank.

    Under sequence parallelism every rank multiplies its part of the sequence. The weight is marked,
    so that Megatron-core sums its gradient over the tensor parallel group.
    """

    def __init__(self, config: Any, in_features: int, out_features: int) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., in] -> [..., out], and no bias, as Megatron-core's linear layers return it."""
        # As one matrix: torch multiplies three dimensions with a frozen weight in another order.
        return F.linear(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]), None


class LatentAttention(MegatronModule):
    """Attention whose keys and values, and perhaps queries, come from latent vectors.

    Replaces Megatron-core's `MLASelfAttention` in the layer spec.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        # Otherwise nothing sums the gradient of the key's rotated part over the ranks' heads.
        assert config.sequence_parallel or self.tp_group.size() == 1
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        heads, eps = config.num_attention_heads, config.layernorm_epsilon
        size = config.qk_head_dim + config.qk_pos_emb_head_dim
        cut = functools.partial(
            tensor_parallel.ColumnParallelLinear,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        if config.q_lora_rank is None:
            self.linear_q_proj = cut(config.hidden_size, heads * size)
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps)
            self.linear_q_up_proj = cut(config.q_lora_rank, heads * size)
        latent = config.kv_lora_rank
        self.linear_kv_down_proj = WholeLinear(
            config, config.hidden_size, latent + config.qk_pos_emb_head_dim
        )
        self.kv_layernorm = RMSNorm(config, latent, eps)
        self.linear_kv_up_proj = cut(latent, heads * (config.qk_head_dim + config.v_head_dim))
        magnitude = yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim)
        self.core_attention = PackedAttention(
            config, layer_number, softmax_scale=magnitude**2 * size**-0.5
        )
        self.linear_proj = tensor_parallel.RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        modules = config.recompute_modules or ()
        self.recomputes_core = config.recompute_granularity == "selective" and (
            "core_attn" in modules
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            hidden_states: [T, 1, H].
            attention_mask: unused; attention is causal within sequences.
            packed_seq_params: the micro-batch's layout.

        Returns:
            [T, 1, H], and no bias.

        Collectives: those of the parallel linear layers and of `PackedAttention`; under sequence
        parallelism an all-gather of the rotated part of the keys.
        """
        query, key, value = self._query_key_value(hidden_states)
        attend = functools.partial(self.core_attention, packed_seq_params=packed_seq_params)
        if self.recomputes_core and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value, attention_mask)
        else:
            attended = attend(query, key, value, attention_mask)
        output, _ = self.linear_proj(attended[:, None])
        return output, None

    def _query_key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, D] queries and keys, and [T, N, V] values; the first elements are to be rotated.

        Pairs that are rotated are neighbours in the weights, and half of them apart afterwards: the
        same order in queries and keys, so their products do not change.
        """
        config = self.config
        if config.q_lora_rank is None:
            of_query, _ = self.linear_q_proj(hidden)
        else:
            latent, _ = self.linear_q_down_proj(hidden)
            of_query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        whole, _ = self.linear_kv_down_proj(hidden)
        latent, rotated_key = whole.split(sizes, dim=-1)
        of_key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        if config.sequence_parallel and self.tp_group.size() > 1:
            rotated_key = gather_from_sequence_parallel_region(rotated_key, group=self.tp_group)
        of_query, of_key_value = (
            x.squeeze(1).unflatten(-1, (self.num_heads, -1)) for x in (of_query, of_key_value)
        )
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        plain_query, rotated_query = of_query.split(sizes, dim=-1)
        sizes = [config.qk_head_dim, config.v_head_dim]
        plain_key, value = of_key_value.split(sizes, dim=-1)
        rotated_key = _halves(rotated_key).expand(-1, self.num_heads, -1)
        query = torch.cat([_halves(rotated_query), plain_query], dim=-1)
        return query, torch.cat([rotated_key, plain_key], dim=-1), value


def _halves(x: Tensor) -> Tensor:
    """[..., 2 n] with the even elements in front of the odd ones."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
