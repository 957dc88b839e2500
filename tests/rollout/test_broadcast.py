"""Weights in buckets: the same bits, bounded memory, and errors on both ends."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gapo_megatron.compat.torch import TorchDispatchMode, operator_name
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.rollout import broadcast
from gapo_megatron.rollout.broadcast import Route
from gapo_megatron.run.process_group import World
from tests.dist import run_sides

BUCKET_BYTES = 4096


def weights() -> Iterator[tuple[str, Tensor]]:
    """Various shapes and dtypes, in memory that the next tensor overwrites, as a policy's is."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (), (0, 3), (33, 5), (64, 64), (1,), (3, 1, 5), (257, 31), (1024,), (11, 13)]
    tied = torch.randn(40, 8, generator=generator)
    yield "embed", tied
    for number, shape in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float16):
            tensor = torch.randn(shape, generator=generator).to(dtype)
            yield f"{number}.{dtype}", tensor
            tensor.view(-1).view(torch.uint8).fill_(0xAA)
    yield "columns", torch.randn(50, 60, generator=generator).t()
    yield "slice", torch.randn(50, 60, generator=generator)[:, ::3]
    yield "not a number", torch.tensor([0x7FC1, -1, 0x7F80], dtype=torch.int16).view(torch.bfloat16)
    yield "head", tied


def bits(
    pairs: Iterator[tuple[str, Tensor]], *, held: bool = False
) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Received tensors; `held`: read when all have arrived, as an engine may do."""
    return [
        (
            name,
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in (list(pairs) if held else pairs)
    ]


def _route(world: World) -> Route:
    assert world.bridge is not None and world.bridge._route is not None
    return world.bridge._route


class Memory(TorchDispatchMode):
    """Counts the bytes allocated by `torch.empty` while they are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if operator_name(func) == "empty":
            storage = made.untyped_storage()
            self._made.append((StorageWeakRef(storage), storage.nbytes()))
        sizes = [size for one, size in self._made if size > 2**16 and not one.expired()]
        self.peak = max(self.peak, sum(sizes))
        return made


def _send_or_receive(world: World, bucket_bytes: int) -> list[object]:
    """Twice over one route: the first broadcast leaves no messages for the second."""
    route = _route(world)
    if world.bridge.is_generation:  # type: ignore[union-attr]
        return [bits(broadcast.receive(route), held=True) for _ in range(2)]
    return [broadcast.send(weights(), route, bucket_bytes=bucket_bytes) for _ in range(2)]


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES, 2**24])
def test_every_receiver_gets_every_bit_in_order(bucket_bytes: int) -> None:
    """Tiny buckets, several buckets of several tensors, and one bucket for all."""
    sent = bits(weights())
    sender, *receivers = run_sides(_send_or_receive, 1, 2, bucket_bytes)
    assert receivers == [[sent, sent]] * 2
    assert sender == [sum(len(content) for *_, content in sent)] * 2


def _many() -> Iterator[tuple[str, Tensor]]:
    yield from ((str(number), torch.full((900,), float(number))) for number in range(20))


def _failing() -> Iterator[tuple[str, Tensor]]:
    yield from _many()
    raise ArithmeticError("no tensor 20")


def _error_of_the_sender(world: World) -> str:
    assert world.bridge is not None
    try:
        if world.bridge.is_generation:
            bits(world.bridge.receive_weights())
        else:
            broadcast.send(_failing(), _route(world), bucket_bytes=BUCKET_BYTES)
    except (ArithmeticError, WeightSyncError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_the_sender_is_every_receivers() -> None:
    sender, *receivers = run_sides(_error_of_the_sender, 1, 2)
    assert sender == "ArithmeticError: no tensor 20"
    for receiver in receivers:
        assert receiver.startswith("WeightSyncError") and sender in receiver


def _one_is_gone(world: World, gone: int, folder: Path) -> None:
    """Exit without notice, as after SIGKILL; each other rank's error is in a file."""
    rank = int(os.environ["RANK"])
    try:
        if rank == 0:
            broadcast.send(_leaving(0 if gone == 0 else None), _route(world), bucket_bytes=4096)
        else:
            for number, _ in enumerate(broadcast.receive(_route(world))):
                if rank == gone and number == 10:
                    os._exit(0)
    except WeightSyncError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


def _leaving(rank: int | None) -> Iterator[tuple[str, Tensor]]:
    for number, pair in enumerate(_many()):
        if rank == 0 and number == 10:
            os._exit(0)
        yield pair


@pytest.mark.parametrize("gone", [0, 1])
def test_who_is_gone_keeps_nobody_waiting(tmp_path: Path, gone: int) -> None:
    # Under a launcher: without one the ranks that are left are ended before they can say it.
    run_sides(
        _one_is_gone, 1, 2, gone, tmp_path, env={"GAPO_ATTEMPT_DIR": str(tmp_path / "attempt")}
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"0", "1", "2"} - {str(gone)})


def _memory(world: World, bucket_bytes: int, sizes: list[int], num_held: int) -> list[int]:
    """Peak bytes allocated by an end in each of two broadcasts, without the sent tensors.

    The receiver holds its last `num_held` tensors.
    """
    peaks = []
    for _ in range(2):
        with Memory() as made:
            if world.bridge is not None and world.bridge.is_generation:
                taken: deque[Tensor] = deque(maxlen=num_held)
                for _, tensor in broadcast.receive(_route(world)):
                    taken.append(tensor)
                    del tensor
                taken.clear()
            else:
                tensors = ((str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes)
                broadcast.send(tensors, _route(world), bucket_bytes=bucket_bytes)
        peaks.append(made.peak)
    return peaks


@pytest.mark.parametrize(("num_held", "num_buckets"), [(0, 2), (3, 5)])
def test_memory_beside_the_weights_is_two_buckets_and_what_is_held(
    num_held: int, num_buckets: int
) -> None:
    """A bucket is freed with its last tensor that is still held."""
    bucket = 2**20
    sizes = [bucket // 2] * 2 + [bucket] * 9
    sender, receiver = run_sides(_memory, 1, 1, bucket, sizes, num_held)
    assert sender == [2 * bucket] * 2
    # Gloo's own thread may still hold the one before.
    assert all(num_buckets <= peak / bucket <= num_buckets + 1 for peak in receiver)
