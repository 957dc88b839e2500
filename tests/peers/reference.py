"""One GAPO update's loss and gradients, written plainly from the paper: transformers and float64.

Padded batch, whole logits, no packing, no tiles, nothing of `gapo_megatron`. Slow and simple on
purpose: the numbers that faster code has to reproduce.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Update:
    """What one mini-batch says about the weights. Everything float64, on the CPU."""

    loss: float
    gradients: dict[str, Tensor]
    """By Hugging Face name; a tied output layer is part of the embedding's."""
    log_probs: list[Tensor]
    """[response tokens] of every sequence."""
    advantages: list[float]
    ratios: list[float]
    """s_i of every sequence."""
    clipped: list[bool]
    """Whether the clipped term is the larger one, so that sequence i has no gradient."""

    @property
    def grad_norm(self) -> float:
        """Euclidean norm over all weights, before clipping."""
        return sum(float(g.square().sum()) for g in self.gradients.values()) ** 0.5


def gapo_update(
    model: nn.Module,
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rewards: Sequence[float],
    group_size: int,
    old_log_probs: Sequence[Tensor] | None = None,
    eps_low: float = 3e-3,
    eps_high_max: float = 5e-3,
    temperature: float = 1.0,
    importance_weights: Sequence[float] | None = None,
    masks: Sequence[Tensor] | None = None,
    conversations: Sequence[Sequence[int]] | None = None,
) -> Update:
    """Loss of a mini-batch, with token-level aggregation, and its gradient for every weight.

    Args:
        model: a causal language model of transformers, at the current weights; left as it is.
        prompts: token ids of every sequence's prompt.
        responses: token ids of every response, group after group.
        rewards: 0 or 1 for every response.
        group_size: k, responses of each group.
        old_log_probs: [response tokens] of every sequence under the policy that sampled it; None:
            the current policy did, so every ratio is 1.
        eps_low: lower clip width.
        eps_high_max: upper clip width at c = 1.
        temperature: of sampling.
        importance_weights: a factor for every sequence's loss; None: 1.
        masks: [response tokens] bool of every sequence, True where the model sampled the token:
            the others are skipped, and `old_log_probs` has none of them. None: all.
        conversations: see `response_log_probs`.
    """
    assert len(prompts) == len(responses) == len(rewards) and len(rewards) % group_size == 0
    assert set(rewards) <= {0.0, 1.0}
    model = in_float64(model)
    log_probs = response_log_probs(model, prompts, responses, temperature, conversations)
    if masks is not None:
        log_probs = [values[mask] for values, mask in zip(log_probs, masks, strict=True)]

    total = torch.zeros((), dtype=torch.float64)
    advantages, ratios, clipped = [], [], []
    for i, (reward, new) in enumerate(zip(rewards, log_probs, strict=True)):
        old = new.detach() if old_log_probs is None else old_log_probs[i].double()
        first = i - i % group_size
        c = sum(rewards[first : first + group_size])
        # A_i = r_i - mean of the group's rewards.
        advantage = reward - c / group_size
        # s_i = (pi_new(y_i) / pi_old(y_i)) ^ (1 / |y_i|)
        ratio = torch.exp((new.sum() - old.sum()) / len(new))
        # Incorrect rollouts always use eps_low.
        eps_high = eps_low
        if reward == 1:
            eps_high += (eps_high_max - eps_low) * (group_size - c) / (group_size - 1)
        free = -advantage * ratio
        bounded = -advantage * ratio.clamp(1 - eps_low, 1 + eps_high)
        # Every response token carries its sequence's loss.
        weight = 1.0 if importance_weights is None else importance_weights[i]
        total = total + len(new) * weight * torch.maximum(free, bounded)
        advantages.append(advantage)
        ratios.append(float(ratio.detach()))
        clipped.append(bool(bounded > free))
    loss = total / sum(len(values) for values in log_probs)

    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return Update(
        loss=float(loss.detach()),
        gradients=dict(zip(weights, gradients, strict=True)),
        log_probs=[values.detach() for values in log_probs],
        advantages=advantages,
        ratios=ratios,
        clipped=clipped,
    )


def response_log_probs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
    conversations: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Log-prob of every response token given what precedes it, from one right-padded batch.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of every sequence's prompt.
        responses: token ids of every response.
        temperature: of sampling.
        conversations: of every response token the number of its conversation: what precedes it is
            what it has of these, and of the first the prompt. NaN where nothing does. None: one.
    """
    if conversations is not None:
        return _of_conversations(model, prompts, responses, temperature, conversations)
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    result = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # The position before a token predicts it.
        predicted = log_p[i, len(prompt) - 1 : len(prompt) - 1 + len(response)]
        result.append(predicted[torch.arange(len(response)), torch.tensor(response)])
    return result


def _of_conversations(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
    conversations: Sequence[Sequence[int]],
) -> list[Tensor]:
    parts = [
        (i, [place for place, one in enumerate(numbers) if one == number], number)
        for i, numbers in enumerate(conversations)
        for number in sorted({*numbers})
    ]
    # Of a conversation without the prompt the first token is no response.
    found = response_log_probs(
        model,
        [[*prompts[i]] if number == 0 else [responses[i][at[0]]] for i, at, number in parts],
        [[responses[i][one] for one in at[number > 0 :]] for i, at, number in parts],
        temperature,
    )
    result = [found[0].new_full((len(one),), math.nan) for one in responses]
    for (i, at, number), values in zip(parts, found, strict=True):
        result[i] = result[i].index_copy(0, torch.tensor(at[number > 0 :], dtype=int), values)
    return result


def in_float64(model: nn.Module) -> nn.Module:
    """A copy that computes in float64 also where layers of transformers fall back to float32."""
    model = copy.deepcopy(model).cpu().double().eval().requires_grad_()
    model.set_attn_implementation("sdpa")  # its eager attention takes the softmax in float32
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _rms_norm.__get__(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _rotary.__get__(module)
    return model


def _rms_norm(self: nn.Module, hidden: Tensor) -> Tensor:
    mean_square = hidden.square().mean(-1, keepdim=True)
    return self.weight * hidden * torch.rsqrt(mean_square + self.variance_epsilon)


def _rotary(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[:, :, None].double() * self.inv_freq.double()
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
