"""Every layout leaves out the backward passes that one rank does, and diverges on all ranks."""

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
from gapo_megatron.learn.score import Scored
from gapo_megatron.learn.update import update
from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.policy import destroy
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import (
    CP,
    PP,
    SP,
    TP,
    VPP,
    ClippedLoss,
    always_back,
    copies,
    count_backward,
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.messages import mentions

# Which sequences are clipped in each update: some, all (nothing may move), all but one.
CLIPPED = ((1, 2, 3, 4), tuple(range(8)), (0, 1, 2, 3, 4, 6, 7))
# Per layout of two ranks: [parallel] settings, and the micro-batches of each data parallel rank. In
# every update some have nothing to go back for; in the last one a whole data parallel rank.
ONE_SHARE = [[(0,), (1, 2, 3), (), (4, 5, 6, 7)]]
LAYOUTS: dict[str, tuple[dict[str, Any], list[list[tuple[int, ...]]]]] = {
    "tensor": ({TP: 2}, ONE_SHARE),
    "sequence": ({TP: 2, SP: True}, ONE_SHARE),
    "pipeline": ({PP: 2}, ONE_SHARE),
    "uneven, virtual": ({PP: 2, "num_layers_in_first_pipeline_stage": 4, VPP: 2}, ONE_SHARE),
    "context": ({CP: 2}, ONE_SHARE),
    "data": ({}, [[(0,), (1, 2, 3)], [(4,), (5, 6, 7)]]),
}
# Backward passes of each rank's first layer. A stage before the last does not know what can be left
# out: the last one sends it zeros.
NUM_BACKWARD = dict.fromkeys(LAYOUTS, [[2, 0, 1]] * 2) | {
    "data": [[1, 0, 0], [1, 0, 1]],
    "pipeline": [[4, 4, 4], [2, 0, 1]],
    "uneven, virtual": [[4, 4, 4], [4, 4, 4]],
}


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


def train_every_layout(folder: Path) -> dict[str, tuple[Skipping, Skipping]]:
    reports = {}
    for layout, arguments in LAYOUTS.items():
        skipping = train_clipped(folder, *arguments)
        with patch.object(step, "_has_backward", always_back):
            reports[layout] = skipping, train_clipped(folder, *arguments)
    return reports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied", num_layers=6)
    return path


def test_every_layout_skips_what_one_rank_does(folder: Path) -> None:
    with single_rank():
        one = train_clipped(folder, {}, ONE_SHARE)
    assert one.num_backward == one.num_active == [2, 0, 1]
    assert one.num_updates == 2 and one.grad_norms[1] == 0
    ranks = run_distributed(train_every_layout, 2, folder)
    for layout, (_, shares) in LAYOUTS.items():
        for found, whole in (rank[layout] for rank in ranks):
            # What was left out are exact zeros.
            assert found.grad_norms == whole.grad_norms, layout
            assert found.num_updates == whole.num_updates == one.num_updates, layout
            for name, weight in found.weights.items():
                assert torch.equal(weight, whole.weights[name]), f"{layout}: {name}"
                # Steps of at most 1e-3, smooth by a large eps: what is left is fp32 rounding.
                difference = (weight - one.weights[name]).abs().max()
                assert difference <= 1e-6, f"{layout}: {name}"
            assert found.grad_norms == pytest.approx(one.grad_norms, rel=2e-5), layout
        found, whole = zip(*(rank[layout] for rank in ranks), strict=True)
        assert [one.num_backward for one in found] == NUM_BACKWARD[layout], layout
        assert [one.num_backward for one in whole] == [[len(shares[0])] * 3] * 2, layout
        if layout != "data":
            assert found[1].num_active == [2, 0, 1], layout


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


def test_divergence_is_every_ranks_and_the_culprit_says_which_sequence(folder: Path) -> None:
    ranks = run_distributed(diverge, 2, folder)
    for layout, sequence in ((0, 1), (1, 2)):
        for rank in ranks:
            message, unchanged, num_updates = rank[layout]
            assert unchanged and num_updates == 0
            assert re.search(mentions("update 0"), message)
        message = ranks[1][layout][0]
        assert re.search(
            mentions("micro-batch 1", "old_log_probs", f"sequence {sequence}"), message
        )
