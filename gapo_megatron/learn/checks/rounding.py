"""Comparison of a step's changes of ratios with their rounding errors (docs/numerics.md).

A few sequences are scored before and after a step's updates, in the run's precision and, at the
same weights, in a higher precision (`policy.exact`). The first log-ratio is the one that is
clipped, the second is the same without rounding.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.config import MetricsConfig, ObjectiveConfig, RolloutConfig
from gapo_megatron.config.methods import Method
from gapo_megatron.learn.checks.routes import StepRoutes
from gapo_megatron.learn.loss import may_differ
from gapo_megatron.learn.score import score
from gapo_megatron.objective import decide
from gapo_megatron.objective.draws import keys_of, with_step
from gapo_megatron.policy import Policy
from gapo_megatron.policy.exact import exact_arithmetic
from gapo_megatron.rollouts import Batch

logger = logging.getLogger(__name__)

LEAST_CORRELATION = 0.9
"""Correlation of the ratios with those without rounding below which a run is warned."""

_REMEDIES = {
    "fp8": "set model.precision (fp8) to fp16, bf16 or fp32",
    "bf16": "set model.precision (bf16) to fp16, or to fp32",
    "fp16": "set model.precision (fp16) to fp32",
    "fp32": "model.precision is fp32 already",
}

_ROUTES = -1
"""Number under which `StepRoutes` has the routes of these sequences."""

_SUMS = (
    *("count", "x", "y", "xx", "yy", "xy", "errors"),
    *("engine_count", "engine", "decided", "changed"),
)


@dataclass(frozen=True)
class Scores:
    """Log-probs of a few sequences at one state of the weights.

    Position in the batch -> [num sampled tokens] float32 or float64 on the CPU, of this rank's
    sequences; empty except on the last pipeline stage.
    """

    in_run: dict[int, Tensor] = field(default_factory=dict)
    """In the run's precision."""
    exact: dict[int, Tensor] = field(default_factory=dict)
    """At the same weights, without the run's rounding."""

    @classmethod
    def of(cls, policy: Policy, batch: Batch, routes: StepRoutes | None = None) -> Self:
        """Score the sequences that the plan chooses (`Plan.rounding`).

        Args:
            policy: unchanged; the memory of its gradients is released.
            batch: planned; the same on every rank except for the tokens.
            routes: the step's routes. The first call's, in the run's precision, are recorded, and
                followed by all passes afterwards, as by the step's updates. None: no experts.

        Collectives: those of `learn.score.score`, twice.

        Raises:
            DivergenceError: a log-prob is not finite.
        """
        assert batch.plan is not None
        packing = batch.plan.rounding[policy.groups.dp_rank]
        policy.make_room()
        mark: Any = list if routes is None else partial(routes.tracing, _ROUTES)
        in_run = score(policy, batch, packing, mark=mark)
        with exact_arithmetic(policy):
            return cls(in_run, score(policy, batch, packing, mark=mark))


def is_due(
    step: int,
    policy: Policy,
    objective: ObjectiveConfig,
    rollout: RolloutConfig,
    metrics: MetricsConfig,
) -> bool:
    """Whether `step` is measured: by `metrics.rounding_every_steps`, if possible.

    Not if attention in the higher precision needs memory for every pair of tokens: on a GPU in
    float64, and without Transformer Engine under context parallelism. Nor if ratios compare with
    log-probs of an engine with older weights: then more than this step has changed them.
    """
    is_quadratic = policy.precision == "fp32" or policy.groups.cp_size > 1
    if policy.device.type == "cuda" and is_quadratic:
        return False
    if objective.old_log_probs == "rollout" and rollout.max_staleness:
        return False
    every = metrics.rounding_every(policy.precision)
    return every > 0 and step % every == 0


