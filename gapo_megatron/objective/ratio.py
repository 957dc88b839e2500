"""Ratios from log-ratios, bounded so that neither they nor their gradients overflow."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is far outside every clip, and its gradient still fits float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(bound(log_ratio))."""
    return torch.exp(bound(log_ratio))


def bound(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp values to +-MAX_LOG_RATIO; the gradient is 1 everywhere."""
    # A plain clamp has no gradient outside, so a wrong response beyond it would never be pulled
    # back. Only the value is bounded; inside the bound the correction is exactly zero.
    return log_ratio + (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()
