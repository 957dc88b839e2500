"""The noise floor: how far rounding alone moves a ratio, to be read beside the clip.

The same sequences are scored twice at the same weights, packed differently. Exact arithmetic would
give the same log-probs; what differs is rounding. docs/numerics.md says how to read the figures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.plan import choose_for_noise_floor, plan_scoring
from gapo_megatron.learn.score import score
from gapo_megatron.objective import edge_share
from gapo_megatron.objective.families import FAMILIES
from gapo_megatron.policy import Policy
from gapo_megatron.types import Batch

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.1
"""Share of the way to the rule's edge that the mean may reach without a warning."""

_REMEDIES = {
    "fp8": "set model.precision (fp8) to bf16 or fp32, or widen",
    "bf16": "set model.precision (bf16) to fp32, or widen",
    "fp32": "model.precision is fp32 already: widen",
}


@dataclass(frozen=True)
class NoiseFloor:
    """Two packings at equal weights, over sequences (token ratio: over tokens)."""

    mean: float
    """|ratio - 1|, and its largest."""
    max: float
    share: float | None
    """Mean share of the way to the rule's edge (`objective.edge_share`; of a band: mean / eps_low).
    None: the rule has no edge."""


def watch_noise_floor(
    policy: Policy,
    batch: Batch,
    config: Config,
    stopwatch: Stopwatch,
    *,
    step: int,
    first_sampled: int,
) -> dict[str, float]:
    """Measure when it is due, log the result on rank 0, and warn when the clip is too narrow.

    Where a run begins, a clip that would decide on rounding alone ends it.

    Due at every `metrics.noise_floor_every_steps`-th step from step 0 (0: never), and at the first
    step that a resumed run samples for, whose machine or layout may be another. The latter is in
    the log only: the metrics hold what an uninterrupted run has too.

    The warning goes by the mean. The largest of a sample grows with its size, that is with the
    number of ranks, and is mostly a short response's, which counts least in a token mean.

    Args:
        policy: at any weights; unchanged.
        batch: the same on every rank.
        config: the run's settings.
        stopwatch: counts the stage `noise_floor`.
        step: about to be trained.
        first_sampled: the first that this process samples for.

    Returns:
        `numerics/noise_floor_{mean,max,share}` and the clip of the method in use,
        `numerics/{eps_low,eps_high_max}`; the same bits on every rank. No share for a rule without
        an edge, nothing when not recorded.

    Collectives: those of `measure_noise_floor`, when due.

    Raises:
        ConfigError: at step 0, on every rank alike, the share is above `metrics.noise_floor_limit`.
            Later it is a warning: work is at stake.
    """
    every = config.metrics.noise_floor_every_steps
    if not every or (step % every and step != first_sampled):
        return {}
    with stopwatch("noise_floor"):
        found = measure_noise_floor(policy, batch, config)
    if policy.groups.rank == 0:
        _log(found, config)
    if found is None:
        return {}
    method, limit = config.objective.resolve(), config.metrics.noise_floor_limit
    if step == 0 and found.share is not None and found.share > limit:
        raise ConfigError(
            f"metrics.noise_floor_limit ({limit:g}): at the same weights another packing moves the "
            f"ratio by {found.mean:.1e} (mean), {found.share:.2g} of the way to the edge of "
            f"{method.name} ({_edge(method)}): {_remedy(config)}, or raise the limit"
        )
    if step % every:
        return {}
    metrics = {
        "numerics/noise_floor_mean": found.mean,
        "numerics/noise_floor_max": found.max,
        "numerics/eps_low": method.eps_low,
        "numerics/eps_high_max": method.eps_high_max,
    }
    return metrics if found.share is None else metrics | {"numerics/noise_floor_share": found.share}


