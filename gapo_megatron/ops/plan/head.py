"""Workspace of the head: what `logprob.token_log_probs` needs beside the activations it keeps."""

from __future__ import annotations

from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.activations import tokens_per_rank
from gapo_megatron.ops.plan.flops import element_bytes
from gapo_megatron.ops.plan.layout import Layout

_TILE_COLUMNS, _TILE_LOGITS = 8192, 2**24
_TILES_PER_BLOCK, _BLOCK_ROWS = 8, 4096
"""Tile and block sizes of the head on a GPU: a copy of those in `logprob.tiles.block_shape`, which
imports torch."""


def head_bytes(hf_config: Any, config: Config, layout: Layout) -> int:
    """Workspace of `logprob.token_log_probs` in its backward pass, its larger one.

    It holds the gradient of the hidden states, the hidden states of all positions if sequence
    parallelism gathers them, and one block of active rows: its states, two float32 gradients (one
    is summed over ranks while the next is computed), the gradient of a tile of logits, and that
    tile in float32.
    """
    tokens, h = tokens_per_rank(config, layout), hf_config.hidden_size
    e = element_bytes(config)
    sp = layout.tp_size if layout.sequence_parallel else 1
    vocab = -(-hf_config.vocab_size // layout.tp_size)
    block_rows, columns = block_shape(vocab)
    rows, columns = min(block_rows, tokens), min(columns, vocab)
    gathered = 2 * tokens * h * e if layout.sequence_parallel else 0  # shards, gathered
    block = rows * (h * (e + 2 * 4) + columns * e)
    tile = 4 * min(block_rows // _TILES_PER_BLOCK, rows) * columns
    return tokens * h * e // sp + gathered + block + tile


def block_shape(num_columns: int) -> tuple[int, int]:
    """What `logprob.tiles.block_shape` gives for this many columns on a GPU (Triton's too)."""
    num_rows = _TILE_LOGITS // max(min(_TILE_COLUMNS, num_columns), 64)
    return max(_TILES_PER_BLOCK * num_rows, _BLOCK_ROWS), _TILE_COLUMNS
