"""Presets of every method the paper compares, as plain numbers (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How one policy-gradient method turns advantages and ratios into a loss.

    The switches are independent; a preset is only a name for one combination of them.
    """

    name: str
    ratio: Literal["sequence", "token"]
    """`sequence`: s_i = exp(mean over tokens of the log-ratio) (GSPO); `token`: one ratio per token."""
    adaptive: bool = False
    """True: upper clip eps_high(c) of the paper's boxed equation; False: eps_high_max for every c."""
    eps_low: float
    eps_high_max: float
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO)."""
    focal_gamma: float = 0.0
    """Exponent of F-GRPO's shaping (1 - c/k)^gamma; 0 turns it off."""
    stop_gradient_ratio: bool = False
    """CISPO: the clipped ratio weights the log-probability and carries no gradient itself."""


_TOKEN = {"ratio": "token", "eps_low": 0.2}
_SEQUENCE = {"ratio": "sequence", "eps_low": 3e-3}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="grpo", **_TOKEN, eps_high_max=0.2, normalize_std=True, aggregation="sequence_mean"),
        Method(name="dr_grpo", **_TOKEN, eps_high_max=0.28, aggregation="constant"),
        Method(name="dapo", **_TOKEN, eps_high_max=0.28, normalize_std=True),
        Method(name="gspo", **_SEQUENCE, eps_high_max=3e-3),
        Method(name="gspo_asym", **_SEQUENCE, eps_high_max=5e-3),
        Method(name="f_grpo", **_TOKEN, eps_high_max=0.2, focal_gamma=1.0),
        Method(name="f_gspo", **_SEQUENCE, eps_high_max=5e-3, focal_gamma=1.0),
        Method(name="gapo", **_SEQUENCE, eps_high_max=5e-3, adaptive=True),
        Method(name="gapo_token", **_TOKEN, eps_high_max=0.28, adaptive=True),
        Method(name="cispo", ratio="token", eps_low=1.0, eps_high_max=0.28, stop_gradient_ratio=True),
    )
}
"""Presets by name, with the clip widths of the paper's tables. docs/objective.md says what is open."""
