"""The arena's training: every seed's own mini-batch, pairing, staleness."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gapo_megatron.objective import METHODS, Method, group_advantages, policy_loss
from gapo_megatron.objective.diagnostics import SUMS
from studies.arena import task as walks
from studies.arena import train as trainer
from studies.arena.task import (
    MAX_TOKENS,
    Responses,
    exact,
    log_policy,
    log_probs,
    make_task,
    sample,
)
from studies.arena.train import MOVED, Setting, Trained, train

SEEDS = range(3)
K = 8
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
MODES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "stale": {"staleness": 4},
    "around": {"staleness": 4, "around_sampler": True},
    "reversed": {"reversed_width": True},
    "unweighted": {"staleness": 4, "weights": "none"},
    "token": {"staleness": 4, "weights": "token"},
    "over length": {"over_length": True},
}


class _Minibatch:
    """Eight prompts of three seeds; the third seed's responses are all wrong."""

    def __init__(self) -> None:
        task = make_task(SEEDS)
        self.prompts, uniforms = trainer._draw(task, SEEDS, 7, K)
        generator = torch.Generator().manual_seed(0)

        def near(weights: Tensor) -> Tensor:
            noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
            return weights + 0.3 * noise

        sampler = task.weights
        begin = near(sampler)
        self.weights = near(begin).requires_grad_()
        responses = sample(sampler, self.prompts, uniforms)
        self.sampled = log_probs(log_policy(sampler, self.prompts), responses)
        self.at_begin = log_probs(log_policy(begin, self.prompts), responses)
        self.keys = torch.arange(len(SEEDS) * responses.rewards[0].numel()).view_as(
            responses.rewards
        )
        rewards = responses.rewards.clone()
        rewards[2] = 0
        self.responses = Responses(responses.tokens, responses.states, responses.is_token, rewards)

    def of(self, seed: int, setting: Setting) -> Tensor:
        """Gradient of one seed by `policy_loss`, one response after the other."""
        method, responses = setting.method, self.responses
        rewards, is_token = responses.rewards[seed], responses.is_token[seed]
        advantages = group_advantages(
            rewards,
            normalize_std=method.normalize_std,
            focal_gamma=method.focal_gamma,
            virtual_correct=method.virtual_correct,
        )
        policy = log_policy(self.weights, self.prompts)
        new = log_probs(policy, responses)[seed]
        at_begin, sampled = self.at_begin[seed], self.sampled[seed]
        old = sampled if setting.around_sampler else at_begin
        columns: dict[str, list[Tensor]] = {"new": [], "old": [], "ids": [], "A": [], "c": []}
        for prompt in range(len(rewards)):
            for response in range(K):
                row = is_token[prompt, response]
                apart = (at_begin - sampled)[prompt, response][row]
                weight, tokens = torch.tensor(1.0), torch.ones_like(apart)
                if setting.staleness and not setting.around_sampler:
                    if setting.weights == "sequence":
                        weight = apart.mean().exp().clamp(max=2)
                    if setting.weights == "token":
                        tokens = apart.exp().clamp(max=2)
                ids = torch.full((int(row.sum()),), len(columns["A"]))
                columns["ids"].append(ids)
                given = new[prompt, response][row]
                columns["new"].append(given.detach() + tokens * (given - given.detach()))
                columns["old"].append(old[prompt, response][row])
                columns["A"].append((advantages[prompt, response] * weight).view(1))
                columns["c"].append(rewards[prompt].sum().long().view(1))
        new, old, ids, scaled, c = (torch.cat(column) for column in columns.values())
        widths = None
        if setting.reversed_width:
            low, span = method.eps_low, method.eps_high_max - method.eps_low
            widths = (torch.full_like(scaled, low), low + span * c / (K - 1))
        if setting.over_length:
            low, span = method.eps_low, method.eps_high_max - method.eps_low
            upper = (low + span * (K - c) / (K - 1)) * 6 / ids.bincount()
            widths = (torch.full_like(scaled, low), upper)
        result = policy_loss(
            new,
            old,
            sequence_ids=ids,
            advantages=scaled,
            num_correct=c,
            group_size=K,
            num_tokens_global=int(is_token.sum()),
            num_sequences_global=rewards.numel(),
            max_response_tokens=MAX_TOKENS,
            method=method,
            keys=self.keys[seed].flatten(),
            widths=widths,
        )
        (gradient,) = torch.autograd.grad(result.loss, self.weights)
        return gradient[seed]


