"""`learn` on one rank: old log-probs, penalties, denominators and metrics of a step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapo_megatron.batching import pack
from gapo_megatron.learn.checks import rounding
from gapo_megatron.learn.metrics import Sums, add, add_over_ranks
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import SUMS
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed
from tests.distributed.policy_setup import equal
from tests.learn_setup import (
    GROUP_SIZE,
    NUM_MINIBATCHES,
    VERDICTS,
    Report,
    assert_update,
    carry_some,
    expected_update,
    load_model,
    make_config,
    make_judged,
    mask_some,
    minibatches,
    planned,
    run_learn,
    with_columns,
)
from tests.peers.reference import in_float64

pytestmark = pytest.mark.usefixtures("process_group")

ROLLOUTS = make_judged(seed=1)
ONE_MINIBATCH = {"minibatch_prompts": len(VERDICTS)}


def step(
    folder: Path,
    rollouts: Rollouts = ROLLOUTS,
    *,
    num_steps: int = 1,
    **sections: dict[str, Any],
) -> Report:
    return run_learn(make_config(folder, **sections), rollouts, num_steps=num_steps)


def rows_of(rollouts: Rollouts, *, active: bool) -> list[int]:
    """All valid rows, or those with A != 0."""
    rewards = rollouts.rewards.reshape(-1, GROUP_SIZE)
    is_valid = ~np.isnan(rewards)
    if active:
        is_valid &= ((rewards == 1).any(axis=1) & (rewards == 0).any(axis=1))[:, None]
    return np.flatnonzero(is_valid).tolist()


def test_a_single_mini_batch_has_ratio_one(folder: Path) -> None:
    report = step(folder, batch=ONE_MINIBATCH)
    (update,) = report.updates
    assert sorted(update.ratios) == rows_of(ROLLOUTS, active=True)
    assert set(update.ratios.values()) == {1.0} and not any(update.clipped.values())
    for key, value in report.metrics.items():
        if key.startswith(("clip/", "ratio/")):
            assert value == 0.0, key
    # With s = 1 the loss is the mean of -A: in float64, where no log-prob enters.
    model = load_model(folder)
    expected = expected_update(model, ROLLOUTS, old=model, config=make_config(folder))
    assert report.metrics["loss/policy"] == pytest.approx(expected.loss, abs=1e-15)


def test_a_pass_of_its_own_gives_the_ratio_one_too(folder: Path) -> None:
    """The first update changes no weight: the old pass must have the bits of the second's pass."""
    rollouts = make_judged(("wwww", "cccc", "wwww", "cwww", "ccww", "cwcc"))
    report = step(folder, rollouts, optimizer={"weight_decay": 0.0})
    first, second = report.updates
    assert first.ratios == {} and first.grad_norm == 0.0
    assert len(second.ratios) == 12 and set(second.ratios.values()) == {1.0}
    assert not any(second.clipped.values())


def test_tokens_of_earlier_steps_keep_their_old_log_probs(folder: Path) -> None:
    """Ratio, loss and gradient of a mixed old policy, in the first mini-batch too."""
    config = make_config(folder)
    rollouts = carry_some(ROLLOUTS, config)
    is_carried = rollouts.table["num_carried_tokens"] > 0
    report = step(folder, rollouts)
    old = load_model(folder)
    gaps, clipped = [], []
    for number, (update, part) in enumerate(
        zip(report.updates, minibatches(rollouts), strict=True)
    ):
        model = load_model(folder, update.weights)
        expected = expected_update(model, part, old=old, config=config)
        assert_update(update, expected, start=number * len(part))
        clipped += [flag for i, flag in expected.clipped.items() if expected.ratios[i] != 1]
        at_old = expected_update(old, part, old=old, config=config)
        for i in expected.ratios:
            values = at_old.log_probs[i].clone()
            then = torch.from_numpy(part.carried_log_probs[i])
            values[: len(then)] = then
            gaps.append((values - torch.from_numpy(part.rollout_log_probs[i])).abs())
    assert {True, False} <= set(clipped)
    # Tokens of this step need no old pass in the first mini-batch, and have none.
    for i, ratio in report.updates[0].ratios.items():
        assert (ratio == 1.0) != is_carried[i]
    skipped = "skip/old_pass_token_share"
    assert report.metrics[skipped] == step(folder).metrics[skipped]
    # Ratios of older tokens start an update away from 1, and are clipped more often.
    flags: dict[bool, list[bool]] = {True: [], False: []}
    for update in report.updates:
        for i, flag in update.clipped.items():
            flags[bool(is_carried[i])].append(flag)
    for name, found in {"carried": flags[True], "new": flags[False]}.items():
        expected_share = sum(found) / len(found)
        key = f"clip/fraction_sequences_{name}"
        assert report.metrics[key] == pytest.approx(expected_share), key
        assert key not in step(folder).metrics
    assert sum(flags[True]) > sum(flags[False])
    # The engine's log-probs are compared with those of the same weights.
    mean = float(torch.cat(gaps).mean())
    assert report.metrics["mismatch/mean_abs_log_prob_diff"] == pytest.approx(mean, abs=1e-6)


