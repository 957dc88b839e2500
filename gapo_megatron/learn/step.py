"""A step on a batch of rollouts: old log-probs, then one update per mini-batch.

In the order of the data flow: `plan`, `Policy.pack`, `score` (old log-probs), `loss`, `update`,
`metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import ObjectiveConfig, RolloutConfig
from gapo_megatron.config.methods import Method
from gapo_megatron.learn import metrics, records
from gapo_megatron.learn.checks import rounding
from gapo_megatron.learn.checks.bounds import find_widths
from gapo_megatron.learn.checks.routes import Recorded, StepRoutes
from gapo_megatron.learn.loss import LogProbs, MinibatchLoss, may_differ, may_lose_gradients
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import UpdateResult, update
from gapo_megatron.objective.families import FAMILIES
from gapo_megatron.policy import Policy
from gapo_megatron.rollouts import Batch
from gapo_megatron.types import LossMicrobatch, Microbatch


@dataclass
class Progress:
    """Progress of this rank with a batch, which a stop must save beside weights and batch."""

    old_log_probs: list[LogProbs] = field(default_factory=list)
    """Old log-probs per mini-batch, at the weights at the start of the step; empty before the pass.
    An empty entry was not computed."""
    sums: metrics.Sums = field(default_factory=dict)
    """Metrics of the finished updates."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norm of each finished update."""
    learning_rate: float = 0.0
    """Learning rate of the last finished update."""
    scores: rounding.Scores | None = None
    """Log-probs at the start of the step, to measure rounding; None: not measured."""
    routes: Recorded = field(default_factory=Recorded)
    """Experts of the tokens of mini-batches to come; empty for a model without experts."""
    recorded: list[int] | None = None
    """Rows of the batch that are recorded, as chosen before the first update; None: not yet."""
    records: dict[int, records.Arrays] = field(default_factory=dict)
    """Rows of the batch that are recorded -> what the finished updates made of them, on the rank
    that reports log-probs."""

    @property
    def num_updates(self) -> int:
        return len(self.grad_norms)

    def add(
        self,
        result: UpdateResult,
        scored: Sequence[Microbatch],
        batch: Batch,
        recorded: Collection[int] = (),
    ) -> None:
        """Count an update; `scored` are its micro-batches on the last pipeline stage."""
        lengths, num_rows = batch.num_fed_tokens.numpy(), batch.table["num_sampled_tokens"]
        for microbatch, outputs in zip(scored, result.outputs, strict=True):
            sums, found = records.split(outputs, microbatch, recorded, num_rows)
            self.records |= found
            num_tokens = float(lengths[list(microbatch.indices)].sum())
            tokens_backward = (sums["active_rows"] > 0).double() * num_tokens
            metrics.add(self.sums, sums | {"tokens_backward": tokens_backward})
        self.grad_norms.append(result.grad_norm)
        self.learning_rate = result.learning_rate


