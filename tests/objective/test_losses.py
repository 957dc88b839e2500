"""The losses against a loop over the paper's equations, and against numbers worked by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapo_megatron.errors import ConfigError, DivergenceError
from gapo_megatron.objective import METHODS, kl_penalty
from gapo_megatron.objective.clipping import MAX_LOG_RATIO
from tests.messages import mentions
from tests.objective.response import loss_of
from tests.objective_reference import ROUNDING, Case, cases, reference

VARIANTS = [
    *METHODS.values(),
    dataclasses.replace(METHODS["gapo"], name="gapo, sequence_mean", aggregation="sequence_mean"),
    dataclasses.replace(METHODS["gapo"], name="gapo, constant", aggregation="constant"),
    dataclasses.replace(METHODS["gapo"], name="gapo, sequence_sum", aggregation="sequence_sum"),
    dataclasses.replace(METHODS["gapo"], name="gapo, product", ratio="product"),
    dataclasses.replace(METHODS["gapo_token"], name="token", aggregation="sequence_mean"),
    dataclasses.replace(METHODS["cispo"], name="cispo, two-sided", eps_low=0.2),
    dataclasses.replace(METHODS["cispo"], name="cispo, sequence", ratio="sequence", eps_low=0.2),
    dataclasses.replace(METHODS["cispo"], name="cispo, adaptive", adaptive=True, eps_low=0.2),
    dataclasses.replace(METHODS["sapo"], name="sapo, token_mean", aggregation="token_mean"),
    dataclasses.replace(METHODS["sapo"], name="sapo, sharp", adaptive=True, eps_low=0.1),
    dataclasses.replace(METHODS["sapo"], name="sapo, sequence", ratio="sequence"),
    dataclasses.replace(METHODS["gmpo"], name="gmpo, token_mean", aggregation="token_mean"),
    dataclasses.replace(METHODS["gmpo"], name="gmpo, adaptive", adaptive=True, eps_low=0.1),
    dataclasses.replace(METHODS["gapo"], name="gapo, masked", off_policy_mask=1e-3),
    dataclasses.replace(METHODS["cispo"], name="cispo, masked", off_policy_mask=1e-3),
    dataclasses.replace(
        METHODS["dppo_tv"], name="dppo, adaptive", adaptive=True, eps_low=0.05, ratio_max=1.5
    ),
    dataclasses.replace(METHODS["fspo"], name="fspo, sequence", ratio="sequence"),
    dataclasses.replace(METHODS["fspo"], name="fspo, adaptive", adaptive=True, eps_high_max=0.05),
    dataclasses.replace(METHODS["topr"], name="topr, token", ratio="token"),
    dataclasses.replace(METHODS["topr"], name="topr, other taper", eps_low=0.5, eps_high_max=0.3),
    dataclasses.replace(METHODS["dcpo"], name="dcpo, low cap", ratio_max=1.5),
    dataclasses.replace(METHODS["dcpo"], name="dcpo, adaptive", adaptive=True, eps_high_max=0.5),
    dataclasses.replace(METHODS["aspo"], name="aspo, low cap", ratio_max=1.1),
    dataclasses.replace(METHODS["aspo"], name="aspo, adaptive", adaptive=True, eps_high_max=0.4),
    dataclasses.replace(
        METHODS["abc"],
        name="abc, four widths",
        eps_low=0.1,
        eps_low_correct=0.4,
        eps_high_wrong=0.7,
    ),
    dataclasses.replace(METHODS["abc"], name="abc, adaptive", adaptive=True, eps_high_max=0.4),
    dataclasses.replace(METHODS["dgpo"], name="dgpo, n = 2, m = 3", decay_low=2.0, decay_high=3.0),
    dataclasses.replace(METHODS["dgpo"], name="dgpo, adaptive", adaptive=True, eps_high_max=0.4),
    dataclasses.replace(METHODS["nsr"], name="nsr, adaptive", adaptive=True, rescue_noise=0.5),
    dataclasses.replace(METHODS["nsr"], name="nsr, sequence", ratio="sequence", eps_low=0.01),
    dataclasses.replace(METHODS["atr"], name="atr, adaptive", adaptive=True, eps_high_max=0.3),
    dataclasses.replace(METHODS["atr"], name="atr, sequence", ratio="sequence", eps_low=1e-5),
]
every_method = pytest.mark.parametrize("method", VARIANTS, ids=lambda method: method.name)


@every_method
@settings(max_examples=40)
@given(case=cases())
def test_matches_the_loop_reference(method, case):
    log_probs, old, ids = case.tensors()
    got = case.loss(method, log_probs, old, ids)
    (gradient,) = torch.autograd.grad(got.loss, log_probs)
    loss, ratios, flags, margins = reference(case, method, log_probs, old)
    (expected,) = torch.autograd.grad(loss, log_probs)
    assert float(got.loss.detach()) == pytest.approx(
        float(loss.detach()), abs=ROUNDING, rel=ROUNDING
    )
    torch.testing.assert_close(gradient, expected, atol=ROUNDING, rtol=ROUNDING)
    assert got.ratio.tolist() == pytest.approx(ratios, rel=ROUNDING)
    # A ratio within a rounding error of the clip's edge may fall on either side of it.
    triples = zip(got.clipped.tolist(), flags, margins, strict=True)
    assert all(ours == theirs for ours, theirs, margin in triples if margin > ROUNDING)


# (advantage, c, ratio) -> (factor the loss takes instead of the ratio, clipped), GAPO with k = 8.
# The upper edges are 1 + 5e-3 for c = 1 and 1 + (3 + 2/7)e-3 for c = 7; the lower edge is 1 - 3e-3.
BY_HAND = [
    (+7 / 8, 1, 1.0051, 1.005, True),
    (+7 / 8, 1, 1.0049, 1.0049, False),
    (+7 / 8, 1, 0.9, 0.9, False),  # fell although correct: never held back
    (+1 / 8, 7, 1.0033, 1 + (3 + 2 / 7) * 1e-3, True),
    (+1 / 8, 7, 1.0032, 1.0032, False),
    (-1 / 8, 1, 0.9969, 0.997, True),
    (-1 / 8, 1, 0.9971, 0.9971, False),
    (-1 / 8, 1, 1.1, 1.1, False),  # rose although wrong: never held back
    (-7 / 8, 7, 0.9969, 0.997, True),
]


@pytest.mark.parametrize(("advantage", "c", "ratio", "factor", "clipped"), BY_HAND)
def test_both_edges_and_both_signs_by_hand(advantage, c, ratio, factor, clipped):
    old = torch.full((4,), -1.0, dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_()
    method = METHODS["gapo"]
    result = loss_of(method, advantage, log_probs, old, num_correct=c, num_tokens=10)
    assert float(result.ratio) == pytest.approx(ratio, rel=ROUNDING)
    assert result.clipped.tolist() == [clipped]
    # Each of the 4 tokens carries -A * factor; 10 tokens in the mini-batch.
    assert float(result.loss.detach()) == pytest.approx(-advantage * factor * 4 / 10, rel=1e-11)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    # d(-A s)/d(log_prob_t) = -A s / 4 per carried token, 4 of them, over 10.
    expected = 0.0 if clipped else -advantage * ratio / 10
    assert gradient.tolist() == pytest.approx([expected] * 4, rel=1e-11)
    if clipped:
        assert not gradient.any(), "the gradient of a clipped sequence is exactly zero"


@every_method
@settings(max_examples=20)
@given(case=cases())
def test_equal_weights_give_ratio_exactly_one(method, case):
    _, old, ids = case.tensors(torch.float32)
    log_probs = old.clone().requires_grad_()
    result = case.loss(method, log_probs, old, ids)
    assert bool((result.ratio == 1).all())
    assert not result.clipped.any()
    if method.aggregation == "token_mean":
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        expected = -case.advantages[ids] / (sum(case.counts) + 5)
        # Float32 gradients of float32 log-probs: one rounding at the end.
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)


@every_method
@settings(max_examples=20)
@given(case=cases())
def test_no_gradient_where_nothing_is_to_be_learnt(method, case):
    log_probs, old, ids = case.tensors()
    result = case.loss(method, log_probs, old, ids)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert not gradient[case.advantages[ids] == 0].any()
    if dataclasses.replace(method, off_policy_mask=None).stops_gradients:
        clipped = result.clipped if result.per_token else result.clipped[ids]
        assert not gradient[clipped].any()
        assert bool((gradient[~clipped & (case.advantages[ids] != 0)] != 0).all())


@every_method
@settings(max_examples=20)
@given(case=cases(), data=st.data())
def test_sequences_may_be_split_and_dropped_in_any_way(method, case, data):
    """Denominators are the mini-batch's: parts add up, and A = 0 may be left out of every part."""
    log_probs, old, ids = case.tensors()
    whole = case.loss(method, log_probs, old, ids)
    (expected,) = torch.autograd.grad(whole.loss, log_probs)
    parts = data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.counts), max_size=len(case.counts))
    )
    drop = data.draw(st.booleans())
    total, gradient = 0.0, torch.zeros_like(expected)
    for part in range(3):
        members = [
            i for i, p in enumerate(parts) if p == part and not (drop and case.advantages[i] == 0)
        ]
        rows = torch.tensor([t for t, i in enumerate(ids.tolist()) if i in members]).long()
        some = log_probs.detach()[rows].requires_grad_()
        result = case.loss(
            method,
            some,
            old[rows],
            torch.tensor([members.index(i) for i in ids[rows].tolist()]).long(),
            advantages=case.advantages[members],
            num_correct=torch.tensor([case.num_correct[i] for i in members]).long(),
            keys=torch.arange(len(case.counts))[members],
        )
        total += float(result.loss.detach())
        gradient[rows] = torch.autograd.grad(result.loss, some)[0]
    assert total == pytest.approx(float(whole.loss.detach()), abs=ROUNDING, rel=ROUNDING)
    assert bool((gradient == expected).all()), "a sequence's gradient keeps its bits in any part"


