"""Whole batches through `learn` on two ranks: a stop changes no bit, the layout no metric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.config import Config
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import save_model
from tests.learn_setup import (
    NUM_MINIBATCHES,
    carry_some,
    make_config,
    make_judged,
    mask_some,
    run_learn,
)

LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}
ROLLOUTS = make_judged(seed=1)


def config_of(folder: Path, sizes: dict[str, object], method: str = "gapo") -> Config:
    # The penalty adds the reference's pass, which is not saved but made again.
    objective = {"method": method, "kl_coef": 0.1, "entropy_coef": 0.01}
    return make_config(folder, parallel=sizes, objective=objective)


def rollouts_of(folder: Path, *, has_masks: bool) -> Rollouts:
    rollouts = carry_some(ROLLOUTS, config_of(folder, {}))
    return mask_some(rollouts) if has_masks else rollouts


def stop_in_every_layout(
    folder: Path, layouts: Sequence[str], has_masks: bool, method: str
) -> None:
    on_one_rank = json.loads((folder / "on_one_rank.json").read_text())
    rollouts = rollouts_of(folder, has_masks=has_masks)
    for name in layouts:
        config = config_of(folder, LAYOUTS[name], method)
        whole = run_learn(config, rollouts)
        assert_same_statistics(whole.metrics, on_one_rank, name)
        kept = folder / f"kept_{name}"
        kept.mkdir(exist_ok=True)
        dist.barrier()
        stopped = run_learn(config, rollouts, stop_in=kept)
        assert len(whole.updates) == len(stopped.updates) == NUM_MINIBATCHES
        assert stopped.metrics == whole.metrics, name
        for key, tensor in whole.after.items():
            assert torch.equal(stopped.after[key], tensor), (name, key)


def assert_same_statistics(found: dict[str, float], expected: dict[str, float], name: str) -> None:
    """Sums and maxima over ranks contain every rank's part exactly once."""
    assert found.keys() == expected.keys(), name
    for part in ("per_c/correct/sequences", "per_c/wrong/ratio_abs_deviation_max", "mismatch/max"):
        assert any(key.startswith(part) for key in expected), part
    for key, value in expected.items():
        if key.startswith(("clip/", "ratio/", "per_c/", "mismatch/")):
            # Other orders of float32 sums, and AdamW's first step from other last bits: 3e-7
            # measured of a mean, 5e-7 of a single ratio, 7e-6 of the correlation.
            bound = 3e-5 if "correlation" in key else 2e-6 if "max" in key else 1e-6
            assert found[key] == pytest.approx(value, rel=1e-6, abs=bound), (name, key)


@pytest.mark.parametrize(
    ("layouts", "has_masks", "method"),
    [
        ([*LAYOUTS], False, "gapo"),
        (["pipeline", "context"], True, "gapo"),
        (["data", "tensor"], False, "grpo"),
        (["data", "tensor"], False, "dapo"),
    ],
    ids=["sampled", "masked", "grpo", "dapo"],
)
def test_neither_a_stop_nor_the_layout_changes_what_is_learned(
    tmp_path: Path, layouts: Sequence[str], has_masks: bool, method: str
) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, {}, method)
    with single_rank():
        whole = run_learn(config, rollouts_of(tmp_path, has_masks=has_masks))
    (tmp_path / "on_one_rank.json").write_text(json.dumps(whole.metrics))
    run_distributed(stop_in_every_layout, 2, tmp_path, layouts, has_masks, method)