def learn(
    policy: Policy,
    batch: Batch,
    objective: ObjectiveConfig,
    rollout: RolloutConfig,
    stopwatch: Stopwatch,
    *,
    progress: Progress | None = None,
    measures_rounding: bool = False,
    recorded: Collection[int] = (),
    place: tuple[int, int] = (0, 0),
    must_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Take one optimizer step per mini-batch of the batch's plan.

    Args:
        policy: at the weights that generated the last tokens of `batch` (newer weights with
            `rollout.max_staleness`), after the updates in `progress`; the rest are taken here.
        batch: planned; the same on every rank except for the tokens: this rank holds its
            data-parallel share.
        objective: section `objective`: method and coefficients.
        rollout: section `rollout`: response limit, staleness, and how the engine sampled.
        stopwatch: times the stages `old_log_probs`, `update` and `rounding`.
        progress: progress of an earlier call that had to stop; resumed with the same bits.
            Updated in place.
        measures_rounding: also compare the ratios with those without rounding
            (`learn.checks.rounding`).
        recorded: rows of the batch to describe token by token, in `progress.records`; the same on
            every rank. After a stop those hold that were chosen before it.
        place: the run's seed and the step's index, for methods that decide by chance.
        must_stop: called before every mini-batch, on every rank; must return the same on all.

    Returns:
        Metrics of the step (`metrics.summarize`), the same bits on every rank; None if it had to
        stop (see `progress`).

    Collectives: if rounding is measured, first those of `rounding.Scores.of`, and last those of
    `rounding.measure`. Per mini-batch those of `score.log_probs` (all mini-batches first), then
    those of `update.update`, and before them, with `Method.bounds`, those of
    `bounds.find_widths`; at the end one all-gather of metrics over all ranks, and those of
    `StepRoutes.summarize`.

    Raises:
        DivergenceError: a loss or gradient is not finite; the weights are those before that update.
    """
    progress, plan, method = progress or Progress(), batch.plan, objective.resolve()
    assert plan is not None, "the batch is not planned"
    if must_stop():
        return None
    routes = StepRoutes(policy, batch, progress.routes, replayed=objective.replayed_routes)
    # Scored before and after the updates in the same way, to measure rounding of the ratios.
    if measures_rounding and not progress.old_log_probs:
        with stopwatch("rounding"):
            progress.scores = rounding.Scores.of(policy, batch, routes)
    with stopwatch("old_log_probs"):
        packed = [
            [policy.pack(batch, indices) for indices in one.microbatches[policy.groups.dp_rank]]
            for one in plan.minibatches
        ]
        reference = _score(policy, packed, objective, progress, routes)
    table = batch.table
    if progress.recorded is None:
        progress.recorded = sorted(recorded)
    kept = frozenset(progress.recorded if policy.groups.is_first_copy else ())
    # Older weights sampled tokens whose log-probs the trainer has not kept.
    is_stale = bool((table["num_carried_tokens"] > table["num_scored_tokens"]).any())
    for i in range(progress.num_updates, len(packed)):
        if i and must_stop():
            return None
        with stopwatch("update"):
            old = progress.old_log_probs[i]
            loss = MinibatchLoss(
                plan.minibatches[i],
                cast("Sequence[LossMicrobatch]", packed[i]),  # packed from a `Batch`, for the loss
                is_first=i == 0,
                old_log_probs=old,
                ref_log_probs=reference[i],
                objective=objective,
                method=method,
                rollouts_per_prompt=batch.rollouts_per_prompt,
                max_response_tokens=rollout.max_response_tokens,
                measures_staleness=rollout.max_staleness > 0 or is_stale,
                recorded=kept,
                place=place,
            )
            has_moved = bool(old) or batch.has_scored
            if method.bounds != "fixed" and may_differ(objective, has_moved=has_moved):
                marked = routes.following(i, packed[i], counts=False)
                loss = replace(loss, widths=find_widths(policy, marked, loss))
            result = update(
                policy,
                routes.following(i, packed[i]),
                loss,
                skip_inactive=may_lose_gradients(objective, method, has_moved=has_moved),
                with_entropy=objective.entropy_coef > 0,
            )
            # The loss is computed on the last pipeline stage only.
            scored = packed[i] if policy.groups.is_last_stage else []
            progress.add(result, scored, batch, kept)
        routes.forget(i)
    summary = _summarize(policy, batch, progress, objective, method) | routes.summarize()
    if progress.scores is not None:
        with stopwatch("rounding"):
            summary |= rounding.measure(
                policy, batch, progress.scores, objective, rollout, routes, place
            )
    return summary


def _score(
    policy: Policy,
    packed: Sequence[Sequence[Microbatch]],
    objective: ObjectiveConfig,
    progress: Progress,
    routes: StepRoutes,
) -> list[LogProbs]:
    """Compute old log-probs into `progress`; returns the reference's log-probs, for a KL term.

    The old log-probs of mini-batch 1 are those of its own forward pass, detached: its weights are
    still the same. The others come from a pass at these weights, packed exactly as in their update,
    so that a ratio differs from 1 only if the weights differ; it records the routes that the update
    replays. Tokens sampled by earlier steps keep their log-probs at the weights that sampled them
    (`Batch.carried_log_probs`), in every mini-batch; not if other ranks generate, where nobody has
    scored them then. With `objective.old_log_probs` = "rollout" there is no pass: the batch has the
    engine's log-probs.
    """
    score_one = partial(log_probs, policy, with_entropy=objective.entropy_coef > 0)
    if not progress.old_log_probs:
        needs_pass = objective.old_log_probs == "trainer"
        others = [
            score_one(routes.recording(i, one)) if needs_pass else []
            for i, one in enumerate(packed[1:], start=1)
        ]
        progress.old_log_probs = [[], *others]
    if objective.kl_coef == 0:
        return [[]] * len(packed)
    with policy.reference_weights():
        return [score_one(one) for one in packed]


def _summarize(
    policy: Policy, batch: Batch, progress: Progress, objective: ObjectiveConfig, method: Method
) -> dict[str, float]:
    """Metrics of the step, the same bits on every rank. Collective."""
    assert batch.plan is not None
    sums = progress.sums if policy.groups.is_first_copy else {}
    summary = metrics.summarize(
        metrics.add_over_ranks(
            sums,
            group_size=batch.rollouts_per_prompt,
            device=policy.device,
            has_own=method.family not in FAMILIES or method.rescue_noise is not None,
        ),
        batch.plan,
        objective,
        lengths=batch.num_fed_tokens.numpy(),
        grad_norms=progress.grad_norms,
        learning_rate=progress.learning_rate,
    )
    if policy.loss_scale is not None:
        summary["optim/loss_scale"] = policy.loss_scale.value
        summary["optim/overflows"] = float(policy.loss_scale.num_overflows)
    return summary
