"""The arena's transformer: log-probs, samples and exact pass rates against literal loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gapo_megatron.objective import METHODS
from studies.arena import train as trainer
from studies.arena import transformer
from studies.arena.task import Responses
from studies.arena.train import Setting, train
from studies.arena.transformer import (
    MAX_TOKENS,
    NUM_HEADS,
    NUM_SYMBOLS,
    NUM_TOKENS,
    SHAPES,
    WIDTH,
    Policy,
    Prompts,
    exact,
    log_probs,
    make_task,
    sample,
)

SEEDS = range(3, 5)
K = 4


@pytest.fixture(autouse=True)
def _short_warm_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transformer, "WARM_STEPS", 20)
    make_task.cache_clear()
    yield
    make_task.cache_clear()


def _some(number: int) -> tuple[Tensor, Prompts]:
    """Weights in float64 and prompts."""
    task = make_task(SEEDS)
    return task.weights.double(), task.training.of(slice(0, number))


def _random_responses(prompts: Prompts) -> Responses:
    generator = torch.Generator().manual_seed(0)
    shape = (*prompts.symbols.shape[:2], K, MAX_TOKENS)
    tokens = torch.randint(NUM_TOKENS, shape, generator=generator)
    return Responses(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), tokens[..., 0])


def _plain(weights: Tensor, symbols: list[int], tokens: list[int]) -> list[Tensor]:
    """Log-prob of every token of one response by one seed's transformer, place by place."""
    parts, first = [], 0
    for rows, columns in SHAPES:
        parts.append(weights[first : first + rows * columns].view(rows, columns))
        first += rows * columns
    assert first == len(weights)
    of_ids, of_places, *layers, to_logits = parts

    def norm(vector: Tensor) -> Tensor:
        return vector / (vector.square().mean() + torch.finfo(vector.dtype).eps).sqrt()

    ids = [*symbols, *(NUM_SYMBOLS + token for token in tokens[:-1])]
    streams = [of_ids[identity] + of_places[place] for place, identity in enumerate(ids)]
    size = WIDTH // NUM_HEADS
    for at in range(0, len(layers), 4):
        inward, outward, up, down = layers[at : at + 4]
        heads = [(norm(stream) @ inward).view(3, NUM_HEADS, size) for stream in streams]
        attended = []
        for place in range(len(ids)):
            found = []
            for head in range(NUM_HEADS):
                query = heads[place][0, head]
                scores = [query @ heads[to][1, head] / size**0.5 for to in range(place + 1)]
                shares = torch.stack(scores).softmax(dim=0)
                found.append(sum(shares[to] * heads[to][2, head] for to in range(place + 1)))
            attended.append(torch.cat(found))
        streams = [stream + own @ outward for stream, own in zip(streams, attended, strict=True)]
        streams = [stream + (norm(stream) @ up).clamp(min=0) @ down for stream in streams]
    tables = [(norm(stream) @ to_logits).log_softmax(dim=0) for stream in streams[-MAX_TOKENS:]]
    return [table[token] for table, token in zip(tables, tokens, strict=True)]


def test_log_probs_and_gradient_are_those_of_one_transformer_per_seed() -> None:
    weights, prompts = _some(3)
    responses = _random_responses(prompts)
    weights.requires_grad_()
    found = log_probs(Policy(weights, prompts), responses)
    expected = torch.stack(
        [
            torch.stack(_plain(weights[place[0]], symbols.tolist(), tokens.tolist()))
            for place in itertools.product(range(len(SEEDS)), range(3), range(K))
            for symbols in [prompts.symbols[place[:2]]]
            for tokens in [responses.tokens[place]]
        ]
    ).view_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = [
        torch.autograd.grad((factors * values).sum(), weights)[0] for values in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)
    assert all(row.any() for row in gradients[0])


