"""Batches sampled by older weights: the decoupled objective, and a clip around the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from gapo_megatron.batching import pack
from gapo_megatron.config import ObjectiveConfig
from gapo_megatron.device import Flags
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.loss import MinibatchLoss, may_lose_gradients
from gapo_megatron.learn.score import Scored
from gapo_megatron.logprob import RowPlan, Sequences
from gapo_megatron.objective import METHODS
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Microbatch, Minibatch
from tests.learn_setup import (
    GROUP_SIZE,
    Expected,
    assert_update,
    expected_update,
    load_model,
    make_config,
    make_judged,
    minibatches,
    run_learn,
    with_columns,
)
from tests.peers.reference import in_float64, response_log_probs

pytestmark = pytest.mark.usefixtures("process_group")

STALE = {"rollout": {"max_staleness": 1, "generation_ranks": 1}}
WIDTHS = {"eps_low": 0.02, "eps_high_max": 0.04}
LARGEST = 1.05


# --- one micro-batch ------------------------------------------------------------------------------


def make_inputs() -> tuple[Microbatch, Tensor, Tensor]:
    """Nine sequences of 1 to 9 tokens, with current and initial log-probs. One has A = 0."""
    random = np.random.default_rng(3)
    lengths = list(range(1, 10))
    ids = np.repeat(np.arange(9), lengths)
    shifts = np.array([0.1, -0.1, 0.02, -0.02, 0.0, 0.2, -0.2, 0.05, -0.05])[ids]

    def around(values: np.ndarray) -> np.ndarray:
        return (values + 0.05 * random.normal(size=len(ids))).astype(np.float32)

    rollout = -4 * random.random(len(ids)).astype(np.float32)
    begin = around(rollout + shifts)
    now = around(begin)
    sampled = Rollouts.of(
        [np.zeros(1, np.int32)] * 9,
        [np.zeros(length, np.int32) for length in lengths],
        np.split(rollout, np.cumsum(lengths)[:-1]),
    )
    batch = Batch(
        sampled.table,
        sampled.tokens,
        advantages=torch.tensor([0.75, -0.25, 0.5, -0.5, 0.0, 0.25, -0.75, -0.5, 0.5]).double(),
        num_correct=torch.tensor([1, 1, 2, 2, 4, 3, 3, 2, 2]),
        group_size=torch.full((9,), GROUP_SIZE),
        valid=torch.ones(9, dtype=torch.bool),
    )
    given = pack(batch, range(9), device="cpu")
    return given, torch.from_numpy(begin), torch.from_numpy(now).requires_grad_()


def microbatch_loss(
    given: Microbatch, begin: Tensor, now: Tensor, objective: ObjectiveConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = MinibatchLoss(
        # Denominators are larger than the computed counts.
        Minibatch(((tuple(range(9)),),), num_tokens_global=100, num_sequences_global=12),
        [given],
        is_first=False,
        old_log_probs=[begin],
        ref_log_probs=[],
        objective=objective,
        method=objective.resolve(),
        rollouts_per_prompt=GROUP_SIZE,
        max_response_tokens=24,
        measures_staleness=False,
    )
    flags = Flags()
    sequences = Sequences(given.sequence_ids, given.row_offsets)
    return loss(Scored(0, now, None, flags, None, RowPlan(flags, (0, len(now))), sequences))


@pytest.mark.parametrize("method", [*METHODS])
def test_a_tokens_weight_multiplies_its_gradient_in_every_family(method: str) -> None:
    """So nothing else changes: neither the loss, nor which ratios are clipped."""
    given, begin, now = make_inputs()
    results = []
    for objective in ({}, {"importance_weights": "token", "importance_weight_max": LARGEST}):
        settings = ObjectiveConfig.model_validate({"method": method} | objective)
        loss, sums = microbatch_loss(given, begin, now, settings)
        results.append((loss, sums, torch.autograd.grad(loss, now)[0]))
    (loss, sums, plain), (weighted_loss, weighted_sums, weighted) = results
    old, engine = begin.tolist(), given.rollout_log_probs.tolist()
    weights = [min(math.exp(a - b), LARGEST) for a, b in zip(old, engine, strict=True)]
    expected = [w * g for w, g in zip(weights, plain.tolist(), strict=True)]
    assert weighted.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert torch.equal(loss, weighted_loss)
    assert all(torch.equal(weighted_sums[name], value) for name, value in sums.items())
    assert 0 < weights.count(LARGEST) < len(weights) and min(weights) < 0.95
    assert float(weighted_sums["importance_weights"]) == pytest.approx(sum(weights), rel=1e-6)
    assert float(weighted_sums["importance_weights_cut"]) == weights.count(LARGEST)
    assert float(weighted_sums["importance_weights_count"]) == len(weights)


def test_the_engines_ratios_may_be_clipped_from_the_start() -> None:
    def answers(**objective: Any) -> list[bool]:
        settings = ObjectiveConfig.model_validate(objective)
        method = settings.resolve()
        return [may_lose_gradients(settings, method, has_moved=moved) for moved in (False, True)]

    assert answers() == [False, True]
    assert answers(old_log_probs="rollout") == [True, True]
    assert answers(old_log_probs="rollout", method="cispo") == [False, False]
    assert answers(old_log_probs="rollout", entropy_coef=0.1) == [False, False]
    # A mask leaves out whole responses, whatever the family does to a ratio.
    assert answers(method="cispo", off_policy_mask=1e-3) == [False, True]
    assert answers(old_log_probs="rollout", method="cispo", off_policy_mask=1e-3) == [True, True]
    assert answers(method="opsm") == answers(method="gmpo") == [False, True]
    assert answers(method="sapo") == [False, False]


# --- whole steps ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(folder: Path) -> Rollouts:
    """Sampled by other weights than those in `folder`, with those weights' log-probs."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(1)
    judged = make_judged()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 2e-3 * torch.randn(weight.shape, generator=generator)
        found = response_log_probs(
            in_float64(model),
            [ids.tolist() for ids in judged.prompt_ids.values()],
            [ids.tolist() for ids in judged.response_ids.values()],
            make_config(folder).rollout.temperature,
        )
    return with_columns(judged, rollout_log_probs=[one.float().numpy() for one in found])


