"""A curriculum by pass rate: more problems from where the policy can learn more.

A stratum is a level of a data source (`Prompt.source`, `Prompt.level`). What a group of k responses
with rewards r_i teaches is estimated by its mean squared advantage,

    v = sum_i (r_i - mean(r))^2 / (k - 1),        for right and wrong: c (k - c) / (k (k - 1)),

whose expectation is p (1 - p) for a problem that the policy solves with probability p: 0 for what
it always or never solves, largest at p = 1/2. To first order the expected improvement of the policy
grows with it ("learnability", Foster et al. 2025, arXiv:2502.12272). It is taken by group: a
stratum of solved and of hopeless problems has a pass rate of 1/2, and nothing to teach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gapo_megatron.config import DataConfig
from gapo_megatron.errors import DataError
from gapo_megatron.types import Prompt

MEMORY = 32
"""Groups that an estimate remembers: more than that only if a single step brings more."""
PRIOR = 4
"""Groups of the mean stratum that count beside those that a stratum had, so that a few unlucky
groups are not believed."""
MOST_STRATA = 256
"""Each has metrics, and needs groups of its own to be known."""
NO_LEVEL = "(no level)"


def stratum_of(prompt: Prompt) -> str:
    """Name of a problem's stratum: `source/level`, or what there is of it."""
    return "/".join(filter(None, (prompt.source, prompt.level))) or NO_LEVEL


def check_strata(counts: Mapping[str, int], data: DataConfig) -> None:
    """Refuse a curriculum over problems that do not differ in source or level.

    Raises:
        DataError: there is a single stratum, or there are more than `MOST_STRATA`; names the
            setting, the number and the rule.
    """
    if data.curriculum is None or 1 < len(counts) <= MOST_STRATA:
        return
    raise DataError(
        f"data.curriculum ({data.curriculum:g}) needs 2 to {MOST_STRATA} strata, which are the "
        f"sources and the levels of their problems; {', '.join(data.train_files.values())} has "
        f"{len(counts)}: {', '.join([*counts][:3])}{', ...' if len(counts) > 3 else ''}. Rows name "
        "their level by the key 'level', families of generated problems have `levels`"
    )


@dataclass(slots=True)
class _Estimate:
    """What recent groups of a stratum say, each sum over `num_groups` of them."""

    num_groups: float = 0.0
    learnability: float = 0.0
    pass_rate: float = 0.0

    def add(self, learnabilities: Sequence[float], pass_rates: Sequence[float]) -> None:
        """Add a step's groups; those before keep the rest of `MEMORY`.

        The result does not depend on the order of the groups, nor on the machine: sums are exactly
        rounded, and nothing but the four operations follows.
        """
        num_new = len(learnabilities)
        kept = min(self.num_groups, float(max(MEMORY - num_new, 0)))
        share = kept / self.num_groups if self.num_groups else 0.0
        self.num_groups = kept + num_new
        self.learnability = share * self.learnability + math.fsum(learnabilities)
        self.pass_rate = share * self.pass_rate + math.fsum(pass_rates)


class Curriculum:
    """Shares of the strata, which follow what the verdicts of earlier steps say of each."""

    def __init__(self, prompts: Sequence[Prompt], *, strength: float) -> None:
        """Start without knowledge: shares are as without a curriculum.

        Args:
            prompts: the dataset.
            strength: `data.curriculum`.
        """
        self.strata = [stratum_of(prompt) for prompt in prompts]
        """Stratum of each problem."""
        self._strength = strength
        self._sizes = Counter(self.strata)
        self._source_of = dict(zip(self.strata, [one.source for one in prompts], strict=True))
        self._source_sizes = Counter(one.source for one in prompts)
        self._estimates = {name: _Estimate() for name in self._sizes}

    def shares(self, of_sources: Mapping[str, float]) -> dict[str, float]:
        """Shares of a step's strata, which add up to 1.

        Without a curriculum a stratum has a share b: that of its source, times its part of the
        source's problems. Here it has b (1 - strength + strength v / mean of v over b). While
        nothing is known, or where nothing teaches, it has b.

        Args:
            of_sources: share of each source that the step draws from; '' without sources.
        """
        base = {
            name: of_sources[source] * self._sizes[name] / self._source_sizes[source]
            for name, source in self._source_of.items()
            if source in of_sources
        }
        values = self._learnabilities()
        mean = math.fsum(share * values[name] for name, share in base.items())
        if not mean:
            return base
        return {
            name: share * (1 - self._strength + self._strength * values[name] / mean)
            for name, share in base.items()
        }

    def _learnabilities(self) -> dict[str, float]:
        """Estimate of v of each stratum, drawn to the mean of all while it has few groups."""
        every = self._estimates.values()
        num_groups = math.fsum(one.num_groups for one in every)
        mean = math.fsum(one.learnability for one in every) / max(num_groups, 1.0)
        return {
            name: (one.learnability + PRIOR * mean) / (one.num_groups + PRIOR)
            for name, one in self._estimates.items()
        }

    def observe(self, problems: Sequence[int], rewards: np.ndarray, is_correct: np.ndarray) -> None:
        """Learn from the groups of a step.

        An unknown verdict is no wrong one: it leaves its group, and a group with fewer than two
        others says nothing.

        Args:
            problems: number of the problem of each of G groups.
            rewards: [G, k] float64, NaN where the verdict is unknown.
            is_correct: [G, k] bool.
        """
        num_known = (~np.isnan(rewards)).sum(axis=1)
        found: dict[str, list[tuple[float, float]]] = {}
        for i in np.flatnonzero(num_known > 1).tolist():
            known = [one for one in rewards[i].tolist() if one == one]
            mean = math.fsum(known) / len(known)
            variance = math.fsum((one - mean) * (one - mean) for one in known) / (len(known) - 1)
            pair = (variance, int(is_correct[i].sum()) / len(known))
            found.setdefault(self.strata[problems[i]], []).append(pair)
        for name, pairs in found.items():
            self._estimates[name].add([one for one, _ in pairs], [one for _, one in pairs])

    def metrics(self, used: Mapping[str, float]) -> dict[str, float]:
        """Share, pass rate and v of each stratum of a step.

        Args:
            used: the shares that the step was drawn with.
        """
        metrics = {f"curriculum/{name}/share": share for name, share in used.items()}
        for name in used:
            if (one := self._estimates[name]).num_groups:
                metrics[f"curriculum/{name}/pass_rate"] = one.pass_rate / one.num_groups
                metrics[f"curriculum/{name}/learnability"] = one.learnability / one.num_groups
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The estimates by stratum, for `load_state_dict`; floats, which JSON keeps exactly."""
        return {
            name: [one.num_groups, one.learnability, one.pass_rate]
            for name, one in self._estimates.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, of the same strata."""
        for name in self._estimates:
            self._estimates[name] = _Estimate(*map(float, state[name]))
