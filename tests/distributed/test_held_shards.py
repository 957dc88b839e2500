"""What a rank holds of a checkpoint until it is written: its part, in memory of its own."""

from __future__ import annotations

import logging
import socket
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.checkpoint import Room, shards
from gapo_megatron.checkpoint.shards import Shards
from gapo_megatron.compat.megatron_checkpoint import sharded_tensors
from gapo_megatron.formats import manifest
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import saved_bytes, state_bytes
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import (
    begin,
    held_back,
    make_config,
    make_model,
    make_state,
    tensors_on_disk,
    train_one_update,
)
from tests.distributed.policy_setup import load_policy


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def hold_copies(policy: Policy, folder: Path, room: Room) -> Shards:
    folder.mkdir(parents=True)
    state, gather = policy.sharded_state_dict(), policy.gather_optimizer_state
    return shards.hold(state, folder, policy.groups, gather=gather, copied=True, room=room)


def addresses(held: Shards) -> set[int]:
    tensors = [one for one in held._held.data.values() if isinstance(one, torch.Tensor)]
    return {one.data_ptr() for one in tensors}


def save_before_the_last_is_written(hf_dir: str, run_dir: Path) -> None:
    """Two saves at once in one room, which a first one has filled."""
    policy, room = load_policy(make_config(hf_dir, layout="single")), Room()
    first = hold_copies(policy, run_dir / "first", room)
    assert room.num_bytes == 0
    places = addresses(first)
    first.write()
    assert room.num_bytes >= sum(one.nbytes for one in policy.stages[0].parameters()) * 4
    held, expected = [], []
    for seed in (0, 1):
        train_one_update(policy, seed=seed)
        held.append(hold_copies(policy, run_dir / f"held_{seed}", room))
        expected.append({i: one.clone() for i, one in held[-1]._held.data.items() if tensor(one)})
    assert addresses(held[0]) == places, "memory that is in use already"
    intact = [
        all(torch.equal(one._held.data[i], numbers) for i, numbers in found.items())
        for one, found in zip(held, expected, strict=True)
    ]
    assert intact == [True, True]
    for one in held:
        one.write()
    assert room.num_bytes > 0


def tensor(one: object) -> bool:
    return isinstance(one, torch.Tensor)


def test_memory_is_used_again_but_not_while_it_is_written(hf_dir: str, tmp_path: Path) -> None:
    """A room that kept the memory would silently rewrite the checkpoint that is being written."""
    run_distributed(save_before_the_last_is_written, 1, hf_dir, tmp_path)


def test_copies_share_memory_but_no_storage() -> None:
    """Torch would copy a tensor whose storage holds others, and keep these copies to the end."""
    like = [
        torch.zeros(3, 5, dtype=torch.bfloat16),
        torch.zeros(7),
        torch.zeros(0, 2),
        torch.zeros((), dtype=torch.float16),
        torch.zeros(4, 6).t(),
    ]
    memory = torch.zeros(sum(map(shards._padded, like)), dtype=torch.uint8)
    copies = list(shards._apart(memory, like))
    for i, (one, copy) in enumerate(zip(like, copies, strict=True)):
        assert (copy.shape, copy.dtype) == (one.shape, one.dtype) and copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == one.nbytes
        copy.fill_(i + 1)
    assert [copy.unique().tolist() for copy in copies] == [[1], [2], [], [4], [5]]
    assert memory.any()


def hold_a_copy(hf_dir: str, run_dir: Path) -> None:
    """What is planned of a master weight is a copy of the tensor that stands for it."""
    policy, plan = load_policy(make_config(hf_dir, layout="single")), shards.save_sharded
    name = "optimizer.state.param.output_layer.weight"

    def plan_a_copy(state: dict[str, Any], *others: Any) -> None:
        (one,) = (one for one in sharded_tensors(state["optimizer"]) if one.key == name)
        one.data = one.data.clone()
        plan(state, *others)

    with (
        patch.object(shards, "save_sharded", plan_a_copy),
        pytest.raises(AssertionError, match=name),
    ):
        hold_copies(policy, run_dir / "held", Room())


