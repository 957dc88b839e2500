"""The arena's task: exact pass rates, samples and log-probs against literal loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from studies.arena import task
from studies.arena.task import EOS, MAX_TOKENS, NUM_TOKENS, Responses

SEEDS = range(3, 5)


def _some(number: int) -> tuple[torch.Tensor, task.Prompts]:
    made = task.make_task(SEEDS)
    return made.weights, made.training.of(slice(0, number))


def _rates(weights: torch.Tensor, prompts: task.Prompts) -> torch.Tensor:
    policy = task.log_policy(weights, prompts)
    return task.exact(policy, prompts, policy)[0]


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


def test_log_policy_is_normal_for_any_logits() -> None:
    weights, prompts = _some(3)
    for scale in (1.0, 1e3):
        logits = torch.einsum("snf,sfab->snab", prompts.features, scale * weights)
        found = task.log_policy(scale * weights, prompts)
        torch.testing.assert_close(found, logits.log_softmax(dim=-1), rtol=1e-12, atol=1e-9)


def test_samples_agree_with_the_pass_rate() -> None:
    weights, prompts = _some(64)
    best = _rates(weights, prompts).argsort(dim=1, descending=True)[:, [0, 1, 8, 32]]
    prompts = prompts.pick(best)
    number = 10_000
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(2, 4, number, MAX_TOKENS, generator=generator, dtype=torch.float64)
    frequency = task.sample(weights, prompts, uniforms).rewards.mean(dim=-1)
    # Hoeffding: eight means of `number` draws all lie within, but for one time in a million.
    bound = math.sqrt(math.log(2 * 8 / 1e-6) / (2 * number))
    rates = _rates(weights, prompts)
    assert float(rates.max()) > 4 * bound
    assert float((frequency - rates).abs().max()) < bound


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


def test_parts_keep_prompts_and_responses_together() -> None:
    _, prompts = _some(6)
    index = torch.tensor([[4, 1], [0, 5]])
    picked = prompts.pick(index)
    assert torch.equal(picked.features[0, 0], prompts.features[0, 4])
    assert torch.equal(picked.features[1, 1], prompts.features[1, 5])
    assert picked.targets.tolist() == [
        [int(prompts.targets[0, 4]), int(prompts.targets[0, 1])],
        [int(prompts.targets[1, 0]), int(prompts.targets[1, 5])],
    ]
    values = torch.arange(6).expand(2, 6)
    part = Responses(values, values, values, values).of(slice(2, 4))
    assert part.rewards.tolist() == part.tokens.tolist() == [[2, 3], [2, 3]]