@pytest.fixture(scope="module")
def minibatch() -> _Minibatch:
    return _Minibatch()


def _all_seeds(minibatch: _Minibatch, setting: Setting) -> tuple[Tensor, dict[str, Tensor]]:
    old = (minibatch.at_begin, minibatch.sampled)
    return trainer._gradient(
        minibatch.weights, minibatch.prompts, minibatch.responses, minibatch.keys, old, setting
    )


def _assert_each_seeds_own(minibatch: _Minibatch, setting: Setting) -> None:
    found, _ = _all_seeds(minibatch, setting)
    for seed in SEEDS:
        torch.testing.assert_close(found[seed], minibatch.of(seed, setting), rtol=1e-9, atol=1e-14)
    assert found[0].norm() > 0 and found[1].norm() > 0
    assert found[2].any() == (setting.method.virtual_correct > 0)


@pytest.mark.parametrize("name", METHODS)
def test_gradient_is_each_seeds_own(minibatch: _Minibatch, name: str) -> None:
    for aggregation in AGGREGATIONS:
        method = replace(METHODS[name], aggregation=aggregation)
        _assert_each_seeds_own(minibatch, Setting(method=method, learning_rate=0.05))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_every_mode_is_each_seeds_own(minibatch: _Minibatch, mode: str) -> None:
    # Wide enough that some ratios lie between the widths of different c, and of lengths.
    widest = 0.1 if mode == "over length" else 0.5
    method = replace(METHODS["gapo"], eps_low=0.02, eps_high_max=widest)
    setting = Setting(method=method, learning_rate=0.05, **MODES[mode])
    _assert_each_seeds_own(minibatch, setting)
    if mode not in ("fresh", "unweighted"):
        plain, _ = _all_seeds(minibatch, Setting(method=method, learning_rate=0.05))
        assert not torch.equal(plain, _all_seeds(minibatch, setting)[0])


def _short(method: Method = METHODS["gapo"], **changes: Any) -> Setting:
    return Setting(**{"method": method, "learning_rate": 0.05, "num_steps": 2, **changes})


def test_same_setting_same_bits_and_around_the_sampler_is_plain_when_fresh() -> None:
    first, again, around = (
        train(setting, SEEDS, evaluate_every=1)
        for setting in (_short(), _short(), _short(around_sampler=True))
    )
    for other in (again, around):
        for field in fields(Trained):
            assert torch.equal(getattr(first, field.name), getattr(other, field.name))
    assert first.curve.shape == (3, 3, len(SEEDS))
    assert first.per_c[0].any() and first.per_c[2].any()  # two steps: the halves' first quarters


def test_arms_share_prompts_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Tensor, Tensor]] = []
    draw = trainer._draw

    def spy(*arguments: Any) -> Any:
        prompts, uniforms = draw(*arguments)
        drawn.append((prompts.features, uniforms))
        return prompts, uniforms

    monkeypatch.setattr(trainer, "_draw", spy)
    for setting in (_short(), _short(METHODS["dapo"], staleness=1)):
        train(setting, SEEDS, evaluate_every=2)
    for step in (0, 1):
        assert all(torch.equal(*pair) for pair in zip(drawn[step], drawn[2 + step], strict=True))
    assert not torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])
    # Other group sizes get the same prompts; other seeds other numbers.
    task = make_task(SEEDS)
    assert torch.equal(draw(task, SEEDS, 1, 4)[0].features, drawn[1][0])
    assert not torch.equal(draw(task, range(3, 6), 1, K)[1], drawn[1][1])


