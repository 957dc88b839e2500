"""Training in the arena: one arm on a batch of seeds, with the package's advantages and loss.

The task, the order of the prompts and the random numbers of the samples depend on the chunk of
seeds and the step alone, so arms with the same k see the same draws.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.arena.task import (
    MAX_TOKENS,
    NUM_TRAINING,
    Prompts,
    Responses,
    Task,
    log_policy,
    log_probs,
    make_task,
    pass_rates,
    sample,
)
from gapo_megatron.objective import (
    Method,
    group_advantages,
    importance_weights,
    policy_loss,
    token_importance_weights,
    upper_clip,
    weigh_gradient,
)
from gapo_megatron.objective.diagnostics import per_correct_sums

STEP_PROMPTS, MINIBATCHES = 32, 4
CLIP_GRAD = 1.0
IMPORTANCE_WEIGHT_MAX = 2.0
"""Bound on importance weights of stale batches, whose clip is around the step's first weights."""
TYPICAL_LENGTH = 6
"""Length at which widths over length are the method's; half of the longest response."""
PASS_AT = (1, 8, 64)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of an arm."""

    method: Method
    learning_rate: float
    group_size: int = 8
    staleness: int = 0
    """Age of the weights that sampled a batch, in steps."""
    around_sampler: bool = False
    """Take ratios to the weights that sampled, not to those at the start of the step."""
    weights: Literal["none", "sequence", "token"] = "sequence"
    """Importance weights of a stale batch whose ratios are to the start of the step."""
    over_length: bool = False
    """Probe: widths of correct responses are also inverse to their length."""
    reversed_width: bool = False
    """Probe: eps_high(k - c) instead of eps_high(c), widest for abundant correct responses."""
    num_steps: int = 200


@dataclass(frozen=True)
class Trained:
    """Result of training one arm on S seeds."""

    curve: Tensor
    """[evaluations, len(PASS_AT), S] float64: exact pass@k of the held-out prompts."""
    per_c: Tensor
    """[2, len(SUMS), 2, k + 1] float64: `diagnostics` sums of the first and the second half of
    training, over the updates of all seeds."""


def train(setting: Setting, seeds: range, *, evaluate_every: int) -> Trained:
    """Train one arm on the tasks of `seeds`."""
    task = make_task(seeds)
    weights = task.weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=setting.learning_rate, weight_decay=0.0)
    past = deque([task.weights], maxlen=setting.staleness + 1)
    curve = [_pass_at_k(weights, task)]
    halves: list[list[Tensor]] = [[], []]
    for step in range(setting.num_steps):
        prompts, uniforms = _draw(task, seeds, step, setting.group_size)
        responses = sample(past[0], prompts, uniforms)
        with torch.no_grad():
            sampled = log_probs(log_policy(past[0], prompts), responses)
            at_begin = sampled
            if setting.staleness:
                at_begin = log_probs(log_policy(weights, prompts), responses)
        share = STEP_PROMPTS // MINIBATCHES
        for first in range(0, STEP_PROMPTS, share):
            part = slice(first, first + share)
            old = (at_begin[:, part], sampled[:, part])
            gradient, sums = _gradient(weights, prompts.of(part), responses.of(part), old, setting)
            norm = gradient.flatten(1).norm(dim=1).clamp(min=CLIP_GRAD)
            weights.grad = gradient * (CLIP_GRAD / norm)[:, None, None, None]
            optimizer.step()
            halves[2 * step // setting.num_steps].append(sums)
        past.append(weights.detach().clone())
        if (step + 1) % evaluate_every == 0:
            curve.append(_pass_at_k(weights, task))
    return Trained(torch.stack(curve), torch.stack([torch.stack(half).sum(0) for half in halves]))


def _draw(task: Task, seeds: range, step: int, k: int) -> tuple[Prompts, Tensor]:
    """Draw a step's prompts, and the random numbers of their responses."""
    generator = torch.Generator().manual_seed(seeds.start * 1_000_003 + step)
    order = torch.rand(len(seeds), NUM_TRAINING, generator=generator).argsort(dim=1)
    shape = (len(seeds), STEP_PROMPTS, k, MAX_TOKENS)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
    return task.training.pick(order[:, :STEP_PROMPTS]), uniforms


