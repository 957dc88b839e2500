"""The reversed arm: GAPO's widths in mirrored order, widest where most rollouts are correct.

    eps_high(c) = eps_low + (eps_high_max - eps_low) * c / (k - 1)          for c = 1 .. k - 1

That is GAPO's width of k - c correct rollouts. The lower width is the same for every c.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gapo_megatron.objective import Method, upper_clip
from gapo_megatron.objective.families import LossInputs
from gapo_megatron.objective.families.clipped import clipped_loss


def reversed_clip(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss with mirrored upper widths; see the module."""
    upper = upper_clip(
        inputs.group_size - inputs.num_correct,
        group_size=inputs.group_size,
        eps_low=inputs.method.eps_low,
        eps_high_max=inputs.method.eps_high_max,
    )
    return clipped_loss(replace(inputs, upper=upper))


REVERSED = Method(
    name="reversed",
    ratio="sequence",
    eps_low=3e-3,
    eps_high_max=5e-3,
    family="studies/reversal/reversed.py:reversed_clip",
)
