"""Training in the arena: one arm on a batch of seeds, with the package's advantages and loss.

The task, the order of the prompts and the random numbers of the samples depend on the chunk of
seeds and the step alone, so arms with the same k see the same draws.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gapo_megatron.objective import (
    Method,
    group_advantages,
    importance_weights,
    policy_loss,
    token_importance_weights,
    upper_clip,
    weigh_gradient,
)
from gapo_megatron.objective.diagnostics import DOSE, SUMS, per_correct_sums
from gapo_megatron.objective.draws import keys_of, with_step
from studies.arena import task as walks
from studies.arena.task import Prompts, Responses, Task

STEP_PROMPTS, MINIBATCHES = 32, 4
CLIP_GRAD = 1.0
IMPORTANCE_WEIGHT_MAX = 2.0
"""Bound on importance weights of stale batches, whose clip is around the step's first weights."""
TYPICAL_LENGTH = 6
"""Length at which widths over length are the method's; half of the longest response."""
PASS_AT = (1, 64)
LATE = 3
"""Number of last evaluations whose mean is a seed's outcome."""
QUARTERS = 4
MEASURE_EVERY = 10
"""Steps between measurements of what a whole step does."""
MOVED = (
    "responses",
    "log_ratio",
    "log_ratio_squared",
    "mean_log_ratio",
    "mean_log_ratio_squared",
)
"""Rows of `Trained.moved`: log-ratios of whole responses, and their means over tokens, both minus
the mean of their group, which takes out a constant of the prompt."""
PROGRESS = ("gain", "divergence", "variance")
"""Rows of `Trained.progress`: gain of the pass rate, KL divergence of the new policy from the old
one, and variance p (1 - p) of the reward under the old one; all exact."""


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
    policy: Literal["walks", "transformer"] = "walks"
    """What is trained. Trainings of the transformer are in the archive alone; README.md names the
    commit that made them."""


@dataclass(frozen=True)
class Trained:
    """Result of training one arm on S seeds."""

    curve: Tensor
    """[evaluations, len(PASS_AT) + 1, S] float64: exact pass@k of the held-out prompts, and the
    KL divergence from the first policy."""
    per_c: Tensor
    """[QUARTERS, len(SUMS), 2, k + 1] float64: `diagnostics` sums of each quarter of training, over
    the updates of all seeds."""
    moved: Tensor
    """[QUARTERS, len(MOVED), 2, k + 1] float64: what measured steps did to the log-probs of their
    responses, summed over all seeds by correctness (0 wrong, 1 correct) and c."""
    progress: Tensor
    """[len(PROGRESS), S] float64: what measured steps did on their own prompts, summed."""
    dose: Tensor | None = None
    """[QUARTERS, len(DOSE)] float64: `diagnostics` sums likewise; not in the archive."""


def train(
    setting: Setting, seeds: range, *, evaluate_every: int, evaluations: int | None = None
) -> Trained:
    """Train one arm on the tasks of `seeds`; of its evaluations the last `evaluations` are made."""
    assert setting.policy == "walks"
    task = walks.make_task(seeds)
    weights = task.weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=setting.learning_rate, weight_decay=0.0, fused=True)
    past = deque([task.weights], maxlen=setting.staleness + 1)
    first = walks.log_policy(task.weights, task.held_out)
    evaluated = list(range(0, setting.num_steps + 1, evaluate_every))
    evaluated = evaluated[-evaluations:] if evaluations else evaluated
    curve = [_evaluate(past[-1], task, first)] if 0 in evaluated else []
    k, share = setting.group_size, STEP_PROMPTS // MINIBATCHES
    per_c = torch.zeros(QUARTERS, len(SUMS), 2, k + 1, dtype=torch.float64)
    moved = torch.zeros(QUARTERS, len(MOVED), 2, k + 1, dtype=torch.float64)
    progress = torch.zeros(len(PROGRESS), len(seeds), dtype=torch.float64)
    dose = torch.zeros(QUARTERS, len(DOSE), dtype=torch.float64)
    for step in range(setting.num_steps):
        quarter = QUARTERS * step // setting.num_steps
        prompts, uniforms = _draw(task, seeds, step, k)
        responses = walks.sample(past[0], prompts, uniforms)
        keys = _keys(seeds, step, k)
        with torch.no_grad():
            begin = walks.log_policy(past[-1], prompts)
            at_begin = sampled = walks.log_probs(begin, responses)
            if setting.staleness:
                sampled = walks.log_probs(walks.log_policy(past[0], prompts), responses)
        for start in range(0, STEP_PROMPTS, share):
            part = slice(start, start + share)
            old = (at_begin[:, part], sampled[:, part])
            batch = (prompts.of(part), responses.of(part), keys[:, part])
            gradient, sums = _gradient(weights, *batch, old, setting)
            norm = gradient.flatten(1).norm(dim=1).clamp(min=CLIP_GRAD)
            weights.grad = gradient * (CLIP_GRAD / norm).view(-1, *[1] * (gradient.dim() - 1))
            optimizer.step()
            per_c[quarter] += sums["per_c"]
            dose[quarter] += sums["dose"]
        past.append(weights.detach().clone())
        if (step + 1) % MEASURE_EVERY == 0:
            after = walks.log_policy(past[-1], prompts)
            moved[quarter] += _moved(walks.log_probs(after, responses) - at_begin, responses)
            progress += _progress(begin, after, prompts)
        if step + 1 in evaluated:
            curve.append(_evaluate(past[-1], task, first))
    return Trained(torch.stack(curve), per_c, moved, progress, dose)


