"""Whole batches through `learn` on two ranks: a stop changes no bit, the layout no metric."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.config import Config
from gapo_megatron.learn.records import Record
from gapo_megatron.objective import make_batch
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import save_model
from tests.learn_setup import (
    NUM_MINIBATCHES,
    Report,
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
RECORDED = [row for row in range(len(ROLLOUTS)) if row % 3]
"""Rows: some of most micro-batches."""
LOG_PROBS = ("log_probs", "old_log_probs")


def config_of(folder: Path, sizes: dict[str, object], method: str = "gapo") -> Config:
    # The penalty adds the reference's pass, which is not saved but made again.
    objective: dict[str, object] = {"method": method, "kl_coef": 0.1, "entropy_coef": 0.01}
    if method != "gapo":  # ratios of tokens: some beyond their bounds
        objective |= {"eps_low": 0.01, "eps_high_max": 0.02}
    if method == "nsr":
        objective["rescue_noise"] = 0.03
    return make_config(folder, parallel=sizes, objective=objective)


def rollouts_of(folder: Path, *, has_masks: bool) -> Rollouts:
    return carry_some(mask_some(ROLLOUTS) if has_masks else ROLLOUTS, config_of(folder, {}))


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
        stopped = run_learn(config, rollouts, stop_in=kept, recorded=RECORDED)
        assert_same_records(stopped.records, pickle.loads((folder / "records").read_bytes()), name)
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
        if key.startswith(("clip/", "ratio/", "per_c/", "mismatch/", "method/")):
            # Other orders of float32 sums, and AdamW's first step from other last bits: 3e-7
            # measured of a mean, 5e-7 of a single ratio, 7e-6 of the correlation.
            bound = 3e-5 if "correlation" in key else 2e-6 if "max" in key else 1e-6
            assert found[key] == pytest.approx(value, rel=1e-6, abs=bound), (name, key)


def assert_same_records(found: list[Record], expected: list[Record], name: str) -> None:
    """Rank 0 has each sequence once, with its own tokens, whichever rank computed it."""
    assert len(found) == (len(expected) if dist.get_rank() == 0 else 0), name
    for ours, theirs in zip(found, expected, strict=False):
        assert (ours.row, ours.minibatch) == (theirs.row, theirs.minibatch), name
        for key in ("token_ids", "is_sampled", "rollout_log_probs", "versions"):
            assert np.array_equal(getattr(ours, key), getattr(theirs, key)), (name, key)
        assert ours.learned.keys() == theirs.learned.keys()
        for key, values in theirs.learned.items():
            # As above: 7e-6 measured of a log-prob.
            assert ours.learned[key] == pytest.approx(values, abs=3e-5, nan_ok=True), (name, key)


def assert_records(whole: Report, rollouts: Rollouts, config: Config) -> None:
    """They have what the loss has seen, the ratios its log-probs make, and nothing else."""
    advantages = make_batch(rollouts, config.objective.resolve()).advantages
    is_per_token = config.objective.resolve().ratio == "token"
    computed = [one for one in whole.records if one.learned]
    assert [one.row for one in whole.records] == RECORDED and len(computed) > len(RECORDED) // 2
    assert any(one.learned["clipped"].any() for one in computed)
    num_kept = 0
    for one in computed:
        assert one.minibatch is not None
        ratio, lower, upper = one.learned["facts"].tolist()
        log_probs, old = (one.learned[name].astype(float) for name in LOG_PROBS)
        assert len(log_probs) == len(old) == one.is_sampled.sum()
        if one.minibatch == 0 and not rollouts.table["num_carried_tokens"][one.row]:
            assert (log_probs == old).all()  # it is its own pass of the old log-probs
        scored = rollouts.carried_log_probs[one.row]
        carried = one.is_sampled[: len(scored)]
        assert (old[: carried.sum()] == scored[carried]).all()
        assert 0 < lower < 1 and upper > 0
        if is_per_token:
            ratios, advantage = np.exp(log_probs - old), float(advantages[one.row])
            beyond = ratios > 1 + upper if advantage > 0 else ratios < 1 - lower
            beyond &= advantage != 0
            clipped = one.learned["clipped"]
            assert math.isnan(ratio) and not clipped[~beyond].any()
            num_kept += int((beyond & ~clipped).sum())
        else:
            seen = whole.updates[one.minibatch]
            assert (ratio, [seen.clipped[one.row]]) == (
                seen.ratios[one.row],
                one.learned["clipped"].tolist(),
            )
            assert ratio == pytest.approx(math.exp((log_probs - old).mean()), rel=1e-12)
    assert (num_kept > 0) == (config.objective.method == "nsr")


@pytest.mark.parametrize(
    ("layouts", "has_masks", "method"),
    [
        ([*LAYOUTS], False, "gapo"),
        (["pipeline", "context"], True, "gapo"),
        (["data", "tensor"], False, "grpo"),
        (["data", "tensor"], False, "dapo"),
        ([*LAYOUTS], True, "nsr"),
    ],
    ids=["sampled", "masked", "grpo", "dapo", "nsr"],
)
def test_neither_a_stop_nor_the_layout_changes_what_is_learned(
    tmp_path: Path, layouts: Sequence[str], has_masks: bool, method: str
) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, {}, method)
    with single_rank():
        rollouts = rollouts_of(tmp_path, has_masks=has_masks)
        whole = run_learn(config, rollouts, recorded=RECORDED)
    assert_records(whole, rollouts, config)
    (tmp_path / "records").write_bytes(pickle.dumps(whole.records))
    (tmp_path / "on_one_rank.json").write_text(json.dumps(whole.metrics))
    run_distributed(stop_in_every_layout, 2, tmp_path, layouts, has_masks, method)
