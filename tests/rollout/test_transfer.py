"""Sharded parameters on their way: who sends what, bounded memory, and errors on all ranks."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gapo_megatron.compat.torch import TorchDispatchMode, operator_name
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.rules import Rule
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout import transfer
from gapo_megatron.rollout.transfer import Route, plan
from gapo_megatron.run.process_group import World
from tests.dist import run_sides
from tests.messages import mentions
from tests.transfer_setup import exported_of, rule_of

KIB = 2**10


def model(num_layers: int = 12, num_experts: int = 8, width: int = 24) -> list[Rule]:
    """Parameters of every kind: replicated, cut along either dimension, experts, ends."""
    layer = {"num_layers": num_layers}
    return [
        rule_of("embedding.weight", (100, width), tp_dim=0),
        rule_of("decoder.layers.{layer}.norm", (width,), **layer),
        rule_of("decoder.layers.{layer}.bias", (width // 2,), is_buffer=True, **layer),
        rule_of("decoder.layers.{layer}.column", (2 * width, width), tp_dim=0, **layer),
        rule_of("decoder.layers.{layer}.row", (width, 2 * width), tp_dim=1, **layer),
        rule_of(
            "decoder.layers.{layer}.experts.{expert}",
            (width, width // 3),
            num_experts=num_experts,
            **layer,
        ),
        rule_of("output.weight", (100, width), tp_dim=0),
    ]


def stages_of(num_stages: int, num_virtual: int = 1) -> list[list[range]]:
    size = 12 // num_stages // num_virtual
    return [
        [range(first * size, (first + 1) * size) for first in range(rank, 12 // size, num_stages)]
        for rank in range(num_stages)
    ]


LAYOUTS = {
    # Tensor, expert, pipeline ranks, virtual stages; all ranks that train, ranks that receive.
    "one": (1, 1, 1, 1, 1, 1),
    "data": (1, 1, 1, 1, 4, 2),
    "tensor": (4, 1, 1, 1, 8, 2),
    "few receivers": (2, 2, 2, 1, 16, 3),
    "virtual stages": (2, 4, 3, 2, 24, 8),
    "many receivers": (2, 2, 2, 1, 8, 48),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bucket_bytes", [1, 4 * KIB, 2**30])
def test_every_element_of_every_shard_travels_once_from_a_rank_that_holds_it(
    layout: str, bucket_bytes: int
) -> None:
    tp, ep, pp, vpp, num_ranks, num_receivers = LAYOUTS[layout]
    exported = Exported(model(), stages_of(pp, vpp), tp, ep, num_ranks, torch.bfloat16)
    for bucket, size, messages in plan(
        exported, num_receivers=num_receivers, bucket_bytes=bucket_bytes
    ):
        # Buffers stay in float32, and each travels by itself.
        has_buffer = any(rule.is_buffer for rule, _ in bucket.parts)
        assert bucket.dtype == (torch.float32 if has_buffer else torch.bfloat16)
        assert not has_buffer or len(bucket.parts) == 1
        holders = exported.holders(bucket.stage, bucket.group)
        assert len(holders) == bucket.num_shards
        end, stops = 0, dict[tuple[int, int], int]()
        for one in messages:
            assert one.start == end < one.stop
            # In one row; and aligned, except where a shard begins.
            assert one.start == stops.get((one.sender, one.shard), one.start)
            assert one.start % 128 == 0 or one.start % bucket.shard_numel == 0
            stops[one.sender, one.shard] = one.stop
            assert one.sender in holders[one.shard]
            assert one.start // bucket.shard_numel == one.shard
            assert (one.stop - 1) // bucket.shard_numel == one.shard
            assert one.start // size == (one.stop - 1) // size == one.receiver < num_receivers
            end = one.stop
        assert end == bucket.num_shards * bucket.shard_numel


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_trainers_send_about_the_same(layout: str) -> None:
    """Of a model of many layers of equal size; a receiver gets as much from them as any other."""
    tp, ep, pp, vpp, num_ranks, num_receivers = LAYOUTS[layout]
    rules = [rule for rule in model(width=768) if rule.num_layers]
    exported = Exported(rules, stages_of(pp, vpp), tp, ep, num_ranks, torch.float32)
    sent, received = Counter[int](), Counter[int]()
    for _, _, messages in plan(exported, num_receivers=num_receivers, bucket_bytes=2**30):
        for one in messages:
            sent[one.sender] += one.stop - one.start
            received[one.receiver] += one.stop - one.start
    total = 12 * sum(math.prod(rule.full_shape) * (rule.num_experts or 1) for rule in rules)
    assert sum(sent.values()) == total
    assert max(sent.values()) <= 1.35 * total / num_ranks
    assert max(received.values()) <= 1.05 * total / num_receivers


def many(num_trainers: int) -> Exported:
    """Ten layers of two parameters, each cut over all trainers."""
    rules = [
        rule_of(f"{{layer}}.{part}", (num_trainers * 450, 2), tp_dim=0, num_layers=10)
        for part in range(2)
    ]
    return exported_of(rules, num_ranks=num_trainers)


def number_of(name: str) -> int:
    """Number of a parameter of `many`."""
    layer, part = name.split(".")
    return 2 * int(layer) + int(part)


def _outcome(world: World) -> str:
    """The error that a rank gets where receivers expect only one of the two rules."""
    assert world.bridge is not None
    bridge, exported = world.bridge, many(world.bridge.num_training)
    try:
        if bridge.is_generation:
            for _ in bridge.receive_whole(replace(exported, rules=exported.rules[:1])):
                pass
        else:
            bridge.send_shards(exported, lambda name: torch.zeros(450, 2))
    except WeightSyncError as error:
        return str(error)
    return ""


def test_ranks_that_expect_other_parameters_find_out_before_the_first() -> None:
    for text in run_sides(_outcome, 2, 1):
        assert "do not expect the same" in text


def test_whatever_decides_what_travels_is_compared() -> None:
    """Every field of a rule, but for the functions of the Hugging Face tensors."""
    rule = rule_of("{layer}", (4, 2), tp_dim=0, num_layers=2)
    other: dict[str, Any] = {
        "megatron": "{layer}.weight",
        "hf": ("other",),
        "hf_shapes": ((2, 4),),
        "tp_dim": 1,
        "num_layers": 3,
        "in_layers": range(1),
        "num_experts": 2,
        "te_name": "other",
        "glu": True,
        "vocab_padded": True,
        "is_buffer": True,
        "shape": (2, 4),
    }
    assert other.keys() == {one.name for one in fields(Rule)} - {"join", "part", "tied"}
    rules = [rule, *(replace(rule, **{name: value}) for name, value in other.items())]
    seen = {transfer._fingerprint(exported_of([one], num_ranks=2), 1) for one in rules}
    seen |= {transfer._fingerprint(exported_of([rule], num_ranks=2), 2)}
    assert len(seen) == len(rules) + 1


def test_a_shard_of_another_size_or_dtype_is_no_message() -> None:
    bucket = next(plan(many(1), num_receivers=1, bucket_bytes=1)).bucket
    for odd in (torch.zeros(449, 2), torch.zeros(450, 2, dtype=torch.bfloat16)):
        with pytest.raises(WeightSyncError, match=mentions(odd.numel(), odd.dtype, 900)):
            bucket.pieces(0, lambda name, odd=odd: odd)


def _one_is_gone(world: World, gone: int, folder: Path) -> None:
    """Exit without notice, as after SIGKILL; each other rank's error is in a file."""
    assert world.bridge is not None
    rank, exported = int(os.environ["RANK"]), many(2)
    world.bridge._route.bucket_bytes = 4 * KIB

    def shard_of(name: str) -> Tensor:
        if rank == gone and number_of(name) == 10:
            os._exit(0)
        return torch.full((450, 2), float(rank))

    try:
        if world.bridge.is_generation:
            for number, _ in enumerate(world.bridge.receive_whole(exported)):
                if rank == gone and number == 10:
                    os._exit(0)
        else:
            world.bridge.send_shards(exported, shard_of)
    except WeightSyncError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_who_is_gone_keeps_nobody_waiting(tmp_path: Path, gone: int) -> None:
    # Under a launcher: without one the ranks that are left are ended before they can say it.
    run_sides(
        _one_is_gone, 2, 2, gone, tmp_path, env={"GAPO_ATTEMPT_DIR": str(tmp_path / "attempt")}
    )
    left = {"0", "1", "2", "3"} - {str(gone)}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)


