"""Tensors that a model folder stores for all experts of a layer together, expert first.

gpt-oss's folders hold `model.layers.3.mlp.experts.down_proj` [E, ...]. Everything else here knows
each expert's own tensor, `model.layers.3.mlp.experts.7.down_proj` [...]: a slice of a stack is a
range of its file, so it is read and written without the rest.

Published stacks are in MXFP4 (OCP Microscaling Formats 1.0): `..._blocks` [E, out, in / 32, 16]
uint8, two numbers of 4 bits in each, and `..._scales` [E, out, in / 32] uint8, the exponents of
their blocks. Read, they are bfloat16, exactly, unless they underflow, and [in, out] as in other
folders.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from gapo_megatron.errors import ConversionError
from gapo_megatron.hf.headers import Header, item_bytes
from gapo_megatron.models.rules import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Layout = tuple[Shape, torch.dtype]

_STACK = re.compile(
    r"(?P<experts>model\.layers\.\d+\.mlp\.experts\.)"
    r"(?P<name>(?:gate_up|down)_proj(?:_bias)?)(?P<packed>_blocks|_scales)?"
)
_SLICE = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
MAX_EXPERTS = 2**11
"""As many as config.json may state: an empty stack could claim any number."""
_BLOCK = 32
"""Numbers with one scale."""
# The 16 numbers of 4 bits: a sign, two bits of exponent and one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class Slice(NamedTuple):
    """The slot of an expert's tensor in a file."""

    stack: str
    """Name of the tensor in the file; that of the tensor itself if it is not stacked."""
    expert: int | None
    """Its index in the stack; None: it is not stacked."""


def slice_of(name: str) -> Slice:
    """The slot of a tensor in its file."""
    found = _SLICE.fullmatch(name)
    return Slice(f"{found[1]}{found[3]}", int(found[2])) if found else Slice(name, None)


def experts_of(name: str) -> str | None:
    """What the tensors of a layer's stacked experts have in common; None: it is not stacked."""
    found = _SLICE.fullmatch(name)
    return found[1] if found else None


@dataclass(frozen=True, slots=True)
class Packed(Header):
    """An expert's matrix in MXFP4, with the shape and dtype that it has when it is read."""

    blocks: Header
    scales: Header


def unstacked(headers: Mapping[str, Header]) -> dict[str, Header]:
    """The tensors of a folder, with every stack as its experts' tensors.

    Args:
        headers: of the tensors in its files.

    Raises:
        ConversionError: a stack has no experts or too many, an expert is there twice, or blocks and
            scales of MXFP4 do not fit together; names file and tensor.
    """
    found: dict[str, Header] = {}
    for name, header in headers.items():
        for of_one, one in _experts(name, headers):
            if of_one in found:
                raise ConversionError(f"{header.file}: {name} holds {of_one}, which is there twice")
            found[of_one] = one
    return found


def _experts(name: str, headers: Mapping[str, Header]) -> Iterator[tuple[str, Header]]:
    """The tensors of a stack's experts, or the tensor itself; none of scales."""
    header, stack = headers[name], _STACK.fullmatch(name)
    if stack is None:
        yield name, header
        return
    if not header.shape or not 0 < header.shape[0] <= MAX_EXPERTS:
        raise ConversionError(
            f"{header.file}: {name} has shape {list(header.shape)}; it must be a stack of 1 to "
            f"{MAX_EXPERTS} experts"
        )
    if stack["packed"] == "_scales":
        if name.replace("_scales", "_blocks") not in headers:
            raise ConversionError(f"{header.file}: {name} are scales without blocks")
        return
    scales = _scales_of(name, headers) if stack["packed"] else None
    for expert in range(header.shape[0]):
        one = _slice(header, expert)
        if scales is not None:
            one = _packed(one, _slice(scales, expert))
        yield f"{stack['experts']}{expert}.{stack['name']}", one


def _scales_of(name: str, headers: Mapping[str, Header]) -> Header:
    """The scales of packed blocks."""
    blocks, scales = headers[name], headers.get(name.replace("_blocks", "_scales"))
    fits = (
        scales is not None
        and blocks.dtype == scales.dtype == "uint8"
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, _BLOCK // 2)
    )
    if scales is None or not fits:
        shown = "missing" if scales is None else f"{list(scales.shape)} {scales.dtype}"
        raise ConversionError(
            f"{blocks.file}: {name} is {list(blocks.shape)} {blocks.dtype}, its scales are "
            f"{shown}: MXFP4 must be uint8, [experts, out, in / {_BLOCK}, {_BLOCK // 2}] and "
            "without the last dimension"
        )
    return scales


def _slice(stack: Header, expert: int) -> Header:
    shape = stack.shape[1:]
    num_bytes = math.prod(shape) * item_bytes(stack.dtype)
    return replace(stack, shape=shape, offset=stack.offset + expert * num_bytes)


def _packed(blocks: Header, scales: Header) -> Packed:
    num_rows, num_blocks, _ = blocks.shape
    shape = (num_blocks * _BLOCK, num_rows)
    return Packed(shape, "bfloat16", blocks.file, blocks.offset, blocks, scales)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """A matrix [in, out] bfloat16 from MXFP4.

    Args:
        blocks: [out, in / 32, 16] uint8; of each byte the lower four bits are the first number.
        scales: [out, in / 32] uint8; powers of two, biased by 127.
    """
    import torch

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    numbers = values[torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2).int()]
    exponents = scales.int()[..., None] - _EXPONENT_BIAS
    return torch.ldexp(numbers, exponents).to(torch.bfloat16).flatten(-2).T.contiguous()


# --- writing -------------------------------------------------------------------------------------


def stacked(layout: Mapping[str, Layout]) -> dict[str, Layout]:
    """Shape and dtype of a file's tensors.

    Args:
        layout: of each expert's own tensor; all experts of a stack are there.
    """
    found: dict[str, Layout] = {}
    counts = Counter(slice_of(name).stack for name in layout)
    for name, (shape, dtype) in layout.items():
        stack, expert = slice_of(name)
        whole = shape if expert is None else (counts[stack], *shape)
        assert found.setdefault(stack, (whole, dtype)) == (whole, dtype), f"{name}: {shape} {dtype}"
    return found
