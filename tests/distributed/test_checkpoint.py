"""Checkpoints of a real policy are exact, on the layout that wrote them and on every other."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.config import Config
from gapo_megatron.errors import CheckpointError, ConversionError
from gapo_megatron.formats import manifest
from gapo_megatron.formats.unpickle import read_common, read_metadata
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.learn.step import Progress
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.policy.load import load_sharded
from gapo_megatron.rollouts import Batch, Rollouts
from tests.attempt_setup import make_attempt
from tests.damage import TRAPS, sign, sign_document
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import (
    assert_bitwise,
    make_config,
    make_model,
    make_state,
    save,
    stored,
    tensors_on_disk,
    train_one_update,
)
from tests.distributed.policy_setup import load_policy
from tests.messages import mentions
from tests.slurm.training import fill, small_disk


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def continue_on(hf_dir: str, run_dir: Path, layouts: list[str]) -> None:
    """Per layout: resume, save again at once (the content must not have changed), train, save."""
    for layout in layouts:
        config = make_config(hf_dir, layout=layout)
        policy = load_policy(config)
        state = checkpoint.load_latest(run_dir, policy=policy, config=config)
        step = 0
        if state is not None:
            step = state.step
            assert stored(state) == stored(make_state(step))
            assert policy.num_updates == step
            again = save(run_dir / layout, policy, config, step=step)
            found = manifest.step_dir(checkpoints_dir(run_dir), step)
            before, after = tensors_on_disk(found), tensors_on_disk(again)
            assert any("exp_avg_sq" in name for name in before)
            assert_bitwise(before, after)
        train_one_update(policy, seed=step)
        save(run_dir, policy, config, step=step + 1)
        destroy()


def test_every_layout_reads_what_any_other_wrote(hf_dir, tmp_path):
    run_distributed(continue_on, 1, hf_dir, tmp_path, ["single"])
    run_distributed(continue_on, 2, hf_dir, tmp_path, ["pp2", "cp2", "vpp", "dp2", "uneven", "tp2"])
    run_distributed(continue_on, 1, hf_dir, tmp_path, ["single"])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def resume_exactly(hf_dir: str, run_dir: Path) -> None:
    """Three updates without a stop, then the last two again from the checkpoint after the first."""
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    assert checkpoint.load_latest(run_dir, policy=policy, config=config) is None
    train_one_update(policy, seed=0)
    random.seed(dist.get_rank())  # ranks differ, and each gets its own state back
    save(run_dir, policy, config, step=1)
    expected_draw = draw()
    for seed in (1, 2):
        train_one_update(policy, seed=seed)
    expected = tensors_on_disk(save(run_dir / "expected", policy, config, step=3))
    assert policy.num_updates == 3

    destroy()
    resumed = load_policy(config)
    state = checkpoint.load_latest(run_dir, policy=resumed, config=config)
    assert state is not None and state.step == 1 and resumed.num_updates == 1
    assert draw() == expected_draw
    for seed in (1, 2):
        train_one_update(resumed, seed=seed)
    # Bitwise: nothing of the state may be rounded, or counted twice, on its way through the files.
    assert_bitwise(tensors_on_disk(save(run_dir / "resumed", resumed, config, step=3)), expected)


def test_resume_is_bitwise(hf_dir, tmp_path):
    run_distributed(resume_exactly, 2, hf_dir, tmp_path)


def listen() -> list[str]:
    """Later warnings of this rank."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gapo_megatron.checkpoint").addHandler(handler)
    return warnings


