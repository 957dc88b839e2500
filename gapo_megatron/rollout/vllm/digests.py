"""Digests of weights: whether an engine has loaded every tensor that it was given, whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are digested at once, by device type: few enough for a core's cache."""
_FACTORS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
"""Those of murmur3's last step for 32 bits, as signed numbers."""


class Digests(Counter[str]):
    """A number for every module: the sum of a 32-bit hash of each element's float32 bits.

    It does not depend on how a module's elements are ordered, cut or joined, so those of the
    tensors that were sent (query, key, value; one expert after another) add up to those of the
    parameters that an engine has made of them, over the ranks of a replica. Zeros, with which
    engines pad, count nothing. One changed bit changes it.

    Keys are `model.embed_tokens`, `model.layers.3.mlp`, `model.layers.3.input_layernorm`, ...: up
    to the part of a layer, in which Hugging Face and vLLM name the same things.
    """

    def note(self, name: str, tensor: Tensor, *, times: int = 1) -> None:
        """Add a tensor, or a part of one, under its module, so many times."""
        self[module_of(name)] += times * digest(tensor)

    def noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors through, and add them."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor


def module_of(name: str) -> str:
    """Key in `Digests` of a parameter."""
    found = re.match(r".*\blayers\.\d+\.[^.]+(?=\.)", name)
    return found[0] if found else name.rpartition(".")[0]


def digest(tensor: Tensor) -> int:
    """Sum of `hashes` over the elements of a floating-point tensor of any shape."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK[tensor.device.type]):
        total += hashes(chunk).sum(dtype=torch.int64)
    return int(total)


def hashes(tensor: Tensor) -> Tensor:
    """32-bit hash of every element of a floating-point tensor, int32 of its shape.

    Murmur3's last step (fmix32) on the bits of the float32 of the same value: 0 for 0, and a
    different hash for every other float32, also where 16 of its bits are always 0, as in bf16.
    """
    bits = tensor.float().view(torch.int32)
    hashed = bits ^ _shifted(bits, 16)
    hashed.mul_(_FACTORS[0])
    hashed.bitwise_xor_(_shifted(hashed, 13)).mul_(_FACTORS[1])
    return hashed.bitwise_xor_(_shifted(hashed, 16))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: of int32 `>>` alone repeats the sign."""
    return (bits >> by).bitwise_and_(2 ** (32 - by) - 1)


def differing(sent: Digests, loaded: Sequence[Digests]) -> list[str]:
    """Modules that the ranks of a replica have not loaded as they were sent, in order of names.

    Args:
        sent: of whole tensors.
        loaded: of what each rank of the replica has loaded. A part that only one rank has counts
            as many times as the replica has ranks, one that several have as many times fewer: so
            that every copy of it counts, and all add up to that many times what was sent.
    """
    names = sorted({*sent, *(name for one in loaded for name in one)})
    return [
        name
        for name in names
        if (len(loaded) * sent[name] - sum(one[name] for one in loaded)) % 2**64 != 0
    ]
