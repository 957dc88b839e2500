"""Ratios from log-ratios, bounded so that neither they nor their gradients overflow."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is far outside every clip, and its gradient still fits float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, with its argument held within +-MAX_LOG_RATIO and its gradient kept alive beyond it."""
    return torch.exp(bound(log_ratio))


def bound(log_ratio: torch.Tensor) -> torch.Tensor:
    """Hold values within +-MAX_LOG_RATIO; the gradient is that of the identity everywhere."""
    # A plain clamp has no gradient outside, so a wrong response that ran away would never be pulled
    # back. Only the value is bounded; inside the bound the correction is exactly zero.
    return log_ratio + (log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - log_ratio).detach()