def around_engine(rollouts: Rollouts) -> Rollouts:
    """Rollouts for the reference, with the engine's log-probs as old log-probs."""
    return with_columns(rollouts, carried_log_probs=[*rollouts.rollout_log_probs.values()])


def engine_gap(rollouts: Rollouts, expected: Expected) -> Tensor:
    """|trainer - engine| of every token computed; `expected` is at the step's weights."""
    gaps = [
        expected.log_probs[i] - torch.from_numpy(rollouts.rollout_log_probs[i])
        for i in expected.ratios
    ]
    return torch.cat(gaps).abs()


def test_a_stale_batch_is_clipped_around_the_step_and_weighted(
    folder: Path, rollouts: Rollouts
) -> None:
    objective = {"importance_weight_max": 1.005}
    config = make_config(folder, objective=objective, **STALE)
    found = run_learn(config, rollouts)
    old, gaps = load_model(folder), []
    weights: list[float] = []
    outside: list[bool] = []
    for number, part in enumerate(minibatches(rollouts)):
        model = load_model(folder, found.updates[number].weights)
        expected = expected_update(model, part, old=old, config=config)
        assert_update(found.updates[number], expected, start=number * len(part))
        weights += expected.importance_weights.values()
        # The same rule, around the engine's log-probs, at the weights that the step began with.
        unweighted = make_config(folder)
        at_begin = expected_update(old, around_engine(part), old=old, config=unweighted)
        outside += at_begin.clipped.values()
        gaps.append(engine_gap(part, at_begin))
    assert set(found.updates[0].ratios.values()) == {1.0}
    assert max(weights) == 1.005 and min(weights) < 0.995
    metrics = found.metrics
    assert metrics["mismatch/importance_weight"] == pytest.approx(np.mean(weights), rel=1e-5)
    assert metrics["mismatch/outside_clip"] == pytest.approx(np.mean(outside))
    assert 0 < metrics["clip/fraction_sequences"] < metrics["mismatch/outside_clip"] < 1
    gap = float(torch.cat(gaps).mean())
    assert metrics["mismatch/mean_abs_log_prob_diff"] == pytest.approx(gap, abs=1e-6)
    # On-policy the same step has the same bits, and no such metric.
    plain = run_learn(make_config(folder, objective=objective), rollouts)
    assert plain.metrics.keys() == metrics.keys() - {"mismatch/outside_clip"}
    assert all(metrics[key] == value for key, value in plain.metrics.items())


