"""Tensors that a model folder stores for all experts of a layer together, expert first.

gpt-oss's folders hold `model.layers.3.mlp.experts.down_proj` [E, ...]. Everything else here knows
each expert's own tensor, `model.layers.3.mlp.experts.7.down_proj` [...]: a slice of a stack is a
range of its file, so it is read and written without the rest. No other architecture's rules have
names of this form, and no other's folders are read so (`Architecture.stacks_experts`).

Published stacks are quantized (`quantized`): numbers and scales are a stack each, and so have each
expert's own here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.headers import Header, item_bytes
from gapo_megatron.models.rules import Shape

if TYPE_CHECKING:
    import torch

    Layout = tuple[Shape, torch.dtype]

_STACK = re.compile(
    r"(?P<experts>model\.layers\.\d+\.mlp\.experts\.)"
    r"(?P<name>(?:gate_up|down)_proj(?:_bias|_blocks|_scales)?)"
)
_SLICE = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
MAX_EXPERTS = 2**11
"""Most experts that config.json may state: an empty stack could claim any number."""


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


def unstacked(headers: Mapping[str, Header]) -> dict[str, Header]:
    """The tensors of a folder, with every stack as its experts' tensors.

    Args:
        headers: headers of the tensors in its files.

    Raises:
        ConversionError: a stack has no experts or too many, or an expert is there twice; names file
            and tensor.
    """
    found: dict[str, Header] = {}
    for name, header in headers.items():
        for of_one, one in _experts(name, header):
            if of_one in found:
                raise ConversionError(f"{header.file}: {name} holds {of_one}, which is there twice")
            found[of_one] = one
    return found


def _experts(name: str, header: Header) -> Iterator[tuple[str, Header]]:
    """The tensors of a stack's experts, or the tensor itself."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        yield name, header
        return
    if not header.shape or not 0 < header.shape[0] <= MAX_EXPERTS:
        raise ConversionError(
            f"{header.file}: {name} has shape {list(header.shape)}; it must be a stack of 1 to "
            f"{MAX_EXPERTS} experts"
        )
    for expert in range(header.shape[0]):
        yield f"{stack['experts']}{expert}.{stack['name']}", _slice(header, expert)


def _slice(stack: Header, expert: int) -> Header:
    shape = stack.shape[1:]
    num_bytes = math.prod(shape) * item_bytes(stack.dtype)
    return replace(stack, shape=shape, offset=stack.offset + expert * num_bytes)


# --- writing -------------------------------------------------------------------------------------


def stacked(layout: Mapping[str, Layout]) -> dict[str, Layout]:
    """Shape and dtype of a file's tensors.

    Args:
        layout: layout of each expert's own tensor; all experts of a stack are there.
    """
    found: dict[str, Layout] = {}
    counts = Counter(slice_of(name).stack for name in layout)
    for name, (shape, dtype) in layout.items():
        stack, expert = slice_of(name)
        whole = shape if expert is None else (counts[stack], *shape)
        assert found.setdefault(stack, (whole, dtype)) == (whole, dtype), f"{name}: {shape} {dtype}"
    return found