def measure_noise_floor(policy: Policy, batch: Batch, config: Config) -> NoiseFloor | None:
    """Score a few sequences packed as an update would, then each alone in the opposite order.

    Args:
        policy: at any weights; unchanged.
        batch: `plan.NOISE_FLOOR_SEQUENCES` of its valid sequences per data-parallel rank are
            scored; each rank has the tokens of its own (`plan.wanted_sequences`).
        config: the run's settings: token budget of a micro-batch, method.

    Returns:
        Over the sequences that shared a micro-batch; the same bits on every rank. None when none
        did (too few valid ones, or a budget of one sequence): there was no other packing.

    Collectives: those of `learn.score.score`, twice; one all-gather over all ranks.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    groups = policy.groups
    chosen = choose_for_noise_floor(batch, data_parallel_size=groups.dp_size)
    packing = plan_scoring(
        batch,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=groups.dp_size,
        chosen=chosen,
    )
    compared = [
        [index for indices in microbatches if len(indices) > 1 for index in indices]
        for microbatches in packing
    ]
    # As many micro-batches as on the rank that compares most: collectives must match.
    most = max(len(indices) for indices in compared)
    if most == 0:
        return None
    mine = compared[groups.dp_rank]
    alone = [(index,) for index in reversed(mine)] + [()] * (most - len(mine))

    together_scores = score(policy, batch, packing[groups.dp_rank])
    alone_scores = score(policy, batch, alone)
    local = torch.zeros(4, dtype=torch.float64)
    if mine and groups.is_last_stage and groups.is_first_copy:
        local = _sums(batch, mine, together_scores, alone_scores, config)
    method = config.objective.resolve()
    # From the method, not from what this rank scored: the others may have scored nothing.
    of_family, of_mask = FAMILIES[method.family].edge_share, method.off_policy_mask
    has_edge = of_family is not None or of_mask is not None
    return _over_ranks(local, policy.device, has_edge=has_edge)


def _sums(
    batch: Batch,
    indices: Sequence[int],
    scores: dict[int, torch.Tensor],
    other_scores: dict[int, torch.Tensor],
    config: Config,
) -> torch.Tensor:
    """Sum and largest |ratio - 1|, sum of the shares, and the number of ratios: [4] float64."""
    index = torch.tensor(indices)
    deviation, shares = edge_share(
        torch.cat([scores[i] for i in indices]),
        torch.cat([other_scores[i] for i in indices]),
        sequence_ids=torch.arange(len(index)).repeat_interleave(batch.num_response_tokens[index]),
        advantages=batch.advantages[index],
        num_correct=batch.num_correct[index],
        group_size=batch.group_size[index],
        method=config.objective.resolve(),
    )
    values = deviation.tolist()
    share = 0.0 if shares is None else math.fsum(shares.tolist())
    sums = [math.fsum(values), max(values, default=0.0), share, len(values)]
    return torch.tensor(sums, dtype=torch.float64)


def _over_ranks(local: torch.Tensor, device: torch.device, *, has_edge: bool) -> NoiseFloor:
    """Means and maximum over all ranks, added in rank order. Collective."""
    local = local.to(device)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    sums, maxima, shares, counts = zip(*(part.tolist() for part in parts), strict=True)
    count = sum(counts)
    return NoiseFloor(sum(sums) / count, max(maxima), sum(shares) / count if has_edge else None)


def _log(found: NoiseFloor | None, config: Config) -> None:
    if found is None:
        logger.info("noise floor not measured: no two sequences share a micro-batch")
        return
    method = config.objective.resolve()
    logger.info(
        "noise floor of the ratio: mean %.1e, max %.1e (%s)", found.mean, found.max, _edge(method)
    )
    if found.share is not None and found.share > LARGEST_SHARE:
        logger.warning(
            "noise floor: at the same weights another packing moves the ratio by %.1e (mean; max "
            "%.1e), %.2g of the way to the edge of %s (%s), more than a tenth: the clip "
            "decides partly on rounding. What to change: %s. The rounding is that of the layers: "
            "in every configuration the head keeps float32 logits, and old log-probs are the "
            "trainer's own.",
            found.mean,
            found.max,
            found.share,
            method.name,
            _edge(method),
            _remedy(config),
        )


def _edge(method: Method) -> str:
    """The numbers that the nearest edge may come from."""
    mask = method.off_policy_mask
    more = "" if mask is None else f", off_policy_mask {mask:g}"
    return f"eps_low {method.eps_low:g}, eps_high_max {method.eps_high_max:g}{more}"


def _remedy(config: Config) -> str:
    model = config.model
    remedy = f"{_REMEDIES[model.precision]} objective.eps_low and objective.eps_high_max"
    if config.objective.resolve().off_policy_mask is not None:
        remedy += ", and objective.off_policy_mask"
    if model.precision == "fp8" and model.fp8_recipe in ("tensorwise", "delayed"):
        return f"set model.fp8_recipe ({model.fp8_recipe}) to blockwise or mxfp8, or {remedy}"
    return remedy