def test_metrics_are_means_over_what_was_computed(folder: Path) -> None:
    metrics = step(folder).metrics
    old = load_model(folder)
    config = make_config(folder)
    difference, fed = [], {True: 0, False: 0}
    for number, part in enumerate(minibatches(ROLLOUTS)):
        active = rows_of(part, active=True)
        # At the initial weights, also for the second mini-batch.
        expected = expected_update(old, part, old=old, config=config)
        for i in part.rows_here:
            fed[i in active] += len(part.prompt_ids[i]) + len(part.response_ids[i]) - 1
            if i in active:
                theirs = torch.from_numpy(part.rollout_log_probs[i])
                difference.append(expected.log_probs[i] - theirs)
        assert active, number
    gap = torch.cat(difference).abs()
    # float32 log-probs of order 5, to about 1e-6.
    assert metrics["mismatch/mean_abs_log_prob_diff"] == pytest.approx(float(gap.mean()), abs=1e-6)
    assert metrics["mismatch/max_abs_log_prob_diff"] == pytest.approx(float(gap.max()), abs=5e-6)
    assert metrics["skip/forward_token_share"] == fed[False] / (fed[True] + fed[False])
    assert metrics["optim/learning_rate"] == config.optimizer.learning_rate


def test_skipped_shares_are_those_counted_by_hand(folder: Path) -> None:
    # No room around 1: whatever moved as its advantage wants it is clipped.
    report = step(folder, objective={"eps_low": 1e-7, "eps_high_max": 1e-7})
    config = make_config(folder)
    batch = planned(make_batch(ROLLOUTS, config.objective.resolve()), config)
    assert batch.plan is not None
    lengths, response_lengths = batch.num_fed_tokens, batch.num_sampled_tokens
    clipped = report.updates[0].clipped | report.updates[1].clipped
    counts = {"forward": 0, "old_pass": 0, "backward": 0, "head_backward": 0}
    kinds = []
    for number, minibatch in enumerate(batch.plan.minibatches):
        for indices in minibatch.microbatches[0]:
            rows = list(indices)
            num_tokens = int(lengths[rows].sum())
            counts["forward"] += num_tokens
            counts["old_pass"] += num_tokens if number > 0 else 0
            counts["backward"] += 0 if all(clipped[i] for i in rows) else num_tokens
            counts["head_backward"] += sum(int(response_lengths[i]) for i in rows if not clipped[i])
            kinds.append((number, {clipped[i] for i in rows}))
    # The second mini-batch has micro-batches with and without a clipped sequence, and of both.
    assert [kind for number, kind in kinds if number == 0].count({False}) > 1
    assert {(1, (True,)), (1, (False, True))} <= {(n, tuple(sorted(kind))) for n, kind in kinds}
    num_tokens = dict.fromkeys(counts, int(lengths.sum()))
    num_tokens["head_backward"] = int(response_lengths[batch.valid].sum())
    for stage, count in counts.items():
        share = report.metrics[f"skip/{stage}_token_share"]
        assert share == pytest.approx(1 - count / num_tokens[stage], rel=1e-12), stage
        assert 0 < share < 1, stage
    assert report.metrics["skip/updates"] == 0

    # A single mini-batch needs no old pass; a first one without advantage no optimizer step.
    assert step(folder, batch=ONE_MINIBATCH).metrics["skip/old_pass_token_share"] == 1.0
    rollouts = make_judged(("wwww", "cccc", "cwww", "ccww"))
    assert step(folder, rollouts).metrics["skip/updates"] == 1