def survive_damage(hf_dir: str, other_dir: str, run_dir: Path) -> list[str]:
    """Write four checkpoints, damage them in turn; returns this rank's warnings."""
    warnings = listen()
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    folder = checkpoints_dir(run_dir)

    def alter(step: int, name: str, keep: slice) -> None:
        if dist.get_rank() == 0:
            path = manifest.step_dir(folder, step) / name
            path.write_bytes(path.read_bytes()[keep])
        dist.barrier()

    def load() -> int:
        state = checkpoint.load_latest(run_dir, policy=policy, config=config)
        assert state is not None
        return state.step

    for step in (1, 2, 3, 4, 5):
        save(run_dir, policy, config, step=step, keep_last=4)
    assert [path.name[-1] for path in manifest.list_steps(folder)] == ["5", "4", "3", "2"]
    if dist.get_rank() == 0:
        (folder / ".tmp_step_00000006.1.0").mkdir()  # killed while writing
    assert load() == 5
    alter(5, "__1_0.distcp", slice(None, -7))
    alter(4, "rng_00001.pt", slice(1, None))
    assert load() == 3
    # What was refused stays refused, even if it could be read again, and there until it is passed.
    assert [path.name[-1] for path in manifest.list_steps(folder)] == ["3", "2"]
    if dist.get_rank() == 0:
        (folder / ".tmp_step_00000004.1.0").mkdir()
        (folder / ".tmp_step_00000004.1.0" / "junk").touch()  # of a save at this very step
    path = save(run_dir, policy, config, step=4, keep_last=2)
    assert "junk" not in manifest.read_manifest(path).files
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".damaged_step_00000005", "step_00000003", "step_00000004"]

    destroy()
    stranger_config = make_config(other_dir, layout="dp2")
    stranger = load_policy(stranger_config)
    with pytest.raises(CheckpointError, match=mentions("hidden_size", 32, 48)):
        checkpoint.load_latest(run_dir, policy=stranger, config=stranger_config)

    alter(4, "manifest.json", slice(0, 100))
    alter(3, ".metadata", slice(0, 0))
    with pytest.raises(CheckpointError, match=mentions("2 checkpoints", folder)):
        load()
    assert len(manifest.list_steps(folder)) == 2  # nothing is thrown away when nothing is left
    return warnings


def test_damage_is_skipped_and_named_by_all_ranks_together(hf_dir, tmp_path):
    other_dir = make_model(tmp_path / "other", hidden_size=48)
    warnings, others = run_distributed(survive_damage, 2, hf_dir, other_dir, tmp_path / "run")
    text = "\n".join(warnings)
    for name in ("step_00000005/__1_0.distcp has", "step_00000004/rng_00001.pt has"):
        assert name in text
    assert others == []


def fill_the_disk(hf_dir: str, run_dir: Path) -> None:
    config = make_config(hf_dir, layout="single")
    policy = load_policy(config)
    save(run_dir, policy, config, step=1)
    # A file-size limit stands for a full disk: the write fails with an OSError half-way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with pytest.raises(
        CheckpointError, match=mentions("step_00000002", "rank 0", "File too large")
    ):
        save(run_dir, policy, config, step=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    state = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert state is not None and state.step == 1

    with small_disk(run_dir / "disk") as is_there:
        if is_there:
            fill_a_real_one(run_dir / "disk", policy, config)


def fill_a_real_one(run_dir: Path, policy: Policy, config: Config) -> None:
    """Fails after some pages, for any writer: the system's error must be passed on."""
    path = save(run_dir, policy, config, step=1)
    folder, filler = checkpoints_dir(run_dir), run_dir / "filler"
    pages = [-(-file.stat().st_size // 4096) for file in path.iterdir()]
    total = sum(pages)
    for left in (0, total // 3, *(total - end for end in (16, 9, 3, 1))):
        manifest.remove_half_written(folder)
        fill(filler, leave=4096 * left)
        with pytest.raises(CheckpointError, match=mentions("step_00000002", "No space left")):
            save(run_dir, policy, config, step=2)
        assert manifest.list_steps(folder) == [path]
        filler.unlink()


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path):
    # Of tensors that no buffer of a file holds.
    hf_dir = make_model(tmp_path / "model", hidden_size=96)
    run_distributed(fill_the_disk, 1, hf_dir, tmp_path)


def put(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], str]:
    """Change a file of tensors and plain values."""

    def damage(folder: Path, _: Path) -> str:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)
        return folder.name

    return damage


def put_common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], str]:
    """Change what is no tensor, in a file of its own: Megatron-core prefers it to the object."""

    def damage(folder: Path, _: Path) -> str:
        common = read_common(folder, read_metadata(folder))
        change(common)
        torch.save(common, folder / "common.pt")
        return folder.name

    return damage


def put_state(folder: Path, _: Path) -> str:
    path = folder / "trainer_state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    return path.name


def unlist(name: str) -> Callable[[Path, Path], str]:
    def damage(folder: Path, _: Path) -> str:
        sign_document(folder, lambda document: document["files"].pop(name))
        return name

    return damage


