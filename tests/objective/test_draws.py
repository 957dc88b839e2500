"""Random numbers of a token's place: the published generator, layouts, and how random they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import Sequences
from gapo_megatron.objective import METHODS, draws
from gapo_megatron.rollouts import ROW
from tests.messages import mentions
from tests.objective.response import loss_of
from tests.objective_reference import split_mix

PUBLISHED = (6457827717110365317, 3203168211198807973, 9817491932198370423)
"""First outputs of SplitMix64 for the seed 1234567, as published with it."""


def keys_of(
    problems: list[int], samples: list[int], *, seed: int = 0, step: int = 0
) -> torch.Tensor:
    table = np.zeros(len(problems), dtype=ROW)
    table["problem"], table["sample"] = problems, samples
    return draws.with_step(draws.keys_of(table), seed=seed, step=step)


def test_the_generator_is_the_published_one() -> None:
    """A key is its seed, and a sequence's tokens are its outputs: the upper 53 bits of each."""
    sequences = Sequences.of(torch.zeros(3, dtype=torch.int64), 1)
    found = draws.uniforms(torch.tensor([1234567]), sequences)
    assert found.tolist() == [(output >> 11) / 2**53 for output in PUBLISHED]
    assert split_mix(1234567) == PUBLISHED[0]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    shuffle=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**62),
    step=st.integers(0, 10**6),
)
def test_a_tokens_number_is_the_same_in_every_packing(
    lengths: list[int], shuffle: object, seed: int, step: int
) -> None:
    keys = keys_of([7] * len(lengths), [*range(len(lengths))], seed=seed, step=step)
    alone = [
        draws.uniforms(key[None], Sequences.of(torch.zeros(count, dtype=torch.int64), 1)).tolist()
        for key, count in zip(keys, lengths, strict=True)
    ]
    ids = [i for i, count in enumerate(lengths) for _ in range(count)]
    shuffle.shuffle(ids)  # type: ignore[attr-defined]
    packed = draws.uniforms(keys, Sequences.of(torch.tensor(ids).long(), len(lengths)))
    for i, expected in enumerate(alone):
        assert packed[torch.tensor(ids) == i].tolist() == expected
    assert draws.uniforms(keys, None).tolist() == [
        draws.uniforms(key[None], Sequences.of(torch.zeros(1).long(), 1)).item() for key in keys
    ]


def test_every_part_of_the_place_counts() -> None:
    """Seed, step, problem, sample and token: 20,000 numbers each, all uniform, none twice."""
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]
    sequences = Sequences.of(torch.zeros(20_000, dtype=torch.int64), 1)
    rows = torch.stack(
        [
            draws.uniforms(keys_of([problem], [sample], seed=seed, step=step), sequences)
            for seed, step, problem, sample in places
        ]
    )
    assert len(rows.unique()) == rows.numel() and rows.min() >= 0 and rows.max() < 1
    counts = torch.stack([row.histc(100, 0, 1) for row in rows])
    # Poisson of mean 200: six deviations are 85.
    assert bool(((counts - 200).abs() < 85).all())
    # Correlations of independent rows have a deviation of 1 / sqrt(20,000) = 0.007.
    assert (torch.corrcoef(rows) - torch.eye(len(places))).abs().max() < 0.04
    assert (torch.corrcoef(torch.stack([rows[0, 1:], rows[0, :-1]]))[0, 1]).abs() < 0.04


@pytest.mark.parametrize(("advantage", "bound", "far"), [(0.5, 1.28, 1.4), (-0.5, 0.8, 0.74)])
def test_nsr_keeps_a_token_with_the_probability_of_its_distance(
    advantage: float, bound: float, far: float
) -> None:
    """1/2 at the bound, that of its noise further out, 0 beyond what the noise brings back."""
    size = 20_000
    old = torch.full((size,), -1.0, dtype=torch.float64)
    for ratio in (bound, far, 2 * far - bound):
        log_probs = (old + np.log(ratio) + 1e-9 * np.sign(advantage)).requires_grad_()
        result = loss_of(METHODS["nsr"], advantage, log_probs, old, keys=torch.tensor([5]))
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        share = (bound / ratio - 0.9) / 0.2
        share = min(max(share if advantage > 0 else 1 - share, 0), 1)
        kept = float((gradient != 0).double().mean())
        assert kept == pytest.approx(share, abs=0.02)  # five deviations of the share
        assert float(result.metrics["rescued"].mean()) == kept
        assert bool((result.clipped == (gradient == 0)).all())
        expected = -advantage * ratio / size
        assert gradient[gradient != 0].tolist() == pytest.approx(
            [expected] * int((gradient != 0).sum()), rel=1e-8
        )


def test_a_loss_by_chance_without_a_place_is_refused() -> None:
    log_probs = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=mentions("'nsr'", "keys")):
        loss_of(METHODS["nsr"], 0.5, log_probs, log_probs)