class Memory(TorchDispatchMode):
    """Counts the bytes allocated by these operators while they are in use."""

    def __init__(self, operators: Sequence[str]) -> None:
        super().__init__()
        self.peak = 0
        self._operators = operators
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if operator_name(func) in self._operators:
            storage = made.untyped_storage()
            self._made.append((StorageWeakRef(storage), storage.nbytes()))
        sizes = {one.cdata: size for one, size in self._made if size > 2**16 and not one.expired()}
        self.peak = max(self.peak, sum(sizes.values()))
        return made


def _memory(world: World, bucket: int, num_held: int) -> list[int]:
    """Peak bytes allocated by an end in each of two transfers; a receiver holds some tensors."""
    assert world.bridge is not None
    bridge = world.bridge
    route: Route = bridge._route
    route.bucket_bytes = bucket
    # Half a bucket, so that two are put together.
    rules = [
        rule_of(f"decoder.layers.{{layer}}.{i}", (bucket // 8,), num_layers=10) for i in range(2)
    ]
    exported, peaks = exported_of(rules, num_ranks=1), []
    kept = torch.zeros(bucket // 8)
    for _ in range(2):
        with Memory(("empty", "cat")) as made:
            if bridge.is_generation:
                taken: deque[Tensor] = deque(maxlen=num_held)
                for _, _, tensor in transfer.receive(exported, route):
                    taken.append(tensor)
                    del tensor
                taken.clear()
            else:
                transfer.send(exported, lambda name: kept, route)
        peaks.append(made.peak)
    return peaks


@pytest.mark.parametrize(("num_held", "num_buckets"), [(0, 3), (6, 6)])
def test_memory_beside_the_weights_is_three_buckets_and_what_is_held(
    num_held: int, num_buckets: int
) -> None:
    """Two buffers at a trainer. A bucket is freed with its last tensor that is still held."""
    bucket = 2**20
    sender, *receivers = run_sides(_memory, 1, 2, bucket, num_held)
    assert [peak / bucket for peak in sender] == [2, 2]
    assert all(num_buckets <= peak / bucket <= num_buckets + 1 for one in receivers for peak in one)
