from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.config.methods import METHODS
from gapo_megatron.objective import diagnostics, policy_loss
from gapo_megatron.objective.segments import segment_counts, segment_mean, segment_sum


@given(ids=st.lists(st.integers(0, 5), max_size=40), seed=st.integers(0, 1000))
def test_sums_and_counts_match_a_loop(ids, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(ids), generator=generator, dtype=torch.float64).requires_grad_()
    sequence_ids = torch.tensor(ids, dtype=torch.int64)
    sums = segment_sum(values, sequence_ids, num_sequences=6)
    expected = [
        sum(v for v, i in zip(values.tolist(), ids, strict=True) if i == s) for s in range(6)
    ]
    # At most 40 float64 additions of numbers of order one.
    torch.testing.assert_close(
        sums, torch.tensor(expected, dtype=torch.float64), atol=1e-13, rtol=0
    )
    assert segment_counts(sequence_ids, num_sequences=6).tolist() == [
        ids.count(s) for s in range(6)
    ]
    weights = torch.arange(6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((sums * weights).sum(), values)
    assert torch.equal(gradient, weights[sequence_ids])


def test_float32_is_summed_in_float64():
    values = torch.tensor([1e8, 1.0, -1e8])
    assert segment_sum(values, torch.zeros(3, dtype=torch.int64), num_sequences=1).tolist() == [1.0]


def test_neighbours_do_not_change_a_bit():
    """The same tokens give the same sum wherever they are packed."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(1000, generator=generator, dtype=torch.float64)
    alone = segment_sum(own, torch.zeros(1000, dtype=torch.int64), num_sequences=1)
    others = 1e6 * torch.randn(777, generator=generator, dtype=torch.float64)
    ids = torch.cat([torch.zeros(777), torch.ones(1000)]).long()
    packed = segment_sum(torch.cat([others, own]), ids, num_sequences=2)
    assert float(packed[1]) == float(alone[0])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_micro_batch_without_a_sequence_gives_no_kernel_nothing_to_do(method):
    """segment_reduce on a GPU is not asked about zero rows or zero segments."""
    seen = []

    def watched(data, reduce, *, offsets, **options):
        seen.append((len(data), len(offsets) - 1))
        return reduced(data, reduce, offsets=offsets, **options)

    reduced = torch.segment_reduce
    log_probs = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    with patch.object(torch, "segment_reduce", watched):
        loss = policy_loss(
            log_probs * 1,
            torch.zeros(0),
            sequence_ids=nothing,
            advantages=torch.zeros(0, dtype=torch.float64),
            num_correct=nothing,
            group_size=nothing,
            num_tokens_global=0,
            num_sequences_global=0,
            max_response_tokens=4,
            method=method,
        )
        sums = diagnostics.per_correct_sums(
            loss,
            sequence_ids=nothing,
            advantages=torch.zeros(0, dtype=torch.float64),
            num_correct=nothing,
            group_size=4,
            num_response_tokens=nothing,
            is_carried=nothing.bool(),
        )
        # Beside ranks that share experts it has a backward pass, too.
        loss.loss.backward()
    assert seen and all(rows > 0 and segments > 0 for rows, segments in seen)
    assert float(loss.loss.detach()) == 0 and log_probs.grad.shape == (0,)
    assert all(not values.any() for values in sums.values())


def test_segment_mean_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    ids, counts = torch.tensor([0, 2, 0, 2]), torch.tensor([2, 0, 4])
    means = segment_mean(values, ids, 3, counts)
    assert means.dtype == torch.float64
    assert means.tolist() == [2.0, 0.0, 3.0]
    means.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.25, 0.5, 0.25]
