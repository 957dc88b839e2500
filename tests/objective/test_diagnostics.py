import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.objective import METHODS, diagnostics, policy_loss
from gapo_megatron.objective.diagnostics import (
    DOSE,
    SUMS,
    CorrelationWindow,
    count_by_correct,
    per_correct_sums,
    summarize,
)
from gapo_megatron.rollouts import Batch, Rollouts
from tests.objective.response import loss_of
from tests.objective_reference import reference

K = 8
ROUNDING = 1e-12  # float64 sums of a few dozen numbers of order one


def carried(size):
    """[size] bool: every third sequence."""
    return torch.arange(size) % 3 == 0


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
    is_carried, keys = carried(len(counts)), torch.arange(len(counts))
    if members is not None:
        rows = torch.tensor([t for t, i in enumerate(ids.tolist()) if i in members]).long()
        ids = torch.tensor([members.index(i) for i in ids[rows].tolist()]).long()
        log_probs, old = log_probs[rows], old[rows]
        advantages, num_correct = advantages[members], num_correct[members]
        counts, is_carried, keys = counts[members], is_carried[members], keys[members]
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
        keys=keys,
    )
    sums = per_correct_sums(
        loss,
        sequence_ids=ids,
        advantages=advantages,
        num_correct=num_correct,
        group_size=K,
        is_carried=is_carried,
    )
    return loss, sums


def gradient_masses(sequences, method):
    """[T] |d loss / d log_prob|, by autograd."""
    log_probs, old, ids, *rest = sequences
    log_probs = log_probs.clone().requires_grad_()
    loss, _ = sums_of((log_probs, old, ids, *rest), method)
    return torch.autograd.grad(loss.loss, log_probs)[0].abs()


def without_clip(method):
    """No ratio reaches these bounds. (Adaptive widths are as wide for every c < k.)"""
    if method.family == "dcpo":  # whose lower bound is never below 1/2
        method = dataclasses.replace(method, family="clipped")
    low = {"cispo": 1.0, "topr": 1.0, "sapo": 1e15, "dppo": 1e15, "fspo": 1e15, "atr": 1e15}
    return dataclasses.replace(
        method,
        eps_low=low.get(method.family, 1 - 1e-15),
        eps_high_max=1e15,
        eps_low_correct=1.0,
        eps_high_wrong=1e15,
        ratio_max=math.inf,
        off_policy_mask=None,
    )


def expected_cells(sequences, method):
    """Every sum and maximum by side and c, one sequence at a time, from log-probs and rewards."""
    log_probs, old, ids, advantages, num_correct, counts = sequences
    whole = gradient_masses(sequences, without_clip(method))
    lost = (whole - gradient_masses(sequences, method)).clamp(min=0)
    case = SimpleNamespace(
        num_correct=num_correct.tolist(), advantages=advantages, counts=counts.tolist()
    )
    _, every_ratio, every_flag, _ = reference(case, method, log_probs, old)
    lengths = counts.tolist() if method.ratio == "token" else [1] * len(counts)
    starts = np.cumsum([0, *lengths])
    table, largest = np.zeros((len(SUMS), 2, K + 1)), np.zeros((2, K + 1))
    by_age = np.zeros((2, 2))
    dose = np.zeros(len(DOSE))
    if method.adaptive:
        fixed = dataclasses.replace(method, adaptive=False)
        kept, fixed_kept = (gradient_masses(sequences, one) for one in (method, fixed))
        _, _, fixed_flag, _ = reference(case, fixed, log_probs, old)
    for i in range(len(advantages)):
        advantage, c = float(advantages[i]), int(num_correct[i])
        if advantage == 0:
            continue
        own = slice(starts[i], starts[i + 1])
        ratios, clipped = every_ratio[own], every_flag[own]
        share = sum(clipped) / len(clipped)
        values = {
            "sequences": 1,
            "tokens": int(counts[i]),
            "advantage": advantage,
            "clipped_sequences": share,
            "clipped_tokens": share * int(counts[i]),
            "deviation": sum(s - 1 for s in ratios) / len(ratios),
            "abs_deviation": sum(abs(s - 1) for s in ratios) / len(ratios),
            "gradient_mass": float(whole[ids == i].sum()),
            "gradient_mass_lost": float(lost[ids == i].sum()),
        }
        cell = (int(advantage > 0), c)
        for row, name in enumerate(SUMS):
            table[(row, *cell)] += values[name]
        largest[cell] = max(largest[cell], *(abs(s - 1) for s in ratios))
        by_age[int(carried(len(counts))[i])] += [1, share]
        if method.adaptive and advantage > 0:
            differs = [one != other for one, other in zip(clipped, fixed_flag[own], strict=True)]
            of_gradient = [float((kept - fixed_kept)[ids == i].abs().sum())]
            dose += [1, sum(differs) / len(differs), values["gradient_mass"], *of_gradient]
    return {"per_c": table, "per_c_max": largest, "by_age": by_age, "dose": dose}


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 20),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 5e-3, 0.3, 1.5]),
    name=st.sampled_from(
        (
            *("gapo", "gapo_token", "gapo_proportional", "cispo", "dr_grpo", "grpo"),
            *("sapo", "gmpo", "luspo", "opsm", "dppo_tv", "fspo", "topr", "dcpo", "aspo"),
            *("atr", "abc", "dgpo", "nsr"),
        )
    ),
)
def test_sums_match_a_loop(size, seed, scale, name):
    sequences = random_sequences(size, seed, scale)
    _, sums = sums_of(sequences, METHODS[name])
    expected = expected_cells(sequences, METHODS[name])
    assert sums.keys() == expected.keys() == diagnostics.sum_shapes(K).keys()
    for key, value in sums.items():
        assert value.dtype == torch.float64
        # Differences of log-probs of order one, hence ratios to 1e-15; the rest as above.
        np.testing.assert_allclose(value.numpy(), expected[key], rtol=ROUNDING, atol=ROUNDING)