def test_a_token_depends_on_its_prompt_and_on_what_its_response_has_before() -> None:
    weights, prompts = _some(2)
    responses = _random_responses(prompts)

    def after(change: tuple[int, ...]) -> Tensor:
        """Which log-probs change with one token, [S, N, K, L]; its own place is left out."""
        tokens = responses.tokens.clone()
        tokens[change] = (tokens[change] + 1) % NUM_TOKENS
        changed = Responses(tokens, tokens, responses.is_token, responses.rewards)
        policy = Policy(weights, prompts)
        differs = log_probs(policy, responses) != log_probs(policy, changed)
        differs[change] = False
        return differs

    for place in range(MAX_TOKENS):
        expected = torch.zeros_like(responses.is_token)
        expected[1, 0, 2, place + 1 :] = True
        assert torch.equal(after((1, 0, 2, place)), expected)


def test_pass_rate_and_divergence_are_sums_over_all_responses() -> None:
    weights, prompts = _some(2)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    policy, reference = Policy(weights, prompts), Policy(weights + 0.05 * noise, prompts)
    every = torch.cartesian_prod(*[torch.arange(NUM_TOKENS)] * MAX_TOKENS)
    tokens = every.expand(*prompts.symbols.shape[:2], -1, -1)
    responses = Responses(tokens, tokens, torch.ones_like(tokens).bool(), tokens[..., 0])
    mine, other = (log_probs(one, responses).sum(dim=-1) for one in (policy, reference))
    torch.testing.assert_close(mine.exp().sum(dim=-1), torch.ones(2, 2).double())
    is_right = (tokens == prompts.answers[:, :, None]).all(dim=-1)
    rates, divergence = exact(policy, prompts, reference)
    torch.testing.assert_close(rates, mine.exp()[is_right].view(2, 2))
    torch.testing.assert_close(divergence, (mine.exp() * (mine - other)).sum(dim=-1))
    assert divergence.min() > 0.01


def test_samples_agree_with_the_pass_rate() -> None:
    task = make_task(SEEDS)
    rates, _ = exact(
        *[Policy(task.weights, task.training), task.training] * 1,
        Policy(task.weights, task.training),
    )
    best = rates.argsort(dim=1, descending=True)[:, [0, 1, 8, 32]]
    prompts = task.training.pick(best)
    number = 5_000
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(2, 4, number, MAX_TOKENS, generator=generator)
    responses = sample(task.weights, prompts, uniforms)
    frequency = responses.rewards.mean(dim=-1)
    # Hoeffding: eight means of `number` draws all lie within, but for one time in a million.
    bound = math.sqrt(math.log(2 * 8 / 1e-6) / (2 * number))
    rates = rates.gather(1, best)
    assert float(rates.max()) > 4 * bound
    assert float((frequency - rates).abs().max()) < bound


def test_samples_are_those_of_a_loop() -> None:
    weights, prompts = _some(2)
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(2, 2, K, MAX_TOKENS, generator=generator, dtype=torch.float64)
    uniforms[0, 0, 0] = 1 - 1e-16  # 1 after rounding: beyond every sum
    responses = sample(weights, prompts, uniforms)
    for place in itertools.product(range(2), range(2), range(K)):
        symbols = prompts.symbols[place[:2]].tolist()
        written: list[int] = []
        for t in range(MAX_TOKENS):
            token, below = -1, 0.0
            while token < NUM_TOKENS - 1 and float(uniforms[(*place, t)]) >= below:
                token += 1
                rest = [0] * (MAX_TOKENS - t - 1)
                below += float(
                    _plain(weights[place[0]], symbols, [*written, token, *rest])[t].exp()
                )
            written.append(token)
        assert responses.tokens[place].tolist() == written
        assert responses.states[place].tolist() == [NUM_TOKENS, *written[:-1]]
        is_right = written == prompts.answers[place[:2]].tolist()
        assert float(responses.rewards[place]) == is_right
    assert responses.is_token.all()


