"""Every parallel layout computes what one rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.policy.step import log_probs, update
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import (
    MODELS,
    WeightedLoss,
    make_batch,
    make_config,
    pack_all,
    read_weights,
    save_model,
)

# Per layout of two ranks: [parallel] settings, and the micro-batches of each data parallel rank.
# Lengths are uneven everywhere; in the last layout one rank has nothing to compute.
TOGETHER = [[(0, 1, 2, 3), (), (4, 5, 6, 7)]]
LAYOUTS = {
    "tensor": ({"tensor_model_parallel_size": 2}, TOGETHER),
    "sequence": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, TOGETHER),
    "pipeline": ({"pipeline_model_parallel_size": 2}, TOGETHER),
    "data": ({}, [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]),
    "data_empty_rank": ({}, [[(0, 1, 2, 3), (4, 5, 6, 7)], [(), ()]]),
}
NUM_UPDATES = 2


@dataclass
class Report:
    """What one rank saw; tensors by sequence exist on the last pipeline stage only."""

    grad_norms: list[float]
    log_probs: dict[int, Tensor]
    ratio_is_one: bool
    weights: dict[str, Tensor]


def train(folder: Path, parallel: dict[str, object], shares: list[list[tuple[int, ...]]]) -> Report:
    """Two updates on this rank's share; the log-probs are those before the second."""
    config = make_config(folder, parallel=parallel)
    groups = initialize(config.parallel)
    policy = Policy.build(config, groups, "cpu")
    policy.load_hf_weights(read_weights(folder))
    batch = make_batch()
    align = groups.tp_size if config.parallel.sequence_parallel else 1
    microbatches = pack_all(batch, shares[groups.dp_rank], align=align)
    grad_norms = []
    for _ in range(NUM_UPDATES):
        old = log_probs(policy, microbatches)
        loss = WeightedLoss(batch, microbatches)
        grad_norms.append(update(policy, microbatches, loss).grad_norm)
    by_sequence = {}
    if groups.is_last_stage:
        assert len(loss.seen) == len(microbatches)
        for microbatch, values in zip(microbatches, old, strict=True):
            for row, index in enumerate(microbatch.indices):
                by_sequence[index] = values[microbatch.sequence_ids == row]
    else:
        assert old == [None] * len(microbatches) and loss.seen == []
    weights = {name: tensor.clone() for name, tensor in policy.iterate_hf_weights()}
    destroy()
    equal = all(torch.equal(a, b) for a, b in zip(old, loss.seen, strict=False))
    return Report(grad_norms, by_sequence, equal, weights)


def train_every_layout(folders: dict[str, Path]) -> dict[tuple[str, str], Report]:
    return {
        (model, layout): train(folder, *LAYOUTS[layout])
        for model, folder in folders.items()
        for layout in LAYOUTS
    }


@pytest.mark.slow
def test_every_layout_computes_what_one_rank_does(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in MODELS}
    for name, folder in folders.items():
        save_model(folder, name)
    # One test, because the two ranks take far longer to start than to compute.
    ranks = run_distributed(train_every_layout, 2, folders)
    for model, folder in folders.items():
        with single_rank():
            expected = train(folder, {}, [[tuple(range(8))]])
        for layout in LAYOUTS:
            reports = [rank[model, layout] for rank in ranks]
            compare(reports, expected, where=f"{model}, {layout}")


def compare(reports: list[Report], expected: Report, *, where: str) -> None:
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
    seen = first.log_probs | second.log_probs
    assert set(seen) == set(expected.log_probs), where
