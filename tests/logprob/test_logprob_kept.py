"""Logits that a forward pass on a CPU keeps for its backward pass."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from gapo_megatron.logprob import tiles, token_log_probs
from tests.logprob_setup import both, problem, relative, with_gradients

ROWS, COLUMNS = 500, 5000
ROOM = {"none": 0, "two tiles of rows": 2 * 192 * COLUMNS * 4, "all": tiles.KEPT_BYTES}


@pytest.mark.parametrize(
    ("kind", "dtype"), [("offset200", torch.float32), ("peaked", torch.bfloat16)], ids=str
)
def test_kept_logits_give_the_same_gradients_and_are_not_computed_again(
    kind: str, dtype: torch.dtype
) -> None:
    inputs = problem(ROWS, COLUMNS, kind=kind, dtype=dtype)
    results, products = [], []
    for room in ROOM.values():
        with (
            patch.object(tiles, "KEPT_BYTES", room),
            patch.object(tiles, "_logits", wraps=tiles._logits) as logits,
        ):
            results.append(with_gradients(both, *inputs, temperature=0.7))
        products.append(logits.call_count)
    for others in results[1:]:
        assert torch.equal(others[0], results[0][0]) and torch.equal(others[1], results[0][1])
        for mine, expected in zip(others[2:], results[0][2:], strict=True):
            assert relative(mine, expected) < (1e-6 if dtype == torch.float32 else 1e-4)
    # Three tiles of columns by three of rows; 333 rows have a gradient, 256 of them in the first
    # two tiles, which are one whole tile and a part of the next.
    assert products == [9 + 3 * 2, 9 + 3 * 1, 9]


def test_a_pass_without_gradients_keeps_nothing() -> None:
    hidden, weight, labels = problem(300, 50)
    with patch.object(tiles, "room_for_logits") as room, torch.no_grad():
        token_log_probs(hidden.requires_grad_(), weight, labels)
    room.assert_not_called()
