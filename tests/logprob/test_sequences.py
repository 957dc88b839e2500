"""Sums over the rows of each sequence: by offsets, in float64, with the bits of its own rows."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gapo_megatron.config.methods import METHODS
from gapo_megatron.logprob import Sequences, self_check, sequences
from gapo_megatron.objective import diagnostics, policy_loss


def in_order(*lengths: int) -> Sequences:
    counts = torch.tensor(lengths, dtype=torch.int64)
    ids = torch.arange(len(lengths)).repeat_interleave(counts)
    return Sequences(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


@given(ids=st.lists(st.integers(0, 5), max_size=40), seed=st.integers(0, 1000))
def test_sums_and_counts_match_a_loop(ids: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(ids), generator=generator, dtype=torch.float64).requires_grad_()
    sequences = Sequences.of(torch.tensor(ids, dtype=torch.int64), 6)
    sums = sequences.sum(values)
    expected = [
        sum((v for v, i in zip(values.tolist(), ids, strict=True) if i == s), 0.0) for s in range(6)
    ]
    # At most 40 float64 additions of numbers of order one.
    torch.testing.assert_close(
        sums, torch.tensor(expected, dtype=torch.float64), atol=1e-13, rtol=0
    )
    assert sequences.counts.tolist() == [ids.count(s) for s in range(6)]
    weights = torch.arange(6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((sums * weights).sum(), values)
    assert torch.equal(gradient, weights[sequences.ids])


def test_float32_is_summed_in_float64() -> None:
    values = torch.tensor([1e8, 1.0, -1e8])
    assert in_order(3).sum(values).tolist() == [1.0]
    # A difference of float32 numbers is not rounded to float32 either.
    assert in_order(1).log_ratio(torch.tensor([1e8]), torch.tensor([1e-8])).item() == 1e8 - 1e-8


def test_neighbours_and_the_way_to_the_offsets_do_not_change_a_bit() -> None:
    """The same tokens give the same D wherever they are packed."""
    generator = torch.Generator().manual_seed(0)
    # Of 53 bits each, so that another order of additions shows.
    new, old = torch.randn(2, 1777, generator=generator, dtype=torch.float64)
    new[:777] *= 1e6
    alone = in_order(1000).log_ratio(new[777:], old[777:])
    packed = in_order(777, 0, 1000)
    assert packed.log_ratio(new, old)[2] == alone[0]
    mixed = torch.cat([torch.arange(777, 1777), torch.arange(777)])  # rows stay in their order
    of_ids = Sequences.of(packed.ids[mixed], 3)
    assert torch.equal(of_ids.log_ratio(new[mixed], old[mixed]), packed.log_ratio(new, old))


def test_the_gradient_of_a_sequence_is_rounded_once() -> None:
    """g / n in float64, then float32: the bits that autograd gives row by row."""
    lengths = tuple(range(60))
    log_probs = torch.zeros(sum(lengths), requires_grad=True)
    upstream = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    in_order(*lengths).log_ratio(log_probs, torch.zeros(sum(lengths))).backward(upstream)
    expected = [float(u) / n for u, n in zip(upstream, lengths, strict=True) for _ in range(n)]
    assert torch.equal(log_probs.grad, torch.tensor(expected, dtype=torch.float64).float())


def test_segment_reduce_has_the_kernel_that_adds_row_by_row() -> None:
    """On a GPU it has another one for [T], whose order depends on where a sequence begins."""
    dimensions = []

    def watched(data: Tensor, *args: Any, **options: Any) -> Tensor:
        dimensions.append(data.dim())
        return reduced(data, *args, **options)

    reduced, values = torch.segment_reduce, torch.arange(5.0)
    with patch.object(torch, "segment_reduce", watched):
        assert in_order(2, 0, 3).mean(values).tolist() == [0.5, 0, 3]
        assert in_order(2, 0, 3).sum(values[:, None].repeat(1, 2)).shape == (3, 2)
    assert dimensions == [2, 2]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_micro_batch_without_a_sequence_gives_no_kernel_nothing_to_do(method: Any) -> None:
    """segment_reduce on a GPU is not asked about zero rows or zero segments."""
    seen = []

    def watched(data: Tensor, reduce: str, *, offsets: Tensor, **options: Any) -> Tensor:
        seen.append((len(data), len(offsets) - 1))
        return reduced(data, reduce, offsets=offsets, **options)

    reduced = torch.segment_reduce
    log_probs = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    facts: dict[str, Any] = {
        "sequence_ids": Sequences(nothing, torch.zeros(1, dtype=torch.int64)),
        "advantages": torch.zeros(0, dtype=torch.float64),
        "num_correct": nothing,
    }
    with patch.object(torch, "segment_reduce", watched):
        loss = policy_loss(
            log_probs * 1,
            torch.zeros(0),
            **facts,
            group_size=nothing,
            num_tokens_global=0,
            num_sequences_global=0,
            max_response_tokens=4,
            method=method,
        )
        sums = diagnostics.per_correct_sums(loss, **facts, group_size=4, is_carried=nothing.bool())
        # Beside ranks that share experts it has a backward pass, too.
        loss.loss.backward()
        in_order(0, 0).sum(torch.zeros(0))
    assert all(rows > 0 and segments > 0 for rows, segments in seen)
    assert float(loss.loss.detach()) == 0 and log_probs.grad.shape == (0,)
    assert all(not values.any() for values in sums.values())


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("forward", lambda total: total.float().double(), "log-ratio is off"),
        ("forward", lambda total: total + 1e-3 * torch.rand([]).double(), "bits"),
        ("backward", lambda found: (found[0].roll(1, 0), *found[1:]), "gradient of a log-ratio is"),
        ("forward", lambda total: total if total.dim() == 1 else total.flip(1), "sum per sequence"),
        ("forward", lambda total: total * torch.nan, ""),
    ],
)
def test_the_self_check_finds_what_is_wrong(name: str, change: Any, what: str) -> None:
    cpu = torch.device("cpu")
    assert self_check.find_reduction_fault("torch", cpu) == ""
    right, turn = getattr(sequences._Reduce, name), []

    def wrong(*args: Any) -> Any:
        turn.append(name)
        found = right(*args)
        expected_run = 2 if name == "forward" else 1  # calls of the run that it is compared with
        return found if len(turn) <= expected_run else change(found)

    with patch.object(sequences._Reduce, name, staticmethod(wrong)):
        fault = self_check.find_reduction_fault("torch", cpu)
    assert fault and what in fault
