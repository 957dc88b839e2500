"""Packing of a micro-batch's sequences into one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gapo_megatron.device import to_device, to_host
from gapo_megatron.errors import DataError
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
        Position in the batch -> values of its sampled response tokens, on the CPU.
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
        by_sequence |= zip(indices, parts, strict=True)
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

    A sequence with p prompt and n response tokens is fed as prompt + response[:-1]. The row at its
    position p - 1 + t predicts response token t. Rows of sampled tokens are scored.

    Args:
        batch: prompts and responses of at least one token each.
        indices: positions in `batch`; empty for a rank without sequences, which gets R = 0 and
            max(align, 1) padding tokens, so that it takes part in every collective.
        align: T becomes a multiple of it (tensor-parallel size under sequence parallelism); the
            padding is a separate sequence. A multiple of `sequence_align`.
        sequence_align: every sequence is padded at its end to a multiple of it, to be split over
            context parallel ranks; causal attention does not see the padding.
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
    responses = [batch.response_ids[i] for i in indices]
    prompt_lengths = np.array([len(ids) for ids in prompts], dtype=np.int64)
    response_lengths = np.array([len(ids) for ids in responses], dtype=np.int64)
    assert (prompt_lengths > 0).all() and (response_lengths > 0).all(), (
        "a prompt or a response is empty"
    )
    limit = np.inf if vocab_size is None else vocab_size
    for i, *parts in zip(indices, prompts, responses, strict=True):
        for name, ids in zip(("prompt", "response"), parts, strict=True):
            outside = ids[(ids < 0) | (ids >= limit)]
            if len(outside):
                raise DataError(
                    f"sequence {i}: its {name} has the token {outside[0]}; the model's are 0 or "
                    f"more, and below {limit}"
                )
    fed_lengths = prompt_lengths + response_lengths - 1
    fillers = -fed_lengths % sequence_align
    lengths = fed_lengths + fillers
    num_packed = int(lengths.sum())
    padding = max(-num_packed % align, 0 if num_packed else align)

    fed = [
        part
        for prompt, response, filler in zip(prompts, responses, fillers, strict=True)
        for part in (prompt, response[:-1], np.zeros(filler, dtype=np.int64))
    ]
    tokens = np.concatenate([*fed, np.zeros(padding, dtype=np.int64)], dtype=np.int64)
    if padding:
        lengths, fed_lengths = np.append(lengths, padding), np.append(fed_lengths, 0)
    bounds = np.concatenate([[0], lengths.cumsum()])
    # Position t of sequence s sits at bounds[s] + t; its first row at bounds[s] + p - 1.
    position_ids = np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths)
    is_padding = position_ids >= np.repeat(fed_lengths, lengths)
    # The head scores the rows of sampled tokens.
    is_sampled = _concatenated([batch.is_sampled(i) for i in indices], np.bool_)
    first_rows = bounds[: len(indices)] + prompt_lengths - 1
    first_labels = response_lengths.cumsum() - response_lengths
    rows = np.arange(len(is_sampled)) + np.repeat(first_rows - first_labels, response_lengths)
    sequence_ids = np.repeat(np.arange(len(indices)), response_lengths)[is_sampled]
    labels = _concatenated(responses, np.int64)[is_sampled]
    arrays = {
        "tokens": tokens[None],
        "position_ids": position_ids[None],
        "cu_seqlens": bounds.astype(np.int32),
        "row_index": rows[is_sampled],
        "labels": labels,
        "sequence_ids": sequence_ids,
        "row_offsets": np.searchsorted(sequence_ids, np.arange(len(indices) + 1)),
        "is_padding": is_padding[None],
    }
    made: type[Microbatch] = Microbatch
    if for_loss and isinstance(batch, Batch):
        made = LossMicrobatch
        arrays |= _loss_arrays(batch, indices, is_sampled)
    tensors: dict[str, Any] = dict(zip(arrays, to_device([*arrays.values()], device), strict=True))
    return made(
        **tensors,
        max_seqlen=int(lengths.max()),
        indices=tuple(int(i) for i in indices),
        row_edges=(0, len(labels)),
    )


def _loss_arrays(
    batch: Batch, indices: Sequence[int], is_sampled: np.ndarray
) -> dict[str, np.ndarray]:
    """Inputs of the loss for these sequences, [S] or [R] (`LossMicrobatch`)."""
    index = np.asarray(indices, dtype=np.int64)
    table = batch.table[index]
    log_probs = _concatenated([batch.rollout_log_probs[i] for i in indices], np.float32)
    arrays = {
        "advantages": batch.advantages.numpy()[index],
        "num_correct": batch.num_correct.numpy()[index],
        "group_size": batch.group_size.numpy()[index],
        "is_carried": table["num_carried_tokens"] > 0,
        "rollout_log_probs": log_probs[is_sampled],
    }
    if batch.has_scored:
        carried = [batch.carried_log_probs[i] for i in indices]
        lengths = table["num_response_tokens"].tolist()
        padded = [np.pad(one, (0, n - len(one))) for one, n in zip(carried, lengths, strict=True)]
        is_carried = [np.arange(n) < len(one) for one, n in zip(carried, lengths, strict=True)]
        arrays["carried_log_probs"] = _concatenated(padded, np.float32)[is_sampled]
        arrays["is_carried_row"] = _concatenated(is_carried, np.bool_)[is_sampled]
    return arrays


def _concatenated(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