UNSIGNED: list[Callable[[Path, Path], str]] = [
    *map(unlist, ("__0_0.distcp", ".metadata", "rng_00000.pt", "trainer_state.json"))
]
SIGNED: list[Callable[[Path, Path], str]] = [
    *TRAPS,
    put_state,
    put_common(lambda common: common.update(num_updates="1")),
    put_common(lambda common: common.pop("optimizer")),
    put_common(lambda common: common["optimizer"]["optimizer"].pop("param_groups")),
    put("rng_00000.pt", lambda state: state.update(torch=torch.ones(2))),
]


def refuse_the_newest(hf_dir: str, run_dir: Path) -> None:
    """An older one is loaded; no code is run, and no unlisted file is read."""
    config = make_config(hf_dir, layout="single")
    policy = load_policy(config)
    trace = run_dir / "trace"
    expected = tensors_on_disk(save(run_dir, policy, config, step=1))
    train_one_update(policy, seed=1)
    newest = save(run_dir, policy, config, step=2)
    shutil.copytree(newest, run_dir / "kept")
    warnings = listen()

    def load() -> checkpoint.State | None:
        warnings.clear()
        return checkpoint.load_latest(run_dir, policy=policy, config=config)

    def load_the_older(named: str) -> None:
        state = load()
        assert state is not None and (state.step, policy.num_updates) == (1, 0), named
        assert re.search(mentions("step_00000002", named), warnings[0])
        assert not trace.exists() and not newest.exists()
        shutil.copytree(run_dir / "kept", newest)

    for damage in (*UNSIGNED, *SIGNED):
        name = damage(newest, trace)
        if damage in SIGNED:
            sign(newest)
        load_the_older(name)
    # Of the tensors too: what it had read of them by then has been replaced.
    read_data = FileSystemReader.read_data

    def fail_once(reader: FileSystemReader, *arguments: Any) -> Any:
        read_data(reader, *arguments)
        FileSystemReader.read_data = read_data  # type: ignore[method-assign]
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    FileSystemReader.read_data = fail_once  # type: ignore[method-assign]
    load_the_older("Input/output error")
    again = save(run_dir / "again", policy, config, step=1)
    assert_bitwise(tensors_on_disk(again), expected)

    open_groups = newest / "open_groups.pt"
    open_groups.write_text("not of this checkpoint")
    state = load()
    assert state is not None and (state.step, state.open_groups) == (2, ())
    assert not [line for line in warnings if "skipping" in line]
    open_groups.unlink()

    # As the beginning of a branch, and with nothing to fall back on.
    new = config.run.model_copy(update={"output_dir": str(run_dir / "new")})
    settings = config.checkpoint.model_copy(update={"branch_from": str(newest)})
    branch = config.model_copy(update={"run": new, "checkpoint": settings})
    for trap in TRAPS:
        # Whatever a caller has looked at before.
        trap(newest, trace)
        with pytest.raises(ConversionError, match=mentions(newest)):
            load_sharded(policy.sharded_state_dict(is_loading=True), newest)
        assert not trace.exists()
        shutil.rmtree(newest)
        shutil.copytree(run_dir / "kept", newest)
        name = trap(newest, trace)
        sign(newest)
        point = checkpoint.check_branch(branch, policy.hf_config)
        assert point is not None
        checkpoint.begin_branch(point, branch, make_attempt(run_dir / "new"))
        with pytest.raises(CheckpointError, match=mentions("checkpoints/step_00000002", name)):
            checkpoint.load_latest(run_dir / "new", policy=policy, config=branch)
        assert not trace.exists()
        shutil.rmtree(run_dir / "new")


def test_the_newest_is_refused_by_name_whoever_signed_it(hf_dir, tmp_path):
    run_distributed(refuse_the_newest, 1, hf_dir, tmp_path)


