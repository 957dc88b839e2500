"""Metrics of an environment's calls, by c, and of draft tokens: the table has neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gapo_megatron.rollout.calls import CallCounts
from gapo_megatron.types import Episode

_NAMES = ("rollouts", "turns", "conversations", "calls", "errors", "cut", "shortened", "seconds")

Sums = Mapping[int, np.ndarray]
"""Sums over rollouts by c, in the order of `_NAMES`."""


def sum_calls(
    groups: Sequence[Sequence[Episode]],
    num_correct: Sequence[int],
    counts: Mapping[tuple[str, int], CallCounts],
) -> Sums:
    """Sums of turns, calls, failed calls and seconds over judged groups, by their c.

    Args:
        groups: episodes, failed ones included.
        num_correct: c of each group.
        counts: `Calls.counts`.
    """
    parts = []
    for group, c in zip(groups, num_correct, strict=True):
        for one in group:
            cost = counts.get((one.prompt.id, one.sample), CallCounts())
            counts_of_one = (cost.num_calls, cost.num_errors, cost.num_cut, cost.num_shortened)
            sizes = (1, num_turns(one), one.num_conversations)
            parts.append({c: np.array([*sizes, *counts_of_one, cost.seconds])})
    return join_sums(parts)


def num_turns(episode: Episode) -> int:
    """Number of the model's turns: runs of sampled tokens."""
    is_sampled = episode.is_sampled.astype(np.int8)
    return int((np.diff(is_sampled, prepend=0) == 1).sum())


def join_sums(parts: Iterable[Sums]) -> Sums:
    """Sums over the groups of all parts."""
    joined: dict[int, np.ndarray] = {}
    for part in parts:
        for c, sums in part.items():
            joined[c] = joined.get(c, 0) + sums
    return joined


def call_metrics(sums: Sums) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics, which a resumed run repeats, and timings, which it need not (docs/metrics.md)."""
    metrics, timings = dict[str, float](), dict[str, float]()
    total = _named(sum(sums.values(), np.zeros(len(_NAMES))))
    for name in ("turns", "conversations", "calls"):
        metrics[f"environment/{name}"] = total[name] / max(total["rollouts"], 1)
    metrics["environment/error_share"] = total["errors"] / max(total["calls"], 1)
    metrics["environment/cut_share"] = total["cut"] / max(total["rollouts"], 1)
    metrics["environment/shortened_share"] = total["shortened"] / max(total["calls"], 1)
    timings["perf/environment_s"] = total["seconds"] / max(total["rollouts"], 1)
    for c in sorted(sums):
        part = _named(sums[c])
        for name in ("turns", "calls", "errors"):
            metrics[f"per_c/{name}/c{c}"] = part[name] / part["rollouts"]
        timings[f"perf/environment_s/c{c}"] = part["seconds"] / part["rollouts"]
    return metrics, timings


def _named(sums: np.ndarray) -> dict[str, float]:
    return dict(zip(_NAMES, sums.tolist(), strict=True))


def count_drafts(groups: Sequence[Sequence[Episode]]) -> np.ndarray:
    """[3] numbers of tokens: sampled in this step, proposed by a draft, and accepted.

    Those of a response that earlier steps began are carried, and the engine does not say how many
    of them were proposed.
    """
    counts = np.zeros(3, np.int64)
    for one in (one for group in groups for one in group):
        num_carried = 0 if one.carried_versions is None else len(one.carried_versions)
        num_new = int(one.is_sampled[num_carried:].sum())
        counts += (num_new, one.num_drafted, one.num_accepted)
    return counts


def draft_metrics(parts: Sequence[np.ndarray]) -> dict[str, float]:
    """Shares of proposed and of sampled tokens that were accepted, by `count_drafts` of all ranks.

    Absent where nothing was proposed, or sampled.
    """
    sampled, drafted, accepted = np.sum(parts, axis=0).tolist()
    metrics = {"rollout/draft_acceptance": accepted / drafted} if drafted else {}
    return metrics | ({"rollout/draft_share": accepted / sampled} if sampled else {})
