"""The policy loss of every method: log-ratios, the method's family, aggregation, in float64.

    s_i = exp(mean_t(log_probs - old_log_probs))        (token ratio: exp of each difference)
    l_i = max(-A_i s_i, -A_i clip(s_i, 1 - eps_low, 1 + eps_high(c_i)))     (`families.clipped`)

and, summed over response tokens (every token of sequence i carries l_i):

    token_mean     sum_i sum_t l / num_tokens_global
    sequence_mean  sum_i mean_t l / num_sequences_global
    sequence_sum   sum_i sum_t l / num_sequences_global
    constant       sum_i sum_t l / (num_sequences_global * max_response_tokens)

The denominators are those of the whole mini-batch, so losses and gradients of micro-batches and
data-parallel ranks add up, and sequences with A = 0 may be skipped. Response tokens are those that
the model sampled: tokens of an environment have no row here.

Clips of sequence ratios are as narrow as 7e-5, and a log-ratio is a sum over thousands of tokens
that nearly cancel. So it is accumulated in float64, which costs nothing compared with the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gapo_megatron.config.methods import Method
from gapo_megatron.device import Flags
from gapo_megatron.errors import ConfigError, DivergenceError
from gapo_megatron.logprob import Sequences
from gapo_megatron.objective.clipping import bound, upper_clip
from gapo_megatron.objective.families import Family, LossInputs, LossResult, find_family
from gapo_megatron.objective.families.base import CLIP
from gapo_megatron.objective.families.clipped import clipped_loss


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of one micro-batch, and what the metrics need."""

    loss: torch.Tensor
    """Scalar float64 with autograd: this micro-batch's share of the mini-batch's loss."""
    ratio: torch.Tensor
    """[B] (sequence ratio) or [T] (token ratio) float64, detached."""
    clipped: torch.Tensor
    """Bool, shaped like `ratio`: the clip is active, the gradient zero (CISPO: bounded)."""
    gradient_mass: torch.Tensor
    """Float64, shaped like `ratio`: |d loss / d log_probs|, summed over the tokens that share the
    ratio, as it would be without a clip. Detached."""
    gradient_mass_lost: torch.Tensor
    """Float64, shaped like `ratio`: gradient mass that the clip removes (CISPO: the part of the
    weight above the bound; a lower bound removes nothing). Detached."""
    per_token: bool
    """Whether the tensors shaped like `ratio` are [T]."""
    lower: torch.Tensor
    """[B] float64: lower clip width of each sequence, which its family may read in its own way."""
    upper: torch.Tensor
    """[B] float64: upper clip width, likewise."""
    metrics: dict[str, torch.Tensor]
    """What a user's family returns beside the clip, of any shape; detached."""
    dose: Dose | None
    """What widths by c change; None: the method has none, or `widths` replace them."""


