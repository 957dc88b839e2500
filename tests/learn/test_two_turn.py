"""A batch of two-turn episodes through `learn`, against a float64 loop over its tokens.

The loop is written from the paper and knows neither packing nor tables: tokens that the
environment appended are skipped, and every denominator is the whole mini-batch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from gapo_megatron.batching import pack
from gapo_megatron.config import Config
from gapo_megatron.device.flags import Flags
from gapo_megatron.learn import loss as loss_module
from gapo_megatron.learn.forward import Scored
from gapo_megatron.learn.loss import MinibatchLoss
from gapo_megatron.learn.metrics import Sums, add
from gapo_megatron.logprob import Sequences
from gapo_megatron.objective import PolicyLoss, make_batch
from gapo_megatron.objective.diagnostics import SUMS
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.acting import EOS, calls_of
from tests.batches import make_rollouts
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import VOCAB_SIZE, save_model
from tests.learn_setup import (
    GROUP_SIZE,
    VERDICTS,
    Report,
    load_model,
    make_config,
    minibatches,
    planned,
    run_learn,
)
from tests.peers.reference import in_float64, response_log_probs
from tests.scripted_engine import ScriptedEngine
from tests.two_turn import TwoTurn

METHODS = {
    # ratio of the whole sequence; lower and upper width; divided by the standard deviation;
    # each token counts the same, or each sequence.
    "gapo": (True, 3e-3, 5e-3, False, "tokens"),
    "gspo": (True, 3e-3, 3e-3, False, "tokens"),
    "grpo": (False, 0.2, 0.2, True, "sequences"),
    "dapo": (False, 0.2, 0.28, True, "tokens"),
}
ROUNDING = 1e-13
"""Float64 sums of some hundred terms of order 1, in another order."""
MAX_TOKENS = 24


class Answers(TwoTurn):
    """Says one to six tokens after the first turn, by the problem; to some episodes nothing."""

    def __init__(self) -> None:
        super().__init__(())

    def respond(self, episode: Episode) -> Sequence[int] | None:
        if episode.response_mask is not None or (int(episode.prompt.id) + episode.sample) % 7 == 0:
            return None
        return [2 + int(episode.prompt.id)] * (1 + int(episode.prompt.id) % 6)


def draws(request: Request) -> list[int]:
    """Random tokens and EOS: the first turn is short, the second often too long for the limit."""
    random = np.random.default_rng([request.seed, len(request.response_ids)])
    longest = 18 if len(request.response_ids) else 8
    return [*random.integers(2, VOCAB_SIZE, random.integers(0, longest)).tolist(), EOS]


def two_turns() -> Rollouts:
    """Ten problems of four episodes, as `generate` makes them; those of the last are begun."""
    prompts = [Prompt(str(i), tuple(range(3, 5 + i % 4)), answer="") for i in range(len(VERDICTS))]
    given = np.array([9, 8, 7], np.int32)
    begun = {
        prompts[-1].id: tuple(
            Episode(
                prompts[-1], i, given, np.zeros(3, np.float32), finished=False,
                response_mask=np.zeros(3, bool),
            )
            for i in range(GROUP_SIZE)
        )
    }  # fmt: skip
    settings = SamplingSettings(num_samples=GROUP_SIZE, max_response_tokens=MAX_TOKENS, seed=3)
    calls = calls_of(Answers().respond, max_response_tokens=MAX_TOKENS)
    engine = ScriptedEngine(draws, log_prob=-4.0)
    groups = generate(engine, prompts, settings, calls=calls, begun=begun)
    assert groups is not None
    episodes = [one for group in groups for one in group]
    masks = ["".join("+-"[not one] for one in episode.is_sampled) for episode in episodes]
    assert any("+-" in mask and "-+" in mask for mask in masks)  # appended between sampled ones
    assert any(mask.startswith("-") for mask in masks) and any("-" not in mask for mask in masks)
    assert {one.truncated for one in episodes} == {True, False}
    assert len({len(one.token_ids) for one in episodes}) > 5
    return make_rollouts(groups, VERDICTS)


ROLLOUTS = two_turns()


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Loop:
    """What the equations say about a mini-batch."""

    loss: Tensor
    """Float64, with autograd."""
    log_ratios: dict[int, list[float]]
    """Of the sequences with A != 0, by row: one D, or one for each token."""
    clipped: dict[int, list[bool]]
    sums: dict[tuple[str, int], dict[str, float]]
    """By side and c."""


def loop(name: str, rollouts: Rollouts, new: Mapping[int, Tensor], old: Any) -> Loop:
    """Every sequence and every sampled token in turn; `new` and `old` hold sampled tokens only."""
    of_sequence, eps_low, eps_high_max, divides, counted = METHODS[name]
    rewards = rollouts.rewards.reshape(-1, GROUP_SIZE)
    valid = [row for row in range(len(rollouts)) if not math.isnan(rollouts.rewards[row])]
    num_tokens = sum(len(new[row]) for row in valid)  # those with A = 0, too
    found = Loop(torch.zeros((), dtype=torch.float64), {}, {}, {})
    for row in valid:
        group = [r for r in rewards[row // GROUP_SIZE].tolist() if not math.isnan(r)]
        c, k, reward = sum(group), len(group), float(rollouts.rewards[row])
        advantage = reward - c / k
        if advantage == 0:
            continue
        if divides:
            advantage /= math.sqrt(sum((r - c / k) ** 2 for r in group) / (k - 1))
        high = eps_low if name == "gapo" and not reward else eps_high_max
        if name == "gapo" and reward:
            high = eps_low + (eps_high_max - eps_low) * (k - c) / (k - 1)
        differences = [new[row][t] - old[row][t] for t in range(len(new[row]))]
        logs = [sum(differences) / len(differences)] if of_sequence else differences
        losses, clips = [], []
        for log in logs:
            free = -advantage * torch.exp(log)
            bound = -advantage * torch.exp(log).clamp(1 - eps_low, 1 + high)
            losses.append(torch.maximum(free, bound))
            clips.append(bool(bound > free))
        carried = losses * len(differences) if of_sequence else losses
        mean = sum(carried) / len(carried)
        weight = 1 / len(valid) if counted == "sequences" else len(carried) / num_tokens
        found.loss = found.loss + weight * mean
        found.log_ratios[row] = [float(log.detach()) for log in logs]
        found.clipped[row] = clips
        _count(found, row, "correct" if reward else "wrong", int(c), advantage, len(differences))
    return found


def _count(found: Loop, row: int, side: str, c: int, advantage: float, length: int) -> None:
    deviations = [math.exp(log) - 1 for log in found.log_ratios[row]]
    share = sum(found.clipped[row]) / len(deviations)
    values = {
        "sequences": 1.0,
        "tokens": float(length),
        "advantage": advantage,
        "clipped_sequences": share,
        "clipped_tokens": share * length,
        "deviation": sum(deviations) / len(deviations),
        "abs_deviation": sum(map(abs, deviations)) / len(deviations),
    }
    sums = found.sums.setdefault((side, c), dict.fromkeys(values, 0.0) | {"max": 0.0})
    for key, value in values.items():
        sums[key] += value
    sums["max"] = max(sums["max"], *map(abs, deviations))


# --- the loss of micro-batches, in float64 --------------------------------------------------------


def config_of(folder: Path, method: str, *, tokens: int = 48, **sizes: Any) -> Config:
    return make_config(
        folder,
        objective={"method": method},
        rollout={"max_response_tokens": MAX_TOKENS},
        batch={"max_tokens_per_microbatch": tokens},
        parallel=sizes,
        # The second mini-batch has ratios within the clip and beyond it.
        optimizer={"learning_rate": 3e-3 if method in ("grpo", "dapo") else 3e-4},
    )


def log_probs_of(rollouts: Rollouts, *, scale: float) -> tuple[dict[int, Tensor], Any]:
    """New ones and old ones of the sampled tokens, by row: some D or ratios beyond every clip."""
    generator = torch.Generator().manual_seed(5)
    new, old = {}, {}
    for row, count in enumerate(rollouts.table["num_sampled_tokens"].tolist()):
        old[row] = -4 * torch.rand(count, generator=generator, dtype=torch.float64)
        shift = torch.randn(1, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        new[row] = (old[row] + scale * (shift + noise)).requires_grad_()
    return new, old


def microbatch_losses(
    config: Config, rollouts: Rollouts, new: Mapping[int, Tensor], old: Any, *, dp_size: int
) -> tuple[list[Tensor], list[Sums], dict[int, PolicyLoss]]:
    """Loss and sums of every mini-batch, added over ranks and micro-batches; ratios by row."""
    batch = make_batch(rollouts, config.objective.resolve())
    batch = planned(batch, config, data_parallel_size=dp_size)
    assert batch.plan is not None
    losses, sums, ratios = [], [], {}
    policy_loss = loss_module.policy_loss

    def watched(*args: Any, **kwargs: Any) -> PolicyLoss:
        results.append(policy_loss(*args, **kwargs))
        return results[-1]

    for minibatch in batch.plan.minibatches:
        total, found = torch.zeros((), dtype=torch.float64), Sums()
        for indices_of_rank in minibatch.microbatches:
            packed = [pack(batch, indices, device="cpu") for indices in indices_of_rank]

            def joined(values: Any, numbers: Sequence[int]) -> Tensor:
                return torch.cat([torch.zeros(0).double(), *(values[i] for i in numbers)])

            results: list[PolicyLoss] = []
            head = MinibatchLoss(
                minibatch, packed, False, [joined(old, i) for i in indices_of_rank], (),
                config.objective, rollouts_per_prompt=GROUP_SIZE, max_response_tokens=MAX_TOKENS,
                measures_staleness=False,
            )  # fmt: skip
            with patch.object(loss_module, "policy_loss", watched):
                for number, indices in enumerate(indices_of_rank):
                    plan: Any = None  # of the head, which is not run
                    rows = Sequences(packed[number].sequence_ids, packed[number].row_offsets)
                    scored = Scored(number, joined(new, indices), None, Flags(), None, plan, rows)
                    loss, more = head(scored)
                    total = total + loss
                    add(found, more)
                    ratios |= _by_row(results[-1], packed[number].sequence_ids, indices)
        losses.append(total)
        sums.append(found)
    return losses, sums, ratios


def _by_row(result: PolicyLoss, sequence_ids: Tensor, indices: Sequence[int]) -> dict[int, Any]:
    """Ratios and clips of each sequence."""
    pairs = [*zip(result.ratio.tolist(), result.clipped.tolist(), strict=True)]
    if not result.per_token:
        return {row: [pair] for row, pair in zip(indices, pairs, strict=True)}
    ids = sequence_ids.tolist()
    return {
        row: [pair for pair, i in zip(pairs, ids, strict=True) if i == number]
        for number, row in enumerate(indices)
    }


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [32, 64, 4096])
@pytest.mark.parametrize("method", METHODS)
def test_losses_gradients_and_metrics_are_those_of_the_loop(
    method: str, tokens: int, dp_size: int
) -> None:
    """In float64, to its rounding, for every packing and number of ranks."""
    config = config_of(Path("unused"), method, tokens=tokens)
    scale = 0.2 if method in ("grpo", "dapo") else 4e-3
    new, old = log_probs_of(ROLLOUTS, scale=scale)
    losses, sums, found = microbatch_losses(config, ROLLOUTS, new, old, dp_size=dp_size)
    start, flags = 0, []
    for loss, more, part in zip(losses, sums, minibatches(ROLLOUTS), strict=True):
        rows = range(start, start + len(part))
        here = [{i: values[row] for i, row in enumerate(rows)} for values in (new, old)]
        expected = loop(method, part, *here)
        start += len(part)
        assert float(loss) == pytest.approx(float(expected.loss), rel=ROUNDING, abs=ROUNDING)
        ours, theirs = (
            torch.autograd.grad(one, [new[row] for row in rows], allow_unused=True)
            for one in (loss, expected.loss)
        )
        for row, (one, other) in zip(rows, zip(ours, theirs, strict=True), strict=True):
            zeros = torch.zeros_like(new[row])
            one, other = (zeros if grad is None else grad for grad in (one, other))
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-16), row
        assert {row for row in found if row in rows} == {i + rows[0] for i in expected.log_ratios}
        for i, logs in expected.log_ratios.items():
            ratios, clips = zip(*found[i + rows[0]], strict=True)
            assert ratios == pytest.approx([math.exp(log) for log in logs], rel=ROUNDING)
            assert [*clips] == expected.clipped[i]
            flags += clips
        _assert_sums(more, expected)
    assert {*flags} == {True, False}


def _assert_sums(found: Sums, expected: Loop) -> None:
    """Statistics by side and c; nothing is counted elsewhere."""
    cells, largest = found["per_c"], found["per_c_max"]
    for side, number in (("wrong", 0), ("correct", 1)):
        for c in range(GROUP_SIZE + 1):
            sums = expected.sums.get((side, c), {})
            for key in ("sequences", "tokens", "advantage", "clipped_sequences", "clipped_tokens"):
                value = float(cells[SUMS.index(key), number, c])
                assert value == pytest.approx(sums.get(key, 0.0), rel=1e-12), (side, c, key)
            for key in ("deviation", "abs_deviation"):
                value = float(cells[SUMS.index(key), number, c])
                assert value == pytest.approx(sums.get(key, 0.0), rel=1e-10, abs=1e-15)
            assert float(largest[number, c]) == pytest.approx(sums.get("max", 0.0), rel=1e-10)


# --- the whole step, with a model -----------------------------------------------------------------

LAYOUTS: dict[str, dict[str, object]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
LEARNED = ("gapo", "grpo", "dapo")


def learn_in_every_layout(folder: Path) -> dict[tuple[str, str], Report]:
    return {
        (name, method): run_learn(config_of(folder, method, **sizes), ROLLOUTS)
        for name, sizes in LAYOUTS.items()
        for method in LEARNED
    }


def expected_of(method: str, report: Report, folder: Path, number: int) -> tuple[Loop, Any]:
    """The loop over a float64 model's log-probs, and the loss's gradients of its weights."""
    part = minibatches(ROLLOUTS)[number]
    rows = range(len(part))
    now = in_float64(load_model(folder, report.updates[number].weights))
    texts = [
        [part.prompt_ids[i].tolist() for i in rows],
        [part.response_ids[i].tolist() for i in rows],
    ]
    values = []
    for model in (now, in_float64(load_model(folder))):
        whole = response_log_probs(model, *texts, 0.8)
        values.append({i: whole[i][torch.from_numpy(part.is_sampled(i))] for i in rows})
    expected = loop(method, part, values[0], {i: one.detach() for i, one in values[1].items()})
    weights = dict(now.named_parameters())
    return expected, dict(
        zip(weights, torch.autograd.grad(expected.loss, [*weights.values()]), strict=True)
    )


@pytest.mark.system
def test_a_step_is_that_of_the_loop_in_every_layout(tmp_path: Path) -> None:
    """Megatron-core in float32 on one rank, and data or tensor parallel on two."""
    save_model(tmp_path, "qwen2_tied")
    with single_rank():
        alone = {method: run_learn(config_of(tmp_path, method), ROLLOUTS) for method in LEARNED}
    ranks = run_distributed(learn_in_every_layout, 2, tmp_path)
    for method in LEARNED:
        layouts = {name: [rank[name, method] for rank in ranks] for name in LAYOUTS}
        for name, reports in ({"one": [alone[method]]} | layouts).items():
            for number in range(len(reports[0].updates)):
                expected, gradients = expected_of(method, reports[0], tmp_path, number)
                seen = [report.updates[number] for report in reports]
                # Float32 log-probs of order 5, each to about 1e-6.
                loss = sum(one.loss for one in seen)
                assert loss == pytest.approx(float(expected.loss), abs=1e-6), (name, method)
                for key, whole in gradients.items():
                    error = (seen[0].gradients[key].double() - whole).norm()
                    assert error <= 3e-5 * whole.norm(), (name, method, number, key)
        for name, reports in layouts.items():
            for key, value in alone[method].metrics.items():
                if key.startswith(("clip/", "ratio/", "per_c/", "loss/")):
                    bound = 3e-5 if "correlation" in key or "max" in key else 3e-6
                    found = reports[0].metrics[key]
                    assert found == pytest.approx(value, rel=1e-5, abs=bound), (name, method, key)