def test_statistics_per_c_do_not_depend_on_the_packing(folder: Path) -> None:
    """One sequence per micro-batch, a few, or all: the same metrics, by side and c and overall."""
    widths = {"eps_low": 1e-4, "eps_high_max": 5e-4}
    one, few, all_at_once = (
        step(folder, batch={"max_tokens_per_microbatch": size}, objective=widths).metrics
        for size in (32, 64, 4096)
    )
    assert one.keys() == few.keys() == all_at_once.keys()
    lost = [value for key, value in one.items() if "clip_gradient_mass_lost" in key]
    assert any(0 < value < 1 for value in lost) and len(lost) > 4
    for key, value in one.items():
        if key.startswith(("clip/", "ratio/", "per_c/")):
            # Matrices of other shapes, and AdamW's first step from other last bits: 3e-8 measured
            # of a mean, 7e-7 of a single ratio.
            bound = 5e-5 if "correlation" in key else 3e-6 if "max" in key else 3e-7
            assert few[key] == pytest.approx(value, rel=1e-6, abs=bound), key
            assert all_at_once[key] == pytest.approx(value, rel=1e-6, abs=bound), key


def test_what_is_left_to_chance_is_a_matter_of_the_place(folder: Path) -> None:
    """NSR keeps the same tokens in every packing; others with another seed and in another step."""
    objective = {"method": "nsr", "eps_low": 1e-4, "eps_high_max": 1e-4, "rescue_noise": 0.3}

    def metrics(place: tuple[int, int], size: int) -> dict[str, float]:
        config = make_config(folder, batch={"max_tokens_per_microbatch": size}, objective=objective)
        return run_learn(config, ROLLOUTS, place=place, measures_rounding=True).metrics

    one, few, all_at_once = (metrics((3, 5), size) for size in (32, 64, 4096))
    assert 0 < one["method/rescued"] < one["clip/fraction_tokens"] < 1
    assert 0 <= one["numerics/clip_decisions_changed"] < 0.1
    for other in (few, all_at_once):
        for key in ("method/rescued", "clip/fraction_tokens", "clip/gradient_mass_lost"):
            # One token in 200 may be as close to its noise as the rounding of another packing.
            assert other[key] == pytest.approx(one[key], abs=1 / 200), key
    cells = [key for key in one if key.startswith("per_c/") and "clip_fraction_tokens" in key]
    for place in ((4, 5), (3, 6)):
        other = metrics(place, 32)
        assert max(abs(other[key] - one[key]) for key in cells) > 1 / 50


def test_the_rounding_is_measured_with_the_draws_of_the_loss(folder: Path) -> None:
    """Of an episode whose conversations take turns, the loss has one after another."""
    config = make_config(folder, objective={"method": "nsr"})
    batch = make_batch(mask_some(ROLLOUTS), config.objective.resolve())
    rows = [*batch.rows_here]
    ids = {
        row: torch.from_numpy(batch.response_ids[row][batch.is_sampled(row)]).float()
        for row in rows
    }
    scores = rounding.Scores(ids, ids)
    with patch.object(rounding, "decide", wraps=rounding.decide) as decide:
        rounding._local_sums(batch, scores, scores, config.objective.resolve(), (3, 5))
    labels = pack(batch, rows, device="cpu").labels.float()
    assert not torch.equal(labels, torch.cat([*ids.values()]))
    for call in decide.call_args_list:
        assert torch.equal(call.args[0], labels) and torch.equal(call.args[1], labels)


def test_metrics_take_one_collective(folder: Path) -> None:
    """All sums of a step are gathered once, as a vector of fixed length."""
    names = [name for name in dir(dist) if re.match("all_|reduce|broadcast|gather|send|recv", name)]
    calls = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)
        return lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs)

    sums = {"loss": torch.tensor(2.0), "mismatch_max": torch.tensor(3.0)}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, counted(name)))
        totals = add_over_ranks(sums, group_size=4, device=torch.device("cpu"))
    assert calls == ["all_gather"]
    assert (totals["loss"], totals["mismatch_max"], totals["kl"]) == (2.0, 3.0, 0.0)
    with pytest.raises(AssertionError, match="new"):
        add_over_ranks({"new": torch.tensor(1.0)}, group_size=4, device=torch.device("cpu"))


