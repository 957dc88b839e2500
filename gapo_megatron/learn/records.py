"""What the updates made of some sequences of a step, token by token: for people to look at.

The loss hands out the log-probs of its own forward pass, so a record costs no pass and changes
nothing. It is taken of the micro-batches that hold a recorded sequence, and travels to rank 0 once
the step's updates are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gapo_megatron.exchange import Channel, Column, deal, token_columns
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.objective.losses import PolicyLoss
from gapo_megatron.rollouts import Batch
from gapo_megatron.types import Microbatch

_TAG = 6
_PREFIX = "record/"
"""Marks the outputs of a loss that are no sums."""
_FACTS = ("ratio", "lower", "upper")

Arrays = dict[str, torch.Tensor]
"""Of a sequence with n sampled tokens, on the CPU: `log_probs` [n] float32 at its update,
`old_log_probs` [n] float32 of the trainer at the start of the step (NaN: not computed), `facts` [3]
float64: ratio (NaN where tokens have ratios) and clip widths, and `clipped`, bool: [1], or [n]."""


@dataclass(frozen=True)
class Record:
    """A recorded sequence with the tokens of its response, and what its update made of them."""

    row: int
    """Number in the batch."""
    token_ids: np.ndarray
    """[num_response_tokens] int32."""
    is_sampled: np.ndarray
    """[num_response_tokens] bool: `response_mask`."""
    conversations: np.ndarray
    """[num_response_tokens] int32: `Episode.conversations`."""
    rollout_log_probs: np.ndarray
    """[num_response_tokens] float32: the engine's; 0 for appended tokens."""
    versions: np.ndarray
    """[num_response_tokens] int32: policy version that sampled each token."""
    minibatch: int | None
    """Number of its update within the step, from 0; None: it was not computed (A = 0)."""
    learned: Mapping[str, np.ndarray]
    """`Arrays`; empty if it was not computed."""


def outputs_of(
    result: PolicyLoss, log_probs: torch.Tensor, at_begin: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Outputs of a loss for a micro-batch with recorded sequences; `split` takes them apart.

    Args:
        result: of the policy loss.
        log_probs: [R] of this update.
        at_begin: [R] of the trainer at the start of the step; None: not computed.
    """
    old = torch.full_like(log_probs, torch.nan) if at_begin is None else at_begin
    named = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "clipped": result.clipped,
        "lower": result.lower,
        "upper": result.upper,
    }
    if not result.per_token:
        named["ratio"] = result.ratio
    return {_PREFIX + name: value.detach() for name, value in named.items()}


def split(
    outputs: dict[str, torch.Tensor],
    microbatch: Microbatch,
    recorded: Collection[int],
    num_rows: np.ndarray,
) -> tuple[dict[str, torch.Tensor], dict[int, Arrays]]:
    """The sums among a loss's outputs, and the arrays of the recorded sequences of a micro-batch.

    Args:
        outputs: of the loss, on the CPU.
        microbatch: the one they are of.
        recorded: rows of the batch.
        num_rows: [B] sampled tokens of each sequence of the batch.
    """
    sums = {name: one for name, one in outputs.items() if not name.startswith(_PREFIX)}
    named = {name.removeprefix(_PREFIX): outputs[name] for name in outputs.keys() - sums.keys()}
    if not named:
        return sums, {}
    lengths = [int(num_rows[row]) for row in microbatch.indices]
    is_per_token = "ratio" not in named
    found: dict[int, Arrays] = {}
    begin = 0
    for place, (row, length) in enumerate(zip(microbatch.indices, lengths, strict=True)):
        tokens = slice(begin, begin + length)
        begin += length
        if row not in recorded:
            continue
        facts = [float(named[name][place]) if name in named else float("nan") for name in _FACTS]
        found[row] = {
            "log_probs": named["log_probs"][tokens].clone(),
            "old_log_probs": named["old_log_probs"][tokens].clone(),
            "clipped": named["clipped"][
                tokens if is_per_token else slice(place, place + 1)
            ].clone(),
            "facts": torch.tensor(facts, dtype=torch.float64),
        }
    return sums, found


def gather(
    batch: Batch,
    rows: Sequence[int],
    arrays: Mapping[int, Arrays],
    *,
    is_per_token: bool,
    ranks: DataParallelRanks,
    channel: Channel,
) -> list[Record]:
    """The records of `rows`, in this order, on rank 0 of the channel; empty elsewhere.

    Args:
        batch: planned; the same on every rank but for the tokens.
        rows: of the batch, ascending; the same on every rank.
        arrays: by row, those that this rank has computed.
        is_per_token: whether the method's ratio is one of tokens.
        ranks: data-parallel rank of every rank.
        channel: channel of all ranks.

    Collectives: at most one message from every rank to rank 0.
    """
    assert batch.plan is not None, "the batch is not planned"
    computed = {
        row: (number, ranks.scorers[dp_rank])
        for number, one in enumerate(batch.plan.minibatches)
        for dp_rank, microbatches in enumerate(one.microbatches)
        for indices in microbatches
        for row in indices
    }
    # What is computed comes from the rank that has its log-probs, the rest from a rank that has its
    # tokens.
    holder, is_computed = batch.table["holder"].copy(), np.zeros(len(batch), dtype=np.int64)
    for row, (_, scorer) in computed.items():
        holder[row], is_computed[row] = scorer, 1
    num_rows = batch.table["num_sampled_tokens"] * is_computed
    learned = {
        "log_probs": Column(np.float32, num_rows),
        "old_log_probs": Column(np.float32, num_rows),
        "clipped": Column(np.bool_, num_rows if is_per_token else is_computed),
        "facts": Column(np.float64, len(_FACTS) * is_computed),
    }
    unread = ("prompt_ids", "routes")
    tokens = {name: c for name, c in token_columns(batch.table).items() if name not in unread}
    held = {name: {row: one[name].numpy() for row, one in arrays.items()} for name in learned}
    found = deal(
        {name: batch.tokens[name] for name in tokens} | held,
        tokens | learned,
        holder,
        [rows, *[range(0)] * (channel.size - 1)],
        channel=channel,
        tag=_TAG,
    )
    if channel.rank != 0:
        return []
    whole = batch.with_tokens({name: found.get(name, {}) for name in batch.tokens})
    for name in ("log_probs", "old_log_probs", *(["clipped"] if is_per_token else [])):
        for row, one in found[name].items():
            if row in computed:
                found[name][row] = whole.in_order(row, torch.from_numpy(one)).numpy()
    return [
        Record(
            row,
            token_ids=whole.response_ids[row],
            is_sampled=whole.is_sampled(row),
            conversations=whole.conversations_of(row),
            rollout_log_probs=whole.rollout_log_probs[row],
            versions=whole.versions(row),
            minibatch=computed[row][0] if row in computed else None,
            learned={name: found[name][row] for name in learned} if row in computed else {},
        )
        for row in rows
    ]
