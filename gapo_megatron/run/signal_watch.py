"""Warnings of steps, and of a run, in which the rewards have nothing to teach."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from gapo_megatron.errors import DataError
from gapo_megatron.io.metric_files import METRICS_NAME, Value, read_rows
from gapo_megatron.io.sample_files import SAMPLES_NAME
from gapo_megatron.types import Sample

logger = logging.getLogger(__name__)

_NUM_SHOWN = 3
_MOST_CHARACTERS = 200
"""Characters of a response that a warning shows: its end, where the answer usually is."""


class SignalWatch:
    """Warns when every advantage of a step is 0: the first time, then the 10th, 100th, ... time."""

    def __init__(self, run_dir: Path) -> None:
        """Count the steps before a resume; none if their metrics are not all numbers."""
        self._run_dir = run_dir
        steps = []
        with contextlib.suppress(DataError):  # a report refuses such a run, a resume need not
            steps = [row for row in read_rows(run_dir / METRICS_NAME) if _is_step(row)]
        self._num_steps = len(steps)
        self._num_without = sum(not _has_signal(row) for row in steps)

    def check(self, step: int, metrics: Mapping[str, Value], samples: Sequence[Sample]) -> None:
        """Count the step; warn if it had no signal, with some of its samples.

        Args:
            step: index of the step.
            metrics: metrics of its line; a line of an evaluation is ignored.
            samples: samples of the step; may be empty.
        """
        if not _is_step(metrics):
            return
        self._num_steps += 1
        if _has_signal(metrics):
            return
        self._num_without += 1
        if str(self._num_without).strip("0") != "1":
            return
        times = f", like {self._num_without - 1} before it" if self._num_without > 1 else ""
        shown = "".join(f"\n  {_shown(one)}" for one in samples[:_NUM_SHOWN])
        logger.warning(
            "step %d has nothing to learn from%s: %s, so every advantage is 0 "
            "(docs/debugging.md)%s",
            step,
            times,
            _reason(metrics),
            shown and f". Some responses; {SAMPLES_NAME} may have more:{shown}",
        )

    def check_run(self) -> None:
        """Warn if no step of the run had a signal."""
        if self._num_steps and self._num_without == self._num_steps:
            logger.warning(
                "none of the %d steps had anything to learn from: every advantage was 0, so the "
                "rewards have not changed the model. Read %s, and docs/debugging.md",
                self._num_steps,
                self._run_dir / SAMPLES_NAME,
            )


def _is_step(metrics: Mapping[str, Value]) -> bool:
    """Whether these are a training step's metrics, not an evaluation's."""
    return "groups/zero_advantage_share" in metrics


def _has_signal(metrics: Mapping[str, Value]) -> bool:
    return _num_judged_groups(metrics) > 0 and metrics["groups/zero_advantage_share"] < 1


def _num_judged_groups(metrics: Mapping[str, Value]) -> Value:
    """Groups with a known verdict."""
    return sum(number for name, number in metrics.items() if name.startswith("per_c/groups/c"))


def _reason(metrics: Mapping[str, Value]) -> str:
    reward = metrics.get("reward/mean")
    if not _num_judged_groups(metrics):
        return "no verdict is known"
    if reward in (0, 1):
        return f"every response with a known verdict is {'correct' if reward else 'wrong'}"
    return "in each group all rewards are equal"


def _shown(sample: Sample) -> str:
    response = sample.response[-_MOST_CHARACTERS:]
    mark = "..." if len(response) < len(sample.response) else ""
    reason = f" ({sample.reason})" if sample.reason else ""
    cut = " and cut off" if sample.truncated else ""
    return (
        f"{sample.verdict}{reason}{cut}: problem {sample.problem!r}, answer "
        f"{sample.answer[:_MOST_CHARACTERS]!r}, response {mark}{response!r}"
    )