def summed_over_ranks(seed: int, num_ranks: int) -> bool:
    """Whether the totals have the bits of a sum name by name, in rank order."""
    shapes = {"loss": (), "mismatch_max": (), "per_c": (len(SUMS), 2, 5), "per_c_max": (2, 5)}

    def sums_of(rank: int) -> Sums:
        made = torch.Generator().manual_seed(seed * 100 + rank)
        return {
            name: torch.randn(shape, generator=made, dtype=torch.float64) * 10.0**rank
            for i, (name, shape) in enumerate(shapes.items())
            if (seed + rank + i) % 3  # ranks lack some, and of some seeds one has none
        }

    cpu = torch.device("cpu")
    found = add_over_ranks(sums_of(dist.get_rank()), group_size=4, device=cpu)
    expected: Sums = {}
    for rank in range(num_ranks):
        ours = sums_of(rank)
        add(expected, {name: ours.get(name, torch.zeros_like(found[name])) for name in shapes})
    return all(found[name].numpy().tobytes() == expected[name].numpy().tobytes() for name in shapes)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_metrics_are_summed_in_rank_order(seed: int) -> None:
    assert run_distributed(summed_over_ranks, 3, seed, 3) == [True] * 3


def penalties(
    model: nn.Module, reference: nn.Module, rollouts: Rollouts, *, temperature: float
) -> tuple[Tensor, Tensor, int]:
    """Sums over all valid response tokens, with autograd: k3 KL and entropy; their number."""
    kl = entropy = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for i in rows_of(rollouts, active=False):
        prompt, response = rollouts.prompt_ids[i], rollouts.response_ids[i]
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        rows = slice(len(prompt) - 1, -1)
        labels = torch.from_numpy(response).long()[:, None]
        log_p = (model(tokens[None]).logits[0, rows] / temperature).log_softmax(-1)
        with torch.no_grad():
            log_q = (reference(tokens[None]).logits[0, rows] / temperature).log_softmax(-1)
        d = (log_q - log_p).gather(1, labels)
        kl = kl + (d.exp() - d - 1).sum()
        entropy = entropy - (log_p.exp() * log_p).sum()
        num_tokens += len(labels)
    return kl, entropy, num_tokens


@pytest.mark.parametrize(
    "coefficients",
    [{"kl_coef": 0.5}, {"entropy_coef": 0.1}, {"kl_coef": 0.5, "entropy_coef": 0.1}],
    ids=lambda coefficients: "+".join(coefficients),
)
def test_kl_and_entropy_count_for_every_sequence(
    folder: Path, coefficients: dict[str, float]
) -> None:
    report = step(folder, num_steps=2, objective=coefficients)
    config = make_config(folder)
    # The second step: policy, sampling policy and reference differ.
    updates = report.updates[NUM_MINIBATCHES:]
    initial, old = load_model(folder), load_model(folder, updates[0].weights)
    sums = torch.zeros(3, dtype=torch.float64)
    losses = []
    for number, (update, part) in enumerate(zip(updates, minibatches(ROLLOUTS), strict=True)):
        start = number * len(part)
        # A group without advantage is computed too, but not a rollout without a verdict.
        assert sorted(update.ratios) == [start + i for i in rows_of(part, active=False)]
        model = load_model(folder, update.weights)
        expected = expected_update(model, part, old=old, config=config)
        losses.append(expected.loss)
        assert update.loss == pytest.approx(expected.loss, abs=2e-7)

        model = in_float64(model)
        kl, entropy, num_tokens = penalties(
            model, in_float64(initial), part, temperature=config.rollout.temperature
        )
        penalty = coefficients.get("kl_coef", 0.0) * kl / num_tokens
        penalty = penalty - coefficients.get("entropy_coef", 0.0) * entropy / num_tokens
        weights = dict(model.named_parameters())
        extra = torch.autograd.grad(penalty, list(weights.values()))
        for name, gradient in zip(weights, extra, strict=True):
            whole = expected.gradients[name] + gradient
            # As in test_policy_reference: float32, 2e-6 measured there.
            error = (update.gradients[name].double() - whole).norm()
            assert error <= 1e-5 * whole.norm(), (number, name)
            # What is added is far more than what is tolerated.
            assert gradient.norm() > 1e-3 * whole.norm(), name
        sums += torch.tensor([float(kl), float(entropy), num_tokens], dtype=torch.float64)
    assert report.metrics["loss/policy"] == pytest.approx(sum(losses) / 2, abs=2e-7)
    for name, total in zip(("kl", "entropy"), sums[:2], strict=True):
        if f"{name}_coef" in coefficients:
            # k3 is a difference of order 1e-4 of numbers of order 1e-2: float32 log-probs (1e-6)
            # leave an error of 1e-8, an entropy one of 1e-6.
            found = report.metrics[f"loss/{name}"]
            assert found == pytest.approx(float(total / sums[2]), rel=1e-6, abs=1e-7)
            assert found > 1e-5
        else:
            assert f"loss/{name}" not in report.metrics


