"""Undocumented parts of Megatron-core in use: its latent attention, for packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


@dataclass
class PackedAngles(PackedSeqParams):
    """A micro-batch's layout for Transformer Engine's layers with latent attention."""

    # Uses: that layers are given the layout as it is (TEDotProductAttention: its base's fields)
    # Versions: megatron-core 0.19.2
    # Upstream: as of `PackedLatentAttention`

    angles: Tensor | None = None
    """[T / cp, 1, R] float32, rotary angles of this rank's tokens; None: other attention."""
    magnitude: float = 1.0
    """Factor of their cosines and sines."""


class _Angles(nn.Module):
    """In place of Megatron-core's table of angles: those of the micro-batch."""

    def __init__(self, rope_type: str) -> None:
        super().__init__()
        self._has_magnitude = rope_type == "yarn"

    def get_rotary_seq_len(self, *arguments: Any) -> PackedAngles:
        """The layout itself, which Megatron-core passes last, and hands on to `forward`."""
        packed = arguments[-1]
        assert isinstance(packed, PackedAngles) and packed.angles is not None, packed
        return packed

    def forward(self, packed: PackedAngles, **_: Any) -> Any:
        """The angles; with YaRN also the magnitude."""
        return (packed.angles, packed.magnitude) if self._has_magnitude else packed.angles


class PackedLatentAttention(MLASelfAttention):
    """Latent attention without host synchronisation, and without a norm that no model has.

    If queries come straight from the hidden state (no `q_lora_rank`), Megatron-core puts a norm in
    front of them, because latent vectors have norms. No model has it, and even with weights of one
    it divides every hidden state by its size. The layer spec's linear layer is used instead.

    Megatron-core rotates queries, and keys, one sequence at a time, and reads the boundaries twice
    for each. With every token's angles all are rotated at once. The same operations: its fused
    kernel rounds otherwise.
    """

    # Uses: MLASelfAttention.rotary_pos_emb, replaced; that get_query_key_value_tensors passes its
    #     get_rotary_seq_len's result to it and rotates [T, N, R] by [T, 1, R] as one row unless
    #     qkv_format is "thd"; _resolve_qk_norm_config
    # Versions: megatron-core 0.19.2
    # Upstream: none found of the boundaries; of the norm NVIDIA/Megatron-LM#4452 (merged, made it),
    #     NVIDIA-NeMo/Megatron-Bridge#5261 (closed)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rotary_pos_emb = _Angles(self.config.rope_type)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        classes: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return classes | {"linear_q_proj": submodules.linear_q_proj}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **settings: Any,
    ) -> Any:
        """Queries and keys [T, N, D], values [T, N, V] and latent vectors, as in Megatron-core."""
        assert packed_seq_params is not None
        return super().get_query_key_value_tensors(
            hidden_states,
            key_value_states,
            position_ids,
            replace(packed_seq_params, qkv_format="sbhd"),
            **settings,
        )
