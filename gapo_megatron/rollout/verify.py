"""Check that an engine generates with the trainer's weights: equal log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapo_megatron.config.methods import Method
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Largest differences between the engine's and the trainer's log-probs, over all ranks."""

    mean_abs_diff: float
    """Mean difference per token in the sequence where it is largest."""
    max_abs_diff: float
    """Difference at the worst token."""
    ratio_deviation: float = 0.0
    """Mean of |s - 1| over the sequences, on the rank where it is largest: s = exp of the mean over
    a sequence's tokens of the trainer's log-prob less the engine's, the ratio that rounding alone
    would give it against the engine."""
    merge_rounding: float | None = None
    """Rounding errors of weights sent with an adapter merged in, relative to the adapter's own size
    (Frobenius norms); None if the engine computes with factors, and without an adapter."""

    def metrics(self, method: Method) -> dict[str, float]:
        """Metrics of the sync; the deviation also as a share of the clip, for a clip around 1."""
        metrics = {
            "sync/max_abs_log_prob_diff": self.max_abs_diff,
            "sync/ratio_deviation": self.ratio_deviation,
        }
        if method.is_band:
            metrics["sync/ratio_deviation_share"] = self.ratio_deviation / method.eps_low
        if self.merge_rounding is not None:
            metrics["sync/merge_rounding"] = self.merge_rounding
        return metrics


def verify_weights(engine: Engine, probe: Rollouts, log_probs: Sequence[np.ndarray]) -> WeightCheck:
    """Compare the engine's log-probs of a few sequences with the trainer's.

    Args:
        engine: awake, after a sync.
        probe: B sequences with their tokens; the same on every rank.
        log_probs: B arrays of float32, one value per sampled response token: the trainer's, at
            temperature 1; the same on every rank.

    Returns:
        The largest differences over all ranks, the same on every rank.

    Collectives: one gather over all ranks, so that all ranks raise together.

    Raises:
        WeightSyncError: the mean difference per token of a sequence is above the engine's
            `verify_bound`, or a value is not finite; names rank, sequence, worst position, and both
            values there.
    """
    found = engine.replicas.gather([_compare(engine.score(probe), log_probs)])
    rank = max(range(len(found)), key=lambda rank: found[rank][0].mean_abs_diff)
    worst, where = found[rank]
    if not worst.mean_abs_diff <= engine.verify_bound:
        raise WeightSyncError(
            f"weight sync, version {engine.policy_version}: on rank {rank} the mean difference of "
            f"log-probs is {worst.mean_abs_diff:.3g} per token, above rollout.verify_bound "
            f"({engine.verify_bound:g}), in {where}"
        )
    return WeightCheck(
        worst.mean_abs_diff,
        max(one.max_abs_diff for one, _ in found),
        max(one.ratio_deviation for one, _ in found),
    )


def _compare(
    engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray]
) -> tuple[WeightCheck, str]:
    """The differences on this rank, and the worst token of the worst sequence in words."""
    worst, largest, where, deviations = 0.0, 0.0, "", []
    for i, (ours, theirs) in enumerate(zip(trainer, engine, strict=True)):
        if len(ours) == 0:
            continue
        # NaN compares false with everything; infinity makes it the worst value.
        signed = ours.astype(np.float64) - theirs
        diff = np.nan_to_num(np.abs(signed), nan=np.inf, posinf=np.inf)
        deviations.append(abs(float(np.expm1(signed.mean()))))
        at = int(diff.argmax())
        largest = max(largest, float(diff[at]))
        if (mean := float(diff.mean())) >= worst:
            worst = mean
            where = (
                f"sequence {i} (worst at response token {at}: trainer {ours[at]:.6f}, engine "
                f"{theirs[at]:.6f})"
            )
    return WeightCheck(worst, largest, sum(deviations) / max(len(deviations), 1)), where