@dataclass(frozen=True, slots=True, eq=False)
class Dose:
    """How the clip differs from a fixed one, eps_high_max for every c, on the same ratios.

    Both are shaped like `ratio` and detached, and 0 where A <= 0.
    """

    decisions: torch.Tensor
    """Bool: only one of the two clips is active."""
    gradient_mass: torch.Tensor
    """Float64: gradient mass that one of them removes and the other does not."""


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    *,
    sequence_ids: torch.Tensor | Sequences,
    advantages: torch.Tensor,
    num_correct: torch.Tensor,
    group_size: int | torch.Tensor,
    num_tokens_global: int,
    method: Method,
    num_sequences_global: int | None = None,
    max_response_tokens: int | None = None,
    widths: tuple[torch.Tensor, torch.Tensor] | None = None,
    keys: torch.Tensor | None = None,
    flags: Flags | None = None,
) -> PolicyLoss:
    """Loss of a packed micro-batch under `method`, divided by the mini-batch's global denominator.

    Args:
        log_probs: [T] current policy, with autograd; T = response tokens of B sequences.
        old_log_probs: [T] policy that the clip is around; no gradient flows into it.
        sequence_ids: [T] int64 in 0..B-1, in any order; or the `Sequences` of them, which saves
            sorting.
        advantages: [B].
        num_correct: [B] int64, c of each sequence's group.
        group_size: k, an int or [B] int64.
        num_tokens_global: response tokens of the mini-batch over all ranks, those not computed
            included.
        method: ratio, clip widths, aggregation.
        num_sequences_global: sequences likewise; for all aggregations but `token_mean`.
        max_response_tokens: the generation limit; for `constant`.
        widths: lower and upper clip width of each sequence, [B] float64, in place of the method's.
        keys: [B] int64, a hash of each sequence's place in the run (`objective.draws`); for methods
            that decide by chance.
        flags: where an input that is not finite is kept; the caller reads it. None: waits for the
            device to know.

    Returns:
        Loss, ratio, clip mask and gradient mass, local to this micro-batch. No collectives.

    Raises:
        DivergenceError: an input is not finite; names the sequence.
        ConfigError: a denominator that the aggregation needs is missing, or keys.

    Source: equations (gapo_objective), (gspo_ratio); aggregation in section 4.1, training details.
    """
    sequences = Sequences.of(sequence_ids, len(advantages))
    assert log_probs.dim() == 1 and log_probs.shape == old_log_probs.shape == sequences.ids.shape, (
        f"log_probs {tuple(log_probs.shape)}, old_log_probs {tuple(old_log_probs.shape)} and "
        f"sequence_ids {tuple(sequences.ids.shape)} must have one entry per response token"
    )
    assert advantages.shape == num_correct.shape == (len(sequences.offsets) - 1,), (
        f"advantages {tuple(advantages.shape)} and num_correct {tuple(num_correct.shape)} must "
        "have one entry per sequence"
    )
    _flag_not_finite(flags, log_probs, old_log_probs, sequences.ids, advantages)
    # Clip widths in float64, beside the log-probs: what a family starts from.
    advantages = advantages.detach().double()
    if not isinstance(group_size, torch.Tensor):  # filled on the device: a copy would wait
        group_size = torch.full_like(num_correct, group_size)
    lower = torch.full_like(advantages, method.eps_low)
    upper = torch.full_like(advantages, method.eps_high_max)
    if method.adaptive:  # incorrect rollouts get eps_low
        width = upper_clip(
            num_correct,
            group_size=group_size,
            eps_low=method.floor,
            eps_high_max=method.eps_high_max,
        )
        upper = torch.where(advantages > 0, width, method.eps_low)
    if widths is not None:
        lower, upper = widths
    tokens = LossInputs(
        log_probs,
        old_log_probs.detach(),
        sequences,
        advantages=advantages,
        num_correct=num_correct,
        group_size=group_size,
        lower=lower,
        upper=upper,
        method=method,
        keys=keys,
    )
    denominators = _denominators(
        tokens.counts, num_tokens_global, num_sequences_global, max_response_tokens, method
    )
    # Without rows every family's loss is 0, and user code may take a maximum of nothing.
    family = find_family(method) if len(log_probs) else clipped_loss
    sums, given = family(tokens)
    sums, clip = _clip(family, tokens, sums, given)
    if tokens.per_token:
        share = 1 / denominators[tokens.sequence_ids]
    else:
        share = tokens.counts / denominators
    mass, kept = clip["gradient_mass"], clip["gradient_mass_kept"]
    has_dose = method.adaptive and widths is None
    return PolicyLoss(
        loss=(sums / denominators).sum(),
        ratio=clip["ratio"],
        clipped=clip["clipped"],
        gradient_mass=mass * share,
        gradient_mass_lost=(mass - kept).clamp(min=0) * share,
        per_token=tokens.per_token,
        lower=lower,
        upper=upper,
        metrics={name: value.detach() for name, value in given.items() if name not in CLIP},
        dose=_dose(family, tokens, clip, share) if has_dose else None,
    )


