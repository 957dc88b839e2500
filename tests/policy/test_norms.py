"""Norms and scaled embeddings in 16 bits beside transformers' modules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from gapo_megatron.policy import destroy
from gapo_megatron.policy.norms import KeyNorm, NormedAdd, QueryNorm, RMSNorm
from tests.dist import single_rank
from tests.distributed.conversion_setup import save_model
from tests.distributed.policy_setup import load_policy, make_config

TOKENS, HEADS, GROUPS, HEAD_DIM = 64, 6, 2, 16
HIDDEN, EPS = 96, 1e-5
ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def settings(*, zero_centred: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(
        params_dtype=dtype,
        layernorm_zero_centered_gamma=zero_centred,
        layernorm_epsilon=EPS,
        hidden_size=HIDDEN,
        sequence_parallel=False,
        kv_channels=HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
    )


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def give_weight(ours: nn.Module, theirs: nn.Module, *, centre: float) -> None:
    """The same weight in bf16, about `centre`: near 0, adding 1 in bf16 would round most of it."""
    weight = (centre + random(len(ours.weight), seed=1, scale=0.3)).bfloat16()
    for module in (ours, theirs):
        module.to(torch.bfloat16).weight.data.copy_(weight)


def pair(kind: str) -> tuple[Any, nn.Module, tuple[int, ...]]:
    """Our module, transformers', and the shape of what ours takes."""
    match kind:
        case "zero-centred":
            ours: Any = RMSNorm(settings(zero_centred=True), HIDDEN, EPS)
            theirs: nn.Module = Gemma3RMSNorm(HIDDEN, EPS)
            shape: tuple[int, ...] = (TOKENS, 1, HIDDEN)
        case "plain":
            ours, theirs = RMSNorm(settings(), HIDDEN, EPS), Olmo2RMSNorm(HIDDEN, EPS)
            shape = (TOKENS, 1, HIDDEN)
        case "all query heads" | "all key heads":
            made, heads = (QueryNorm, HEADS) if "query" in kind else (KeyNorm, GROUPS)
            ours, theirs = made(settings(), eps=EPS), Olmo2RMSNorm(heads * HEAD_DIM, EPS)
            ours.tp_group = ALONE
            shape = (TOKENS, heads, HEAD_DIM)
    give_weight(ours, theirs, centre=0.0 if kind == "zero-centred" else 1.0)
    return ours, theirs, shape


@pytest.mark.parametrize("kind", ["zero-centred", "plain", "all query heads", "all key heads"])
def test_a_norm_rounds_once_as_transformers_does(kind: str) -> None:
    ours, theirs, shape = pair(kind)
    x = random(*shape, scale=3.0).bfloat16()
    output, expected = ours(x), theirs(x.flatten(1)).view(shape)
    assert output.dtype == torch.bfloat16
    # The mean of squares may be added up in another order, and the last bit of float32 then
    # decides how an element between two of bf16 is rounded.
    assert (output != expected).float().mean() < 1e-2
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=0)
    exact = theirs.float()(x.float().flatten(1)).view(shape)
    assert ((output.float() - exact).abs() <= (2**-8 + 1e-5) * exact.abs()).all()


def test_the_norm_is_rounded_before_it_is_added() -> None:
    add, theirs = NormedAdd(settings(zero_centred=True)), Gemma3RMSNorm(HIDDEN, EPS)
    give_weight(add.norm, theirs, centre=0.0)
    x, f = (random(TOKENS, 1, HIDDEN, seed=i, scale=3.0).bfloat16() for i in range(2))
    output = add(True, False)((f, None), x, 0.0)
    assert output.dtype == torch.bfloat16
    assert (output != x + theirs(f)).float().mean() < 1e-2


def test_embeddings_are_scaled_by_the_rounded_root(tmp_path: Path) -> None:
    """The square root of 48, 6.928, is 6.9375 in bf16."""
    save_model(tmp_path, "gemma3_text")
    tokens = torch.arange(61)[None]
    with single_rank():
        policy = load_policy(make_config(tmp_path, model={"precision": "bf16"}))
        stage = policy.stages[0]
        found = stage.embedding(tokens, position_ids=None).transpose(0, 1)
        head = stage.head_weight.detach()
        destroy()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    embedding = reference.get_input_embeddings()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, embedding(tokens))
    assert not torch.equal(found, (embedding.weight.float() * 48**0.5).bfloat16()[tokens])
    assert torch.equal(head[:61], embedding.weight)  # the tied output layer is not scaled
