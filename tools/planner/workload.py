"""Workload of a step: prompt and response lengths, which the config does not determine."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from gapo_megatron.config import BatchConfig, Config
from gapo_megatron.errors import ConfigError

DEFAULT_SPREAD = 0.7
"""Assumed: standard deviation of the logarithm of response lengths; std / mean is then 0.8."""
DEFAULT_ACTIVE_SHARE = 0.67
"""Assumed: pass rates ~ Beta(0.6, 1.4) leave a third of the groups of 8 all right or all wrong."""
_SPREADS = (0.05, 3.0)
_NUM_POINTS = 256
"""Points of the length distribution: enough for the integrals below to three digits."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Average workload of a step; lengths are in tokens.

    Response lengths are modelled as min(X, longest) with lognormal X: a body, a tail, and truncated
    responses. `mean_response_tokens` is the mean of min(X, longest).
    """

    mean_prompt_tokens: float
    mean_response_tokens: float
    longest_response_tokens: int
    active_share: float = 1.0
    """Share of the sampled sequences with A != 0, before dynamic sampling replaces others."""
    clipped_share: float = 0.0
    """Share of the response tokens with A != 0 that clipping leaves without gradient."""
    spread: float = DEFAULT_SPREAD
    """Standard deviation of log X."""

    def __post_init__(self) -> None:
        for name in ("mean_prompt_tokens", "mean_response_tokens", "spread"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} ({getattr(self, name):g}) must be above 0 and finite")
        if self.mean_response_tokens > self.longest_response_tokens:
            raise ConfigError(
                f"mean_response_tokens ({self.mean_response_tokens:g}) must be at most the longest "
                f"({self.longest_response_tokens})"
            )
        for name in ("active_share", "clipped_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} ({getattr(self, name):g}) must be from 0 to 1")

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of prompt and response together."""
        return self.mean_prompt_tokens + self.mean_response_tokens

    @property
    def mean_squared_tokens(self) -> float:
        """E (prompt + L)^2 with every prompt of the mean length."""
        prompt, mean = self.mean_prompt_tokens, self.mean_response_tokens
        return prompt**2 + 2 * prompt * mean + self.mean_squared_response

    @property
    def mean_squared_response(self) -> float:
        """E L^2."""
        return longest_of(self, 1)[1]

    def prompts_by_round(self, batch: BatchConfig) -> list[float]:
        """Mean number of prompts in each sampling round of a step.

        Dynamic sampling replaces the groups with A = 0 of all n prompts: n (1 - a)^r in round r.
        """
        missing = 1 - self.active_share
        return [
            batch.rollout_prompts * missing**number
            for number in range(batch.dynamic_sampling_rounds + 1)
        ]

    def trained_share(self, batch: BatchConfig) -> float:
        """Share of trained sequences with A != 0: 1 - (1 - a)^(rounds + 1)."""
        return 1 - (1 - self.active_share) ** (batch.dynamic_sampling_rounds + 1)


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one data-parallel rank in a mini-batch."""

    tokens: float
    squared_tokens: float
    """Sum of the sequences' squared lengths."""
    scored_tokens: float
    """Tokens of responses."""


def default_workload(
    config: Config,
    *,
    mean_prompt_tokens: float | None = None,
    mean_response_tokens: float | None = None,
    active_share: float | None = None,
) -> Workload:
    """Workload of a config. Arguments that are None are assumed.

    Assumed are prompts of a tenth of `data.max_prompt_tokens` and responses of a third of
    `rollout.max_response_tokens`.

    Raises:
        ConfigError: the run over-samples, or has draft tokens: its steps cannot be predicted.
    """
    if config.batch.oversampling > 1 or config.rollout.draft != "none":
        raise ConfigError(
            f"batch.oversampling ({config.batch.oversampling:g}) must be 1 and rollout.draft "
            f"({config.rollout.draft!r}) 'none': the planner knows neither when an over-sampling "
            "step ends nor how many of a draft's tokens are accepted"
        )
    longest = config.rollout.max_response_tokens
    if mean_prompt_tokens is None:
        mean_prompt_tokens = max(1.0, config.data.max_prompt_tokens / 10)
    if mean_response_tokens is None:
        mean_response_tokens = max(1.0, longest / 3)
    return Workload(
        mean_prompt_tokens=mean_prompt_tokens,
        mean_response_tokens=mean_response_tokens,
        longest_response_tokens=longest,
        active_share=DEFAULT_ACTIVE_SHARE if active_share is None else active_share,
    )


def spread_of(*, mean: float, longest: int, truncated_share: float) -> float:
    """Standard deviation of log X at which `truncated_share` of the responses reach the limit.

    Args:
        mean: mean of the response lengths, in tokens.
        longest: the limit, in tokens.
        truncated_share: truncated share of the responses; 0 gives the default.
    """
    if not 0 < truncated_share < 1 or not 0 < mean < longest:
        return DEFAULT_SPREAD

    def miss(spread: float) -> float:
        reached = (_location(mean, longest, spread) - math.log(longest)) / spread
        return float(ndtr(reached)) - truncated_share

    low, high = _SPREADS
    if miss(low) * miss(high) > 0:  # the share is out of reach for every spread
        return low if miss(low) > 0 else high
    return float(brentq(miss, low, high))


# The planner asks for the same loads in every layout.
@functools.lru_cache(maxsize=4096)
def load_of(workload: Workload, n: float, dp_size: int) -> Load:
    """Load of the busiest of `dp_size` ranks with `n` sequences each; it has the longest one."""
    prompt = workload.mean_prompt_tokens
    longest, squared = longest_of(workload, max(1.0, n * dp_size))
    return Load(
        tokens=max(n * workload.mean_tokens, prompt + longest),
        squared_tokens=max(
            n * workload.mean_squared_tokens, prompt**2 + 2 * prompt * longest + squared
        ),
        scored_tokens=max(n * workload.mean_response_tokens, longest),
    )


@functools.lru_cache(maxsize=4096)
def longest_of(workload: Workload, num_sequences: float) -> tuple[float, float]:
    """E M and E M^2, M the longest of `num_sequences` responses.

    E M = integral of P(M > t), E M^2 = integral of 2 t P(M > t), P(M > t) = 1 - P(L <= t)^N.
    """
    lengths, shares = survival(workload)
    step = workload.longest_response_tokens / len(lengths)
    any_longer = 1 - (1 - shares) ** num_sequences
    return float(any_longer.sum() * step), float(2 * (lengths @ any_longer) * step)


@functools.lru_cache(maxsize=64)
def survival(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Float64 [n]: midpoints t of n equal steps up to the longest; float64 [n]: P(L > t)."""
    longest, spread = workload.longest_response_tokens, workload.spread
    num_points = min(longest, _NUM_POINTS)
    lengths = (np.arange(num_points) + 0.5) * longest / num_points
    location = _location(workload.mean_response_tokens, longest, spread)
    return lengths, ndtr((location - np.log(lengths)) / spread)


def _location(mean: float, longest: float, spread: float) -> float:
    """Mean of log X for which E min(X, longest) = mean."""

    def miss(location: float) -> float:
        reached = (math.log(longest) - location) / spread
        clipped = math.exp(location + spread**2 / 2) * ndtr(reached - spread)
        return float(clipped + longest * ndtr(-reached)) - mean

    low, high = math.log(mean) - 5 * spread**2 - 5, math.log(longest) + 10 * spread
    return high if miss(high) < 0 else float(brentq(miss, low, high))
