"""Weights that a folder stores quantized: small numbers, and a scale for each block of them.

What is read is bfloat16, whatever the model's dtype: the weights of the bfloat16 model. Nothing
here writes quantized weights. config.json says how they are stored (`models.quantization`):

- MXFP4 (OCP Microscaling Formats 1.0): `NAME_blocks` [out, in / 32, 16] uint8, two numbers of 4
  bits in each, and `NAME_scales` [out, in / 32] uint8, exponents. `NAME` is [in, out], as in other
  folders; every number is exact, unless it underflows.
- FP8 (DeepSeek-V3): `NAME` [out, in] float8_e4m3fn, and `NAME_scale_inv` float32, a scale for each
  block of `weight_block_size`, the last of a dimension perhaps smaller. A number is multiplied by
  its scale in float32, as in transformers, and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.headers import Header
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.models.quantization import FP8, MXFP4, block_size, quantization_of
from gapo_megatron.models.rules import Shape

if TYPE_CHECKING:
    from torch import Tensor

_MXFP4_BLOCK = 32
"""Numbers with one scale."""
# The 16 numbers of 4 bits: a sign, two bits of exponent and one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class _Kind(NamedTuple):
    """The two tensors of a weight: what their names end in, and their dtypes."""

    numbers: str
    scales: str
    numbers_dtype: str
    scales_dtype: str


_KINDS = {
    MXFP4: _Kind("_blocks", "_scales", "uint8", "uint8"),
    FP8: _Kind("", "_scale_inv", "float8_e4m3fn", "float32"),
}


@dataclass(frozen=True, slots=True)
class Quantized(Header):
    """A quantized weight, with the shape and dtype that it has when it is read."""

    numbers: Header
    scales: Header
    block: tuple[int, int] | None
    """FP8: rows and columns with one scale. None: it is in MXFP4."""


def joined(headers: Mapping[str, Header], facts: ModelFacts) -> dict[str, Header]:
    """The tensors of a folder, with numbers and scales of every quantized weight as one.

    Args:
        headers: headers by tensor name, one per expert.
        facts: the folder's config.json.

    Raises:
        ConversionError: numbers or scales are missing, do not fit together or have another dtype,
            or a weight is there twice; names file and tensor.
    """
    kind = _KINDS.get(quantization_of(facts) or "")
    if kind is None:
        return dict(headers)
    block = block_size(facts) if quantization_of(facts) == FP8 else None
    found: dict[str, Header] = {}
    for name, header in headers.items():
        weight, one = name, header
        if name.endswith(kind.scales):
            numbers = name.removesuffix(kind.scales) + kind.numbers
            if not _are_numbers(numbers, headers, kind):
                raise ConversionError(
                    f"{header.file}: {name} has scales, but there is no {numbers} in "
                    f"{kind.numbers_dtype}"
                )
            continue
        if _are_numbers(name, headers, kind):
            weight = name.removesuffix(kind.numbers)
            one = _joined(name, header, headers.get(weight + kind.scales), block, kind)
        if weight in found:
            raise ConversionError(f"{header.file}: {name} holds {weight}, which is there twice")
        found[weight] = one
    return found


def _are_numbers(name: str, headers: Mapping[str, Header], kind: _Kind) -> bool:
    is_there = name in headers and name.endswith(kind.numbers)
    return is_there and headers[name].dtype == kind.numbers_dtype


def _joined(
    name: str, numbers: Header, scales: Header | None, block: tuple[int, int] | None, kind: _Kind
) -> Quantized:
    shapes = _shapes(numbers.shape, block)
    if shapes is None:
        rule = f"[out, in / {_MXFP4_BLOCK}, {_MXFP4_BLOCK // 2}]" if block is None else "[out, in]"
        raise ConversionError(
            f"{numbers.file}: {name} is {list(numbers.shape)} {numbers.dtype}; must be {rule}"
        )
    shape, of_scales = shapes
    if scales is None or (scales.shape, scales.dtype) != (of_scales, kind.scales_dtype):
        shown = "missing" if scales is None else f"{list(scales.shape)} {scales.dtype}"
        raise ConversionError(
            f"{numbers.file}: {name} is {list(numbers.shape)} {numbers.dtype}, and its scales "
            f"({name.removesuffix(kind.numbers)}{kind.scales}) are {shown}; they must be "
            f"{list(of_scales)} {kind.scales_dtype}"
        )
    return Quantized(shape, "bfloat16", numbers.file, numbers.offset, numbers, scales, block)


def _shapes(numbers: Shape, block: tuple[int, int] | None) -> tuple[Shape, Shape] | None:
    """Shapes of the weight and of its scales; None: numbers have no such shape."""
    if block is None:
        if len(numbers) != 3 or numbers[2] != _MXFP4_BLOCK // 2:
            return None
        rows, num_blocks, _ = numbers
        return (num_blocks * _MXFP4_BLOCK, rows), (rows, num_blocks)
    if len(numbers) != 2:
        return None
    return numbers, (-(-numbers[0] // block[0]), -(-numbers[1] // block[1]))


def dequantized(
    numbers: Tensor, scales: Tensor, block: tuple[int, int] | None, *, name: str
) -> Tensor:
    """A whole weight, bfloat16.

    Args:
        numbers: see the head of this file; of a byte in MXFP4 the lower four bits come first.
        scales: scales of its blocks; for MXFP4 powers of two, biased by 127.
        block: `Quantized.block`.
        name: file and tensor, for errors.

    Raises:
        ConversionError: a scale in FP8 is not finite, zero or negative.
    """
    import torch

    if block is None:
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
        found = values[torch.stack([numbers & 0xF, numbers >> 4], dim=-1).flatten(-2).int()]
        exponents = scales.int()[..., None] - _EXPONENT_BIAS
        return torch.ldexp(found, exponents).to(torch.bfloat16).flatten(-2).T.contiguous()
    is_wrong = ~((scales > 0) & scales.isfinite())
    if is_wrong.any():
        row, column = is_wrong.nonzero()[0].tolist()
        raise ConversionError(
            f"{name}: scale [{row}, {column}] is {scales[row, column].item()}; must be a finite "
            "number above 0"
        )
    found = torch.empty(numbers.shape, dtype=torch.bfloat16)
    num_columns = numbers.shape[1]
    for row, of_row in enumerate(scales):  # no float32 copy of the whole weight
        rows = slice(row * block[0], (row + 1) * block[0])
        factors = of_row.repeat_interleave(min(block[1], num_columns))[:num_columns]
        found[rows] = numbers[rows].float() * factors
    return found
