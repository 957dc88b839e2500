"""Rotary positions in 16 bits, beside transformers' own modules."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapo_megatron.models.rope import read_rope, yarn_magnitude
from gapo_megatron.policy.attention import _Rotate
from gapo_megatron.policy.rotary import Rotary, _scaled_frequencies
from gapo_megatron.policy.sequences import PackedSequences, pack_sequences
from tests.distributed.conversion_setup import ARCHITECTURES, hf_config

LENGTHS = (200, 3)
ALONE: Any = SimpleNamespace(size=lambda: 1)
CPU = torch.device("cpu")
# transformers 5's module keeps the tables of this one in float32.
WIDE = {"olmo2"}


def packed_as(config: PretrainedConfig) -> PackedSequences:
    """The layout of sequences of a model in bf16."""
    positions = [position for length in LENGTHS for position in range(length)]
    return pack_sequences(
        torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32),
        max_seqlen=max(LENGTHS),
        position_ids=torch.tensor([positions]),
        rotary=Rotary.of(config, CPU, torch.bfloat16),
        dtype=torch.bfloat16,
        cp_group=ALONE,
    )


def tables_of(model: PreTrainedModel, kind: str | None = None) -> tuple[Tensor, Tensor]:
    """transformers' cosines and sines [1, T, R] of the same positions, of a model in bf16."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    x = torch.zeros(1, dtype=torch.bfloat16)
    return model.rotary_emb(x, positions, *([] if kind is None else [kind]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tables_have_transformers_dtype_and_values(name: str) -> None:
    config = hf_config(name)
    model, packed = AutoModel.from_config(config), packed_as(config)
    expected = [((packed.cos, packed.sin), None)]
    if packed.windowed_tables is not None:
        expected = [
            ((packed.cos, packed.sin), "full_attention"),
            (packed.windowed_tables, "sliding_attention"),
        ]
    for (cos, sin), kind in expected:
        for ours, theirs in zip((cos, sin.abs()), tables_of(model, kind), strict=True):
            if theirs.shape[-1] == ours.shape[-1] // 2:  # gpt-oss's are not repeated
                theirs = torch.cat([theirs, theirs], dim=-1)
            assert ours.dtype == theirs.dtype == (torch.float32 if name in WIDE else torch.bfloat16)
            theirs = theirs[0, :, None].abs() if ours is not cos else theirs[0, :, None]
            # Cosines of large arguments differ in the last bit, which may round the other way.
            rtol = 1e-5 if name in WIDE else 2**-7
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncate": False},
        {"beta_fast": 6.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.6},
        {"attention_factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [16, 64])
def test_yarn_has_transformers_frequencies(more: dict[str, Any], size: int) -> None:
    """Also as DeepSeek-V3 has it: the range rounded, two weights of the magnitude."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    stated = {"rope_theta": 10000.0, **scaling, **more}
    config = LlamaConfig(head_dim=size, max_position_embeddings=163840, rope_parameters=stated)
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = read_rope({"rope_parameters": stated})
    torch.testing.assert_close(_scaled_frequencies(rope, size), expected, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)
    whole = yarn_magnitude(40.0, 0.6)
    assert whole == pytest.approx(0.1 * 0.6 * math.log(40) + 1) and yarn_magnitude(1.0) == 1.0


def test_a_model_that_rotates_in_float32_rounds_once() -> None:
    """Forward and backward: half a unit in the last place of bf16, and not tables' as well."""
    config = hf_config("olmo2")
    packed = packed_as(config)
    model = AutoModel.from_config(config)
    x = torch.randn(
        sum(LENGTHS), 6, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)
    )
    rotate = sys.modules[type(model).__module__].apply_rotary_pos_emb
    wide = x.float().requires_grad_()
    exact, _ = rotate(wide[None], wide[None], *tables_of(model), unsqueeze_dim=2)
    x.requires_grad_()
    output = _Rotate.apply(x, packed.cos, packed.sin)
    weights = torch.linspace(-1, 1, x.numel()).view_as(x).bfloat16()
    (of_exact,) = torch.autograd.grad(exact[0], wide, weights.float())
    (of_output,) = torch.autograd.grad(output, x, weights)
    for ours, theirs in ((output, exact[0]), (of_output, of_exact)):
        assert ours.dtype == torch.bfloat16
        assert ((ours.float() - theirs).abs() <= 2**-8 * theirs.abs() + 1e-5).all()
    rounded, _ = rotate(x[None], x[None], *tables_of(model), unsqueeze_dim=2)
    assert (rounded[0] != output).float().mean() < 1e-3