def test_group_size_may_be_given_per_sequence():
    case = Case([1, 3], [True, True], [[0.0043], [0.0043]])
    log_probs, old, ids = case.tensors()
    one = case.loss(METHODS["gapo"], log_probs, old, ids)
    same = case.loss(METHODS["gapo"], log_probs, old, ids, group_size=torch.tensor([8, 8]))
    shrunk = case.loss(METHODS["gapo"], log_probs, old, ids, group_size=torch.tensor([8, 4]))
    assert float(one.loss.detach()) == float(same.loss.detach())
    # exp(0.0043) - 1 = 4.309e-3. Width for c = 3: 4.43e-3 when k = 8, 3.67e-3 when k = 4.
    assert one.clipped.tolist() == [False, False]
    assert shrunk.clipped.tolist() == [False, True]


def test_log_ratios_are_accumulated_in_float64():
    """20,000 float32 tokens: a float32 sum would miss the ratio by 1e-8."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(20_000, generator=generator) * 8
    log_probs = old + 1e-2 * torch.randn(20_000, generator=generator)
    log_probs[0], old[0] = -1e-6, -7.0  # a difference that float32 does not hold
    result = loss_of(METHODS["gapo"], 0.5, log_probs, old)
    exact = math.fsum(
        new - before for new, before in zip(log_probs.tolist(), old.tolist(), strict=True)
    )
    # 20,000 float64 roundings of sums below 10, divided by 20,000: far below 1e-15.
    assert float(result.ratio) == pytest.approx(math.exp(exact / 20_000), rel=1e-15)


@every_method
def test_an_empty_microbatch_is_a_zero_with_a_gradient(method):
    case = Case([], [], [])
    log_probs, old, ids = case.tensors()
    result = case.loss(method, log_probs, old, ids, num_tokens_global=0, num_sequences_global=0)
    assert float(result.loss.detach()) == 0
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert gradient.shape == (0,)


def test_a_sequence_without_tokens_adds_nothing():
    case = Case([1, 1], [True, True], [[0.001], []])
    result = case.loss(METHODS["gapo"], *case.tensors(), num_sequences_global=2)
    assert float(result.loss.detach()) == pytest.approx(-7 / 8 * math.exp(0.001) / 6, rel=1e-6)
    assert result.ratio.tolist()[1] == 1


@pytest.mark.parametrize("name", ["gapo", "dapo", "cispo"])
@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_name_their_sequence(name, field, value):
    case = Case([1, 1, 1], [True, False, False], [[0.0, 0.0], [0.0], [0.0, 0.0]])
    log_probs, old, ids = case.tensors()
    advantages = case.advantages
    place = {"log_probs": log_probs.detach(), "old_log_probs": old, "advantages": advantages}[field]
    place[2] = value
    sequence = 2 if field == "advantages" else 1
    with pytest.raises(DivergenceError, match=rf"\b{field}\b.*\bsequence {sequence}\b"):
        case.loss(METHODS[name], log_probs, old, ids, advantages=advantages)


@pytest.mark.parametrize("name", ["gapo", "dapo"])
def test_a_ratio_out_of_all_bounds_stays_finite_and_is_pulled_back(name):
    """A wrong response 500 nats up: exp would overflow, a clamped exp would let it go."""
    old = torch.tensor([-501.0, -501.0])
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    result = loss_of(METHODS[name], -0.5, log_probs, old)
    result.loss.backward()
    assert result.ratio.flatten()[0] == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-12)
    assert bool((log_probs.grad > 0).all() & log_probs.grad.isfinite().all())


@pytest.mark.parametrize(
    ("aggregation", "missing"),
    [
        ("sequence_mean", "num_sequences_global"),
        ("constant", "num_sequences_global"),
        ("constant", "max_response_tokens"),
    ],
)
def test_a_missing_denominator_is_named(aggregation, missing):
    case = Case([1], [True], [[0.0]])
    method = dataclasses.replace(METHODS["gapo"], aggregation=aggregation)
    with pytest.raises(ConfigError, match=mentions(aggregation, missing)):
        case.loss(method, *case.tensors(), **{missing: None})


def test_shapes_that_do_not_fit_are_shown():
    case = Case([1], [True], [[0.0, 0.0]])
    log_probs, old, ids = case.tensors()
    with pytest.raises(AssertionError, match=r"\bold_log_probs \(1,\)"):
        case.loss(METHODS["gapo"], log_probs, old[:1], ids)
    with pytest.raises(AssertionError, match=r"num_correct \(2,\)"):
        case.loss(METHODS["gapo"], log_probs, old, ids, num_correct=torch.tensor([1, 1]))


@given(
    log_probs=st.lists(st.floats(-30, 0), min_size=1, max_size=8),
    shifts=st.lists(st.floats(-5, 5), min_size=8, max_size=8),
)
def test_kl_penalty_is_never_negative(log_probs, shifts):
    new = torch.tensor(log_probs, dtype=torch.float64)
    ref = new + torch.tensor(shifts[: len(log_probs)], dtype=torch.float64)
    penalty = kl_penalty(new, ref)
    assert bool((penalty >= 0).all())
    torch.testing.assert_close(
        penalty, torch.exp(ref - new) - (ref - new) - 1, atol=1e-12, rtol=1e-9
    )


def test_kl_penalty_is_zero_at_the_reference_and_unbiased():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator).double().log_softmax(0)
    ref = torch.randn(50, generator=generator).double().log_softmax(0)
    assert not kl_penalty(policy, policy).any()
    expectation = (policy.exp() * kl_penalty(policy, ref)).sum()
    exact = (policy.exp() * (policy - ref)).sum()
    assert float(expectation) == pytest.approx(float(exact), rel=1e-12)  # float64 sums of 50


def test_kl_penalty_pulls_towards_the_reference():
    log_probs = torch.tensor([-1.0, -3.0, -500.0], requires_grad=True)
    ref = torch.tensor([-2.0, -2.0, -1.0], requires_grad=True)
    kl_penalty(log_probs, ref).sum().backward()
    assert [float(g) > 0 for g in log_probs.grad] == [True, False, False]
    assert bool(log_probs.grad.isfinite().all())
    assert ref.grad is None
