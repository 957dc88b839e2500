"""Metrics of draft tokens, by c."""

from __future__ import annotations

from collections.abc import Sequence

from gapo_megatron.rollout.call_metrics import Sums, added, count_correct
from gapo_megatron.types import Episode, Verdict

_NAMES = ("sampled", "drafted", "accepted")


def sum_drafts(
    groups: Sequence[Sequence[Episode]],
    verdicts: Sequence[Sequence[Verdict]],
    *,
    judges_truncated: bool = True,
) -> Sums:
    """Numbers of sampled, proposed and accepted tokens of judged groups, by their c.

    Only tokens of this step count: those of a response that earlier steps began are carried, and
    the engine does not say how many of them were proposed.

    Args:
        groups: episodes, failed ones included.
        verdicts: their verdicts.
        judges_truncated: see `call_metrics.sum_calls`.
    """
    sums: dict[int, dict[str, float]] = {}
    for group, judged in zip(groups, verdicts, strict=True):
        num_correct = count_correct(group, judged, judges_truncated=judges_truncated)
        for one in group:
            # Over-sampling and an environment exclude each other: every carried token is sampled.
            num_carried = 0 if one.carried_versions is None else len(one.carried_versions)
            found = (one.num_sampled_tokens - num_carried, one.num_drafted, one.num_accepted)
            sums[num_correct] = added(
                sums.get(num_correct, {}), dict(zip(_NAMES, found, strict=True))
            )
    return sums


def draft_metrics(sums: Sums) -> dict[str, float]:
    """Shares of proposed and of sampled tokens that were accepted (docs/metrics.md).

    Absent where nothing was proposed, or sampled.
    """
    total = {name: sum(part[name] for part in sums.values()) for name in _NAMES}
    metrics: dict[str, float] = {}
    parts = [("rollout/{}", total), *((f"per_c/{{}}/c{c}", sums[c]) for c in sorted(sums))]
    for key, part in parts:
        if part["drafted"]:
            metrics[key.format("draft_acceptance")] = part["accepted"] / part["drafted"]
        if part["sampled"]:
            metrics[key.format("draft_share")] = part["accepted"] / part["sampled"]
    return metrics
