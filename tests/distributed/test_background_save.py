"""Checkpoints that are written while training continues hold what they held when they began."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint.shards import Shards
from gapo_megatron.config import CheckpointConfig, Config
from gapo_megatron.errors import CheckpointError, FencedError
from gapo_megatron.formats import manifest
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.policy import Policy, destroy
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import (
    assert_bitwise,
    begin,
    held_back,
    make_config,
    make_model,
    make_state,
    save,
    tensors_on_disk,
    train_one_update,
)
from tests.distributed.policy_setup import load_policy
from tests.messages import mentions
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def train_meanwhile(run_dir: Path, policy: Policy, config: Config, *, step: int) -> Path:
    """A checkpoint, written after another update of policy, random generators and state."""
    state = make_state(step)
    with held_back() as released:
        saving = begin(run_dir, policy, config, state)
        assert saving.in_background
        train_one_update(policy, seed=9)
        torch.rand(3)
        state.finish_step()
        state.window.load_state_dict([[]])
        assert not saving.is_written()
        assert manifest.list_steps(checkpoints_dir(run_dir)) == []
        released.set()
        return saving.finish()


def differing_files(left: Path, right: Path) -> set[str]:
    """Names of files with different bytes, by their digests; both have files of the same names."""
    files = [manifest.read_manifest(folder).files for folder in (left, right)]
    assert files[0].keys() == files[1].keys()
    return {name for name, entry in files[0].items() if entry != files[1][name]}


def write_both_ways(hf_dir: str, run_dir: Path) -> None:
    for layout in ("dp2", "tp2"):
        config = make_config(hf_dir, layout=layout)
        policy = load_policy(config)
        train_one_update(policy, seed=0)
        whole = save(run_dir / layout / "whole", policy, config, step=1, keep_last=2)
        behind = train_meanwhile(run_dir / layout / "behind", policy, config, step=1)
        assert_bitwise(tensors_on_disk(whole), tensors_on_disk(behind))
        assert differing_files(whole, behind) == {".metadata"}  # has a random id of the save
        destroy()


def test_it_has_the_bytes_of_a_save_that_training_waits_for(hf_dir: str, tmp_path: Path) -> None:
    run_distributed(write_both_ways, 2, hf_dir, tmp_path)


def fail_on_one_rank(hf_dir: str, run_dir: Path) -> None:
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    save(run_dir, policy, config, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with held_back() as released:
        saving = begin(run_dir, policy, config, make_state(2))
        if dist.get_rank() == 1:  # stands for a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        released.set()
        with pytest.raises(
            CheckpointError, match=mentions("step_00000002", "rank 1", "File too large")
        ):
            saving.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    state = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert state is not None and state.step == 1
    # The next save removes what is left of it.
    save(run_dir, policy, config, step=3)
    assert not list(checkpoints_dir(run_dir).glob(".tmp_*"))
    # A whole checkpoint does not fail because older ones stay; other ranks would wait for ever.
    errors = (OSError("input/output error"), CheckpointError("cannot be read"))
    for step, error in enumerate(errors, 4):
        with patch.object(manifest, "prune", side_effect=error):
            whole = save(run_dir, policy, config, step=step)
        assert manifest.list_steps(checkpoints_dir(run_dir))[0] == whole
        dist.barrier()


def test_all_ranks_learn_that_one_could_not_write(tmp_path: Path) -> None:
    # Of tensors that no buffer of a file holds.
    hf_dir = make_model(tmp_path / "model", hidden_size=96)
    run_distributed(fail_on_one_rank, 2, hf_dir, tmp_path / "run")


def lose_the_run(hf_dir: str, run_dir: Path) -> None:
    config = make_config(hf_dir, layout="single")
    policy = load_policy(config)
    for has_saved in (False, True):
        with held_back() as released:
            saving = begin(run_dir, policy, config, make_state(1))
            (run_dir / "OWNER").write_text("8.1\n")  # while the thread writes
            if has_saved:  # the new owner, which removes what others have not finished
                manifest.remove_half_written(checkpoints_dir(run_dir))
            released.set()
            with pytest.raises(FencedError, match=mentions("8.1", "7.0")):
                saving.finish()
        assert manifest.list_steps(checkpoints_dir(run_dir)) == []


def test_an_attempt_that_lost_the_run_meanwhile_publishes_nothing(
    hf_dir: str, tmp_path: Path
) -> None:
    run_distributed(lose_the_run, 1, hf_dir, tmp_path)


def die_while_writing(hf_dir: str, run_dir: Path, after: str) -> None:
    """Whole at step 1, and killed while step 2 is on its way to the disk."""
    config = make_config(hf_dir, layout="dp2")
    only_one = CheckpointConfig(keep_last=1)
    config = config.model_copy(update={"checkpoint": only_one})
    policy = load_policy(config)
    train_one_update(policy, seed=0)
    save(run_dir, policy, config, step=1)
    train_one_update(policy, seed=1)
    save(run_dir / "expected", policy, config, step=2)
    reached = threading.Event()
    at = {"shards": (Shards, "write"), "digests": (manifest, "describe_files")}[after]
    work = getattr(*at)

    def stuck(*arguments: Any) -> None:
        work(*arguments)
        reached.set()
        threading.Event().wait()

    with patch.object(*at, stuck):
        saving = begin(run_dir, policy, config, make_state(2))
        assert reached.wait(HANG_S)
        assert not saving.is_written()
        os._exit(0)  # a kill: nothing is cleaned up


def resume(hf_dir: str, run_dir: Path, step: int) -> None:
    """From the checkpoint after this step; what was expected after step 2 is written again."""
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    state = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert state is not None and state.step == step
    if step == 1:
        train_one_update(policy, seed=1)
    path = save(run_dir / "again", policy, config, step=2)
    expected = manifest.step_dir(checkpoints_dir(run_dir / "expected"), 2)
    assert_bitwise(tensors_on_disk(path), tensors_on_disk(expected))
    save(run_dir, policy, config, step=3)


def die_while_removing(hf_dir: str, run_dir: Path) -> None:
    """Step 2 is whole, and killed while step 1 is on its way out."""
    config = make_config(hf_dir, layout="dp2")
    config = config.model_copy(update={"checkpoint": CheckpointConfig(keep_last=1)})
    policy = load_policy(config)
    save(run_dir, policy, config, step=1)
    train_one_update(policy, seed=0)
    save(run_dir / "expected", policy, config, step=2)
    reached = threading.Event()

    def half(path: Path) -> bool:
        next(path.glob("__*.distcp")).unlink()
        reached.set()
        threading.Event().wait()
        return False

    saving = begin(run_dir, policy, config, make_state(2))
    with patch.object(manifest, "remove", lambda path: path.exists() and half(path)):
        saving.finish()  # does not wait for it
        assert dist.get_rank() != 0 or reached.wait(HANG_S)
        dist.barrier()
        os._exit(0)


def test_a_kill_while_an_old_one_is_removed_leaves_the_new_one(hf_dir: str, tmp_path: Path) -> None:
    """Nor is half a checkpoint left under its name; the next save removes the rest."""
    run_distributed(die_while_removing, 2, hf_dir, tmp_path)
    names = [path.name for path in sorted(checkpoints_dir(tmp_path).iterdir())]
    assert names == [".tmp_step_00000001.old", "step_00000002"]
    run_distributed(resume, 2, hf_dir, tmp_path, 2)
    names = [path.name for path in sorted(checkpoints_dir(tmp_path).iterdir())]
    assert names == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("after", ["shards", "digests"])
def test_a_kill_while_it_is_written_leaves_the_one_before(
    hf_dir: str, tmp_path: Path, after: str
) -> None:
    run_distributed(die_while_writing, 2, hf_dir, tmp_path, after)
    assert list(checkpoints_dir(tmp_path).glob(".tmp_step_00000002.*/__*_0.distcp"))
    run_distributed(resume, 2, hf_dir, tmp_path, 1)
