"""The loss of a mini-batch's micro-batches: old log-probs, weights, policy loss, KL, entropy.

R = rows = sampled response tokens of a micro-batch of B sequences. Tokens appended by an
environment have no row: every array here omits them, as `batching.pack` omits them from the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from gapo_megatron.config import ObjectiveConfig
from gapo_megatron.config.methods import Method
from gapo_megatron.learn import records
from gapo_megatron.learn.metrics import Sums
from gapo_megatron.learn.score import Scored
from gapo_megatron.objective import (
    decide,
    diagnostics,
    importance_weights,
    kl_penalty,
    policy_loss,
    token_importance_weights,
    weigh_gradient,
)
from gapo_megatron.objective.draws import with_step
from gapo_megatron.types import LossMicrobatch, Minibatch

LogProbs = Sequence[torch.Tensor | None]
"""Log-probs of a mini-batch: [R] float32 per micro-batch, None off the last pipeline stage."""


@dataclass(frozen=True)
class MinibatchLoss:
    """The loss of micro-batch i of a mini-batch, divided by global denominators: ranks only add."""

    minibatch: Minibatch
    microbatches: Sequence[LossMicrobatch]
    """Read on the last pipeline stage only, where the loss is computed."""
    is_first: bool
    """Whether the weights are still those of the start of the step."""
    old_log_probs: LogProbs
    """The trainer's log-probs at the start of the step; empty: not computed. In the first
    mini-batch the current log-probs, detached, replace them."""
    ref_log_probs: LogProbs
    """The reference model's log-probs; empty: no KL term."""
    objective: ObjectiveConfig
    _: KW_ONLY
    method: Method
    """That of `objective`."""
    rollouts_per_prompt: int
    """k of the run; unknown verdicts make the k of a group smaller."""
    max_response_tokens: int
    measures_staleness: bool
    """Whether older weights may have sampled tokens whose log-probs the trainer has not kept:
    with `rollout.max_staleness`, or responses that generation ranks began in earlier steps."""
    place: tuple[int, int] = (0, 0)
    """The run's seed and the step's index, for methods that decide by chance."""
    widths: tuple[float, float] | None = None
    """Lower and upper clip width of this mini-batch (`learn.checks.bounds`); None: the method's."""
    recorded: frozenset[int] = frozenset()
    """Rows of the batch whose tokens the outputs describe beside the sums (`learn.records`)."""

    def __call__(self, scored: Scored) -> tuple[torch.Tensor, Sums]:
        """Scalar float64 loss and additive metrics of a micro-batch, and what `records` takes.

        Does not wait for the device.
        """
        given, log_probs = self.microbatches[scored.index], scored.log_probs
        at_begin, old = self.find_old_log_probs(scored.index, log_probs)
        sums = {} if at_begin is None else self._engine_sums(at_begin, scored)
        advantages, widths = given.advantages, None
        if self.objective.importance_weight_max is not None:
            largest = self.objective.importance_weight_max
            log_probs, advantages = self._weigh(log_probs, old, scored, largest, sums)
        if self.widths is not None:
            lower, upper = (torch.full_like(given.advantages, one) for one in self.widths)
            widths = (lower, upper)
        result = policy_loss(
            log_probs,
            old,
            sequence_ids=scored.sequences,
            advantages=advantages,
            num_correct=given.num_correct,
            group_size=given.group_size,
            num_tokens_global=self.minibatch.num_tokens_global,
            num_sequences_global=self.minibatch.num_sequences_global,
            max_response_tokens=self.max_response_tokens,
            method=self.method,
            widths=widths,
            keys=self._keys(given),
            flags=scored.flags,
        )
        sums |= diagnostics.per_correct_sums(
            result,
            sequence_ids=scored.sequences,
            advantages=given.advantages,
            num_correct=given.num_correct,
            group_size=self.rollouts_per_prompt,
            is_carried=given.is_carried,
        )
        for name, value in result.metrics.items():  # of a user's family: means over elements
            sums[f"method/{name}/sum"] = total = value.double().sum()
            sums[f"method/{name}/count"] = torch.full_like(total, value.numel())
        sums["loss"] = result.loss.detach()
        sums["tokens"] = torch.full_like(sums["loss"], len(log_probs))
        if self.widths is not None and scored.index == 0:  # once per mini-batch and rank
            bounds = {"low": 1 - self.widths[0], "high": 1 + self.widths[1], "count": 1.0}
            sums |= {f"bound_{k}": torch.full_like(sums["loss"], v) for k, v in bounds.items()}
        if not self.recorded.isdisjoint(given.indices):
            sums |= records.outputs_of(result, scored.log_probs, at_begin)
        if not self.ref_log_probs and scored.entropy is None:
            return result.loss, sums
        return self._add_penalties(result.loss, scored, sums), sums

    def _keys(self, given: LossMicrobatch) -> torch.Tensor:
        """[S] int64: a hash of each sequence's place in the run."""
        seed, step = self.place
        return with_step(given.keys, seed=seed, step=step)

    def find_old_log_probs(
        self, index: int, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Old log-probs [R] float32 of micro-batch `index`; `log_probs` are the current ones.

        Returns:
            The trainer's at the start of the step, carried tokens' at the weights that sampled
            them; None: not computed. And those that the ratios compare with: the same ones, or the
            engine's.
        """
        given = self.microbatches[index]
        old = self.old_log_probs[index] if self.old_log_probs else None
        if old is None and self.is_first:
            old = log_probs.detach()
        carried = given.carried_log_probs
        if old is not None and given.is_carried_row is not None and carried is not None:
            old = torch.where(given.is_carried_row, carried, old)
        if self.objective.old_log_probs == "rollout":
            return old, given.rollout_log_probs
        assert old is not None  # computed unless ratios compare with the engine's log-probs
        return old, old

    def _engine_sums(self, at_begin: torch.Tensor, scored: Scored) -> Sums:
        """Differences between the engine's log-probs and the trainer's at the start of the step."""
        given = self.microbatches[scored.index]
        sums: Sums = {}
        if len(at_begin):
            mismatch = (at_begin - given.rollout_log_probs).abs().double()
            sums = {"mismatch": mismatch.sum(), "mismatch_max": mismatch.max()}
        if self.objective.old_log_probs == "rollout":
            sums["mismatch_tokens"] = given.advantages.new_full((), len(at_begin))
        if self.measures_staleness:
            _, clipped = decide(
                at_begin,
                given.rollout_log_probs,
                sequence_ids=scored.sequences,
                advantages=given.advantages,
                num_correct=given.num_correct,
                group_size=given.group_size,
                keys=self._keys(given),
                method=self.method,
            )
            shares = clipped.double()
            if self.method.ratio == "token":
                shares = scored.sequences.mean(shares)
            sums["outside_clip"] = shares.sum()
            sums["outside_clip_sequences"] = (given.advantages != 0).sum().double()
        return sums

    def _weigh(
        self,
        log_probs: torch.Tensor,
        old: torch.Tensor,
        scored: Scored,
        largest: float,
        sums: Sums,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and advantages that carry the importance weights, which `sums` counts."""
        given = self.microbatches[scored.index]
        advantages = given.advantages
        if self.objective.importance_weights == "token":
            weights = token_importance_weights(old, given.rollout_log_probs, largest=largest)
            log_probs = weigh_gradient(log_probs, weights)
        else:
            weights = importance_weights(
                old,
                given.rollout_log_probs,
                sequence_ids=scored.sequences,
                num_sequences=len(advantages),
                largest=largest,
            )
            advantages = advantages * weights
        sums["importance_weights"] = total = weights.sum()
        sums["importance_weights_cut"] = (weights == largest).sum()
        sums["importance_weights_count"] = torch.full_like(total, len(weights))
        return log_probs, advantages

    def _add_penalties(self, loss: torch.Tensor, scored: Scored, sums: Sums) -> torch.Tensor:
        """KL and entropy terms: means over the valid response tokens of the mini-batch."""
        denominator = max(self.minibatch.num_tokens_global, 1)
        if self.ref_log_probs:
            reference = self.ref_log_probs[scored.index]
            assert reference is not None
            kl = kl_penalty(scored.log_probs, reference).sum()
            loss = loss + self.objective.kl_coef * kl / denominator
            sums["kl"] = kl.detach()
        if scored.entropy is not None:
            total = scored.entropy.double().sum()
            loss = loss - self.objective.entropy_coef * total / denominator
            sums["entropy"] = total.detach()
        return loss


def may_lose_gradients(objective: ObjectiveConfig, method: Method, *, has_moved: bool) -> bool:
    """Whether some rows may have no gradient, decided on the host without reading the device.

    At the weights of its old log-probs no ratio is clipped; bounding an importance weight removes
    no gradient, and an entropy term gives every row a gradient. With a KL term sequences with A = 0
    are computed, which have no gradient while the policy equals its reference. The engine's
    log-probs are never exactly the trainer's: as old log-probs they may clip any ratio from the
    start.

    Args:
        objective: section `objective`.
        method: that of `objective`.
        has_moved: the weights differ from those of some old log-probs of the trainer.
    """
    if objective.entropy_coef > 0:
        return False
    if objective.kl_coef > 0:
        return True
    return may_differ(objective, has_moved=has_moved) and method.stops_gradients


def may_differ(objective: ObjectiveConfig, *, has_moved: bool) -> bool:
    """Whether a ratio may differ from 1; arguments as in `may_lose_gradients`."""
    return has_moved or objective.old_log_probs == "rollout"