@pytest.mark.parametrize("staleness", [1, 2])
def test_samples_are_that_many_steps_old(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    used: list[Tensor] = []

    def spy(weights: Tensor, prompts: Any) -> Tensor:
        used.append(weights.detach().clone())
        return log_policy(weights, prompts)

    monkeypatch.setattr(walks, "log_policy", spy)
    train(_short(num_steps=4, staleness=staleness), SEEDS, evaluate_every=4)
    used = used[2:]  # after those of the held-out prompts
    calls = 3 + trainer.MINIBATCHES
    samplers, begins = used[::calls], used[1::calls]
    for step in range(4):
        assert torch.equal(samplers[step], begins[max(step - staleness, 0)])
    assert not torch.equal(begins[0], begins[1])


def test_every_seeds_gradient_is_clipped_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    gradients = torch.zeros_like(make_task(SEEDS).weights)
    gradients[0, 0, 0, 0], gradients[1, 0, 0, 0] = 50.0, 0.25

    def constant(weights: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(weights.detach().clone())
        return gradients, {"per_c": torch.zeros(1), "dose": torch.zeros(1)}

    def plain(weights: list[Tensor], *, lr: float, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=lr)

    monkeypatch.setattr(trainer, "_gradient", constant)
    monkeypatch.setattr(torch.optim, "AdamW", plain)
    train(_short(learning_rate=0.5), SEEDS, evaluate_every=2)
    moved = (seen[0] - seen[1]).flatten(1)
    assert moved[:, 0].tolist() == pytest.approx([0.5, 0.125, 0], rel=1e-12)
    assert not moved[:, 1:].any()


def test_the_dose_is_summed_over_training() -> None:
    found = train(_short(num_steps=16), SEEDS, evaluate_every=16)
    assert found.dose is not None
    sequences, decisions, mass, changed = found.dose.sum(dim=0).tolist()
    correct = found.per_c.sum(dim=0)[:, 1].sum(dim=1)
    assert sequences == float(correct[SUMS.index("sequences")]) > 0
    assert mass == pytest.approx(float(correct[SUMS.index("gradient_mass")]))
    assert 0 < decisions < sequences and 0 < changed < mass


@pytest.mark.parametrize("staleness", [0, 1])
def test_measured_steps_move_the_log_probs_of_their_responses(
    monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """The sums of a step against a loop over its responses; its gain and KL, exactly.

    A stale batch of the second step is sampled by the first weights, and moves from the second.
    """
    number = 1 + staleness
    monkeypatch.setattr(trainer, "MEASURE_EVERY", number)
    ends: list[Tensor] = []

    def spy(weights: Tensor, prompts: Any) -> Tensor:
        ends.append(weights.detach().clone())
        return log_policy(weights, prompts)

    monkeypatch.setattr(walks, "log_policy", spy)
    found = train(_short(num_steps=number, staleness=staleness), SEEDS, evaluate_every=number)
    calls = 3 + trainer.MINIBATCHES  # of a stale step, after two of the held-out prompts
    begin, last = ends[2 + staleness * calls + 1], ends[-1]
    task = make_task(SEEDS)
    assert torch.equal(begin, task.weights) is (staleness == 0)
    prompts, uniforms = trainer._draw(task, SEEDS, number - 1, K)
    responses = sample(task.weights, prompts, uniforms)
    old, new = log_policy(begin, prompts), log_policy(last, prompts)
    apart = (log_probs(new, responses) - log_probs(old, responses)) * responses.is_token
    expected = torch.zeros(len(MOVED), 2, K + 1, dtype=torch.float64)
    for seed in SEEDS:
        for prompt in range(trainer.STEP_PROMPTS):
            right = responses.rewards[seed, prompt].long()
            total = apart[seed, prompt].sum(dim=-1)
            mean = total / responses.is_token[seed, prompt].sum(dim=-1)
            total, mean = total - total.mean(), mean - mean.mean()
            for one in range(K):
                row = torch.stack([torch.ones_like(total), total, total**2, mean, mean**2])[:, one]
                expected[:, right[one], right.sum()] += row
    torch.testing.assert_close(found.moved.sum(dim=0), expected, rtol=1e-9, atol=1e-12)
    before, _ = exact(old, prompts, old)
    after, divergence = exact(new, prompts, old)
    rows = torch.stack([after - before, divergence, before * (1 - before)]).mean(dim=-1)
    torch.testing.assert_close(found.progress, rows, rtol=1e-9, atol=1e-12)
    assert bool((found.progress[0] > 0).all())