def test_what_a_lower_bound_adds_is_no_loss():
    """Of CISPO with a band on both sides: one token above it, one below, one inside."""
    log_probs = torch.tensor([0.5, -0.5, 0.05], dtype=torch.float64)
    band = dataclasses.replace(METHODS["cispo"], eps_low=0.1, eps_high_max=0.1)
    zeros = torch.zeros(3, dtype=torch.float64)
    loss = loss_of(band, 2.0, log_probs, zeros, num_correct=1, num_tokens=1)
    expected = [2 * (math.exp(0.5) - 1.1), 0, 0]
    assert loss.gradient_mass_lost.tolist() == pytest.approx(expected, abs=ROUNDING)
    assert loss.clipped.tolist() == [True, True, False]


def cell_sums(cells, group_size=K):
    """Sums with one entry per (side, c): (sequences, tokens, clipped, deviation, advantage)."""
    table = torch.zeros(len(SUMS), 2, group_size + 1, dtype=torch.float64)
    for (side, c), (sequences, tokens, clipped, deviation, advantage) in cells.items():
        values = (sequences, tokens, advantage, clipped, 10 * clipped, deviation, abs(deviation))
        table[:, side, c] = torch.tensor([*values, 8 * sequences, clipped])
    largest = table[SUMS.index("abs_deviation")]
    rest = {"by_age": torch.zeros(2, 2), "dose": torch.zeros(len(DOSE))}
    return {"per_c": table, "per_c_max": largest, **rest}


def test_metrics_are_means_per_c_and_side():
    sums = cell_sums({(1, 1): (4, 40, 1, 0.02, 3.5), (0, 1): (4, 60, 2, -0.04, -0.5)})
    metrics = summarize(sums | {"loss": torch.tensor(3.0)})
    per_cell = {
        "sequences": (4, 4),
        "advantage": (3.5 / 4, -0.5 / 4),
        "clip_fraction_sequences": (1 / 4, 2 / 4),
        "clip_fraction_tokens": (10 / 40, 20 / 60),
        "clip_gradient_mass_lost": (1 / 32, 2 / 32),
        "ratio_deviation": (0.02 / 4, -0.04 / 4),
        "ratio_abs_deviation": (0.02 / 4, 0.04 / 4),
        "ratio_abs_deviation_max": (0.02, 0.04),
    }
    assert metrics == pytest.approx(
        {
            "clip/fraction_sequences": 3 / 8,
            "clip/fraction_tokens": 30 / 100,
            "clip/gradient_mass_lost": 3 / 64,
            "clip/positive_gradient_mass_lost": 1 / 32,
            "ratio/deviation": -0.02 / 8,
            "ratio/abs_deviation": 0.06 / 8,
            "ratio/abs_deviation_max": 0.04,
        }
        | {f"per_c/correct/{name}/c1": pair[0] for name, pair in per_cell.items()}
        | {f"per_c/wrong/{name}/c1": pair[1] for name, pair in per_cell.items()},
        rel=1e-7,  # the helper's numbers are float32
    )


