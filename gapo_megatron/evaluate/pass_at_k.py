"""The unbiased pass@k of Chen et al. 2021, "Evaluating Large Language Models Trained on Code"."""

from __future__ import annotations

import math
from collections.abc import Iterable


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is correct, from n >= k samples.

    Args:
        num_samples: n, samples drawn.
        num_correct: c, how many of them are correct.
        k: samples allowed.

    Returns:
        1 - C(n - c, k) / C(n, k), computed in integers and rounded once.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.

    Source: equation 1 of the paper named above.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct ({num_correct}) must be in 0..num_samples ({num_samples})")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k ({k}) must be in 1..num_samples ({num_samples})")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


def mean_pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> float:
    """Average pass@k over problems, given as (num_samples, num_correct).

    Problems with fewer than k samples (unknown verdicts do not count) are skipped; NaN if none is
    left.
    """
    values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    return math.fsum(values) / len(values) if values else math.nan