def test_answers_follow_a_table_of_each_seed() -> None:
    task = make_task(SEEDS)
    for seed in range(len(SEEDS)):
        symbols = torch.cat([task.training.symbols[seed], task.held_out.symbols[seed]])
        answers = torch.cat([task.training.answers[seed], task.held_out.answers[seed]])
        assert len(symbols.unique(dim=0)) == len(symbols)
        table: dict[tuple[int, int], int] = {}
        for prompt, answer in zip(symbols.tolist(), answers.tolist(), strict=True):
            for state, symbol, token in zip([NUM_TOKENS, *answer], prompt, answer, strict=False):
                assert table.setdefault((state, symbol), token) == token
    assert not torch.equal(task.training.answers[0], task.training.answers[1])


def test_a_task_depends_on_its_own_seed_alone() -> None:
    beside = make_task(SEEDS)
    alone = make_task(range(4, 5))
    assert torch.equal(alone.held_out.symbols[0], beside.held_out.symbols[1])
    assert torch.equal(alone.training.answers[0], beside.training.answers[1])
    # Float32: the order of a sum may depend on the number of seeds, and the warm start adds up.
    torch.testing.assert_close(alone.weights[0], beside.weights[1], rtol=1e-3, atol=1e-4)
    assert (beside.weights[0] - beside.weights[1]).abs().max() > 0.1


def test_parts_keep_symbols_and_answers_together() -> None:
    _, prompts = _some(6)
    picked = prompts.pick(torch.tensor([[4, 1], [0, 5]]))
    assert torch.equal(picked.symbols[0, 0], prompts.symbols[0, 4])
    assert torch.equal(picked.answers[1, 1], prompts.answers[1, 5])


def _setting(**changes: Any) -> Setting:
    settings = {"method": METHODS["gapo"], "learning_rate": 1e-3, "policy": "transformer"}
    return Setting(**{**settings, **changes})


@pytest.mark.parametrize("staleness", [0, 4])
def test_every_seeds_gradient_is_as_if_alone(staleness: int) -> None:
    """The rewards are drawn, because the short warm start finds too few right responses."""
    weights, prompts = _some(4)
    responses = _random_responses(prompts)
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(responses.rewards.shape, generator=generator)
    responses = replace(responses, rewards=(draws < 0.4).double())
    old = []
    for scale in (0.01, 0.02):
        noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        old.append(log_probs(Policy(weights + scale * noise, prompts), responses))
    setting = _setting(staleness=staleness, group_size=K)

    def gradient(part: slice) -> Tensor:
        given = Prompts(prompts.symbols[part], prompts.answers[part])
        written = Responses(*(getattr(responses, one.name)[part] for one in fields(Responses)))
        leaf = weights[part].clone().requires_grad_()
        before = (old[0][part], old[1][part])
        return trainer._gradient(leaf, given, written, before, setting)[0]

    together = gradient(slice(None))
    for seed in range(2):
        alone = gradient(slice(seed, seed + 1))
        torch.testing.assert_close(together[seed], alone[0], rtol=1e-9, atol=1e-12)
        assert alone.any()


def test_a_seeds_training_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(SEEDS)
    strange = task.weights.clone()
    strange[1] += 0.1
    curves = []
    for weights in (task.weights, strange):
        changed = replace(task, weights=weights)
        monkeypatch.setattr(transformer, "make_task", lambda _, changed=changed: changed)
        curves.append(train(_setting(num_steps=3), SEEDS, evaluate_every=1).curve)
    torch.testing.assert_close(curves[0][..., 0], curves[1][..., 0], rtol=1e-4, atol=1e-7)
    assert (curves[0][..., 1] - curves[1][..., 1]).abs().max() > 1e-3


def test_training_raises_the_pass_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "WARM_STEPS", 150)
    setting = _setting(num_steps=10)
    first, again = (train(setting, SEEDS, evaluate_every=5) for _ in range(2))
    assert torch.equal(first.curve, again.curve) and torch.equal(first.per_c, again.per_c)
    assert first.curve.shape == (3, 3, 2) and first.progress.shape == (3, 2)
    begin, _, end = first.curve[:, 0]
    assert bool((begin > 0.01).all()) and bool((begin < 0.2).all())
    assert bool((end > begin + 0.02).all())
    assert not first.curve[0, 2].any() and bool((first.curve[-1, 2] > 0.05).all())
