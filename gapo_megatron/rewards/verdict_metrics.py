"""Metrics that verifiers give beside their verdicts: means over a step's responses, and by c."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gapo_megatron.types import Outcome, Verdict

logger = logging.getLogger(__name__)

MOST_NAMES = 64
"""Metrics of a step; further ones, in the order of their names, are left out."""

Sums = Mapping[str, Mapping[int, tuple[float, int]]]
"""Sum and number of the values of each metric, by name and c."""


class Carrier:
    """Sends sums along with what a `gather` sends anyway."""

    def __init__(self, sums: Sequence[Sums], gather: Callable[[Sequence[Any]], list[Any]]) -> None:
        """`sums`: of this rank."""
        self.sums: list[Sums] = []
        """Those of all ranks, in the order of ranks, once `gather` has returned."""
        self._ours = sums
        self._gather = gather

    def gather(self, ours: Sequence[Any]) -> list[Any]:
        """As the `gather` that it was made with. Collective."""
        parts = self._gather([(ours, self._ours)])
        self.sums = [one for _, sums in parts for one in sums]
        return [one for theirs, _ in parts for one in theirs]


def sum_metrics(groups: Iterable[tuple[int, Sequence[Verdict]]]) -> Sums:
    """Sums over known verdicts of `Verdict.metrics`, each of those that have it.

    Args:
        groups: c of each group, and its verdicts.
    """
    return join_sums(
        {name: {c: (value, 1)} for name, value in one.metrics.items()}
        for c, verdicts in groups
        for one in verdicts
        if one.outcome is not Outcome.UNKNOWN
    )


def join_sums(parts: Iterable[Sums]) -> Sums:
    """Sums over all parts, in their order."""
    joined: dict[str, dict[int, tuple[float, int]]] = {}
    for part in parts:
        for name, by_c in part.items():
            mine = joined.setdefault(name, {})
            for c, (value, count) in by_c.items():
                before, number = mine.get(c, (0.0, 0))
                mine[c] = before + value, number + count
    return joined


def verifier_metrics(sums: Sequence[Sums], *, is_first: bool) -> dict[str, float]:
    """`verifier/NAME`, the mean over responses, and `per_c/verifier/NAME/cN`.

    Args:
        sums: of all ranks.
        is_first: whether this rank warns of names that are left out.
    """
    metrics: dict[str, float] = {}
    by_name = join_sums(sums)
    names = sorted(by_name)
    if len(names) > MOST_NAMES and is_first:
        logger.warning(
            "verifiers gave %d metrics in a step; only %d are logged, without %s, ...",
            len(names),
            MOST_NAMES,
            names[MOST_NAMES],
        )
    for name in names[:MOST_NAMES]:
        by_c = by_name[name]
        total, count = (sum(part[i] for part in by_c.values()) for i in range(2))
        metrics[f"verifier/{name}"] = total / count
        for c in sorted(by_c):
            metrics[f"per_c/verifier/{name}/c{c}"] = by_c[c][0] / by_c[c][1]
    return metrics


__all__ = ["Carrier", "Sums", "join_sums", "sum_metrics", "verifier_metrics"]