def test_a_batch_without_advantage_moves_nothing(folder: Path) -> None:
    rollouts = make_judged(("wwww", "cccc", "wwwu", "uuuu"))
    report = step(folder, rollouts, optimizer={"weight_decay": 0.1})
    for update in report.updates:
        assert update.ratios == {} and update.loss == 0.0 and update.grad_norm == 0.0
        assert not any(bool(gradient.any()) for gradient in update.gradients.values())
    assert equal(report.after, report.updates[0].weights)
    assert report.metrics["loss/policy"] == report.metrics["optim/grad_norm"] == 0.0
    for stage in ("forward", "old_pass", "backward", "head_backward"):
        assert report.metrics[f"skip/{stage}_token_share"] == 1.0
    assert report.metrics["skip/updates"] == NUM_MINIBATCHES
    assert "clip/fraction_sequences" not in report.metrics  # a mean over nothing


def with_length(row: int, num_tokens: int) -> Rollouts:
    """`ROLLOUTS` with a response of another length."""
    responses = [*ROLLOUTS.response_ids.values()]
    log_probs = [*ROLLOUTS.rollout_log_probs.values()]
    responses[row] = np.full(num_tokens, 3, dtype=np.int32)
    log_probs[row] = np.zeros(num_tokens, dtype=np.float32)
    return with_columns(ROLLOUTS, response_ids=responses, rollout_log_probs=log_probs)


def test_an_unknown_verdict_leaves_every_denominator(folder: Path) -> None:
    assert VERDICTS[2] == "cwuc"
    unknown = 2 * GROUP_SIZE + 2
    losses = {}
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        one, other = (
            step(folder, with_length(unknown, length), objective={"aggregation": aggregation})
            for length in (1, 24)
        )
        # Its value does not matter, bitwise.
        assert equal(one.after, other.after), aggregation
        changed = {key for key in one.metrics if one.metrics[key] != other.metrics[key]}
        # It counts among the skipped tokens.
        assert changed and all(key.startswith("skip/") for key in changed), aggregation
        losses[aggregation] = one.updates[0].loss
    # 19 rollouts of 20 have a verdict. Ratios of 1: exact in float64.
    first, _ = minibatches(ROLLOUTS)
    rows = rows_of(first, active=False)
    assert len(rows) == 19 and losses["constant"] != 0
    per_token = losses["constant"] * 19 * make_config(folder).rollout.max_response_tokens
    num_tokens = int(first.table["num_response_tokens"][rows].sum())
    assert losses["token_mean"] * num_tokens == pytest.approx(per_token, rel=1e-14)
    # Nor does it count as wrong.
    wrong = make_judged((*VERDICTS[:2], "cwwc", *VERDICTS[3:]), seed=1)
    assert step(folder, wrong).updates[0].loss != step(folder).updates[0].loss


def test_an_unknown_verdict_narrows_the_clip_of_its_group(folder: Path) -> None:
    """k counts the group's valid rollouts: at c = 2 the clip is narrower for k = 3 than for 4."""

    def judged(letters: str) -> Rollouts:
        return make_judged((*VERDICTS[:5], letters, *VERDICTS[6:]), seed=1)

    start = 5 * GROUP_SIZE
    ratios = step(folder, judged("ccuw")).updates[1].ratios
    deviation, highest = max((ratios[start + i] - 1, i) for i in (0, 1))
    assert deviation > 1e-4
    # The first update knows no clip, so the same ratio comes back. eps_high(2) is eps_low plus 1/2
    # of the range at k = 3 and plus 2/3 at k = 4: 0.9 and 1.13 of the deviation.
    widths = {"eps_low": 0.2 * deviation, "eps_high_max": 1.6 * deviation}
    update = step(folder, judged("ccuw"), objective=widths).updates[1]
    assert update.ratios[start + highest] == ratios[start + highest]
    assert update.clipped[start + highest]
    whole = step(folder, judged("ccww"), objective=widths).updates[1]
    assert not whole.clipped[start + highest]
