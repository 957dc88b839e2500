"""The arena's task: exact pass rates, samples and log-probs against literal loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from studies.arena import task
from studies.arena.task import EOS, MAX_TOKENS, NUM_TOKENS

SEEDS = range(3, 5)


def _some(number: int) -> tuple[torch.Tensor, task.Prompts]:
    made = task.make_task(SEEDS)
    return made.weights, made.training.of(slice(0, number))


def test_pass_rates_and_divergences_are_sums_over_all_walks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = 4
    monkeypatch.setattr(task, "MAX_TOKENS", longest)
    weights, prompts = _some(1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    policies = [task.log_policy(weights, prompts), task.log_policy(weights + noise, prompts)]
    rates, divergences = task.exact(policies[1], prompts, policies[0])
    # Every response: it ends with EOS, or has `longest` tokens without one.
    walks: list[tuple[int, ...]] = list(itertools.product(range(NUM_TOKENS), repeat=longest))
    for length in range(longest):
        walks += [(*walk, EOS) for walk in itertools.product(range(NUM_TOKENS), repeat=length)]
    for seed in range(2):
        tables = [policy[seed, 0].tolist() for policy in policies]
        target = int(prompts.targets[seed, 0])
        rate = divergence = total = 0.0
        for walk in walks:
            states = (EOS, *walk)
            old, new = (
                sum(table[state][token] for state, token in itertools.pairwise(states))
                for table in tables
            )
            total += math.exp(new)
            divergence += math.exp(new) * (new - old)
            if walk[-1] == EOS and states[-2] == target:
                rate += math.exp(new)
        assert total == pytest.approx(1, rel=1e-12)
        assert float(rates[seed, 0]) == pytest.approx(rate, rel=1e-12)
        assert float(divergences[seed, 0]) == pytest.approx(divergence, rel=1e-12)
        assert divergence > 0.1


def test_samples_and_log_probs_are_those_of_a_loop() -> None:
    weights, prompts = _some(4)
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(2, 4, 20, MAX_TOKENS, generator=generator, dtype=torch.float64)
    uniforms[0, 0, 0] = 1 - 1e-16  # 1 after rounding: beyond every sum
    responses = task.sample(weights, prompts, uniforms)
    policy = task.log_policy(weights, prompts)
    log_probs = task.log_probs(policy, responses)
    ends = set()
    for place in itertools.product(range(2), range(4), range(20)):
        table = policy[place[:2]]
        state, written = EOS, 0
        for t in range(MAX_TOKENS):
            token, below = 0, float(table[state, 0].exp())
            while token < EOS and float(uniforms[(*place, t)]) >= below:
                token += 1
                below += float(table[state, token].exp())
            assert int(responses.tokens[(*place, t)]) == token
            assert float(log_probs[(*place, t)]) == float(table[state, token])
            written += 1
            if token == EOS:
                break
            state = token
        is_right = token == EOS and state == int(prompts.targets[place[:2]])
        assert responses.is_token[place].tolist() == [t < written for t in range(MAX_TOKENS)]
        assert float(responses.rewards[place]) == is_right
        ends.add((token == EOS, is_right))
    assert ends == {(True, True), (True, False), (False, False)}


def test_a_task_depends_on_its_own_seed_alone() -> None:
    alone, beside = task.make_task(range(4, 5)), task.make_task(SEEDS)
    assert torch.equal(alone.weights[0], beside.weights[1])
    assert torch.equal(alone.held_out.features[0], beside.held_out.features[1])
    assert torch.equal(alone.held_out.targets[0], beside.held_out.targets[1])
    assert not torch.equal(beside.weights[0], beside.weights[1])