def stop_within_a_step(hf_dir: str, run_dir: Path) -> None:
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    rank = dist.get_rank()
    progress = Progress(
        old_log_probs=[[], [torch.tensor([-1.5 - rank]), None]],
        sums={"loss": torch.tensor(0.1 + rank, dtype=torch.float64)},
        grad_norms=[0.1, 0.0],
        learning_rate=1e-6,
    )
    rollouts = Rollouts.of(
        [np.array([1, 2], np.int32)], [np.array([3], np.int32)], [np.array([-0.1], np.float32)]
    )
    open_step = OpenStep(
        Batch(
            rollouts.table,
            rollouts.tokens,
            advantages=torch.tensor([0.1], dtype=torch.float64),
            num_correct=torch.tensor([1]),
            group_size=torch.tensor([2]),
            valid=torch.tensor([True]),
        ),
        metrics={"reward/mean": 0.1},
        evaluated={"eval/pass@1": 1 / 3},
        progress=progress,
    )
    save(run_dir, policy, config, step=3)
    path = save(run_dir, policy, config, step=3, open_step=open_step)
    assert path.name == "step_00000003_2"

    found = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert found is not None and (found.step, found.num_open_updates) == (3, 2)
    read = found.open_step
    assert read is not None
    assert read.metrics == open_step.metrics and read.evaluated == open_step.evaluated
    assert (read.progress.grad_norms, read.progress.learning_rate) == ([0.1, 0.0], 1e-6)
    assert read.progress.old_log_probs[0] == [] and read.progress.old_log_probs[1][1] is None
    assert read.progress.old_log_probs[1][0].equal(torch.tensor([-1.5 - rank]))
    assert read.progress.sums["loss"].item() == 0.1 + rank
    for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
        ours, theirs = getattr(open_step.batch, name)[0], getattr(read.batch, name)[0]
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert read.batch.advantages.equal(open_step.batch.advantages)

    # Files of an open step depend on rank and plan: with others the checkpoint is unusable.
    changed = config.model_copy(
        update={
            "batch": config.batch.model_copy(update={"minibatch_prompts": 1}),
            "run": config.run.model_copy(update={"allow_changes": ("batch.minibatch_prompts",)}),
        }
    )
    assert changed != config
    destroy()
    found = checkpoint.load_latest(run_dir, policy=load_policy(changed), config=changed)
    assert found is not None and (found.step, found.open_step) == (3, None)
    save(run_dir, policy, config, step=3, open_step=open_step)
    destroy()
    other = make_config(hf_dir, layout="tp2")
    found = checkpoint.load_latest(run_dir, policy=load_policy(other), config=other)
    assert found is not None and (found.step, found.open_step) == (3, None)
    # Virtual stages are other layers of other ranks, and the sizes of the layout are the same.
    destroy()
    policy, staged = load_policy(pp2 := make_config(hf_dir, layout="pp2")), run_dir / "pp2"
    save(staged, policy, pp2, step=3)
    save(staged, policy, pp2, step=3, open_step=open_step)
    destroy()
    vpp = make_config(hf_dir, layout="vpp")
    found = checkpoint.load_latest(staged, policy=load_policy(vpp), config=vpp)
    assert found is not None and (found.step, found.open_step) == (3, None)
    # So would one by another library's optimizer, which rounds otherwise.
    destroy()
    policy, moved = load_policy(config), run_dir / "apex"
    save(moved, policy, config, step=3)
    policy.implementation = "apex"
    save(moved, policy, config, step=3, open_step=open_step)
    policy.implementation = "torch"
    found = checkpoint.load_latest(moved, policy=policy, config=config)
    assert found is not None and (found.step, found.open_step) == (3, None)
    # It was set aside: what is published next is the newest, and nothing jumps ahead of it.
    destroy()
    policy = load_policy(config)
    found = checkpoint.load_latest(run_dir, policy=policy, config=config)
    assert found is not None and found.open_step is None
    path = save(run_dir, policy, config, step=3, open_step=open_step, keep_last=1)
    if rank == 0:
        shutil.rmtree(manifest.step_dir(checkpoints_dir(run_dir), 3))
    dist.barrier()
    destroy()
    with pytest.raises(CheckpointError, match=mentions("step_00000003_2", "layout")):
        checkpoint.load_latest(run_dir, policy=load_policy(other), config=other)
    destroy()
    policy = load_policy(config)
    save(run_dir, policy, config, step=4)
    assert manifest.list_steps(checkpoints_dir(run_dir)) == [
        manifest.step_dir(checkpoints_dir(run_dir), 4)
    ]


def test_a_step_under_way_is_kept_for_its_own_layout(hf_dir, tmp_path):
    run_distributed(stop_within_a_step, 2, hf_dir, tmp_path)
