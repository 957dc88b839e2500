"""A branch of a real run, on two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from gapo_megatron import checkpoint
from gapo_megatron.io.run_folder import read_changes
from gapo_megatron.policy import destroy
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import (
    assert_bitwise,
    make_config,
    make_model,
    make_state,
    save,
    tensors_on_disk,
    train_one_update,
)
from tests.distributed.policy_setup import load_policy


def branch_off(hf_dir: str, root: Path) -> None:
    """Two ranks branch from a checkpoint of another run, which is removed before they resume."""
    old = make_config(hf_dir, layout="dp2")
    policy = load_policy(old)
    train_one_update(policy, seed=0)
    path = save(root / "old", policy, old, step=2)
    expected = tensors_on_disk(path)
    destroy()

    changes = {
        "run": old.run.model_copy(update={"output_dir": str(root / "new")}),
        "objective": old.objective.model_copy(update={"method": "gspo"}),
        "checkpoint": old.checkpoint.model_copy(update={"branch_from": str(path), "keep_last": 1}),
    }
    config = old.model_copy(update=changes)
    policy = load_policy(config)
    point = checkpoint.check_branch(config, policy.hf_config)
    assert point is not None
    checkpoint.begin_branch(point, config, make_attempt(root / "new"))
    if dist.get_rank() == 0:
        shutil.rmtree(root / "old")
    dist.barrier()
    assert checkpoint.check_branch(config, policy.hf_config) is None
    state = checkpoint.load_latest(root / "new", policy=policy, config=config)
    assert state is not None and (state.step, policy.num_updates) == (2, 1)
    assert state.branch is not None and state.branch.changes == {
        "objective.method": ["gapo", "gspo"]
    }
    assert not state.window.state_dict()  # its steps are those of another objective
    assert read_changes(root / "new") == []  # and yet no change on the way
    assert_bitwise(tensors_on_disk(root / "new/checkpoints/step_00000002"), expected)
    again = checkpoint.save(
        root / "new",
        make_state(3, branch=state.branch),
        policy=policy,
        config=config,
        attempt=make_attempt(root / "new"),
    )
    assert_bitwise(tensors_on_disk(again), expected)
    # The next resume is from there, and knows where the run came from.
    state = checkpoint.load_latest(root / "new", policy=policy, config=config)
    assert state is not None and state.step == 3 and state.branch == point.branch
    assert state.window.state_dict()
    allowed = config.run.model_copy(update={"allow_changes": ("objective.method",)})
    other = config.model_copy(update={"objective": old.objective, "run": allowed})
    state = checkpoint.load_latest(root / "new", policy=policy, config=other)
    assert state is not None and not state.window.state_dict()
    assert [step.name for step in again.parent.iterdir()] == ["step_00000003"]


def test_two_ranks_begin_a_branch_and_resume_it(tmp_path):
    hf_dir = make_model(tmp_path / "model", hidden_size=32)
    run_distributed(branch_off, 2, hf_dir, tmp_path)
