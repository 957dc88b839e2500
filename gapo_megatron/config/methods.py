"""Presets of the paper's methods and of their rivals, as plain numbers (standard library only)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How one policy-gradient method turns advantages and ratios into a loss.

    The switches are independent; a preset is only a name for one combination of them.
    """

    name: str
    ratio: Literal["sequence", "token", "product"]
    """`sequence`: s_i = exp(mean over tokens of the log-ratio), GSPO; `token`: one per token;
    `product`: exp(sum over tokens of the log-ratio), of the whole response."""
    adaptive: bool = False
    """True: upper clip eps_high(c), the paper's boxed equation; False: eps_high_max for all c."""
    has_floor: bool = True
    """False: eps_high(c) without its floor eps_low, so proportional to k - c, as the advantage of a
    correct rollout is. Only with `adaptive`."""
    eps_low: float
    eps_high_max: float
    is_band: bool = True
    """Whether the widths keep a ratio in 1 - eps_low .. 1 + eps_high: then eps_low is below 1 and
    eps_high_max at least eps_low. False: the family's file says what the widths mean."""
    aggregation: Aggregation = "token_mean"
    """How the losses of the tokens become one number; see `losses.policy_loss`."""
    advantages: str = ""
    """User code that makes advantages of rewards, `path/to/file.py:NAME` or `package.module:NAME`
    (`objective.groups.find_advantages`); empty: `group_advantages` with the next three numbers."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO)."""
    std_floor: float = 0.0
    """Least standard deviation that `normalize_std` divides by."""
    virtual_correct: int = 0
    """Number of correct answers that nobody has sampled in each group's mean and standard deviation
    (NGRPO). Groups with c = 0 then have a gradient, and dynamic sampling keeps them."""
    focal_gamma: float = 0.0
    """Exponent of F-GRPO's shaping (1 - c/k)^gamma; 0 turns it off."""
    ratio_max: float = math.inf
    """Largest ratio or weight that counts (DPPO, ASPO, DCPO); the family's file says how."""
    eps_low_correct: float | None = None
    """ABC's lower width of correct responses, else None; `eps_low` is that of wrong ones."""
    eps_high_wrong: float | None = None
    """ABC's upper width of wrong responses, else None; `eps_high_max` is that of correct ones."""
    rescue_noise: float | None = None
    """NSR's half-width of the noise that may bring a clipped ratio back, else None."""
    decay_low: float | None = None
    """n of DGPO, else None: how fast the gradient of wrong responses decays below the clip."""
    decay_high: float | None = None
    """m of DGPO, else None: how slowly that of correct responses decays above the clip."""
    off_policy_mask: float | None = None
    """delta: wrong responses whose mean log-ratio is below -delta leave the loss (OPSM)."""
    bounds: Literal["fixed", "second_moment", "balanced"] = "fixed"
    """`fixed`: the widths above. The others find new widths for each mini-batch, from all of its
    tokens at the current weights (`objective.minibatch_bounds`). This costs one more forward pass
    per mini-batch whose ratios may differ from 1. `second_moment`, M2PO: the widths above apply
    while the second moment is within its budget. `balanced`, BAPO: the search starts from them.
    Both need token ratios and the clipped family."""
    second_moment_max: float | None = None
    """tau of `second_moment`, else None: largest mean of (log r)^2 over the tokens with A > 0
    and r > 1, or A < 0 and r < 1."""
    positive_share_min: float | None = None
    """rho_0 of `balanced`, else None: least share of the surrogate that responses with A > 0
    should have."""
    family: str = "clipped"
    """Name of the loss: a key of `objective.families.FAMILIES`, or user code,
    `path/to/file.py:NAME` or `package.module:NAME`, which returns
    `(loss, metrics)`."""

    @property
    def has_width_by_c(self) -> bool:
        """Whether the method has a fixed upper width for correct responses, as `adaptive` needs.

        TOPR's widths are for wrong responses only; bounds found per mini-batch replace both widths.
        """
        return self.bounds == "fixed" and self.family != "topr"

    @property
    def floor(self) -> float:
        """Least upper width by c, that of c = k."""
        return self.eps_low if self.has_floor else 0.0

    @property
    def stops_gradients(self) -> bool:
        """Whether the gradient of some ratios with A != 0 may be exactly 0.

        Then their backward pass is skipped. These families only make gradients small; of user code
        it is not known, so its gradients are looked at.
        """
        is_smooth = self.family in ("cispo", "sapo", "topr", "dgpo")
        return not is_smooth or self.off_policy_mask is not None


_GRPO = Method(
    name="grpo",
    ratio="token",
    eps_low=0.2,
    eps_high_max=0.2,
    normalize_std=True,
    aggregation="sequence_mean",
)
_GSPO = Method(name="gspo", ratio="sequence", eps_low=3e-3, eps_high_max=3e-3)
_GSPO_ASYM = replace(_GSPO, name="gspo_asym", eps_high_max=5e-3)

