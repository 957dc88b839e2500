"""A whole update, from verdicts to every gradient, against the plain float64 reference.

Nothing of the real path is left out or replaced: groups, advantages, plan, packing, Megatron-core's
forward and backward, the head, the loss, the reduction over ranks. The second mini-batch is what
counts: its old log-probs come from a pass of their own, before the first update moved the weights,
so its ratios lie on both sides of both clips.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gapo_megatron.objective import make_batch, upper_clip
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import MODELS, save_model
from tests.learn_setup import (
    Expected,
    Report,
    Seen,
    expected_update,
    load_model,
    make_config,
    make_judged,
    minibatches,
    run_learn,
)

# A seed whose ratios keep a distance of 2e-4 and more from every clip, 500 times what fp32 loses.
ROLLOUTS = make_judged(seed=1)
LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_makes_the_references_update(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, name)
    with single_rank():
        report = run_learn(make_config(tmp_path), ROLLOUTS)
    second = compare([report], tmp_path, where=name)[1]
    if name != "qwen3":  # its ratios do not reach the lower clip
        check_that_clips_matter(second)


@pytest.mark.system
def test_every_layout_makes_the_references_update(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    with single_rank():
        one = run_learn(make_config(tmp_path), ROLLOUTS)
    # One test, because the two ranks take far longer to start than to compute.
    ranks = run_distributed(learn_in_every_layout, 2, tmp_path)
    for layout in LAYOUTS:
        reports = [rank[layout] for rank in ranks]
        compare(reports, tmp_path, where=layout)
        first, second = (report.metrics for report in reports)
        assert first == second, layout  # the same bits on every rank
        assert first.keys() == one.metrics.keys(), layout
        for key, value in one.metrics.items():
            # Means over tokens and sequences of float32 log-probs, in other orders of summation:
            # 5e-8 measured. A correlation of deviations that are 1e-3 themselves: 3e-6 measured.
            bound = 5e-5 if key == "ratio/advantage_correlation" else 1e-6
            assert first[key] == pytest.approx(value, rel=1e-6, abs=bound), (layout, key)
            if re.search("fraction|skip|learning_rate|sequences", key):
                assert first[key] == value, (layout, key)


def learn_in_every_layout(folder: Path) -> dict[str, Report]:
    return {
        layout: run_learn(make_config(folder, parallel=parallel), ROLLOUTS)
        for layout, parallel in LAYOUTS.items()
    }


def compare(reports: Sequence[Report], folder: Path, *, where: str) -> list[Expected]:
    """Compare what all ranks saw with the reference, at the weights these ranks had."""
    config = make_config(folder)
    found = []
    for number, part in enumerate(minibatches(ROLLOUTS)):
        seen = [report.updates[number] for report in reports]
        model = load_model(folder, seen[0].weights)
        expected = expected_update(model, part, old=load_model(folder), config=config)
        first = number * len(part)
        compare_update(seen, expected, first=first, where=f"{where}, mini-batch {number}")
        found.append(expected)
    losses = [expected.loss for expected in found]
    norms = [expected.grad_norm for expected in found]
    for report in reports:
        metrics = report.metrics
        # As in `compare_update`.
        assert metrics["loss/policy"] == pytest.approx(sum(losses) / len(losses), abs=2e-7)
        assert metrics["optim/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-6)
    return found


def compare_update(seen: Sequence[Seen], expected: Expected, *, first: int, where: str) -> None:
    """Compare one update; `first` is the mini-batch's first sequence in the batch."""
    assert all(rank.num_microbatches > 1 for rank in seen), where
    # A float32 log-prob of order 5 has an error of about 1e-6, hence a ratio (a mean over tokens)
    # of 6e-7 as measured. A loss is a mean of A s with |A| < 1: 2e-8 measured.
    assert sum(rank.loss for rank in seen) == pytest.approx(expected.loss, abs=2e-7), where
    for rank in seen:
        # Measured: 1e-7 of the norm of all, 2e-6 of the gradient of a weight (a bias of keys, whose
        # gradient is a hundredth of the others' and the difference of terms that nearly cancel).
        assert rank.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6), where
        assert rank.gradients.keys() == expected.gradients.keys(), where
        for name, gradient in expected.gradients.items():
            error = (rank.gradients[name].double() - gradient).norm()
            assert error <= 1e-5 * gradient.norm(), f"{where}: {name}"
    # Sequences without advantage or verdict were not computed: they matter to denominators alone.
    ratios = {i: ratio for rank in seen for i, ratio in rank.ratios.items()}
    clipped = {i: value for rank in seen for i, value in rank.clipped.items()}
    assert clipped == {first + i: value for i, value in expected.clipped.items()}, where
    assert ratios == pytest.approx({first + i: s for i, s in expected.ratios.items()}, abs=3e-6)
    if first == 0:
        assert set(ratios.values()) == {1.0}, where


def check_that_clips_matter(expected: Expected) -> None:
    """The second mini-batch meets the upper and the lower clip, and goes beyond both unclipped."""
    method = make_config(Path("unused")).objective.resolve()
    batch = make_batch(minibatches(ROLLOUTS)[1], method)
    upper = upper_clip(
        batch.num_correct,
        group_size=batch.group_size,
        eps_low=method.eps_low,
        eps_high_max=method.eps_high_max,
    )
    correct = batch.advantages > 0
    edges = torch.where(correct, 1 + upper, 1 + method.eps_low).tolist()
    low = 1 - method.eps_low
    kinds = {
        (bool(correct[i]), "above" if s > edges[i] else "below" if s < low else "inside")
        for i, s in expected.ratios.items()
    }
    assert {(True, "above"), (False, "below"), (True, "inside"), (False, "inside")} < kinds
    assert {(True, "below"), (False, "above")} & kinds
    assert min(min(abs(s - edges[i]), abs(s - low)) for i, s in expected.ratios.items()) > 2e-4
    assert 0 < sum(expected.clipped.values()) < len(expected.clipped)