def measure(
    policy: Policy,
    batch: Batch,
    before: Scores,
    objective: ObjectiveConfig,
    rollout: RolloutConfig,
    routes: StepRoutes | None = None,
    place: tuple[int, int] = (0, 0),
) -> dict[str, float]:
    """Compare a step's ratios with the ratios without rounding; warn if they differ.

    Args:
        policy: at the weights after the step; unchanged.
        batch: the step's batch, as passed to `Scores.of` before its updates.
        before: result of `Scores.of` before the updates.
        objective: section `objective`.
        rollout: section `rollout`.
        routes: as passed to `Scores.of`; those of these sequences are freed.
        place: the run's seed and the step's index, as in `learn.step.learn`.

    Returns:
        `numerics/*` and `experts/ratio_by_routes` (docs/metrics.md), the same bits on every rank;
        empty without sequences.

    Collectives: those of `Scores.of`; one all-gather over all ranks. With experts, those of
    `learn.score.score`, and another all-gather.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    assert batch.plan is not None
    has_routes = routes is not None and routes.has(_ROUTES)
    after = Scores.of(policy, batch, routes)
    method = objective.resolve()
    if objective.old_log_probs == "rollout":  # compare with the engine's log-probs
        engine = {i: _of_engine(batch, i) for i in before.in_run}
        before = replace(before, in_run=engine)
    local = torch.zeros(len(_SUMS), dtype=torch.float64)
    if after.in_run and policy.groups.is_first_copy:
        local = _local_sums(batch, before, after, method, place)
    named = dict(zip(_SUMS, _sum_over_ranks(local.to(policy.device)).tolist(), strict=True))
    if not named["count"]:
        return {}
    metrics = _summarize(named, method)
    if routes is not None:
        if has_routes:
            moved = _moved_by_routes(policy, batch, after, method, routes, place)
            metrics["experts/ratio_by_routes"] = moved
        routes.forget(_ROUTES)
    if method.bounds == "fixed" and named["decided"]:  # others compute bounds for each mini-batch
        metrics["numerics/clip_decisions_changed"] = named["changed"] / named["decided"]
    # Otherwise the engine's log-probs are not those of the policy at the start of the step.
    has_older_weights = rollout.max_staleness > 0 or batch.has_carried
    if has_older_weights or rollout.top_p != 1:
        metrics = {name: one for name, one in metrics.items() if "engine" not in name}
    if policy.groups.rank == 0:
        has_moved = len(batch.plan.minibatches) > 1 or batch.has_scored
        may_clip = may_differ(objective, has_moved=has_moved) and method.stops_gradients
        _log(metrics, policy.precision, method, may_clip=may_clip)
    return metrics


def _local_sums(
    batch: Batch, before: Scores, after: Scores, method: Method, place: tuple[int, int]
) -> Tensor:
    """`_SUMS` over this rank's ratios: x are the exact log-ratios, y those seen."""
    indices, facts = [*after.in_run], _facts(batch, after.in_run, place)

    def joined(scores: dict[int, Tensor]) -> Tensor:
        return torch.cat([_as_read(batch, i, scores[i]) for i in indices])

    seen, is_clipped = decide(joined(after.in_run), joined(before.in_run), **facts, method=method)
    exact, would_be = decide(joined(after.exact), joined(before.exact), **facts, method=method)
    products = [exact, seen, exact**2, seen**2, exact * seen, (seen - exact) ** 2]
    engine = torch.stack([(_of_engine(batch, i) - before.exact[i]).mean() for i in indices])
    has_signal = facts["advantages"] != 0
    if len(seen) > len(indices):  # ratios of tokens
        has_signal = has_signal[facts["sequence_ids"]]
    counts = [int(has_signal.sum()), int((has_signal & (is_clipped != would_be)).sum())]
    sums = [len(exact), *map(_total, products), len(engine), _total(engine**2), *counts]
    return torch.tensor(sums, dtype=torch.float64)


def _facts(batch: Batch, scores: dict[int, Tensor], place: tuple[int, int]) -> dict[str, Tensor]:
    """What `decide` needs of scored sequences, in their order."""
    index = torch.tensor([*scores])
    counts = torch.tensor([len(values) for values in scores.values()])
    seed, step = place
    return {
        "sequence_ids": torch.arange(len(index)).repeat_interleave(counts),
        "advantages": batch.advantages[index],
        "num_correct": batch.num_correct[index],
        "group_size": batch.group_size[index],
        "keys": with_step(keys_of(batch.table[[*scores]]), seed=seed, step=step),
    }