def test_clip_fractions_by_age_only_where_there_are_carried_sequences():
    def fractions(by_age):
        metrics = summarize(cell_sums({}) | {"by_age": torch.tensor(by_age)})
        return {key.removeprefix("clip/fraction_sequences_"): v for key, v in metrics.items()}

    assert fractions([[8.0, 2.0], [4.0, 3.0]]) == {"new": 0.25, "carried": 0.75}
    assert fractions([[0.0, 0.0], [4.0, 3.0]]) == {"carried": 0.75}
    assert fractions([[8.0, 2.0], [0.0, 0.0]]) == {}


def test_the_dose_is_of_correct_responses_and_zero_where_the_widths_agree():
    """c = 1 has the fixed clip's width; at c = 7 a ratio between the two widths tells them apart.

    Widths 3e-3 and 5e-3: at c = 7 the upper one is 3.286e-3.
    """
    log_probs = torch.tensor([4e-3, 4e-3, 4e-3, 6e-3, -4e-3], dtype=torch.float64)
    num_correct = torch.tensor([1, 7, 7, 7, 7])
    advantages = 1 - num_correct.double() / K
    advantages[-1] = -7 / K
    ids, counts = torch.arange(5), torch.ones(5, dtype=torch.int64)
    sequences = (log_probs, torch.zeros(5).double(), ids, advantages, num_correct, counts)
    metrics = summarize(sums_of(sequences, METHODS["gapo"])[1])
    assert metrics["clip/dose_decisions"] == 2 / 4
    low, high = math.exp(4e-3), math.exp(6e-3)
    expected = 2 * low / 8 / (7 * low / 8 + 2 * low / 8 + high / 8)
    assert metrics["clip/dose_gradient"] == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("name", ["gspo", "gspo_asym", "dapo", "cispo"])
def test_a_method_without_a_width_by_c_has_no_dose(name):
    metrics = summarize(sums_of(random_sequences(20, 0, 5e-3), METHODS[name])[1])
    assert "clip/gradient_mass_lost" in metrics
    assert not any("dose" in key for key in metrics)


def correlation(deviations):
    """Of correct rollouts in groups with c = 1, 2, ...; two sequences each."""
    cells = {
        (1, c): (2, 20, 0, 2 * deviation, 2 * (K - c) / K)
        for c, deviation in enumerate(deviations, start=1)
    }
    return summarize(cell_sums(cells)).get("ratio/advantage_correlation")


def test_correlation_of_ratio_and_advantage():
    # Powers of two: the helper's numbers are float32.
    assert correlation([0.75, 0.5, 0.25]) == pytest.approx(1, abs=ROUNDING)
    assert correlation([0.25, 0.5, 0.75]) == pytest.approx(-1, abs=ROUNDING)
    expected = np.corrcoef([3.0, 1.0, 2.0, -1.0], [7.0, 6.0, 5.0, 4.0])[0, 1]
    assert correlation([0.75, 0.25, 0.5, -0.25]) == pytest.approx(expected, abs=ROUNDING)


def steps_of(num_steps, *, size=10):
    """Per step its sequences and what `summarize` says about them; one step has none with A."""
    steps = []
    for seed in range(num_steps):
        sequences = random_sequences(0 if seed == 1 else size, seed, 5e-3)
        steps.append((sequences, summarize(sums_of(sequences, METHODS["gapo"])[1])))
    return steps


def correlation_over(steps):
    """Pearson over c of means over all correct rollouts of the steps, one rollout at a time."""
    deviations, advantages = {}, {}
    for (log_probs, old, ids, advantage, num_correct, _), _ in steps:
        for i in range(len(advantage)):
            if advantage[i] > 0:
                own = ids == i
                ratio = math.exp(float((log_probs[own] - old[own]).mean()))
                deviations.setdefault(int(num_correct[i]), []).append(ratio - 1)
                advantages.setdefault(int(num_correct[i]), []).append(float(advantage[i]))
    if len(deviations) < 3:
        return None
    means = [[np.mean(values[c]) for c in sorted(values)] for values in (deviations, advantages)]
    return np.corrcoef(means)[0, 1]


