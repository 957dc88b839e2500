"""Clip diagnostics per c for the paper's figures, as sums that add up over ranks.

Rollouts are split by the sign of their advantage, as in the clip: `correct` (A > 0) and `wrong`
(A < 0). The paper's figures per c are about correct rollouts. docs/metrics.md defines every metric.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gapo_megatron.logprob import Sequences
from gapo_megatron.objective.losses import PolicyLoss
from gapo_megatron.rollouts import Batch

WINDOW = 200
"""Number of steps in the paper's windowed correlation."""

SUMS = (
    "sequences",
    "tokens",
    "advantage",
    "clipped_sequences",
    "clipped_tokens",
    "deviation",
    "abs_deviation",
    "gradient_mass",
    "gradient_mass_lost",
)
"""Rows of `per_correct_sums`."""

DOSE = ("sequences", "decisions", "gradient_mass", "gradient_mass_changed")
"""Entries of its `dose`."""

_WRONG, _CORRECT = 0, 1
_SIDES = {"correct": _CORRECT, "wrong": _WRONG}


def sum_shapes(group_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the results of `per_correct_sums`."""
    cells = (2, group_size + 1)
    return {
        "per_c": (len(SUMS), *cells),
        "per_c_max": cells,
        "by_age": (2, 2),
        "dose": (len(DOSE),),
    }


def per_correct_sums(
    loss: PolicyLoss,
    *,
    sequence_ids: torch.Tensor | Sequences,
    advantages: torch.Tensor,
    num_correct: torch.Tensor,
    group_size: int,
    is_carried: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sums of one micro-batch over its sequences with A != 0, by side and c.

    Args:
        loss: result of `policy_loss` on this micro-batch.
        sequence_ids: [T] int64 in 0..B-1, in any order; or the `Sequences` of them.
        advantages: [B].
        num_correct: [B] int64.
        group_size: configured rollouts per prompt, which sets the shapes of the results (a group's
            own k may be smaller after unknown verdicts).
        is_carried: [B] bool: whether earlier steps sampled the response's first tokens.

    Returns:
        `per_c`, [len(SUMS), 2, group_size + 1] float64, to be summed: side (0 wrong, 1 correct),
        then c. With token ratios, the mean over a sequence's tokens counts as its `deviation`
        (s - 1) and as its clipped fraction. `per_c_max`, [2, group_size + 1] float64, to be
        combined by maximum: the largest |s - 1| of a single ratio; 0 if there is none. `by_age`,
        [2, 2] float64, to be summed: number of sequences and of clipped ones, first for sequences
        that are not carried, then for carried ones. `dose`, [len(DOSE)] float64, to be summed over
        correct sequences; with token ratios the mean over a sequence's tokens counts as its
        decision; zeros for a method without widths by c. Local to this micro-batch; no collectives,
        no synchronisation with the device.
    """
    assert isinstance(group_size, int), "group_size must be the configured rollouts per prompt"
    sequences = Sequences.of(sequence_ids, len(advantages))
    values = _per_sequence(loss, sequences, advantages)
    # Sequences with A = 0 go into an extra last cell, which is dropped.
    num_cells = 2 * (group_size + 1)
    side = torch.where(advantages > 0, _CORRECT, _WRONG)
    cells = torch.where(advantages == 0, num_cells, side * (group_size + 1) + num_correct)
    table = torch.stack([values[name] for name in SUMS], dim=1)
    sums = sequences.group(cells, num_cells + 1).sum(table)[:-1]
    of_ratio = cells[sequences.ids] if loss.per_token else cells
    largest = torch.zeros(num_cells + 1, dtype=torch.float64, device=cells.device)
    largest = largest.scatter_reduce(0, of_ratio, (loss.ratio - 1).abs(), "amax")[:-1]
    shapes = sum_shapes(group_size)
    age = torch.where(advantages == 0, 2, is_carried.long())
    counted = torch.stack([values[name] for name in ("sequences", "clipped_sequences")], dim=1)
    return {
        "per_c": sums.T.reshape(shapes["per_c"]),
        "per_c_max": largest.view(shapes["per_c_max"]),
        "by_age": sequences.group(age, 3).sum(counted)[:-1],
        "dose": _dose(loss, sequences, advantages, values),
    }


def _dose(
    loss: PolicyLoss,
    sequences: Sequences,
    advantages: torch.Tensor,
    values: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Sums of `DOSE` over correct sequences, [len(DOSE)] float64; `values` of `_per_sequence`."""
    if loss.dose is None:
        return values["tokens"].new_zeros(len(DOSE))
    is_correct = (advantages > 0).double()
    decisions, mass = loss.dose.decisions.double(), loss.dose.gradient_mass
    if loss.per_token:
        decisions, mass = sequences.sum(torch.stack([decisions, mass], dim=1)).unbind(dim=1)
        decisions = decisions / values["tokens"].clamp(min=1)
    columns = [torch.ones_like(is_correct), decisions, values["gradient_mass"], mass]
    return is_correct @ torch.stack(columns, dim=1)


def _per_sequence(
    loss: PolicyLoss, sequences: Sequences, advantages: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`SUMS` of each sequence, [B] float64; with token ratios, the mean over its tokens."""
    counts = sequences.counts.double()
    deviation = loss.ratio - 1
    means = torch.stack([loss.clipped.double(), deviation, deviation.abs()], dim=1)
    masses = torch.stack([loss.gradient_mass, loss.gradient_mass_lost], dim=1)
    if loss.per_token:
        totals = sequences.sum(torch.cat([means, masses], dim=1))
        means, masses = totals[:, :3] / counts.clamp(min=1)[:, None], totals[:, 3:]
    clipped, mean_deviation, mean_abs_deviation = means.unbind(dim=1)
    return {
        "sequences": torch.ones_like(counts),
        "tokens": counts,
        "advantage": advantages.double(),
        "clipped_sequences": clipped,
        "clipped_tokens": clipped * counts,
        "deviation": mean_deviation,
        "abs_deviation": mean_abs_deviation,
        "gradient_mass": masses[:, 0],
        "gradient_mass_lost": masses[:, 1],
    }


def summarize(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Turn the sums of `per_correct_sums`, combined over micro-batches and ranks, into metrics.

    Args:
        sums: results of `per_correct_sums`; other keys are ignored.

    Returns:
        `clip/*` and `ratio/*` over all computed sequences, `per_c/{correct,wrong}/*/c{c}` by side
        and c, `clip/fraction_sequences_{carried,new}` if some are carried, and
        `clip/dose_{decisions,gradient}` of methods with widths by c. Means over nothing are
        missing.
    """
    # Over all sequences, over those with A > 0, and by age.
    cells, largest = sums["per_c"].cpu(), sums["per_c_max"].cpu()
    metrics = _means(cells.sum(dim=(1, 2)), largest.max())
    if positive := _means(cells[:, _CORRECT].sum(dim=1), largest[_CORRECT].max()):
        metrics["clip/positive_gradient_mass_lost"] = positive["clip/gradient_mass_lost"]
    (num_new, new_clipped), (num_carried, carried_clipped) = sums["by_age"].tolist()
    if num_carried:
        metrics["clip/fraction_sequences_carried"] = carried_clipped / num_carried
        if num_new:
            metrics["clip/fraction_sequences_new"] = new_clipped / num_new
    num_dosed, decisions, mass, changed = sums["dose"].tolist()
    if num_dosed:
        metrics["clip/dose_decisions"] = decisions / num_dosed
        metrics["clip/dose_gradient"] = changed / mass
    # By side and c, and the correlation over c.
    sequences, advantage = (cells[SUMS.index(name)] for name in ("sequences", "advantage"))
    for side, row in _SIDES.items():
        for c in range(cells.shape[2]):
            means = _means(cells[:, row, c], largest[row, c])
            if means:
                means["sequences"] = float(sequences[row, c])
                means["advantage"] = float(advantage[row, c] / sequences[row, c])
            for name, value in means.items():
                metrics[f"per_c/{side}/{name.replace('/', '_')}/c{c}"] = value
    deviation = cells[SUMS.index("deviation")]
    correlation = advantage_correlation(
        *(values[_CORRECT].numpy() for values in (sequences, deviation, advantage))
    )
    if correlation is not None:
        metrics["ratio/advantage_correlation"] = correlation
    return metrics


class CorrelationWindow:
    """The paper's correlation of ratio deviation and advantage over the last `WINDOW` steps.

    The Pearson correlation over c of the means of s - 1 and A over all correct rollouts of these
    steps. It is computed from the metrics of the steps, so it can be recomputed from
    `metrics.jsonl`. Checkpoints store the steps, so a resumed run gives the same bits without that
    file.
    """

    def __init__(self) -> None:
        """Start empty."""
        # Per step [n, 4] float64: c, number of sequences, sums of deviation and of advantage.
        self._steps: deque[np.ndarray] = deque(maxlen=WINDOW)

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the next step.

        Args:
            metrics: result of `summarize` for it.

        Returns:
            `ratio/advantage_correlation_window`; empty if it is undefined.
        """
        rows = []
        prefix = "per_c/correct/sequences/c"
        for key, sequences in metrics.items():
            if key.startswith(prefix):
                c = int(key.removeprefix(prefix))
                deviation = metrics[f"per_c/correct/ratio_deviation/c{c}"]
                advantage = metrics[f"per_c/correct/advantage/c{c}"]
                rows.append([c, sequences, sequences * deviation, sequences * advantage])
        self._steps.append(np.array(rows, dtype=np.float64).reshape(-1, 4))
        c, *columns = np.concatenate(self._steps).T
        sums = [np.bincount(c.astype(np.int64), weights=column) for column in columns]
        correlation = advantage_correlation(*sums)
        if correlation is None:
            return {}
        return {"ratio/advantage_correlation_window": correlation}

    def state_dict(self) -> list[list[list[float]]]:
        """The steps as nested lists, oldest first."""
        return [step.tolist() for step in self._steps]

    def load_state_dict(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Restore `state_dict`, bit for bit."""
        self._steps.clear()
        self._steps.extend(np.array(step, dtype=np.float64).reshape(-1, 4) for step in state)


def count_by_correct(batch: Batch, *, group_size: int) -> dict[str, float]:
    """Metrics of the rollouts by c, over the whole batch, including sequences with A = 0.

    Args:
        batch: the same on every rank.
        group_size: configured rollouts per prompt.

    Returns:
        `rollout/entropy` (of all rollouts) and, of valid ones: `groups/*`; for c = 0..group_size
        `per_c/groups/c{c}`, `per_c/group_share/c{c}`, `per_c/token_share/c{c}`; if there are any
        `per_c/entropy/c{c}` and `per_c/{correct,wrong}/response_length/c{c}`. No collectives.
    """
    # NumPy: a few dozen operations on small arrays, with a tenth of torch's overhead.
    valid, num_correct, size = (
        values.numpy() for values in (batch.valid, batch.num_correct, batch.group_size)
    )
    has_advantage, is_positive = (batch.advantages != 0).numpy(), (batch.advantages > 0).numpy()
    all_tokens = batch.num_sampled_tokens.numpy().astype(np.float64)
    surprisal = -batch.table["log_prob_sum"]
    # A > 0 means correct, and in a group with c = k all are correct with A = 0.
    correct = is_positive | (num_correct == size)
    # Every valid rollout counts as 1/k of its group, so that sums over rollouts count groups.
    part = np.where(valid, 1 / np.maximum(size, 1), 0)
    num_groups = max(round(float(part.sum())), 1)
    num_tokens = max(float(all_tokens[valid].sum()), 1.0)

    def groups(where: np.ndarray) -> int:
        return round(float(part[where].sum()))

    metrics = {
        "rollout/entropy": float(surprisal.sum() / max(all_tokens.sum(), 1.0)),
        "groups/zero_advantage_share": float((valid & ~has_advantage).sum())
        / max(int(valid.sum()), 1),
        "groups/unknown_verdicts": float((~valid).sum()),
        "groups/none_correct_share": groups(num_correct == 0) / num_groups,
        "groups/all_correct_share": groups(num_correct == size) / num_groups,
    }
    if valid.any():
        metrics["groups/solve_rate_mean"] = float((part * correct).sum()) / num_groups
    for c in range(group_size + 1):
        at = valid & (num_correct == c)
        tokens = float(all_tokens[at].sum())
        metrics[f"per_c/groups/c{c}"] = float(groups(at))
        metrics[f"per_c/group_share/c{c}"] = groups(at) / num_groups
        metrics[f"per_c/token_share/c{c}"] = tokens / num_tokens
        if tokens:
            metrics[f"per_c/entropy/c{c}"] = float(surprisal[at].sum()) / tokens
        for side, members in {"correct": at & correct, "wrong": at & ~correct}.items():
            if members.any():
                length = float(all_tokens[members].mean())
                metrics[f"per_c/{side}/response_length/c{c}"] = length
    return metrics


def _means(cell: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
    """Means from the sums of a cell, [len(SUMS)]; empty for an empty cell."""
    sums = dict(zip(SUMS, cell.tolist(), strict=True))
    if sums["sequences"] == 0:
        return {}
    return {
        "clip/fraction_sequences": sums["clipped_sequences"] / sums["sequences"],
        "clip/fraction_tokens": sums["clipped_tokens"] / sums["tokens"],
        "clip/gradient_mass_lost": sums["gradient_mass_lost"] / sums["gradient_mass"],
        "ratio/deviation": sums["deviation"] / sums["sequences"],
        "ratio/abs_deviation": sums["abs_deviation"] / sums["sequences"],
        "ratio/abs_deviation_max": float(largest),
    }


def advantage_correlation(
    sequences: np.ndarray, deviation: np.ndarray, advantage: np.ndarray
) -> float | None:
    """Pearson correlation over c of mean deviation and mean advantage of correct rollouts.

    Args:
        sequences: [C] float64, number of correct rollouts for each of C values of c, maybe 0.
        deviation: [C] float64, sum of their s - 1.
        advantage: [C] float64, sum of their A.

    Returns:
        In -1..1; None with fewer than three values of c (two points always correlate perfectly) or
        if either is constant.

    Source: the paper's figure of the IS-advantage correlation.
    """
    present = sequences > 0
    if present.sum() < 3:
        return None
    deviation = deviation[present] / sequences[present]
    advantage = advantage[present] / sequences[present]
    deviation = deviation - deviation.mean()
    advantage = advantage - advantage.mean()
    scale = float(np.linalg.norm(deviation) * np.linalg.norm(advantage))
    if scale == 0:
        return None
    return float(deviation @ advantage) / scale