_PRESETS = (
    _GRPO,
    Method(name="dr_grpo", ratio="token", eps_low=0.2, eps_high_max=0.28, aggregation="constant"),
    Method(name="dapo", ratio="token", eps_low=0.2, eps_high_max=0.28, normalize_std=True),
    _GSPO,
    _GSPO_ASYM,
    replace(_GRPO, name="f_grpo", focal_gamma=1.0),
    replace(_GSPO_ASYM, name="f_gspo", focal_gamma=1.0),
    replace(_GSPO_ASYM, name="gapo", adaptive=True),
    # A trust region's optimum moves a ratio in proportion to A: 7 : 1 between c = 1 and c = 7 of 8,
    # where GAPO's widths are 1.52 : 1. Not of the paper; studies/arena/README.md measures it.
    replace(_GSPO_ASYM, name="gapo_proportional", adaptive=True, has_floor=False),
    Method(name="gapo_token", ratio="token", eps_low=0.2, eps_high_max=0.28, adaptive=True),
    Method(
        name="cispo",
        ratio="token",
        eps_low=1.0,
        eps_high_max=0.28,
        is_band=False,
        family="cispo",
    ),
    # Temperatures 1.05 where A <= 0 and 1.0 where A > 0: the widths are their inverses.
    Method(
        name="sapo",
        ratio="token",
        eps_low=1 / 1.05,
        eps_high_max=1.0,
        is_band=False,
        aggregation="sequence_mean",
        normalize_std=True,
        family="sapo",
    ),
    Method(
        name="gmpo",
        ratio="token",
        eps_low=1 - math.exp(-0.4),
        eps_high_max=math.exp(0.4) - 1,
        aggregation="sequence_mean",
        normalize_std=True,
        family="gmpo",
    ),
    # GSPO with each response's loss times its length (arXiv 2602.05261), as one transcription and
    # TRL give it. Divided by the standard deviation as in GSPO's own paper: whether LUSPO's does
    # so, too, was not verified. Of one mini-batch it is a token mean up to a factor, its mean
    # response length.
    replace(
        _GSPO,
        name="luspo",
        eps_low=2e-3,
        eps_high_max=2.5e-3,
        aggregation="sequence_sum",
        normalize_std=True,
    ),
    # delta and the widths are slime's defaults; DeepSeek-V3.2's report names neither.
    Method(
        name="opsm",
        ratio="token",
        eps_low=0.2,
        eps_high_max=0.2,
        aggregation="sequence_mean",
        off_policy_mask=1e-4,
    ),
    Method(
        name="m2po",
        ratio="token",
        eps_low=1.0,
        eps_high_max=1e9,  # no ratio gets there
        is_band=False,
        normalize_std=True,
        bounds="second_moment",
        second_moment_max=0.04,
    ),
    # The paper prints a sum over tokens: the mean differs by one factor for the whole mini-batch.
    Method(
        name="bapo",
        ratio="token",
        eps_low=0.4,
        eps_high_max=0.2,
        is_band=False,
        normalize_std=True,
        bounds="balanced",
        positive_share_min=0.4,
    ),
    Method(
        name="dppo_tv",
        ratio="token",
        eps_low=0.15,
        eps_high_max=0.15,
        is_band=False,
        ratio_max=5.0,
        aggregation="sequence_sum",
        family="dppo",
    ),
    Method(
        name="fspo",
        ratio="product",
        eps_low=0.03,
        eps_high_max=0.03,
        is_band=False,
        aggregation="sequence_sum",
        normalize_std=True,
        family="fspo",
    ),
    Method(
        name="topr",
        ratio="product",
        eps_low=1.0,
        eps_high_max=0.0,
        is_band=False,
        aggregation="sequence_sum",
        family="topr",
    ),
    Method(
        name="dcpo",
        ratio="token",
        eps_low=0.16,
        eps_high_max=0.2,
        is_band=False,
        ratio_max=10.0,
        aggregation="sequence_mean",
        normalize_std=True,
        family="dcpo",
    ),
    Method(
        name="aspo",
        ratio="token",
        eps_low=0.2,
        eps_high_max=0.2,
        ratio_max=3.0,
        aggregation="sequence_mean",
        normalize_std=True,
        family="aspo",
    ),
    Method(
        name="atr",
        ratio="token",
        eps_low=0.02,
        eps_high_max=0.02,
        is_band=False,
        aggregation="sequence_mean",
        normalize_std=True,
        family="atr",
    ),
    Method(
        name="abc",
        ratio="token",
        eps_low=0.2,
        eps_high_max=0.2,
        is_band=False,  # the two are bounds of different responses
        eps_low_correct=0.2,
        eps_high_wrong=0.2,
        aggregation="sequence_mean",
        family="abc",
    ),
    Method(
        name="nsr",
        ratio="token",
        eps_low=0.2,
        eps_high_max=0.28,
        rescue_noise=0.1,
        normalize_std=True,
        family="nsr",
    ),
    Method(
        name="ngrpo",
        ratio="token",
        eps_low=0.16,
        eps_high_max=0.24,
        normalize_std=True,
        virtual_correct=1,
    ),
    Method(
        name="dgpo",
        ratio="token",
        eps_low=0.2,
        eps_high_max=0.2,
        decay_low=1.0,
        decay_high=2.0,
        normalize_std=True,
        family="dgpo",
    ),
)
METHODS = {method.name: method for method in _PRESETS}
"""Presets by name, with the clip widths of the papers; docs/objective.md lists open questions."""
