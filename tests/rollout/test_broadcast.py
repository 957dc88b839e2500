"""Weights in buckets: the same bits, in little memory, and no error that stays at one end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gapo_megatron.rollout import broadcast
from gapo_megatron.rollout.broadcast import Route
from gapo_megatron.run.process_group import World
from tests.dist import run_sides

BUCKET_BYTES = 4096


def weights() -> Iterator[tuple[str, Tensor]]:
    """Shapes and dtypes of all kinds, in memory that the next one overwrites, as a policy's is."""
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


def bits(pairs: Iterator[tuple[str, Tensor]]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """What arrives, taken before the next one is asked for."""
    return [
        (
            name,
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in pairs
    ]


def _route(world: World) -> Route:
    assert world.bridge is not None and world.bridge._route is not None
    return world.bridge._route


def _send_or_receive(world: World, bucket_bytes: int) -> list[object]:
    """Twice, by one route: nothing of the first broadcast is left in the way of the second."""
    route = _route(world)
    if world.bridge.is_generation:  # type: ignore[union-attr]
        return [bits(broadcast.receive(route)) for _ in range(2)]
    return [broadcast.send(weights(), route, bucket_bytes=bucket_bytes) for _ in range(2)]


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES, 2**24])
def test_every_receiver_gets_every_bit_in_order(bucket_bytes: int) -> None:
    """Buckets for next to nothing, of several tensors and several of them, and one for all."""
    sent = bits(weights())
    sender, *receivers = run_sides(_send_or_receive, 1, 2, bucket_bytes)
    assert receivers == [[sent, sent]] * 2
    assert sender == [sum(len(content) for *_, content in sent)] * 2
