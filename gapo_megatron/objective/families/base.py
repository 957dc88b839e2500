"""Inputs and results of a family's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import Sequences
from gapo_megatron.objective.clipping import bounded_exp
from gapo_megatron.objective.draws import uniforms


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """T response tokens of the B sequences of one packed micro-batch."""

    log_probs: torch.Tensor
    """[T] current policy, with autograd."""
    old_log_probs: torch.Tensor
    """[T] policy that the clip is around, without autograd."""
    sequences: Sequences
    """The tokens of each sequence."""
    advantages: torch.Tensor
    """[B] float64."""
    num_correct: torch.Tensor
    """[B] int64: c of each sequence's group."""
    group_size: torch.Tensor
    """[B] int64: k of each sequence's group."""
    lower: torch.Tensor
    """[B] float64: lower clip width of each sequence."""
    upper: torch.Tensor
    """[B] float64: upper clip width of each sequence."""
    method: Method
    keys: torch.Tensor | None = None
    """[B] int64: a hash of each sequence's place in the run, for `draws`."""

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[T] int64 in 0..B-1."""
        return self.sequences.ids

    @property
    def counts(self) -> torch.Tensor:
        """[B] int64: response tokens of each sequence."""
        return self.sequences.counts

    @property
    def log_ratio(self) -> torch.Tensor:
        """[T] float64 with autograd: log_probs - old_log_probs."""
        return self.log_probs.double() - self.old_log_probs.double()

    @property
    def per_token(self) -> bool:
        """Whether each token has a ratio of its own, [T]; else each sequence has one, [B]."""
        return self.method.ratio == "token"

    def ratio(self) -> torch.Tensor:
        """Float64 with autograd, by `Method.ratio`.

        s_i = exp(mean_t log_ratio) [B], exp(log_ratio) [T], or exp(sum_t log_ratio) [B].
        """
        if self.per_token:
            return bounded_exp(self.log_ratio)
        is_mean = self.method.ratio != "product"
        return bounded_exp(
            self.sequences.log_ratio(self.log_probs, self.old_log_probs, mean=is_mean)
        )

    def draws(self) -> torch.Tensor:
        """Random numbers in [0, 1) float64, shaped like `ratio` (`objective.draws`).

        Raises:
            ConfigError: the caller of `policy_loss` gave no keys.
        """
        if self.keys is None:
            raise ConfigError(f"method {self.method.name!r} decides by chance: it needs keys")
        return uniforms(self.keys, self.sequences if self.per_token else None)

    def per_ratio(self, values: torch.Tensor) -> torch.Tensor:
        """Expand values of sequences [B] to the shape of `ratio`."""
        return values[self.sequence_ids] if self.per_token else values

    def sum_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """[B] float64 with autograd: `losses`, shaped like `ratio`, summed over each sequence.

        Every token carries the loss of a `sequence` ratio; the loss of a `product` ratio counts
        once per sequence. So at equal log-probs -A s has the gradient -A at every token, for every
        kind of ratio.
        """
        if self.per_token:
            return self.sequences.sum(losses)
        return losses if self.method.ratio == "product" else self.counts * losses


CLIP = ("clipped", "gradient_mass", "gradient_mass_kept")
"""Metrics of the clip."""

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Loss of each sequence, [B] float64 with autograd: summed over its tokens, without denominators.

Then metrics. Three describe the clip, shaped like `ratio` and detached; each is derived if missing:

    clipped             bool: the clip is active; False where A = 0. Missing: A != 0 and no gradient
    gradient_mass       |d loss / d log_probs| of one token without a clip. Missing: |A| * ratio
    gradient_mass_kept  the same with the clip. Missing: 0 where clipped, else `gradient_mass`; the
                        loss's own gradient if `clipped` is missing, too

Tensors of any other name but `ratio` are logged as `method/NAME`, the mean of their elements over
the step. A micro-batch without tokens asks no family.
"""

Family = Callable[[LossInputs], LossResult]
"""Local to the micro-batch: no collectives, no synchronisation with the device."""
