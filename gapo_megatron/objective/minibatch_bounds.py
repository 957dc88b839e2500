"""Clip bounds that a whole mini-batch decides, at the current weights: M2PO and BAPO.

Both rules are in numpy and float64 over all tokens of the mini-batch, and sort them first: whoever
holds which token, in whatever order, the bounds are the same to the bit. The published programs
find them per micro-batch, some per rank as well, so that their loss depends on the split.

M2PO (arXiv 2510.01161, Alg. 1; its text was read from the authors' figures). Trust-region tokens
are those that a step pushes further away: A > 0 and r > 1, or A < 0 and r < 1 (this definition: the
authors' program). The largest (log r)^2 among them is removed until their mean is at most
`second_moment_max`. Removed tokens have no gradient, all others keep theirs; the denominator stays.
Removing the largest is a threshold on |log r|, here one pair of bounds for the clipped family:
gradients are Alg. 1's, and the loss differs by the constant of the clipped tokens. Elsewhere: the
authors' program counts clipped tokens as lying at the threshold, so it cuts more; AReaL's ignores
the sign of A, and takes the policy before the update instead of the current one.

BAPO (arXiv 2510.18927, Eq. 8 and Alg. 1). Until tokens with A > 0 make up `positive_share_min` of

    rho = sum_{A>0} p A min(r, c_high) / (that + sum_{A<0} p |A| max(r, c_low))

c_high rises to its end, then c_low; p is the probability that the old policy gave the token. What
differs: the printed denominator is the absolute value of the signed sum, which is near 0 wherever
both sides balance, so the share could be anything; the authors' program compares the two sums,
without p, and raises c_low first. c_low enters max(r, c_low): raising it lowers rho, so once c_high
is at its end c_low goes to its own, in the paper as here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gapo_megatron.config.methods import Method
from gapo_megatron.objective.ratio import MAX_LOG_RATIO

HIGH_STEP, HIGH_END = 0.05, 3.0
LOW_STEP, LOW_END = 0.02, 0.9
"""BAPO's grid: steps and ends of 1 + eps_high and of 1 - eps_low (paper, section on settings)."""


def find_bounds(
    log_ratio: np.ndarray, advantages: np.ndarray, old_log_probs: np.ndarray, method: Method
) -> tuple[float, float] | None:
    """Clip widths of one mini-batch by the rule `method.bounds`.

    Args:
        log_ratio: [T] float64, current to old policy, of all tokens of the mini-batch; those with
            A = 0 may be missing.
        advantages: [T] float64, of each token's sequence.
        old_log_probs: [T] float64, of the policy that the ratio compares with.
        method: a token ratio of the clipped family.

    Returns:
        Lower and upper width, distances from 1; None: the method's own hold.
    """
    if method.bounds == "second_moment":
        assert method.second_moment_max is not None
        return second_moment_bounds(log_ratio, advantages, method.second_moment_max)
    assert method.bounds == "balanced" and method.positive_share_min is not None, method
    start = (method.eps_low, method.eps_high_max)
    weights = np.exp(old_log_probs)
    return balanced_bounds(log_ratio, advantages, weights, method.positive_share_min, start)


def second_moment_bounds(
    log_ratio: np.ndarray, advantages: np.ndarray, budget: float
) -> tuple[float, float] | None:
    """M2PO's: tokens of the trust region beyond these widths are those that Alg. 1 removes.

    Tokens of equal |log r| have one fate: if Alg. 1 would remove some of them, all are removed. The
    threshold is halfway between the last kept and the first removed token, so that the roundings of
    exp do not decide. Log-ratios count as within +-`ratio.MAX_LOG_RATIO`, as in the loss.

    Args:
        log_ratio: [T] float64.
        advantages: [T] float64.
        budget: tau, largest mean of (log r)^2 that is left alone.

    Returns:
        Lower and upper width, distances from 1; None: nothing is removed.
    """
    bounded = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sizes = np.sort(np.abs(bounded[bounded * np.sign(advantages) > 0]))
    within = np.cumsum(sizes**2) <= budget * np.arange(1, len(sizes) + 1)
    if within.all():
        return None
    # Means of the smallest n do not fall with n: the first beyond the budget is the end.
    first_removed = sizes[within.argmin()]
    kept = sizes[sizes < first_removed]
    threshold = (first_removed + (kept[-1] if len(kept) else 0.0)) / 2
    return -math.expm1(-threshold), math.expm1(threshold)


def balanced_bounds(
    log_ratio: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    share: float,
    start: tuple[float, float],
) -> tuple[float, float] | None:
    """BAPO's: bounds that give correct responses `share` of the surrogate, or the grid's last ones.

    Args:
        log_ratio: [T] float64.
        advantages: [T] float64.
        weights: [T] float64, the old policy's probability of each token.
        share: rho_0.
        start: lower and upper width that the search starts from, distances from 1.

    Returns:
        Lower and upper width; None where no token has an advantage.
    """
    ratio = np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    weighted, positive = weights * np.abs(advantages), advantages > 0
    high_sum = _sum_of_minima(ratio[positive], weighted[positive])
    negative = advantages < 0
    # max(r, c) = -min(-r, -c)
    low_sum = _sum_of_minima(-ratio[negative], weighted[negative])

    def is_below(low: float, high: float) -> bool:
        ours, theirs = high_sum(high), -low_sum(-low)
        return ours < share * (ours + theirs)

    if not weighted.any():
        return None
    highs = _grid(1 + start[1], HIGH_STEP, HIGH_END)
    lows = _grid(1 - start[0], LOW_STEP, LOW_END)
    low, high = lows[0], highs[0]
    for high in highs:
        if not is_below(low, high):
            return 1 - low, high - 1
    for low in lows:
        if not is_below(low, high):
            break
    return 1 - low, high - 1


def _grid(start: float, step: float, end: float) -> list[float]:
    """`start`, then step by step up to `end`; counted, so that no rounding loses the last one."""
    count = math.floor((end - start) / step + 1e-9)
    return [start + i * step for i in range(max(count, 0) + 1)]


def _sum_of_minima(values: np.ndarray, weights: np.ndarray) -> Callable[[float], float]:
    """The function sum(weights * min(values, c)) of c, from sums of the sorted pairs."""
    order = np.lexsort((weights, values))
    values, weights = values[order], weights[order]
    below = np.concatenate([[0.0], np.cumsum(weights * values)])
    above = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]])

    def total(bound: float) -> float:
        place = np.searchsorted(values, bound, side="right")
        return float(below[place] + bound * above[place])

    return total
