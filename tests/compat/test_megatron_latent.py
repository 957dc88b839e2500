"""Megatron-core's latent attention, with Transformer Engine's layout of packed sequences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_latent import PackedAngles, PackedLatentAttention
from gapo_megatron.config import ParallelConfig
from gapo_megatron.policy import destroy, initialize
from gapo_megatron.policy.context import held_positions
from gapo_megatron.policy.model import transformer_config
from gapo_megatron.policy.precision import precision_settings
from gapo_megatron.policy.rotary import Rotary
from tests.dist import single_rank
from tests.distributed.conversion_setup import MOONLIGHT, hf_config
from tests.synchronisations import Waits, counted_waits

CPU = torch.device("cpu")
MODELS = {"yarn": {}, "rope": {"rope_parameters": MOONLIGHT["rope_parameters"]}}
LENGTHS = (40, 4, 12)
CU_SEQLENS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with single_rank():
        yield initialize(ParallelConfig())
        destroy()


def attention(kind: type, model: PretrainedConfig, groups: Any, cp_rank: int | None) -> Any:
    """An attention layer with random weights; one of two context parallel ranks if any."""
    config = transformer_config(
        model,
        groups,
        CPU,
        number_format=precision_settings("fp32", fp8_recipe="blockwise"),
        recompute="none",
        parallel=ParallelConfig(),
    )
    parts = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True).submodules
    parts.self_attention.submodules.core_attention = IdentityOp
    layer = kind(
        config,
        parts.self_attention.submodules,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    if cp_rank is not None:
        config.context_parallel_size = 2
        layer.pg_collection.cp = SimpleNamespace(size=lambda: 2, rank=lambda: cp_rank)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    return layer


def queries_and_gradients(
    layer: Any, rotary: Rotary, cp_rank: int | None
) -> tuple[list[Tensor], Waits]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    if cp_rank is not None:
        positions = positions[held_positions(CU_SEQLENS, cp_rank=cp_rank, cp_size=2)]
    packed = PackedAngles(
        qkv_format="thd",
        cu_seqlens_q=CU_SEQLENS,
        cu_seqlens_kv=CU_SEQLENS,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        angles=rotary.angles(positions[None]),
        magnitude=rotary.magnitude,
    )
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(positions), 1, layer.config.hidden_size, generator=generator)
    hidden.requires_grad_()
    with counted_waits() as waits:
        *found, _, _ = layer.get_query_key_value_tensors(hidden, None, None, packed)
        sum(one.square().sum() for one in found).backward()
    weights = [one for name, one in layer.named_parameters() if "linear_proj" not in name]
    return [*found, *(one.grad for one in (hidden, *weights))], waits


@pytest.mark.parametrize("cp_rank", [None, 0, 1])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_it_computes_as_megatron_core_does_and_never_waits(
    changes: dict[str, Any], cp_rank: int | None, groups: Any
) -> None:
    model = hf_config("deepseek_v3", **changes)
    rotary = Rotary.of(model, CPU, torch.float32)
    with cpu.emulation():
        model_parallel_cuda_manual_seed(0)
        (expected, theirs), (found, waits) = (
            queries_and_gradients(attention(kind, model, groups, cp_rank), rotary, cp_rank)
            for kind in (MLASelfAttention, PackedLatentAttention)
        )
    assert {call: theirs[call] for call in theirs if "rope_utils" in call} == {
        "tolist at megatron/rope_utils.py:_apply_rotary_pos_emb_thd": 2,
        "_local_scalar_dense at megatron/rope_utils.py:_apply_rotary_pos_emb_thd": 2,
    }
    assert waits == Counter()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