def _gradient(
    weights: Tensor,
    prompts: Prompts,
    responses: Responses,
    old: tuple[Tensor, Tensor],
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """Gradient of each seed's mini-batch, [S, F, V + 1, V + 1]; sums per c over all seeds."""
    method, k = setting.method, setting.group_size
    rewards = responses.rewards
    advantages = group_advantages(
        rewards.flatten(0, 1),
        normalize_std=method.normalize_std,
        focal_gamma=method.focal_gamma,
    ).view_as(rewards)
    num_correct = rewards.sum(-1, keepdim=True).long().expand_as(rewards)
    lengths = responses.is_token.sum(-1)

    # As in training, sequences with A = 0 are not computed; denominators count them.
    computed = advantages != 0
    rows = responses.is_token & computed[..., None]
    ids = torch.arange(int(computed.sum())).repeat_interleave(lengths[computed])
    new = log_probs(log_policy(weights, prompts), responses)[rows]
    at_begin, sampled = (values[rows] for values in old)
    c, length = num_correct[computed], lengths[computed]
    leaf = new.detach().requires_grad_()
    given, weighted = _weigh(leaf, at_begin, sampled, ids, advantages[computed], setting)
    result = policy_loss(
        given,
        sampled if setting.around_sampler else at_begin,
        sequence_ids=ids,
        advantages=weighted,
        num_correct=k - c if setting.reversed_width else c,
        group_size=k,
        # Every seed is a mini-batch: its own denominator is applied below.
        num_tokens_global=1,
        num_sequences_global=1,
        max_response_tokens=MAX_TOKENS,
        method=method,
        widths=_widths_over_length(c, length, setting) if setting.over_length else None,
    )
    (of_rows,) = torch.autograd.grad(result.loss, leaf)
    denominators = torch.full((len(rewards),), rewards[0].numel(), dtype=torch.float64)
    if method.aggregation == "token_mean":
        denominators = lengths.flatten(1).sum(dim=1).double()
    of_rows = of_rows / denominators[:, None, None, None].expand_as(rows)[rows]
    (gradient,) = torch.autograd.grad(new, weights, of_rows)
    sums = per_correct_sums(
        result,
        sequence_ids=ids,
        advantages=advantages[computed],
        num_correct=c,
        group_size=k,
        num_response_tokens=length,
        is_carried=torch.zeros_like(c, dtype=torch.bool),
    )
    return gradient, sums["per_c"]


def _weigh(
    leaf: Tensor,
    at_begin: Tensor,
    sampled: Tensor,
    ids: Tensor,
    advantages: Tensor,
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] and advantages [B] that carry the importance weights."""
    if not setting.staleness or setting.around_sampler or setting.weights == "none":
        return leaf, advantages
    if setting.weights == "token":
        weights = token_importance_weights(at_begin, sampled, largest=IMPORTANCE_WEIGHT_MAX)
        return weigh_gradient(leaf, weights), advantages
    return leaf, advantages * importance_weights(
        at_begin,
        sampled,
        sequence_ids=ids,
        num_sequences=len(advantages),
        largest=IMPORTANCE_WEIGHT_MAX,
    )


def _widths_over_length(c: Tensor, length: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Lower and upper widths [B]: the method's, the upper one times `TYPICAL_LENGTH` / length."""
    method = setting.method
    upper = upper_clip(
        c,
        group_size=setting.group_size,
        eps_low=method.floor,
        eps_high_max=method.eps_high_max,
    )
    return torch.full_like(upper, method.eps_low), upper * TYPICAL_LENGTH / length


@torch.no_grad()
def _pass_at_k(weights: Tensor, task: Task) -> Tensor:
    """Exact pass@k of the held-out prompts, [len(PASS_AT), S]."""
    rates = pass_rates(weights, task.held_out)
    return torch.stack([(1 - (1 - rates) ** k).mean(dim=1) for k in PASS_AT])
