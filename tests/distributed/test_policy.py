"""Every parallel layout computes what one rank computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gapo_megatron.errors import DivergenceError
from gapo_megatron.learn import update as step
from gapo_megatron.learn.score import Scored, log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.policy import destroy
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import (
    MODELS,
    ClippedLoss,
    WeightedLoss,
    always_back,
    copies,
    count_backward,
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.messages import mentions

# Per layout of two ranks: [parallel] settings, and the micro-batches of each data parallel rank.
# Lengths are uneven everywhere; in the last layout one rank has nothing to compute.
TOGETHER = [[(0, 1, 2, 3), (), (4, 5, 6, 7)]]
LAYOUTS = {
    "tensor": ({"tensor_model_parallel_size": 2}, TOGETHER),
    "sequence": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, TOGETHER),
    "pipeline": ({"pipeline_model_parallel_size": 2}, TOGETHER),
    "context": ({"context_parallel_size": 2}, TOGETHER),
    "data": ({}, [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]),
    "data_empty_rank": ({}, [[(0, 1, 2, 3), (4, 5, 6, 7)], [(), ()]]),
}
NUM_UPDATES = 2

# Which sequences are clipped in each update: some, all (nothing may move), all but one.
CLIPPED = ((1, 2, 3, 4), tuple(range(8)), (0, 1, 2, 3, 4, 6, 7))
# Micro-batches of each data parallel rank, as above. In every update some have nothing to go back
# for; in the last one a whole data parallel rank.
ONE_SHARE = [[(0,), (1, 2, 3), (), (4, 5, 6, 7)]]
CLIPPED_SHARES = {
    "tensor": ONE_SHARE,
    "sequence": ONE_SHARE,
    "pipeline": ONE_SHARE,
    "context": ONE_SHARE,
    "data": [[(0,), (1, 2, 3)], [(4,), (5, 6, 7)]],
}


@dataclass
class Report:
    """Results of one rank; tensors by sequence exist on the last pipeline stage only."""

    grad_norms: list[float]
    log_probs: dict[int, Tensor]
    ratio_is_one: bool
    weights: dict[str, Tensor]


def train(folder: Path, parallel: dict[str, object], shares: list[list[tuple[int, ...]]]) -> Report:
    """Two updates on this rank's share; the log-probs are those before the second."""
    config = make_config(folder, parallel=parallel)
    policy = load_policy(config)
    batch = make_batch()
    microbatches = [policy.pack(batch, indices) for indices in shares[policy.groups.dp_rank]]
    grad_norms = []
    for _ in range(NUM_UPDATES):
        old = log_probs(policy, microbatches)
        loss = WeightedLoss(batch, microbatches)
        grad_norms.append(update(policy, microbatches, loss).grad_norm)
    by_sequence = {}
    if policy.groups.is_last_stage:
        assert len(loss.seen) == len(microbatches)
        for microbatch, values in zip(microbatches, old, strict=True):
            for row, index in enumerate(microbatch.indices):
                by_sequence[index] = values[microbatch.sequence_ids == row]
    else:
        assert old == [None] * len(microbatches) and loss.seen == []
    weights = copies(policy)
    destroy()
    equal = all(torch.equal(a, b) for a, b in zip(old, loss.seen, strict=False))
    return Report(grad_norms, by_sequence, equal, weights)


@dataclass
class Skipping:
    """Results of one rank for updates in which sequences are clipped."""

    weights: dict[str, Tensor]
    num_updates: int
    grad_norms: list[float]
    num_backward: list[int]
    """Backward passes of this stage's first layer, per update."""
    num_active: list[int]
    """This rank's micro-batches with an active row, per update; 0 before the last stage."""


def train_clipped(
    folder: Path, parallel: dict[str, object], shares: list[list[tuple[int, ...]]]
) -> Skipping:
    """One update for each entry of CLIPPED, on this rank's share."""
    config = make_config(folder, parallel=parallel, optimizer={"weight_decay": 0.1})
    policy = load_policy(config)
    batch = make_batch()
    microbatches = [policy.pack(batch, indices) for indices in shares[policy.groups.dp_rank]]
    passes = count_backward(policy)
    report = Skipping({}, 0, [], [], [])
    for clipped in CLIPPED:
        passes.clear()
        loss = ClippedLoss(batch, microbatches, clipped)
        result = update(policy, microbatches, loss, skip_inactive=True)
        report.grad_norms.append(result.grad_norm)
        report.num_backward.append(len(passes))
        report.num_active.append(sum(bool(o["active_rows"] > 0) for o in result.outputs))
    report.weights = copies(policy)
    report.num_updates = policy.num_updates
    destroy()
    return report


def train_every_layout(folders: dict[str, Path]) -> dict[tuple[str, str], Any]:
    reports: dict[tuple[str, str], Any] = {
        (model, layout): train(folder, *LAYOUTS[layout])
        for model, folder in folders.items()
        for layout in LAYOUTS
    }
    for layout, shares in CLIPPED_SHARES.items():
        arguments = folders["qwen2_tied"], LAYOUTS[layout][0], shares
        reports["skipping", layout] = train_clipped(*arguments)
        with patch.object(step, "_has_backward", always_back):
            reports["whole", layout] = train_clipped(*arguments)
    return reports


