"""Rotary frequencies of a model, from its Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.models.rope import Rope, yarn_ramp
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary frequencies, and the dtype of the tables made from them; R elements are rotated."""

    frequencies: Tensor
    """[R / 2] float32, scaled if the model says so."""
    windowed_frequencies: Tensor | None = None
    """[R / 2] float32, of windowed layers; None: the same."""
    dtype: torch.dtype = torch.float32
    """Dtype of cosines and sines, in which queries and keys are multiplied by them."""
    magnitude: float = 1.0
    """Factor of cosines and sines; not of windowed layers with frequencies of their own."""

    @classmethod
    def of(cls, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Self:
        """The rotary frequencies of a model with activations of `dtype`, on a device.

        Raises:
            ConfigError: the model has a kind of rope scaling that is not supported.
        """
        rope = rope_of(hf_config.to_dict())
        size = rope.rotated(geometry_of(hf_config).rotary_dim)
        windowed = None
        if rope.windowed_base is not None:
            windowed = _frequencies(rope.windowed_base, size).to(device)
        if architecture_of(hf_config).rotates_in_float32:
            dtype = torch.promote_types(dtype, torch.float32)
        frequencies = _scaled_frequencies(rope, size).to(device)
        return cls(frequencies, windowed, dtype, rope.magnitude)

    def angles(self, position_ids: Tensor) -> Tensor:
        """[T, 1, R] float32 angles of positions [1, T], for halves that are rotated together."""
        return torch.outer(position_ids[0].float(), self.frequencies.repeat(2))[:, None]


def _scaled_frequencies(rope: Rope, size: int) -> Tensor:
    """[R / 2] float32; Megatron-core's own scaling has fixed wavelength limits."""
    frequencies = _frequencies(rope.base, size)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.scaling["factor"]
    if rope.kind == "yarn":
        # Fast pairs -> unchanged, slow ones -> divided by `factor`, else between.
        first, last = yarn_ramp(rope, size)
        pairs = torch.arange(size // 2, dtype=torch.float32)
        slow = ((pairs - first) / (last - first)).clamp(0.0, 1.0)
        return slow * frequencies / rope.scaling["factor"] + (1 - slow) * frequencies
    factor, low, high = (rope.scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    # Turns over the original context: many -> unchanged, few -> divided by `factor`, else between.
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _frequencies(base: float, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / (base**exponents)
