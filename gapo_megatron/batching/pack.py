"""Packing of a micro-batch's sequences into one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gapo_megatron.device import to_device, to_host
from gapo_megatron.errors import DataError
from gapo_megatron.objective.draws import keys_of
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import LossMicrobatch, Microbatch

NO_SEQUENCES = Rollouts.of([], [])


def unpack(
    batch: Rollouts,
    microbatches: Sequence[Sequence[int]],
    values: Sequence[torch.Tensor | None],
) -> dict[int, torch.Tensor]:
    """Split log-probs of packed micro-batches into sequences.

    Args:
        batch: the batch that was packed.
        microbatches: positions in `batch`, as they were packed.
        values: [R] per micro-batch; None on ranks of other pipeline stages than the last.

    Returns:
        Position in the batch -> values of its sampled response tokens, in the order in which they
        came, on the CPU.
    """
    by_sequence: dict[int, torch.Tensor] = {}
    scored = [
        (indices, packed)
        for indices, packed in zip(microbatches, values, strict=True)
        if packed is not None
    ]
    on_host = to_host([packed for _, packed in scored])
    num_rows = batch.num_sampled_tokens.tolist()
    for (indices, _), packed in zip(scored, on_host, strict=True):
        parts = packed.split([num_rows[i] for i in indices])
        for i, part in zip(indices, parts, strict=True):
            by_sequence[i] = batch.in_order(i, part)
    return by_sequence


def pack(
    batch: Rollouts,
    indices: Sequence[int],
    *,
    align: int = 1,
    sequence_align: int = 1,
    vocab_size: int | None = None,
    for_loss: bool = True,
    device: torch.device | str,
) -> Microbatch:
    """Pack sequences `indices` of `batch`, in that order, into one micro-batch.

    A conversation is fed without its last token, and the row at a position predicts the next token.
    The first conversation of a sequence begins with its prompt; each has positions of its own and
    attends to itself alone, and they follow one another. Rows of sampled tokens are scored.

    Args:
        batch: prompts and responses of at least one token each.
        indices: positions in `batch`; empty for a rank without sequences, which gets R = 0 and
            max(align, 1) padding tokens, so that it takes part in every collective.
        align: T becomes a multiple of it (tensor-parallel size under sequence parallelism); the
            padding is a separate sequence. A multiple of `sequence_align`.
        sequence_align: every conversation is padded at its end to a multiple of it, to be split
            over context parallel ranks; causal attention does not see the padding.
        vocab_size: the model's vocabulary size; None: any.
        for_loss: make a `LossMicrobatch`, if `batch` is a `Batch`.
        device: device of the tensors.

    Returns:
        The packed micro-batch.

    Raises:
        DataError: a token is outside the model's vocabulary; names the sequence. (On a GPU a kernel
            would abort the process.)
    """
    prompts = [batch.prompt_ids[i] for i in indices]
    responses = [batch.by_conversation(i, batch.response_ids[i]) for i in indices]
    assert all(map(len, prompts)) and all(map(len, responses)), "a prompt or a response is empty"
    limit = np.inf if vocab_size is None else vocab_size
    for i, *parts in zip(indices, prompts, responses, strict=True):
        for name, ids in zip(("prompt", "response"), parts, strict=True):
            outside = ids[(ids < 0) | (ids >= limit)]
            if len(outside):
                raise DataError(
                    f"sequence {i}: its {name} has the token {outside[0]}; the model's are 0 or "
                    f"more, and below {limit}"
                )
    # All tokens one after another: numbers of their sequences, and whether they are scored.
    masks = [batch.by_conversation(i, batch.is_sampled(i)) for i in indices]
    ids = _concatenated([one for pair in zip(prompts, responses, strict=True) for one in pair], int)
    is_scored = _concatenated(
        [np.pad(mask, (len(ids), 0)) for ids, mask in zip(prompts, masks, strict=True)], np.bool_
    )
    sequence_ids = np.repeat(
        np.arange(len(indices)), [len(a) + len(b) for a, b in zip(prompts, responses, strict=True)]
    )[is_scored]

    # Where each conversation begins in the packed row, and each token sits; all but the last of a
    # conversation are fed.
    counts = [np.bincount(batch.conversations_of(i)) for i in indices]
    for one, prompt in zip(counts, prompts, strict=True):
        one[0] += len(prompt)
    num_tokens = _concatenated(counts, int)
    lengths = num_tokens - 1 + -(num_tokens - 1) % sequence_align
    num_packed = int(lengths.sum())
    padding = max(-num_packed % align, 0 if num_packed else align)
    begins = lengths.cumsum() - lengths
    places = np.arange(len(ids)) - np.repeat(num_tokens.cumsum() - num_tokens, num_tokens)
    positions = np.repeat(begins, num_tokens) + places
    is_fed = places < np.repeat(num_tokens - 1, num_tokens)
    tokens = np.zeros(num_packed + padding, dtype=np.int64)
    tokens[positions[is_fed]] = ids[is_fed]
    is_padding = np.ones(len(tokens), dtype=np.bool_)
    is_padding[positions[is_fed]] = False
    # A conversation of a single token has nothing to feed; the padding is a sequence of its own.
    bounds = np.unique([0, *begins, num_packed, len(tokens)])
    lengths = np.diff(bounds)
    arrays = {
        "tokens": tokens[None],
        "position_ids": (np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths))[None],
        "cu_seqlens": bounds.astype(np.int32),
        "row_index": positions[is_scored] - 1,
        "labels": ids[is_scored],
        "sequence_ids": sequence_ids,
        "row_offsets": np.searchsorted(sequence_ids, np.arange(len(indices) + 1)),
        "is_padding": is_padding[None],
    }
    made: type[Microbatch] = Microbatch
    if for_loss and isinstance(batch, Batch):
        made = LossMicrobatch
        arrays |= _loss_arrays(batch, indices, _concatenated(masks, np.bool_))
    tensors: dict[str, Any] = dict(zip(arrays, to_device([*arrays.values()], device), strict=True))
    return made(
        **tensors,
        max_seqlen=int(lengths.max()),
        indices=tuple(int(i) for i in indices),
        row_edges=(0, len(arrays["labels"])),
    )


def _loss_arrays(
    batch: Batch, indices: Sequence[int], is_sampled: np.ndarray
) -> dict[str, np.ndarray]:
    """Inputs of the loss for these sequences, [S] or [R] (`LossMicrobatch`)."""
    index = np.asarray(indices, dtype=np.int64)
    table = batch.table[index]
    log_probs = [batch.by_conversation(i, batch.rollout_log_probs[i]) for i in indices]
    arrays = {
        "advantages": batch.advantages.numpy()[index],
        "num_correct": batch.num_correct.numpy()[index],
        "group_size": batch.group_size.numpy()[index],
        "is_carried": table["num_carried_tokens"] > 0,
        "keys": keys_of(table).numpy(),
        "rollout_log_probs": _concatenated(log_probs, np.float32)[is_sampled],
    }
    if batch.has_scored:
        padded, is_carried = [], []
        for i, num_tokens in zip(indices, table["num_response_tokens"].tolist(), strict=True):
            carried = batch.carried_log_probs[i]
            values = np.pad(carried, (0, num_tokens - len(carried)))
            padded.append(batch.by_conversation(i, values))
            is_carried.append(batch.by_conversation(i, np.arange(num_tokens) < len(carried)))
        arrays["carried_log_probs"] = _concatenated(padded, np.float32)[is_sampled]
        arrays["is_carried_row"] = _concatenated(is_carried, np.bool_)[is_sampled]
    return arrays


def _concatenated(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