def diverge(folder: Path) -> list[tuple[str, bool, int]]:
    """For each layout, the error of an update with a bad old log-prob, and the state after it."""
    seen = []
    for parallel in ({}, {"pipeline_model_parallel_size": 2}):
        config = make_config(folder, parallel=parallel)
        policy = load_policy(config)
        batch = make_batch()
        share = [[(0,), (1, 2, 3)], [(4, 5), (6, 7)]][policy.groups.dp_rank]
        microbatches = [policy.pack(batch, indices) for indices in share]
        before = copies(policy)

        def loss(
            scored: Scored, rank: int = policy.groups.rank
        ) -> tuple[Tensor, dict[str, Tensor]]:
            i, values = scored.index, scored.log_probs
            old, microbatch = values.detach().clone(), microbatches[i]  # noqa: B023
            if rank == 1 and i == 1:
                old[-1] = torch.nan
            index = list(microbatch.indices)
            result = policy_loss(
                values,
                old,
                sequence_ids=microbatch.sequence_ids,
                advantages=batch.advantages[index],  # noqa: B023
                num_correct=batch.num_correct[index],  # noqa: B023
                group_size=4,
                num_tokens_global=200,
                method=METHODS["gapo"],
                flags=scored.flags,
            )
            return result.loss, {}

        with pytest.raises(DivergenceError) as error:
            update(policy, microbatches, loss)
        after = dict(policy.iterate_hf_weights())
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        seen.append((str(error.value), unchanged, policy.num_updates))
        destroy()
    return seen


def test_divergence_is_every_ranks_and_the_culprit_says_which_sequence(
    folders: dict[str, Path],
) -> None:
    ranks = run_distributed(diverge, 2, folders["qwen2_tied"])
    for layout, sequence in ((0, 1), (1, 2)):
        for rank in ranks:
            message, unchanged, num_updates = rank[layout]
            assert unchanged and num_updates == 0
            assert re.search(mentions("update 0"), message)
        message = ranks[1][layout][0]
        assert re.search(
            mentions("micro-batch 1", "old_log_probs", f"sequence {sequence}"), message
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in paths.items():
        save_model(folder, name)
    return paths


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> list[dict[tuple[str, str], Any]]:
    # One start for all tests, because the two ranks take far longer to start than to compute.
    return run_distributed(train_every_layout, 2, folders)


def test_every_layout_computes_what_one_rank_does(
    folders: dict[str, Path], ranks: list[dict[tuple[str, str], Any]]
) -> None:
    for model, folder in folders.items():
        with single_rank():
            expected = train(folder, {}, [[tuple(range(8))]])
        for layout in LAYOUTS:
            reports = [rank[model, layout] for rank in ranks]
            compare(reports, expected, where=f"{model}, {layout}")


def test_every_layout_skips_what_one_rank_does(
    folders: dict[str, Path], ranks: list[dict[tuple[str, str], Any]]
) -> None:
    with single_rank():
        one = train_clipped(folders["qwen2_tied"], {}, ONE_SHARE)
    assert one.num_backward == one.num_active == [2, 0, 1]
    assert one.num_updates == 2 and one.grad_norms[1] == 0
    for layout in CLIPPED_SHARES:
        compare_skipping(
            [rank["skipping", layout] for rank in ranks],
            [rank["whole", layout] for rank in ranks],
            one=one,
            layout=layout,
        )


def compare_skipping(
    skipping: list[Skipping], whole: list[Skipping], *, one: Skipping, layout: str
) -> None:
    for found, everything in zip(skipping, whole, strict=True):
        # What was left out are exact zeros.
        assert found.grad_norms == everything.grad_norms, layout
        assert found.num_updates == everything.num_updates == one.num_updates, layout
        for name, weight in found.weights.items():
            assert torch.equal(weight, everything.weights[name]), f"{layout}: {name}"
            # As in `compare`.
            torch.testing.assert_close(
                weight, one.weights[name], rtol=0, atol=1e-6, msg=f"{layout}: {name}"
            )
        assert found.grad_norms == pytest.approx(one.grad_norms, rel=2e-5), layout
    backward = [found.num_backward for found in skipping]
    if layout == "data":
        assert backward == [[1, 0, 0], [1, 0, 1]]
    elif layout == "pipeline":
        # The first stage does not know; the last one sends it zeros.
        assert backward == [[4, 4, 4], [2, 0, 1]]
    else:
        assert backward == [[2, 0, 1]] * 2, layout
    num_microbatches = len(CLIPPED_SHARES[layout][0])
    assert [rank.num_backward for rank in whole] == [[num_microbatches] * 3] * 2, layout


def compare(
    reports: list[Report], expected: Report, *, where: str, everything: bool = True
) -> None:
    """`everything`: the two ranks have seen every sequence."""
    for report in reports:
        assert report.ratio_is_one, where
        # fp32 sums over ranks and micro-batches in another order; 1e-6 measured.
        assert report.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5), where
        for index, values in report.log_probs.items():
            torch.testing.assert_close(
                values, expected.log_probs[index], rtol=1e-5, atol=2e-5, msg=where
            )
        assert report.weights.keys() == expected.weights.keys(), where
        for name, weight in report.weights.items():
            # Two steps of at most 1e-3, smooth by a large eps: what is left is fp32 rounding.
            torch.testing.assert_close(
                weight, expected.weights[name], rtol=0, atol=1e-6, msg=f"{where}: {name}"
            )
    first, second = reports
    assert first.grad_norms == second.grad_norms, where
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights), where
    if everything:
        assert set(first.log_probs | second.log_probs) == set(expected.log_probs), where