def _moved_by_routes(
    policy: Policy,
    batch: Batch,
    after: Scores,
    method: Method,
    routes: StepRoutes,
    place: tuple[int, int],
) -> float:
    """Root mean square of the log-ratio of free routes to replayed ones, at the same weights."""
    assert batch.plan is not None
    packing = batch.plan.rounding[policy.groups.dp_rank]
    other = score(policy, batch, packing, mark=partial(routes.other_way, _ROUTES))
    local = torch.zeros(2, dtype=torch.float64)
    if other and policy.groups.is_first_copy:
        joined = [torch.cat([one[i] for i in other]) for one in (after.in_run, other)]
        moved, _ = decide(*joined, **_facts(batch, other, place), method=method)
        local = torch.tensor([len(moved), _total(moved**2)], dtype=torch.float64)
    count, total = _sum_over_ranks(local.to(policy.device)).tolist()
    return math.sqrt(total / count)


def _as_read(batch: Batch, i: int, values: Tensor) -> Tensor:
    """Values of the sampled tokens of sequence i in the order of the loss, whose draws go by it."""
    if i not in batch.conversations:
        return values
    sampled = batch.conversations[i][batch.is_sampled(i)]
    return values[torch.from_numpy(np.argsort(sampled, kind="stable"))]


def _of_engine(batch: Batch, i: int) -> Tensor:
    """[num sampled tokens of sequence i] float64, the rollout engine's own log-probs."""
    return torch.from_numpy(batch.rollout_log_probs[i][batch.is_sampled(i)]).double()


def _total(values: Tensor) -> float:
    return math.fsum(values.tolist())


def _sum_over_ranks(local: Tensor) -> Tensor:
    """Sum in rank order, for the same bits on every rank. Collective."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    total = torch.zeros_like(local)
    for part in parts:
        total += part
    return total.cpu()


def _summarize(sums: dict[str, float], method: Method) -> dict[str, float]:
    """Root mean squares and the correlation, from sums over all ratios and sequences."""
    n = sums["count"]
    metrics = {
        "numerics/ratio_signal": math.sqrt(sums["xx"] / n),
        "numerics/ratio_rounding": math.sqrt(sums["errors"] / n),
        "numerics/engine_rounding": math.sqrt(sums["engine"] / sums["engine_count"]),
    }
    if method.is_band:
        for name in ("ratio", "engine"):
            rounding = metrics[f"numerics/{name}_rounding"]
            metrics[f"numerics/{name}_rounding_share"] = rounding / method.eps_low
    spread = [n * sums[2 * key] - sums[key] ** 2 for key in "xy"]
    if min(spread) > 0:
        product = n * sums["xy"] - sums["x"] * sums["y"]
        metrics["numerics/ratio_correlation"] = product / math.sqrt(spread[0] * spread[1])
    return metrics


def _log(metrics: dict[str, float], precision: str, method: Method, *, may_clip: bool) -> None:
    correlation = metrics.get("numerics/ratio_correlation")
    changed = metrics.get("numerics/clip_decisions_changed")
    text = (
        f"ratios: the step moved them by {metrics['numerics/ratio_signal']:.1e} (rms), rounding by "
        f"{metrics['numerics/ratio_rounding']:.1e}"
    )
    if correlation is not None:
        text += f", correlation {correlation:.3f}"
    if changed is not None:
        text += (
            f"; it changed {changed:.1%} of the clip's decisions (eps_low {method.eps_low:g}, "
            f"eps_high_max {method.eps_high_max:g})"
        )
    is_low = correlation is not None and correlation < LEAST_CORRELATION and may_clip
    if is_low:
        text += (
            f". Below a correlation of {LEAST_CORRELATION:g} the clip decides largely on rounding: "
            f"{_REMEDIES[precision]}, or widen objective.eps_low and objective.eps_high_max "
            "(docs/numerics.md)"
        )
    logger.log(logging.WARNING if is_low else logging.INFO, "%s", text)
