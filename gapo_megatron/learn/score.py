"""Scoring: log-probs of given tokens at the current weights, without gradient.

All scoring uses this module: the old pass of `learn`, rollouts carried to the next step, the
measurement of rounding and the check after a weight sync. `score` takes sequences, `log_probs`
micro-batches that the caller has packed and uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gapo_megatron.batching import unpack
from gapo_megatron.device.flags import Flags
from gapo_megatron.learn.forward import Scored, run_pass
from gapo_megatron.policy.policy import Policy
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Microbatch


def score(
    policy: Policy,
    rollouts: Rollouts,
    microbatches: Sequence[Sequence[int]],
    *,
    temperature: float | None = None,
    mark: Callable[[list[Microbatch]], list[Microbatch]] = list,
) -> dict[int, Tensor]:
    """Log-probs of the sampled response tokens of `rollouts`, packed as in `microbatches`.

    Args:
        policy: unchanged.
        rollouts: with these tokens; the same on every rank of a tensor, context or pipeline
            parallel group.
        microbatches: this data-parallel rank's rows of `rollouts`; equally many micro-batches on
            every rank, `()` for an empty micro-batch.
        temperature: sampling temperature; None: `rollout.temperature`.
        mark: sets what chooses the experts of the packed micro-batches (`learn.checks.routes`).

    Returns:
        Row of `rollouts` -> [num sampled tokens] float32 on the CPU, in the order of
        `microbatches`; empty except on the last pipeline stage.

    Collectives: those of `log_probs`.

    Raises:
        DivergenceError: a log-prob is not finite.
        DataError: a token is outside the model's vocabulary.
    """
    if not microbatches:
        return {}
    packed = mark([policy.pack(rollouts, indices) for indices in microbatches])
    values = log_probs(policy, packed, temperature=temperature)
    return unpack(rollouts, microbatches, values)


def log_probs(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    temperature: float | None = None,
    with_entropy: bool = False,
) -> list[Tensor | None]:
    """Log-probs of packed micro-batches, left on the device.

    The same kernels in the same order as the forward pass of `learn.update.update`: at equal
    weights and equal micro-batches the bits are equal.

    Args:
        policy: unchanged.
        microbatches: this data-parallel rank's micro-batches, equally many on every rank.
        temperature: sampling temperature; None: `rollout.temperature`.
        with_entropy: as in the update, whose kernels then are the same; the entropy is dropped.

    Returns:
        Per micro-batch [R] float32 on the last pipeline stage (all tensor and context parallel
        ranks), None elsewhere.

    Collectives: those of the forward pass over the tensor, context and pipeline parallel groups;
    under context parallelism, on the last stage, one all-reduce per micro-batch.

    Waits for the device once, after the last micro-batch.

    Raises:
        DivergenceError: a log-prob is not finite; raised on the ranks that hold it, and the
            launcher ends the others.
    """

    def keep(scored: Scored) -> tuple[Tensor, Tensor]:
        return scored.log_probs.sum(), scored.log_probs

    flags = Flags()
    with torch.no_grad():
        values = run_pass(
            policy,
            microbatches,
            keep,
            flags,
            forward_only=True,
            temperature=temperature,
            with_entropy=with_entropy,
        )
    flags.check()
    return values if policy.groups.is_last_stage else [None] * len(microbatches)
