"""What the clip did, per c: the quantities of the paper's figures, as sums that ranks just add.

Rollouts are split by the sign of their advantage, as the clip splits them: `correct` (A > 0) and
`wrong` (A < 0). The paper's figures per c are those of the correct rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gapo_megatron.objective.losses import PolicyLoss
from gapo_megatron.objective.segments import segment_sum
from gapo_megatron.types import Batch

_WRONG, _CORRECT = 0, 1
_SIDES = {"correct": _CORRECT, "wrong": _WRONG}


def per_correct_sums(
    loss: PolicyLoss,
    *,
    sequence_ids: torch.Tensor,
    advantages: torch.Tensor,
    num_correct: torch.Tensor,
    group_size: int,
    num_response_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Additive sums of one micro-batch, over its sequences with A != 0.

    Args:
        loss: result of `policy_loss` on this micro-batch.
        sequence_ids: [T] int64 in 0..B-1.
        advantages: [B].
        num_correct: [B] int64.
        group_size: the configured rollouts per prompt, which sizes every result alike (a group's
            own k is smaller after unknown verdicts, and may differ between micro-batches).
        num_response_tokens: [B] int64.

    Returns:
        Name -> [2, group_size + 1] float64, row 0 wrong and row 1 correct rollouts, column c. All
        are sums over sequences, local to this micro-batch: `per_c/sequences`, `per_c/tokens`,
        `per_c/advantage`, `per_c/clipped_sequences` (for token ratios the sequence's share of
        clipped tokens), `per_c/clipped_tokens`, `per_c/deviation` (s - 1; token ratios: the
        sequence's mean), `per_c/abs_deviation` (|s - 1|, likewise). No collectives.
    """
    assert isinstance(group_size, int), "group_size must be the configured rollouts per prompt"
    num_sequences = len(advantages)
    counts = num_response_tokens.double()

    def per_sequence(values: torch.Tensor) -> torch.Tensor:
        if not loss.per_token:
            return values.double()
        return segment_sum(values, sequence_ids, num_sequences=num_sequences) / counts.clamp(min=1)

    clipped = per_sequence(loss.clipped)
    deviation = loss.ratio - 1
    values = {
        "sequences": torch.ones_like(counts),
        "tokens": counts,
        "advantage": advantages.double(),
        "clipped_sequences": clipped,
        "clipped_tokens": clipped * counts,
        "deviation": per_sequence(deviation),
        "abs_deviation": per_sequence(deviation.abs()),
    }
    num_bins = group_size + 1
    cells = torch.where(advantages > 0, _CORRECT, _WRONG) * num_bins + num_correct
    counted = advantages != 0
    return {
        f"per_c/{name}": segment_sum(
            value[counted], cells[counted], num_sequences=2 * num_bins
        ).view(2, num_bins)
        for name, value in values.items()
    }


def summarize(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Turn sums of `per_correct_sums`, added over micro-batches and ranks, into metrics.

    Args:
        sums: keys other than `per_c/...` are ignored.

    Returns:
        `clip/fraction_sequences`, `clip/fraction_tokens`, `ratio/deviation` (mean s - 1) and
        `ratio/abs_deviation` over all computed sequences; the same four as
        `per_c/{correct,wrong}/{name}/c{c}`; `ratio/advantage_correlation`. A mean over nothing has
        no key.
    """
    cells = {
        key.removeprefix("per_c/"): value.cpu()
        for key, value in sums.items()
        if key.startswith("per_c/")
    }
    metrics = _means({key: float(value.sum()) for key, value in cells.items()})
    for side, row in _SIDES.items():
        for c in range(cells["sequences"].shape[1]):
            cell = {key: float(value[row, c]) for key, value in cells.items()}
            for name, mean in _means(cell).items():
                metrics[f"per_c/{side}/{name.replace('/', '_')}/c{c}"] = mean
    correlation = _advantage_correlation(cells)
    if correlation is not None:
        metrics["ratio/advantage_correlation"] = correlation
    return metrics


def count_by_correct(batch: Batch, *, group_size: int) -> dict[str, float]:
    """Count what the rollouts brought, per c; the whole batch, those never computed included.

    Args:
        batch: the same on every rank.
        group_size: the configured rollouts per prompt.

    Returns:
        `per_c/groups/c{c}` for c = 0..group_size (groups with at least one valid rollout),
        `per_c/token_share/c{c}` (of the response tokens of valid rollouts),
        `groups/zero_advantage_share` (of valid rollouts) and `groups/unknown_verdicts` (rollouts).
    """
    valid, correct = batch.valid, batch.num_correct
    tokens = torch.where(valid, batch.num_response_tokens, 0)
    # Every valid rollout of a group adds 1/k of the group: the sum needs no list of groups.
    part = torch.where(valid, 1 / batch.group_size.clamp(min=1).double(), 0)
    num_tokens = max(int(tokens.sum()), 1)
    num_valid = max(int(valid.sum()), 1)
    metrics = {
        "groups/zero_advantage_share": float((valid & (batch.advantages == 0)).sum()) / num_valid,
        "groups/unknown_verdicts": float((~valid).sum()),
    }
    for c in range(group_size + 1):
        at = correct == c
        metrics[f"per_c/groups/c{c}"] = float(round(float(part[at].sum())))
        metrics[f"per_c/token_share/c{c}"] = float(tokens[at].sum()) / num_tokens
    return metrics


def _means(cell: Mapping[str, float]) -> dict[str, float]:
    """Means of the sums of one cell (or of all); nothing where there is nothing to divide by."""
    if cell["sequences"] == 0:
        return {}
    return {
        "clip/fraction_sequences": cell["clipped_sequences"] / cell["sequences"],
        "clip/fraction_tokens": cell["clipped_tokens"] / max(cell["tokens"], 1.0),
        "ratio/deviation": cell["deviation"] / cell["sequences"],
        "ratio/abs_deviation": cell["abs_deviation"] / cell["sequences"],
    }


def _advantage_correlation(cells: Mapping[str, torch.Tensor]) -> float | None:
    """Pearson correlation over c of mean ratio deviation and mean advantage of correct rollouts.

    None below three values of c (two points always correlate perfectly) or when either is constant.

    Source: the paper's figure of the IS-advantage correlation, for one step (there: 200 steps).
    """
    present = cells["sequences"][_CORRECT] > 0
    if int(present.sum()) < 3:
        return None
    sequences = cells["sequences"][_CORRECT][present]
    deviation = cells["deviation"][_CORRECT][present] / sequences
    advantage = cells["advantage"][_CORRECT][present] / sequences
    deviation = deviation - deviation.mean()
    advantage = advantage - advantage.mean()
    scale = float(deviation.norm() * advantage.norm())
    if scale == 0:
        return None
    return float(deviation @ advantage) / scale