def test_a_clip_around_the_engine_needs_no_old_pass(
    folder: Path, rollouts: Rollouts, tmp_path: Path
) -> None:
    config = make_config(folder, objective={"old_log_probs": "rollout"}, **STALE)
    skips = []
    update = learn_module.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        skips.append(kwargs["skip_inactive"])
        return update(*args, **kwargs)

    with (
        patch.object(learn_module, "log_probs", side_effect=AssertionError("a pass")),
        patch.object(learn_module, "update", watched),
    ):
        found = run_learn(config, rollouts)
    assert skips == [True, True]
    plain = make_config(folder)
    for number, part in enumerate(minibatches(rollouts)):
        model = load_model(folder, found.updates[number].weights)
        expected = expected_update(model, around_engine(part), old=model, config=plain)
        assert_update(found.updates[number], expected, start=number * len(part))
        assert 1.0 not in expected.ratios.values()
        if number == 0:
            flags, gap = list(expected.clipped.values()), engine_gap(part, expected)
    metrics = found.metrics
    assert metrics["skip/old_pass_token_share"] == 1.0
    assert metrics["skip/backward_token_share"] > metrics["skip/forward_token_share"]
    # Of the first mini-batch only: other log-probs are not computed before an update.
    assert metrics["mismatch/outside_clip"] == pytest.approx(np.mean(flags))
    assert 0 < np.mean(flags) < 1
    mean, largest = (metrics[f"mismatch/{m}_abs_log_prob_diff"] for m in ("mean", "max"))
    assert (mean, largest) == pytest.approx((float(gap.mean()), float(gap.max())), abs=5e-6)
    # Stopped after its first update and resumed: the same bits.
    resumed = run_learn(config, rollouts, stop_in=tmp_path)
    assert resumed.metrics == metrics
    assert all(torch.equal(resumed.after[name], weight) for name, weight in found.after.items())


def test_without_a_computed_sequence_there_is_nothing_to_compare(folder: Path) -> None:
    """No group of the first mini-batch has an advantage: empty means have no key."""
    rollouts = make_judged(("wwww", "cccc", "cwww", "ccww"))
    config = make_config(folder, objective={"old_log_probs": "rollout"}, **STALE)
    metrics = run_learn(config, rollouts).metrics
    assert "clip/fraction_sequences" in metrics
    assert not [name for name in metrics if name.startswith("mismatch/")]


@pytest.mark.parametrize("weights", ["sequence", "token"])
def test_equal_log_probs_have_weights_of_one_and_the_same_bits(weights: str) -> None:
    given, begin, now = make_inputs()
    given = replace(given, rollout_log_probs=begin.clone())
    results = []
    weighted = {"importance_weights": weights, "importance_weight_max": 1.0}
    for fields in (WIDTHS, WIDTHS | weighted):
        found = microbatch_loss(given, begin, now, ObjectiveConfig.model_validate(fields))
        results.append((*found, *torch.autograd.grad(found[0], now)))
    (loss, _, gradient), (weighted_loss, sums, weighted_gradient) = results
    assert torch.equal(loss, weighted_loss) and torch.equal(gradient, weighted_gradient)
    num_weights = len(given.advantages) if weights == "sequence" else len(now)
    assert float(sums["importance_weights"]) == num_weights


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_tokens_of_several_versions_are_learned_as_those_of_a_stale_batch(
    folder: Path, rollouts: Rollouts, max_staleness: int
) -> None:
    """The same bits; but what a clip around the sampling weights would cut is counted always."""
    objective = {"importance_weights": "token", "importance_weight_max": 1.005}
    ahead = {"generation_ranks": 1, "max_staleness": max_staleness}
    config = make_config(folder, objective=objective, rollout=ahead)
    versions = [np.arange(len(ids) // 2, dtype=np.int32) for ids in rollouts.response_ids.values()]
    several = run_learn(config, with_columns(rollouts, carried_versions=versions))
    stale = run_learn(make_config(folder, objective=objective, **STALE), rollouts)
    assert set(several.updates[0].ratios.values()) == {1.0}
    assert all(torch.equal(several.after[name], weight) for name, weight in stale.after.items())
    by_age = {"clip/fraction_sequences_carried", "clip/fraction_sequences_new"}
    assert several.metrics.keys() - by_age == stale.metrics.keys() - by_age
    assert "mismatch/outside_clip" in several.metrics and by_age & several.metrics.keys()
    for name in stale.metrics.keys() - by_age:
        assert several.metrics[name] == stale.metrics[name], name
