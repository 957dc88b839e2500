"""Metrics of an environment's calls, by c."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gapo_megatron.rollout.calls import CallCounts
from gapo_megatron.types import Episode, Outcome, Verdict

_NAMES = ("rollouts", "turns", "calls", "errors", "cut", "seconds")

Sums = Mapping[int, Mapping[str, float]]
"""Sums over rollouts by c."""


def sum_calls(
    groups: Sequence[Sequence[Episode]],
    verdicts: Sequence[Sequence[Verdict]],
    counts: Mapping[tuple[str, int], CallCounts],
    *,
    judges_truncated: bool = True,
) -> Sums:
    """Sums of turns, calls, failed calls and seconds over judged groups, by their c.

    Args:
        groups: episodes, failed ones included.
        verdicts: their verdicts.
        counts: `Calls.counts`.
        judges_truncated: False: a truncated response does not count as correct, as in the table
            (`table.to_rollouts`).
    """
    sums: dict[int, dict[str, float]] = {}
    for group, judged in zip(groups, verdicts, strict=True):
        num_correct = count_correct(group, judged, judges_truncated=judges_truncated)
        for one in group:
            cost = counts.get((one.prompt.id, one.sample), CallCounts())
            found = {
                "rollouts": 1,
                "turns": num_turns(one),
                "calls": cost.num_calls,
                "errors": cost.num_errors,
                "cut": cost.num_cut,
                "seconds": cost.seconds,
            }
            sums[num_correct] = added(sums.get(num_correct, {}), found)
    return sums


def count_correct(
    group: Sequence[Episode], judged: Sequence[Verdict], *, judges_truncated: bool
) -> int:
    """Number of correct responses of a group, its c; see `sum_calls`."""
    return sum(
        verdict.outcome is Outcome.CORRECT and (judges_truncated or not one.truncated)
        for one, verdict in zip(group, judged, strict=True)
    )


def num_turns(episode: Episode) -> int:
    """Number of the model's turns: runs of sampled tokens."""
    is_sampled = episode.is_sampled.astype(np.int8)
    return int((np.diff(is_sampled, prepend=0) == 1).sum())


def join_sums(parts: Iterable[Sums]) -> Sums:
    """Sums over the groups of all parts."""
    joined: dict[int, dict[str, float]] = {}
    for part in parts:
        for num_correct, sums in part.items():
            joined[num_correct] = added(joined.get(num_correct, {}), sums)
    return joined


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Sums of two parts, by name."""
    return {name: one.get(name, 0) + value for name, value in other.items()}


def call_metrics(sums: Sums) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics, which a resumed run repeats, and timings, which it need not (docs/metrics.md)."""
    metrics, timings = dict[str, float](), dict[str, float]()
    total = {name: sum(part[name] for part in sums.values()) for name in _NAMES}
    for name in ("turns", "calls"):
        metrics[f"environment/{name}"] = total[name] / max(total["rollouts"], 1)
    metrics["environment/error_share"] = total["errors"] / max(total["calls"], 1)
    metrics["environment/cut_share"] = total["cut"] / max(total["rollouts"], 1)
    timings["perf/environment_s"] = total["seconds"] / max(total["rollouts"], 1)
    for c, part in sorted(sums.items()):
        for name in ("turns", "calls", "errors"):
            metrics[f"per_c/{name}/c{c}"] = part[name] / part["rollouts"]
        timings[f"perf/environment_s/c{c}"] = part["seconds"] / part["rollouts"]
    return metrics, timings