def _moved(log_ratio: Tensor, responses: Responses) -> Tensor:
    """Sums of `MOVED` by correctness and c, [len(MOVED), 2, k + 1], of log-ratios [S, N, k, L]."""
    k = responses.rewards.shape[-1]
    correct = responses.rewards.long()
    cell = correct * (k + 1) + correct.sum(dim=-1, keepdim=True)
    total = (log_ratio * responses.is_token).sum(dim=-1)
    mean = total / responses.is_token.sum(dim=-1)
    total, mean = (values - values.mean(dim=-1, keepdim=True) for values in (total, mean))
    values = torch.stack([torch.ones_like(total), total, total**2, mean, mean**2])
    sums = torch.zeros(len(MOVED), 2 * (k + 1), dtype=torch.float64)
    sums.index_add_(1, cell.flatten(), values.flatten(1).double())
    return sums.view(len(MOVED), 2, k + 1)


def _progress(before: Tensor, after: Tensor, prompts: Prompts) -> Tensor:
    """`PROGRESS` of one step, means over its prompts, [len(PROGRESS), S]."""
    old, _ = walks.exact(before, prompts, before)
    new, divergence = walks.exact(after, prompts, before)
    return torch.stack([new - old, divergence, old * (1 - old)]).mean(dim=-1)


def _draw(task: Task, seeds: range, step: int, k: int) -> tuple[Prompts, Tensor]:
    """Draw a step's prompts, and the random numbers of their responses."""
    generator = torch.Generator().manual_seed(seeds.start * 1_000_003 + step)
    keys = torch.rand(len(seeds), len(task.training), generator=generator)
    uniforms = torch.rand(len(seeds), STEP_PROMPTS, k, task.max_tokens, generator=generator)
    return task.training.pick(keys.topk(STEP_PROMPTS).indices), uniforms


def _keys(seeds: range, step: int, k: int) -> Tensor:
    """Keys of a step's responses, [S, prompts, k] int64, for rules that decide by chance."""
    table = np.zeros((STEP_PROMPTS, k), dtype=[("problem", np.int32), ("sample", np.int32)])
    table["problem"], table["sample"] = np.indices(table.shape)
    keys = keys_of(table)
    return torch.stack([with_step(keys, seed=seed, step=step) for seed in seeds])


def _gradient(
    weights: Tensor,
    prompts: Prompts,
    responses: Responses,
    keys: Tensor,
    old: tuple[Tensor, Tensor],
    setting: Setting,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradient of each seed's mini-batch, shaped like the weights; `diagnostics` over all seeds."""
    method, k = setting.method, setting.group_size
    rewards = responses.rewards
    advantages = group_advantages(
        rewards.flatten(0, 1),
        normalize_std=method.normalize_std,
        focal_gamma=method.focal_gamma,
        virtual_correct=method.virtual_correct,
    ).view_as(rewards)
    num_correct = rewards.sum(-1, keepdim=True).long().expand_as(rewards)
    lengths = responses.is_token.sum(-1)

    # As in training, sequences with A = 0 are not computed; denominators count them.
    computed = advantages != 0
    rows = (responses.is_token & computed[..., None]).flatten().nonzero().squeeze(1)
    ids = torch.arange(int(computed.sum())).repeat_interleave(lengths[computed])
    new = walks.log_probs(walks.log_policy(weights, prompts), responses).flatten()[rows]
    at_begin, sampled = (values.flatten()[rows] for values in old)
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
        max_response_tokens=responses.tokens.shape[-1],
        method=method,
        keys=keys[computed],
        widths=_widths_over_length(c, length, setting) if setting.over_length else None,
    )
    (of_rows,) = torch.autograd.grad(result.loss, leaf)
    denominators = torch.full((len(rewards),), rewards[0].numel(), dtype=torch.float64)
    if method.aggregation == "token_mean":
        denominators = lengths.flatten(1).sum(dim=1).double()
    of_rows = of_rows / denominators[rows // responses.is_token[0].numel()]
    (gradient,) = torch.autograd.grad(new, weights, of_rows.to(new.dtype))
    sums = per_correct_sums(
        result,
        sequence_ids=ids,
        advantages=advantages[computed],
        num_correct=c,
        group_size=k,
        is_carried=torch.zeros_like(c, dtype=torch.bool),
    )
    return gradient, sums


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
def _evaluate(weights: Tensor, task: Task, first: Tensor) -> Tensor:
    """Exact pass@k of the held-out prompts, and KL from the `first` policy: rows of `curve`."""
    now = walks.log_policy(weights, task.held_out)
    rates, divergence = walks.exact(now, task.held_out, first)
    rows = [1 - (1 - rates) ** k for k in PASS_AT]
    return torch.stack([*rows, divergence]).mean(dim=-1)
