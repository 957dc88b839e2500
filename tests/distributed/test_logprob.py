"""The operator with the vocabulary, or the tokens, spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob import sequence_log_ratio, token_log_probs
from tests.dist import run_distributed

NUM_ROWS, HIDDEN_SIZE = 37, 16
# Of 12 rows of weight 9 are tokens: with 4 ranks the last shard is padding only.
VOCAB_SIZE, PADDED_SIZE = 9, 12

Result = dict[str, torch.Tensor]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=random)
    weight = torch.randn(PADDED_SIZE, HIDDEN_SIZE, generator=random)
    # Every token, so every edge of every shard.
    labels = torch.arange(NUM_ROWS) % VOCAB_SIZE
    upstream = torch.randn(2, NUM_ROWS, generator=random)
    upstream[:, ::4] = 0
    return hidden.to(dtype), weight.to(dtype), labels, upstream


def on_shard(dtype: torch.dtype, group: dist.ProcessGroup | None) -> Result:
    hidden, weight, labels, upstream = inputs(dtype)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    outputs = token_log_probs(
        hidden,
        shard,
        labels,
        temperature=0.8,
        vocab_start=rank * len(shard),
        vocab_size=VOCAB_SIZE,
        tp_group=group,
        return_entropy=True,
    )
    torch.autograd.backward(outputs, list(upstream.to(outputs[0])))
    assert hidden.grad is not None and shard.grad is not None
    names = ("log_probs", "entropy", "grad_hidden", "grad_weight")
    values = (*outputs, hidden.grad, shard.grad)
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def log_ratio_of(rows: slice, group: dist.ProcessGroup | None) -> Result:
    """Three sequences of 15, 15 and 7 tokens, of which this rank holds `rows`."""
    hidden, weight, labels, _ = inputs(torch.float64)
    leaves = hidden[rows].clone().requires_grad_(), weight.clone().requires_grad_()
    log_ratio, _ = sequence_log_ratio(
        *leaves,
        labels[rows],
        torch.full((NUM_ROWS,), -2.0)[rows],
        sequence_ids=(torch.arange(NUM_ROWS) // 15)[rows],
        num_sequences=3,
        num_response_tokens=torch.tensor([15, 15, 7]),
        cp_group=group,
    )
    (log_ratio * torch.tensor([1.0, 2.0, -1.0])).sum().backward()
    grad_hidden, grad_weight = (leaf.grad for leaf in leaves)
    assert grad_hidden is not None and grad_weight is not None
    return {"log_ratio": log_ratio.detach(), "hidden": grad_hidden, "weight": grad_weight}


def on_every_rank() -> dict[str, Any]:
    """All cases in one start of four processes; ranks 0 and 1, and 2 and 3, also form pairs."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    results = {}
    for size, group in ((2, pair), (4, dist.group.WORLD)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            results[f"{dtype} over {size}"] = on_shard(dtype, group)
        no_rows(group)
        one_bad_shard(group)
    # One cut inside a sequence; one that leaves the second rank without a row.
    for cut in (20, NUM_ROWS):
        rows = (slice(0, cut), slice(cut, NUM_ROWS))[pair.rank()]
        results[f"cut at {cut}"] = log_ratio_of(rows, pair)
    return results


def shard_options(weight: torch.Tensor, group: dist.ProcessGroup) -> dict[str, Any]:
    shard = weight.chunk(group.size())[group.rank()].clone()
    start = group.rank() * len(shard)
    return {"weight": shard, "vocab_start": start, "vocab_size": VOCAB_SIZE, "tp_group": group}


def no_rows(group: dist.ProcessGroup) -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    empty = hidden[:0].clone().requires_grad_()
    token_log_probs(empty, labels=labels[:0], **shard_options(weight, group)).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, HIDDEN_SIZE)


def one_bad_shard(group: dist.ProcessGroup) -> None:
    """Every rank raises, so that none is left waiting for another."""
    hidden, weight, labels, _ = inputs(torch.float32)
    weight[PADDED_SIZE // 2] = torch.nan
    options = shard_options(weight, group)
    with pytest.raises(DivergenceError, match="row 0 "):
        token_log_probs(hidden, labels=labels, **options)
    with pytest.raises(ValueError, match=r"vocab_start \(1\) must be tp_rank"):
        token_log_probs(hidden, labels=labels, **(options | {"vocab_start": 1}))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(on_every_rank, 4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_vocabulary_over_ranks_agrees_with_one_rank(
    ranks: list[dict[str, Any]], dtype: torch.dtype, size: int
) -> None:
    # float32: logits up to 20, with a last bit of 2e-6, summed in another order by narrower shards.
    atol = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    whole = on_shard(dtype, None)
    results = [rank[f"{dtype} over {size}"] for rank in ranks[:size]]
    for name in ("log_probs", "entropy", "grad_hidden"):
        for result in results[1:]:
            assert torch.equal(result[name], results[0][name]), f"{name} differs between ranks"
    merged = results[0] | {"grad_weight": torch.cat([r["grad_weight"] for r in results])}
    for name, value in merged.items():
        difference = (value - whole[name]).float()
        if name.startswith("grad") and dtype == torch.bfloat16:
            # The gradient of the logits and the result are rounded, each 1.7e-3 of the norm.
            assert difference.norm() <= 4e-3 * whole[name].float().norm(), name
        else:
            assert difference.abs().max() <= atol, name
    assert not merged["grad_weight"][VOCAB_SIZE:].any()


@pytest.mark.parametrize("cut", [20, NUM_ROWS])
def test_tokens_over_ranks_agree_with_one_rank(ranks: list[dict[str, Any]], cut: int) -> None:
    whole = log_ratio_of(slice(0, NUM_ROWS), None)
    a, b = (rank[f"cut at {cut}"] for rank in ranks[:2])
    assert torch.equal(a["log_ratio"], b["log_ratio"])
    # float64; sums of 37 terms of order 1.
    for value, expected in (
        (a["log_ratio"], whole["log_ratio"]),
        (torch.cat([a["hidden"], b["hidden"]]), whole["hidden"]),
        (a["weight"] + b["weight"], whole["weight"]),
    ):
        assert torch.allclose(value, expected, rtol=0, atol=1e-13)
