"""M2PO's and BAPO's bounds against their algorithms, one token and one step at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.objective.minibatch_bounds import (
    balanced_bounds,
    find_bounds,
    second_moment_bounds,
)

START = (0.4, 0.2)
M2PO, BAPO = METHODS["m2po"], METHODS["bapo"]


def minibatches(min_size=0):
    """Log-ratios (ties and exact zeros among them), advantages, old log-probs."""
    sizes = st.sampled_from([0.0, 0.1, 0.2, 0.5]) | st.floats(0, 3, width=32)
    log_ratio = st.builds(lambda size, sign: size * sign, sizes, st.sampled_from([-1, 1]))
    token = st.tuples(log_ratio, st.sampled_from([-1.0, -0.25, 0.0, 0.5]), st.floats(-5, 0))
    return st.lists(token, min_size=min_size, max_size=30).map(
        lambda tokens: np.array(tokens, dtype=np.float64).reshape(-1, 3).T
    )


def gradient_of(log_ratio, advantages, widths, method):
    """[T] of the loss, each token a sequence of its own."""
    log_probs = torch.tensor(log_ratio, requires_grad=True)
    size = len(log_ratio)
    lower, upper = widths or (method.eps_low, method.eps_high_max)
    result = policy_loss(
        log_probs,
        torch.zeros(size, dtype=torch.float64),
        sequence_ids=torch.arange(size),
        advantages=torch.tensor(advantages),
        num_correct=torch.ones(size, dtype=torch.int64),
        group_size=2,
        num_tokens_global=size,
        method=method,
        widths=(
            torch.full((size,), lower, dtype=torch.float64),
            torch.full((size,), upper, dtype=torch.float64),
        ),
    )
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return gradient.tolist(), result.clipped.tolist()


def removed_one_at_a_time(log_ratio, advantages, budget):
    """Alg. 1 as printed: the set of removed tokens, then every token equal to one of them."""
    region = [
        i
        for i, (log, a) in enumerate(zip(log_ratio, advantages, strict=True))
        if (a > 0 and math.exp(log) > 1) or (a < 0 and math.exp(log) < 1)
    ]
    left = list(region)
    while left:
        mean = math.fsum(log_ratio[i] ** 2 for i in left) / len(left)
        assume(abs(mean - budget) > 1e-12)  # rounding would decide
        if mean <= budget:
            break
        left.remove(max(left, key=lambda i: abs(log_ratio[i])))
    sizes = {abs(log_ratio[i]) for i in region if i not in left}
    return {i for i in region if abs(log_ratio[i]) in sizes}


@settings(max_examples=200, deadline=None)
@given(tokens=minibatches(min_size=1), budget=st.sampled_from([0.001, 0.04, 0.3]))
def test_second_moment_removes_what_the_algorithm_removes(tokens, budget):
    log_ratio, advantages, _ = tokens
    # exp() of a log-ratio below the float64 resolution of 1 is 1: of no region, without a gradient
    # to lose.
    assume(not any(0 < abs(log) < 1e-15 for log in log_ratio))
    removed = removed_one_at_a_time(log_ratio, advantages, budget)
    widths = second_moment_bounds(log_ratio, advantages, budget)
    assert (widths is None) == (not removed)
    gradient, clipped = gradient_of(log_ratio, advantages, widths, M2PO)
    assert {i for i, flag in enumerate(clipped) if flag} == removed
    for i, (log, a) in enumerate(zip(log_ratio, advantages, strict=True)):
        expected = 0.0 if i in removed else -a * math.exp(log) / len(log_ratio)
        assert gradient[i] == (0 if i in removed else pytest.approx(expected, rel=1e-12)), i


def test_second_moment_by_hand():
    """Squares 0.01, 0.04, 0.09, 0.36 of the region: the mean of the first three is 0.0467."""
    log_ratio = np.array([0.1, -0.2, 0.3, -0.6, 5.0, -5.0])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])  # the last two come back: never cut
    widths = second_moment_bounds(log_ratio, advantages, 0.04)
    assert widths == pytest.approx((1 - math.exp(-0.25), math.exp(0.25) - 1), rel=1e-12)
    gradient, _ = gradient_of(log_ratio, advantages, widths, M2PO)
    assert [value == 0 for value in gradient] == [False, False, True, True, False, False]
    # Exactly at the budget nothing is removed: 0.25 is exact.
    pair = np.array([0.5, 0.0, 0.5]), np.ones(3)
    assert second_moment_bounds(*pair, 0.25) is None
    low, high = second_moment_bounds(*pair, 0.2499)
    assert (low, high) == pytest.approx((1 - math.exp(-0.25), math.exp(0.25) - 1))
    # A token out of all bounds is cut, too, where the loss bounds its ratio.
    widths = second_moment_bounds(np.array([0.1, 18.0, 30.0]), np.ones(3), 170.0)
    gradient, _ = gradient_of([0.1, 18.0, 30.0], np.ones(3), widths, M2PO)
    assert [value == 0 for value in gradient] == [False, False, True]


def balanced_literally(log_ratio, advantages, weights, share):
    """Alg. 1 as printed, with Eq. 8 over unsigned sums."""

    def rho(low, high):
        terms = [
            (p * min(r * a, min(r, high) * a), p * min(r * a, max(low, min(r, high)) * a))
            for r, a, p in zip(np.exp(log_ratio), advantages, weights, strict=True)
        ]
        ours = math.fsum(first for first, _ in terms if first > 0)
        theirs = -math.fsum(second for _, second in terms if second < 0)
        assume(abs(ours / (ours + theirs) - share) > 1e-9)  # rounding would decide
        return ours / (ours + theirs)

    low, high = 0.6, 1.2
    while rho(low, high) < share and round(low + 0.02, 9) <= 0.9:
        if round(high + 0.05, 9) <= 3.0:
            high = round(high + 0.05, 9)
        else:
            low = round(low + 0.02, 9)
    return 1 - low, high - 1


@settings(max_examples=200, deadline=None)
@given(tokens=minibatches(min_size=1), share=st.sampled_from([0.3, 0.4, 0.5]))
def test_balanced_bounds_are_those_of_the_algorithm(tokens, share):
    log_ratio, advantages, old = tokens
    assume(advantages.any())
    weights = np.exp(old)
    expected = balanced_literally(log_ratio, advantages, weights, share)
    assert balanced_bounds(log_ratio, advantages, weights, share, START) == pytest.approx(
        expected, abs=1e-12
    )


def test_balanced_counts_tokens_by_their_probability():
    log_ratio, advantages = np.array([0.0, 0.0]), np.array([1.0, -1.0])
    even = find_bounds(log_ratio, advantages, np.array([-1.0, -1.0]), BAPO)
    rare = find_bounds(log_ratio, advantages, np.array([-3.0, -1.0]), BAPO)
    assert even == pytest.approx((0.4, 0.2)) and rare == pytest.approx((0.1, 2.0))


@settings(max_examples=60, deadline=None)
@given(tokens=minibatches(), seed=st.integers(0, 1000))
def test_bounds_have_the_same_bits_in_any_order_of_tokens(tokens, seed):
    order = np.random.default_rng(seed).permutation(tokens.shape[1])
    for method in (M2PO, BAPO):
        assert find_bounds(*tokens, method) == find_bounds(*tokens[:, order], method)
        active = tokens[:, tokens[1] != 0]
        assert find_bounds(*tokens, method) == find_bounds(*active, method)