def test_the_window_correlates_means_over_its_steps(monkeypatch):
    assert diagnostics.WINDOW == 200  # the paper's
    monkeypatch.setattr(diagnostics, "WINDOW", 4)
    steps, window, stored = steps_of(9), CorrelationWindow(), CorrelationWindow()
    found = []
    for number, (_, metrics) in enumerate(steps):
        found.append(window.add(metrics).get("ratio/advantage_correlation_window"))
        expected = correlation_over(steps[max(0, number - 3) : number + 1])
        assert (found[-1] is None) == (expected is None), number
        if expected is not None:
            assert found[-1] == pytest.approx(expected, abs=1e-10), number
        # Resumed before every step: the same bits.
        state = json.loads(json.dumps(stored.state_dict()))
        stored = CorrelationWindow()
        stored.add(steps[0][1])  # forgotten
        stored.load_state_dict(state)
        assert stored.add(metrics).get("ratio/advantage_correlation_window") == found[-1]
    # Not everything so far.
    assert found[-1] != pytest.approx(correlation_over(steps), abs=1e-3)


def test_counts_cover_sequences_that_are_never_computed():
    """Groups of 3: c = 0; c = 1 of 2 valid; all unknown; c = 3."""
    lengths = [1, 1, 1, 2, 4, 9, 5, 5, 5, 3, 3, 3]
    rollouts = Rollouts.of(
        [np.array([1])] * 12,
        [np.arange(n) for n in lengths],
        [np.full(n, -0.5 * (i + 1), np.float32) for i, n in enumerate(lengths)],
    )
    batch = Batch(
        rollouts.table,
        advantages=torch.tensor([0, 0, 0, 0.5, -0.5, 0, 0, 0, 0, 0, 0, 0]),
        num_correct=torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 3, 3, 3]),
        group_size=torch.tensor([3, 3, 3, 2, 2, 2, 0, 0, 0, 3, 3, 3]),
        valid=torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1], dtype=torch.bool),
    )
    expected = {
        "rollout/entropy": 0.5 * sum(n * (i + 1) for i, n in enumerate(lengths)) / sum(lengths),
        "groups/zero_advantage_share": 6 / 8,
        "groups/unknown_verdicts": 4,
        "groups/solve_rate_mean": (0 + 1 / 2 + 1) / 3,
        "groups/none_correct_share": 1 / 3,
        "groups/all_correct_share": 1 / 3,
        **{f"per_c/groups/c{c}": n for c, n in enumerate([1, 1, 0, 1])},
        **{f"per_c/group_share/c{c}": n / 3 for c, n in enumerate([1, 1, 0, 1])},
        **{f"per_c/token_share/c{c}": n / 18 for c, n in enumerate([3, 6, 0, 9])},
        "per_c/entropy/c0": 0.5 * (1 + 2 + 3) / 3,
        "per_c/entropy/c1": 0.5 * (4 * 2 + 5 * 4) / 6,
        "per_c/entropy/c3": 0.5 * (10 + 11 + 12) / 3,
        "per_c/wrong/response_length/c0": 1,
        "per_c/correct/response_length/c1": 2,
        "per_c/wrong/response_length/c1": 4,
        "per_c/correct/response_length/c3": 3,
    }
    assert count_by_correct(batch, group_size=3) == pytest.approx(expected, rel=ROUNDING)


def test_a_group_that_lost_its_wrong_rollout_counts_as_all_correct():
    """Of 3 rollouts, one without a verdict, both others correct: c = k = 2."""
    rollouts = Rollouts.of([np.array([1])] * 3, [np.arange(n) for n in (2, 4, 9)])
    batch = Batch(
        rollouts.table,
        advantages=torch.zeros(3),
        num_correct=torch.tensor([2, 2, 2]),
        group_size=torch.tensor([2, 2, 2]),
        valid=torch.tensor([True, True, False]),
    )
    metrics = count_by_correct(batch, group_size=3)
    assert metrics["per_c/groups/c2"] == metrics["groups/all_correct_share"] == 1
    assert metrics["groups/solve_rate_mean"] == 1
    assert metrics["per_c/correct/response_length/c2"] == 3
    assert "per_c/wrong/response_length/c2" not in metrics
