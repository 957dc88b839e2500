"""What single steps do: correlation of ratio and advantage, and the share of a trust region's gain.

A trust region's optimum multiplies the probability of a response by exp(A / lambda) / Z. So the
log-ratio of a whole response, minus that of its group, is proportional to its advantage: their
correlation is 1, and the log-ratio of correct responses is proportional to k - c. To first order a
step's gain is the covariance of reward and log-ratio, and twice the KL divergence is the variance
of the log-ratio; so no step gains more than sqrt(2 KL variance of the reward).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gapo_megatron.objective.diagnostics import SUMS, advantage_correlation
from studies.arena.train import MOVED, PROGRESS, Trained

ALL = slice(None)
_CORRECT = 1


def paper_correlation(trained: Sequence[Trained], quarters: slice = ALL) -> float:
    """Correlation over c of the means of s - 1 and of A, as in the paper; NaN if undefined."""
    return _over_c(trained, quarters, "deviation")


def drift_correlation(trained: Sequence[Trained], quarters: slice = ALL) -> float:
    """The same of |s - 1|."""
    return _over_c(trained, quarters, "abs_deviation")


def _over_c(trained: Sequence[Trained], quarters: slice, deviation: str) -> float:
    sums = torch.stack([one.per_c[quarters].sum(dim=0) for one in trained]).sum(dim=0)
    names = ("sequences", deviation, "advantage")
    columns = [sums[SUMS.index(name), _CORRECT].numpy() for name in names]
    found = advantage_correlation(*columns)
    return math.nan if found is None else found


def response_correlation(
    trained: Sequence[Trained], quarters: slice = ALL, *, counts: Sequence[int] | None = None
) -> float:
    """Correlation over single responses of log-ratio and A = reward - c / k, after whole steps.

    Args:
        trained: an arm by chunk.
        quarters: quarters of training.
        counts: values of c; None means all with an advantage.

    Returns:
        In -1..1; NaN without responses, or if either is constant.
    """
    sums = torch.stack([one.moved[quarters].sum(dim=0) for one in trained]).sum(dim=0)
    k = sums.shape[-1] - 1
    chosen = list(range(1, k) if counts is None else counts)
    of_c = torch.arange(k + 1, dtype=torch.float64) / k
    advantage = torch.stack([-of_c, 1 - of_c])[:, chosen]
    names = ("responses", "log_ratio", "log_ratio_squared")
    number, ratio, squared = (sums[MOVED.index(name)][:, chosen] for name in names)
    total = number.sum()
    mean, mean_a = ratio.sum() / total, (number * advantage).sum() / total
    covariance = (ratio * advantage).sum() / total - mean * mean_a
    variance = squared.sum() / total - mean**2
    variance_a = (number * advantage**2).sum() / total - mean_a**2
    scale = float(variance * variance_a)
    return float(covariance) / math.sqrt(scale) if scale > 0 else math.nan


def mean_log_ratio(trained: Sequence[Trained]) -> Tensor:
    """Mean log-ratio of correct responses after a step, by c, [k + 1] float64; NaN without any."""
    sums = torch.stack([one.moved.sum(dim=0) for one in trained]).sum(dim=0)[:, _CORRECT]
    return sums[MOVED.index("log_ratio")] / sums[MOVED.index("responses")]


def share_of_best_gain(trained: Sequence[Trained]) -> Tensor:
    """Gain of the steps over the largest at their KL divergence, in %, by seed, [seeds]."""
    sums = torch.cat([one.progress for one in trained], dim=1)
    gain, divergence, variance = (sums[PROGRESS.index(name)] for name in PROGRESS)
    return 100 * gain / (2 * divergence * variance).sqrt()