def decide(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, *, method: Method, **facts: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios of two policies, and what the clip of `method` makes of them, without a loss.

    Args:
        log_probs: [T] of the policy that learns; T = response tokens of B sequences.
        old_log_probs: [T] of the policy that the clip is around.
        method: ratio, clip widths.
        facts: `sequence_ids`, `advantages`, `num_correct`, `group_size` and `keys` of
            `policy_loss`.

    Returns:
        Log of each ratio, float64, and whether it is clipped, bool, never where A = 0: both [B], or
        [T] of a token ratio. Detached, no collectives, nothing waits for the device.
    """
    # Of the loss nothing is used, neither its denominator nor its flag of what is not finite.
    method = dataclasses.replace(method, aggregation="token_mean")
    unused: dict[str, Any] = {"num_tokens_global": 1, "flags": Flags()}
    result = policy_loss(log_probs.detach(), old_log_probs, method=method, **facts, **unused)
    return result.ratio.log(), result.clipped


def _clip(
    family: Family, tokens: LossInputs, sums: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> LossResult:
    """What a family's loss is after the off-policy mask, and `CLIP` with the ratio, detached.

    Metrics that the family has not given are derived. The mask (OPSM) drops wrong responses that
    became much less likely, in any family:

        M_i = 0 where A_i < 0 and mean_t(old_log_probs - log_probs) > delta, else 1

    M_i multiplies the loss of sequence i, and carries no gradient. Denominators still count dropped
    responses, and they count as clipped. Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, as
    given by two transcriptions; slime, miles and TRL implement it. delta is 1e-4 in slime and
    miles, TRL suggests 0.5; the report gives no value.
    """
    clip = {name: given[name].detach() for name in CLIP if name in given}
    with torch.no_grad():
        clip["ratio"] = ratio = tokens.ratio()
        clip.setdefault("gradient_mass", tokens.per_ratio(tokens.advantages).abs() * ratio)
    if "clipped" not in clip:
        clip = _clip_of_gradient(family, tokens) | clip
    clip.setdefault("gradient_mass_kept", torch.where(clip["clipped"], 0, clip["gradient_mass"]))
    if (delta := tokens.method.off_policy_mask) is not None:
        fall = -tokens.sequences.log_ratio(tokens.log_probs.detach(), tokens.old_log_probs)
        is_kept = ~((tokens.advantages < 0) & (fall > delta))
        kept = tokens.per_ratio(is_kept)
        sums = torch.where(is_kept, sums, 0)
        clip["clipped"] = clip["clipped"] | ~kept
        clip["gradient_mass_kept"] = torch.where(kept, clip["gradient_mass_kept"], 0)
    return sums, clip


@torch.no_grad()
def _dose(
    family: Family, tokens: LossInputs, clip: Mapping[str, torch.Tensor], share: torch.Tensor
) -> Dose:
    """Compare `clip` with that of the same family at eps_high_max, on the same log-probs."""
    upper = torch.full_like(tokens.upper, tokens.method.eps_high_max)
    tokens = dataclasses.replace(tokens, log_probs=tokens.log_probs.detach(), upper=upper)
    sums, given = family(tokens)
    _, fixed = _clip(family, tokens, sums, given)
    is_correct = tokens.per_ratio(tokens.advantages) > 0
    changed = (clip["gradient_mass_kept"] - fixed["gradient_mass_kept"]).abs() * share
    return Dose(
        decisions=is_correct & (clip["clipped"] != fixed["clipped"]),
        gradient_mass=torch.where(is_correct, changed, 0),
    )


def _clip_of_gradient(family: Family, tokens: LossInputs) -> dict[str, torch.Tensor]:
    """Which ratios are clipped, and the gradient mass kept, by the gradient of a family's loss."""
    leaf = tokens.log_probs.detach().requires_grad_()
    with torch.enable_grad():
        sums, _ = family(dataclasses.replace(tokens, log_probs=leaf))
        (gradient,) = torch.autograd.grad(sums.sum(), leaf)
    kept = gradient.abs().double()
    if not tokens.per_token:
        kept = tokens.sequences.mean(kept)
    return {
        "clipped": (kept == 0) & (tokens.per_ratio(tokens.advantages) != 0),
        "gradient_mass_kept": kept,
    }


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) per token: exp(d) - d - 1, d = ref_log_probs - log_probs.

    Never negative, zero where both agree, unbiased under the policy's own samples ("k3").

    Args:
        log_probs: [T] current policy, with autograd.
        ref_log_probs: [T] frozen reference; no gradient flows into it.

    Returns:
        [T] float64 with autograd.
    """
    difference = ref_log_probs.detach().double() - log_probs.double()
    difference = bound(difference)
    return torch.expm1(difference) - difference


def _denominators(
    counts: torch.Tensor,
    num_tokens_global: int,
    num_sequences_global: int | None,
    max_response_tokens: int | None,
    method: Method,
) -> torch.Tensor:
    """[B] float64: divisors of the sums over each sequence's tokens."""
    # A mini-batch without one valid sequence has an empty sum, and zero denominators.
    if method.aggregation == "token_mean":
        return torch.full_like(counts, max(num_tokens_global, 1), dtype=torch.float64)
    if num_sequences_global is None:
        raise ConfigError(f"aggregation {method.aggregation!r} needs num_sequences_global")
    num_sequences = max(num_sequences_global, 1)
    if method.aggregation == "sequence_mean":
        return num_sequences * counts.clamp(min=1).double()
    if method.aggregation == "sequence_sum":
        return torch.full_like(counts, num_sequences, dtype=torch.float64)
    if max_response_tokens is None:
        raise ConfigError(f"aggregation {method.aggregation!r} needs max_response_tokens")
    return torch.full_like(counts, num_sequences * max_response_tokens, dtype=torch.float64)


def _flag_not_finite(
    flags: Flags | None,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    sequence_ids: torch.Tensor,
    advantages: torch.Tensor,
) -> None:
    """Keep a flag: an input is not finite. Its DivergenceError names the sequence.

    Without `flags` it is raised at once.
    """
    inputs = {
        "advantages": advantages.isfinite(),
        "old_log_probs": old_log_probs.isfinite(),
        "log_probs": log_probs.isfinite(),
    }

    def explain() -> DivergenceError:
        # In the order of cause: the first that is not finite made the others so.
        name, is_finite = next(one for one in inputs.items() if not one[1].all())
        places = (~is_finite).nonzero()[:, 0]
        found = sorted(set((places if name == "advantages" else sequence_ids[places]).tolist()))
        return DivergenceError(
            f"{name} not finite in sequence {found[0]} of the micro-batch "
            f"({len(found)} of {len(advantages)} sequences affected)"
        )

    kept = Flags() if flags is None else flags
    kept.keep(~torch.stack([one.all() for one in inputs.values()]).all(), explain)
    if flags is None:
        kept.check()
