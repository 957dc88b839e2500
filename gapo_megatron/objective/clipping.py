"""Bounds of ratios: the paper's clip width by c, and a bound against overflow."""

from __future__ import annotations

import torch

from gapo_megatron.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is far outside every clip, and its gradient still fits float32."""


def upper_clip(
    num_correct: torch.Tensor,
    *,
    group_size: int | torch.Tensor,
    eps_low: float,
    eps_high_max: float,
) -> torch.Tensor:
    """Upper clip width of a correct rollout in a group with c of k correct.

        eps_high(c) = eps_low + (eps_high_max - eps_low) * (k - c) / (k - 1)

    It falls from eps_high_max for a single correct rollout (c = 1) to eps_low if all are correct
    (c = k). c = 0 gives eps_high_max, too.

    Args:
        num_correct: c, [...] int64 in 0..k.
        group_size: k, an int or a tensor that broadcasts with `num_correct`. Tensor entries below 2
            (groups shrunk by unknown verdicts, A = 0) get a finite width, which is not used.
        eps_low: lower clip width.
        eps_high_max: largest upper clip width, at least `eps_low`.

    Returns:
        [...] float64 in [eps_low, eps_high_max].

    Raises:
        ConfigError: `group_size` is an int below 2, or eps_high_max < eps_low.

    Source: equation (gapo), boxed, section 3.2.
    """
    if eps_high_max < eps_low:
        raise ConfigError(f"eps_high_max ({eps_high_max}) must be at least eps_low ({eps_low})")
    if isinstance(group_size, int) and group_size < 2:
        raise ConfigError(f"group_size ({group_size}) must be at least 2")
    correct = num_correct.double().clamp(min=1)
    if isinstance(group_size, torch.Tensor):
        size = group_size.double()
    else:  # filled on the device: a copy from the host would synchronise
        size = torch.full_like(correct, group_size)
    share = ((size - correct) / (size - 1).clamp(min=1)).clamp(min=0)
    return eps_low + (eps_high_max - eps_low) * share


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Exp of values clamped to +-MAX_LOG_RATIO; the clamp leaves every gradient as it is."""
    return torch.exp(bound(log_ratio))


def bound(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp values to +-MAX_LOG_RATIO; the gradient is 1 everywhere."""
    # A plain clamp has no gradient outside, so a wrong response beyond it would never be pulled
    # back. Only the value is bounded; inside the bound the correction is exactly zero.
    return log_ratio + (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()
