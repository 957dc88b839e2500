"""Clip bounds computed from a whole mini-batch at the current weights: M2PO and BAPO.

Both rules use numpy and float64 over all tokens of the mini-batch, sorted first, so the bounds have
the same bits for any distribution of tokens over ranks. The published programs compute them per
micro-batch, some also per rank, so that their loss depends on the split.

M2PO (arXiv 2510.01161, Alg. 1; its text was read from the authors' figures). Trust-region tokens
are those that a step moves further away: A > 0 and r > 1, or A < 0 and r < 1 (as in the authors'
program). The largest (log r)^2 among them is removed until their mean is at most
`second_moment_max`. Removed tokens have no gradient; the denominator stays. Removing the largest is
a threshold on |log r|, here a pair of bounds for the clipped family: the gradients are those of
Alg. 1, and the loss differs by the constant of the clipped tokens. Other implementations: the
authors' program counts clipped tokens at the threshold, so it clips more; AReaL's ignores the sign
of A, and uses the policy before the update instead of the current one.

BAPO (arXiv 2510.18927, Eq. 8 and Alg. 1). Until tokens with A > 0 make up `positive_share_min` of

    rho = sum_{A>0} p A min(r, c_high) / (that + sum_{A<0} p |A| max(r, c_low))

c_high rises to its end, then c_low; p is the old policy's probability of the token. Differences:
the printed denominator is the absolute value of the signed sum, which is near 0 if both sides
balance, so that the share could be anything; the authors' program compares the two sums, without p,
and raises c_low first. Raising c_low in max(r, c_low) lowers rho, so once c_high is at its end,
c_low goes to its own end, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gapo_megatron.config.methods import Method
from gapo_megatron.objective.clipping import MAX_LOG_RATIO

HIGH_STEP, HIGH_END = 0.05, 3.0
LOW_STEP, LOW_END = 0.02, 0.9
"""BAPO's grid: steps and ends of 1 + eps_high and of 1 - eps_low (paper, section on settings)."""


def find_bounds(
    log_ratio: np.ndarray, advantages: np.ndarray, old_log_probs: np.ndarray, method: Method
) -> tuple[float, float] | None:
    """Clip widths of one mini-batch by the rule `method.bounds`.

    Args:
        log_ratio: [T] float64, current over old policy, of all tokens of the mini-batch; tokens
            with A = 0 may be missing.
        advantages: [T] float64, of each token's sequence.
        old_log_probs: [T] float64, of the policy in the ratio's denominator.
        method: a method of the clipped family with token ratios.

    Returns:
        Lower and upper width, as distances from 1; None: use the method's own.
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
    """M2PO: widths beyond which Alg. 1 removes trust-region tokens.

    Tokens of equal |log r| are treated alike: if Alg. 1 removes one of them, all are removed. The
    threshold is halfway between the last kept and the first removed token, so that rounding of exp
    does not matter. Log-ratios are clamped to +-`clipping.MAX_LOG_RATIO`, as in the loss.

    Args:
        log_ratio: [T] float64.
        advantages: [T] float64.
        budget: tau, largest mean of (log r)^2 without removal.

    Returns:
        Lower and upper width, as distances from 1; None: nothing is removed.
    """
    bounded = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sizes = np.sort(np.abs(bounded[bounded * np.sign(advantages) > 0]))
    within = np.cumsum(sizes**2) <= budget * np.arange(1, len(sizes) + 1)
    if within.all():
        return None
    # The mean of the n smallest never falls with n: stop at the first above the budget.
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
    """BAPO: bounds that give correct responses `share` of the surrogate, or the end of the grid.

    Args:
        log_ratio: [T] float64.
        advantages: [T] float64.
        weights: [T] float64, the old policy's probability of each token.
        share: rho_0.
        start: lower and upper width at the start of the search, as distances from 1.

    Returns:
        Lower and upper width; None if no token has an advantage.
    """
    # Sums of the surrogate on both sides, as functions of the bound.
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
    # Raise the upper bound to its end, then the lower one.
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
    """`start`, then in steps up to `end`; by number of steps, so that rounding loses none."""
    count = math.floor((end - start) / step + 1e-9)
    return [start + i * step for i in range(max(count, 0) + 1)]


def _sum_of_minima(values: np.ndarray, weights: np.ndarray) -> Callable[[float], float]:
    """The function c -> sum(weights * min(values, c)), from prefix sums of the sorted values."""
    order = np.lexsort((weights, values))
    values, weights = values[order], weights[order]
    below = np.concatenate([[0.0], np.cumsum(weights * values)])
    above = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]])

    def total(bound: float) -> float:
        place = np.searchsorted(values, bound, side="right")
        return float(below[place] + bound * above[place])

    return total