def test_a_tensor_whose_content_nobody_brings_is_not_written(hf_dir: str, tmp_path: Path) -> None:
    """It would be zeros, and a resumed run would begin with them."""
    run_distributed(hold_a_copy, 1, hf_dir, tmp_path)


def hold_little(hf_dir: str, run_dir: Path) -> tuple[int, int, int]:
    """Bytes of this rank's copies, those of it gathered, and those that the planner predicts."""
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    outlines: list[weakref.ref[Any]] = []
    gathered: list[int] = []
    whole_state, gather = policy.sharded_state_dict, policy.gather_optimizer_state

    def watched() -> dict[str, Any]:
        state = whole_state()
        outlines.extend(weakref.ref(one.data) for one in sharded_tensors(state["optimizer"]))
        return state

    def watched_gather(wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        gathered.extend(target.nbytes for _, target in wanted)
        gather(wanted)

    with (
        held_back() as released,
        patch.object(policy, "sharded_state_dict", watched),
        patch.object(policy, "gather_optimizer_state", watched_gather),
    ):
        saving = begin(run_dir, policy, config, make_state(1))
        held = saving.shards._held.data.values()
        num_bytes = sum(one.nbytes for one in held if isinstance(one, torch.Tensor))
        assert outlines and all(one() is None for one in outlines), "the optimizer's whole state"
        released.set()
        path = saving.finish()
    assert not saving.shards._held.data
    assert sum(one.nbytes for one in tensors_on_disk(path).values()) > num_bytes
    layout = Layout.of(config, world_size=2)
    ((_, _, optimizer),) = state_bytes(rules_for(policy.hf_config), config, layout)
    return num_bytes, sum(gathered), saved_bytes(optimizer, config.model.precision, copied=True)


def test_a_rank_copies_what_it_writes_and_no_more(hf_dir: str, tmp_path: Path) -> None:
    """Each tensor once, on one rank; the state that was gathered to be saved is gone."""
    found = run_distributed(hold_little, 2, hf_dir, tmp_path)
    sizes, gathered, predicted = zip(*found, strict=True)
    (path,) = manifest.list_steps(checkpoints_dir(tmp_path))
    (tensors,) = run_distributed(sizes_on_disk, 1, path)
    assert sum(sizes) == sum(predicted) == tensors
    assert sum(gathered) * 4 == tensors * 3  # of float32 weights, their masters and moments
    assert max(sizes) < 0.6 * tensors


def sizes_on_disk(path: Path) -> int:
    return sum(one.nbytes for one in tensors_on_disk(path).values())


def lack_memory(hf_dir: str, run_dir: Path) -> list[str]:
    """Warnings of this rank; the second rank's node has no memory left."""
    config = make_config(hf_dir, layout="dp2")
    policy = load_policy(config)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gapo_megatron.checkpoint").addHandler(handler)
    available = [2**40, 1000][dist.get_rank()]
    room = Room()
    with patch.object(shards, "available_bytes", lambda: available):
        saving = begin(run_dir, policy, config, make_state(1), room)
    assert not saving.in_background and saving.work_s > 0
    assert saving.finish() == manifest.step_dir(checkpoints_dir(run_dir), 1)
    assert room.num_bytes == 0, "kept, though the node lacks it"
    # Together with what the other ranks of the node copy; 10 % are left to training.
    with patch.object(shards, "available_bytes", lambda: 1000):
        assert shards._find_lack(450) == "" and shards._find_lack(451) != ""
        with patch.object(socket, "gethostname", lambda: f"node{dist.get_rank()}"):
            assert shards._find_lack(900) == ""
            assert "node1" in shards._find_lack([900, 901][dist.get_rank()])
    return warnings


def test_a_node_without_memory_saves_before_training_goes_on(hf_dir: str, tmp_path: Path) -> None:
    first, second = run_distributed(lack_memory, 2, hf_dir, tmp_path)
    (warning,) = first
    for said in ("checkpoint.background", socket.gethostname(), "GiB", "step_00000001"):
        assert said in warning
    assert second == []
