import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.objective.diagnostics import count_by_correct, per_correct_sums, summarize
from gapo_megatron.types import Batch

K = 8
ROUNDING = 1e-12  # float64 sums of a few dozen numbers of order one


def random_sequences(size, seed, scale):
    """(log_probs, old, ids, advantages, num_correct, counts) of `size` sequences."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (size,), generator=generator)
    ids = torch.arange(size).repeat_interleave(counts)
    num_correct = torch.randint(0, K + 1, (size,), generator=generator)
    correct = torch.rand(size, generator=generator) < num_correct / K
    advantages = correct.double() - num_correct / K
    old = -torch.rand(len(ids), generator=generator).double()
    log_probs = old + scale * torch.randn(len(ids), generator=generator).double()
    return log_probs, old, ids, advantages, num_correct, counts


def sums_of(sequences, method, members=None):
    log_probs, old, ids, advantages, num_correct, counts = sequences
    if members is not None:
        rows = torch.tensor([t for t, i in enumerate(ids.tolist()) if i in members]).long()
        ids = torch.tensor([members.index(i) for i in ids[rows].tolist()]).long()
        log_probs, old = log_probs[rows], old[rows]
        advantages, num_correct = advantages[members], num_correct[members]
        counts = counts[members]
    loss = policy_loss(
        log_probs,
        old,
        sequence_ids=ids,
        advantages=advantages,
        num_correct=num_correct,
        group_size=K,
        num_tokens_global=100,
        num_sequences_global=20,
        max_response_tokens=10,
        method=method,
    )
    sums = per_correct_sums(
        loss,
        sequence_ids=ids,
        advantages=advantages,
        num_correct=num_correct,
        group_size=K,
        num_response_tokens=counts,
    )
    return loss, sums


@settings(max_examples=30)
@given(
    size=st.integers(0, 20),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 5e-3, 0.3]),
    name=st.sampled_from(["gapo", "gapo_token", "cispo"]),
)
def test_sums_match_a_loop(size, seed, scale, name):
    sequences = random_sequences(size, seed, scale)
    loss, sums = sums_of(sequences, METHODS[name])
    _, _, ids, advantages, num_correct, counts = sequences
    expected = {key: torch.zeros(2, K + 1, dtype=torch.float64) for key in sums}
    for i in range(size):
        if advantages[i] == 0:
            continue
        own = ids == i if loss.per_token else torch.arange(size) == i
        ratio, clipped = loss.ratio[own], loss.clipped[own].double()
        cell = (int(advantages[i] > 0), int(num_correct[i]))
        for key, value in {
            "sequences": 1.0,
            "tokens": float(counts[i]),
            "advantage": float(advantages[i]),
            "clipped_sequences": float(clipped.mean()),
            "clipped_tokens": float(clipped.mean() * counts[i]),
            "deviation": float((ratio - 1).mean()),
            "abs_deviation": float((ratio - 1).abs().mean()),
        }.items():
            expected[f"per_c/{key}"][cell] += value
    for key, value in sums.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[key], rtol=ROUNDING, atol=ROUNDING)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), parts=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_sums_add_over_microbatches_and_ranks(seed, parts):
    """An empty part adds zeros of the same shape, so that any rank may add to any other."""
    sequences = random_sequences(12, seed, 5e-3)
    _, whole = sums_of(sequences, METHODS["gapo"])
    added = {key: torch.zeros_like(value) for key, value in whole.items()}
    for part in range(4):
        _, sums = sums_of(sequences, METHODS["gapo"], [i for i in range(12) if parts[i] == part])
        for key, value in sums.items():
            added[key] += value
    for key, value in whole.items():
        torch.testing.assert_close(added[key], value, rtol=ROUNDING, atol=ROUNDING)


def test_one_token_per_sequence_is_no_special_case():
    """T equals B here; which of the two `ratio` has is not guessed from its shape."""
    old = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    log_probs = old + torch.tensor([0.1, 0.4], dtype=torch.float64)
    arguments = {
        "sequence_ids": torch.tensor([1, 1]),
        "advantages": torch.tensor([0.5, 0.5]),
        "num_correct": torch.tensor([4, 4]),
    }
    loss = policy_loss(
        log_probs, old, group_size=K, num_tokens_global=2, method=METHODS["dapo"], **arguments
    )
    counts = torch.tensor([0, 2])
    sums = per_correct_sums(loss, group_size=K, num_response_tokens=counts, **arguments)
    assert float(sums["per_c/clipped_sequences"].sum()) == 0.5
    assert float(sums["per_c/clipped_tokens"].sum()) == 1.0


def test_group_size_must_be_the_configured_one():
    sequences = random_sequences(3, 0, 0.0)
    loss, _ = sums_of(sequences, METHODS["gapo"])
    with pytest.raises(AssertionError, match="configured rollouts per prompt"):
        per_correct_sums(
            loss,
            sequence_ids=sequences[2],
            advantages=sequences[3],
            num_correct=sequences[4],
            group_size=torch.full((3,), K),
            num_response_tokens=sequences[5],
        )


def cell_sums(cells, group_size=K):
    """Sums with one entry per (correct, c): (sequences, tokens, clipped, deviation, advantage)."""
    names = ("sequences", "tokens", "clipped_sequences", "deviation", "advantage")
    sums = {f"per_c/{name}": torch.zeros(2, group_size + 1, dtype=torch.float64) for name in names}
    for (side, c), values in cells.items():
        for name, value in zip(names, values, strict=True):
            sums[f"per_c/{name}"][side, c] = value
    sums["per_c/clipped_tokens"] = sums["per_c/clipped_sequences"] * 10
    sums["per_c/abs_deviation"] = sums["per_c/deviation"].abs()
    return sums


def test_metrics_are_means_per_c_and_side():
    sums = cell_sums({(1, 1): (4, 40, 1, 0.02, 3.5), (0, 1): (4, 60, 2, -0.04, -0.5)})
    metrics = summarize(sums | {"loss": torch.tensor(3.0)})
    assert metrics == {
        "clip/fraction_sequences": 3 / 8,
        "clip/fraction_tokens": 30 / 100,
        "ratio/deviation": pytest.approx(-0.02 / 8, rel=ROUNDING),
        "ratio/abs_deviation": pytest.approx(0.06 / 8, rel=ROUNDING),
        "per_c/correct/clip_fraction_sequences/c1": 1 / 4,
        "per_c/correct/clip_fraction_tokens/c1": 10 / 40,
        "per_c/correct/ratio_deviation/c1": 0.02 / 4,
        "per_c/correct/ratio_abs_deviation/c1": 0.02 / 4,
        "per_c/wrong/clip_fraction_sequences/c1": 2 / 4,
        "per_c/wrong/clip_fraction_tokens/c1": 20 / 60,
        "per_c/wrong/ratio_deviation/c1": -0.04 / 4,
        "per_c/wrong/ratio_abs_deviation/c1": 0.04 / 4,
    }


def test_no_sequences_no_means():
    assert summarize(cell_sums({})) == {}


def correlation(deviations):
    """Of correct rollouts in groups with c = 1, 2, ...; two sequences each."""
    cells = {
        (1, c): (2, 20, 0, 2 * deviation, 2 * (K - c) / K)
        for c, deviation in enumerate(deviations, start=1)
    }
    return summarize(cell_sums(cells)).get("ratio/advantage_correlation")


def test_correlation_of_ratio_and_advantage():
    assert correlation([3e-3, 2e-3, 1e-3]) == pytest.approx(1, abs=ROUNDING)
    assert correlation([1e-3, 2e-3, 3e-3]) == pytest.approx(-1, abs=ROUNDING)
    expected = np.corrcoef([3.0, 1.0, 2.0, -1.0], [7.0, 6.0, 5.0, 4.0])[0, 1]
    assert correlation([3e-3, 1e-3, 2e-3, -1e-3]) == pytest.approx(expected, abs=ROUNDING)


def test_correlation_needs_three_points_and_some_spread():
    assert correlation([3e-3, 2e-3]) is None
    assert correlation([0.0, 0.0, 0.0]) is None


def test_counts_cover_sequences_that_are_never_computed():
    """Groups of 3: c = 0; c = 1 of 2 valid; all unknown; c = 3."""
    batch = Batch(
        prompt_ids=[np.array([1])] * 12,
        response_ids=[np.arange(n) for n in [1, 1, 1, 2, 4, 9, 5, 5, 5, 3, 3, 3]],
        rollout_log_probs=[],
        advantages=torch.tensor([0, 0, 0, 0.5, -0.5, 0, 0, 0, 0, 0, 0, 0]),
        num_correct=torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 3, 3, 3]),
        group_size=torch.tensor([3, 3, 3, 2, 2, 2, 0, 0, 0, 3, 3, 3]),
        valid=torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1], dtype=torch.bool),
    )
    metrics = count_by_correct(batch, group_size=3)
    assert [metrics[f"per_c/groups/c{c}"] for c in range(4)] == [1, 1, 0, 1]
    shares = [metrics[f"per_c/token_share/c{c}"] for c in range(4)]
    assert shares == [3 / 18, 6 / 18, 0, 9 / 18]
    assert metrics["groups/zero_advantage_share"] == 6 / 8
    assert metrics["groups/unknown_verdicts"] == 4
    assert not any(math.isnan(value) for value in metrics.values())
