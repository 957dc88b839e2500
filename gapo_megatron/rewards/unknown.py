"""Unknown verdicts of a step: their share, their reasons, and the end of a run without verdicts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.types import Outcome, Verdict

if TYPE_CHECKING:
    from gapo_megatron.config import RewardConfig

logger = logging.getLogger(__name__)

MOST_REASONS = 5
"""Reasons that a message lists, the most common first."""
_MOST_SENT = 4 * MOST_REASONS
"""Reasons that a rank sends: each response may have its own."""


def share_unknown(
    verdicts: Sequence[Sequence[Verdict]], *, gather: Callable[[Sequence[Any]], list[Any]]
) -> tuple[float, str]:
    """Share of unknown verdicts over all ranks, and a text with the reasons.

    Args:
        verdicts: verdicts of this rank, by group.
        gather: all-gather over the ranks that judge, as one list.

    Returns:
        The same on every rank; the text is empty if all verdicts are known.

    Collectives: `gather`.
    """
    found = [one for group in verdicts for one in group]
    ours = Counter(one.reason for one in found if one.outcome is Outcome.UNKNOWN)
    parts = gather([(len(found), ours.total(), ours.most_common(_MOST_SENT))])
    num, num_unknown = (sum(part[i] for part in parts) for i in range(2))
    if not num_unknown:
        return 0.0, ""
    reasons: Counter[str] = Counter()
    for *_, sent in parts:
        reasons.update(dict(sent))
    lines = [f"{count} x {reason}" for reason, count in reasons.most_common(MOST_REASONS)]
    text = (
        f"{num_unknown} of {num} responses could not be judged (verdict unknown; tracebacks and "
        "what verifiers of your own print are in the run's folder verifiers)"
    )
    return num_unknown / num, "\n  ".join([f"{text}:", *lines])


class UnknownWatch:
    """Warns of a step's unknown verdicts; ends a run in which most have been for several steps."""

    def __init__(self, config: RewardConfig) -> None:
        """Count from this start of the run on."""
        self._config = config
        self._steps: set[int] = set()
        """Steps in a row with too many; one that is sampled again counts once."""

    def check(
        self,
        step: int,
        verdicts: Sequence[Sequence[Verdict]],
        *,
        gather: Callable[[Sequence[Any]], list[Any]],
        is_first: bool,
    ) -> float:
        """Share of a step's verdicts that are unknown; the rank that `is_first` logs the reasons.

        Arguments and collectives as in `share_unknown`.

        Raises:
            ConfigError: on every rank, after `reward.max_unknown_steps` such steps.
        """
        share, text = share_unknown(verdicts, gather=gather)
        if text and is_first:
            logger.warning("step %d: %s", step, text)
        most, most_steps = self._config.max_unknown_share, self._config.max_unknown_steps
        self._steps = self._steps | {step} if share > most else set()
        if len(self._steps) < most_steps:
            return share
        raise ConfigError(
            f"reward.max_unknown_share ({most:g}): more verdicts were unknown in "
            f"reward.max_unknown_steps ({most_steps}) steps in a row, up to step {step}, in which "
            f"{text}"
        )
