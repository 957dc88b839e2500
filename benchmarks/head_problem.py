"""What benchmarks/head.py gives to everyone: tensors, sequences, the loss, exact results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gapo_megatron.logprob import Sequences

CLIP, CLIPPED_D = 0.2, 0.5
"""Clip of the timed loss, and |D| of clipped sequences (others: 0). It is so much wider than any
provider's error in D that all clip the same sequences, and gradients can be compared."""


@dataclass(frozen=True)
class Problem:
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    sequence_ids: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """A batch: [R] rows (None: all), their labels and sequence ids, and the number B of these."""

    rows: torch.Tensor | None
    labels: torch.Tensor
    sequence_ids: torch.Tensor
    counts: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    num_active_tokens: int


def make_problem(shape: str, dtype: str, data: str, device: str) -> Problem:
    """Tensors of a shape "TxHxV", from a fixed seed; lognormal sequences of 1/8 of T on average.

    "random": logits of unit variance, random labels. "peaked": the label's weight planted in its
    hidden state, so that the mean NLL is about 0.5 and maxima reach 30; other logits deviate by 2.
    """
    num_tokens, hidden_size, vocab_size = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}
    weight = torch.randn(vocab_size, hidden_size, dtype=getattr(torch, dtype), **options)
    weight *= hidden_size**-0.5
    hidden = torch.randn(num_tokens, hidden_size, **options)
    labels = torch.randint(vocab_size, (num_tokens,), **options)
    if data == "peaked":
        planted = 10 + 18 * torch.rand(num_tokens, 1, **options)
        hidden = 2 * hidden + planted * weight[labels].float()
    mean = min(2048, num_tokens / 8)
    lengths = torch.empty(4 * num_tokens).log_normal_(
        0, 0.8, generator=torch.Generator().manual_seed(0)
    )
    lengths = (lengths * mean / 1.377).long().clamp(1, min(16384, num_tokens // 2))
    sequence_ids = torch.repeat_interleave(lengths)[:num_tokens].to(device)
    hidden, weight = (t.to(weight.dtype).requires_grad_() for t in (hidden, weight))
    return Problem(hidden, weight, labels, sequence_ids, torch.bincount(sequence_ids))


def make_batch(problem: Problem, exact: torch.Tensor, active: float, mode: str) -> Batch:
    """The batch in which a share `active` of the sequences has a gradient, given exact [T]."""
    counts, ids = problem.counts, problem.sequence_ids
    num_active = round(active * len(counts))
    generator = torch.Generator().manual_seed(0)
    # Of many draws, take the one whose share of tokens is closest.
    draws = torch.stack([torch.randperm(len(counts), generator=generator) for _ in range(2000)])
    tokens = counts.cpu()[draws[:, :num_active]].sum(1)
    chosen = draws[(tokens - active * len(ids)).abs().argmin(), :num_active].to(ids.device)
    is_active = torch.zeros_like(counts, dtype=torch.bool).index_fill_(0, chosen, True)
    advantages = 1.0 - 2.0 * (torch.arange(len(counts), device=ids.device) % 2)
    log_ratio = torch.where(is_active, 0, CLIPPED_D * advantages)
    old = (exact - log_ratio[ids]).float()
    num_tokens = int(counts[is_active].sum())
    if mode == "clipped":
        return Batch(None, problem.labels, ids, counts, old, advantages, num_tokens)
    rows = is_active[ids].nonzero()[:, 0]
    kept = (counts[is_active], old[rows], advantages[is_active], num_tokens)
    return Batch(rows, problem.labels[rows], (is_active.cumsum(0) - 1)[ids[rows]], *kept)


def sequences_of(batch: Batch) -> Sequences:
    """The rows of each sequence, which lie one after another."""
    offsets = F.pad(batch.counts.cumsum(0), (1, 0))
    return Sequences(batch.sequence_ids, offsets)


def gspo_loss(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Turn log-probs into the sequence loss, in float64."""
    ratio = sequences_of(batch).log_ratio(log_probs, batch.old_log_probs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()


def exact_log_probs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] log-probs and log-sum-exps in float64, tile by tile."""
    hidden, weight = problem.hidden.detach().double(), problem.weight.detach()
    parts = [torch.logsumexp(hidden @ w.double().T, 1) for w in weight.split(4096)]
    log_sum = torch.stack(parts).logsumexp(0)
    return (hidden * weight[problem.labels].double()).sum(1) - log_sum, log_sum


@torch.no_grad()
def gradient_errors(
    problem: Problem,
    grad_weight: torch.Tensor | None,
    batch: Batch,
    exact: torch.Tensor,
    log_sum: torch.Tensor,
) -> dict[str, float]:
    """Relative L2 errors against float64: of dhidden at 64 rows, of dweight at 512 tokens."""
    leaf = exact.clone().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad(gspo_loss(leaf, batch), leaf)
    hidden, weight, labels = problem.hidden.double(), problem.weight, problem.labels
    rows = torch.linspace(0, len(labels) - 1, 64, device=g.device).long()
    d_hidden = weight[labels[rows]].double()
    for w in weight.split(4096):
        d_hidden -= (hidden[rows] @ w.double().T - log_sum[rows, None]).exp() @ w.double()
    tokens = torch.linspace(0, len(weight) - 1, 256, device=g.device).long()
    tokens = torch.cat([tokens, labels[:256]]).unique()
    p = (hidden @ weight[tokens].double().T - log_sum[:, None]).exp()
    d_weight = ((labels[:, None] == tokens).double().sub_(p) * g[:, None]).T @ hidden
    assert grad_weight is not None and problem.hidden.grad is not None
    pairs = {"hidden": (problem.hidden.grad[rows], d_hidden * g[rows, None])}
    pairs["weight"] = (grad_weight[tokens], d_weight)
    return {f"d{k}_error": float((a - b).norm() / b.norm()) for k, (a, b) in pairs.items()}


@torch.no_grad()
def other_bits(
    log_probs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], problem: Problem
) -> float:
    """Share of rows with other bits in another packing.

    Packings: all rows; without the first third of them; the first sequence by itself.
    """
    hidden, weight, labels = problem.hidden, problem.weight, problem.labels
    whole = log_probs(hidden, weight, labels)
    packings = (slice(len(labels) // 3, None), slice(int(problem.counts[0])))
    differ = [whole[rows] != log_probs(hidden[rows], weight, labels[rows]) for rows in packings]
    return float(torch.cat(differ).double().mean())
