"""Digests of weights, to check that an engine has loaded every tensor completely."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements hashed at once, by device type: few enough for a core's cache."""
_FACTORS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
"""Multipliers of murmur3's last step for 32 bits (fmix32), as signed numbers."""


class Digests(Counter[str]):
    """A digest for every module: the sum of a 32-bit hash of each element's float32 bits.

    It does not depend on how a module's elements are ordered, split or fused. So the digests of the
    sent tensors (query, key, value; single experts) add up to those of the engine's fused
    parameters, over the ranks of a replica. Zeros, with which engines pad, add 0. A single changed
    bit changes the digest.

    Keys are `model.embed_tokens`, `model.layers.3.mlp`, `model.layers.3.input_layernorm`, ...: the
    part of the name that Hugging Face and vLLM have in common.
    """

    def note(self, name: str, tensor: Tensor, *, times: int = 1) -> None:
        """Add a tensor, or a part of it, to its module's digest, `times` times."""
        self[module_of(name)] += times * digest(tensor)

    def noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and add each to the digests."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor


def module_of(name: str) -> str:
    """Key in `Digests` of a parameter."""
    found = re.match(r".*\blayers\.\d+\.[^.]+(?=\.)", name)
    module = found[0] if found else name.rpartition(".")[0]
    # Two modules of vLLM's gpt-oss have names of their own.
    return re.sub(r"(?<=\d\.)attn$", "self_attn", re.sub(r"\bembedding$", "embed_tokens", module))


def digest(tensor: Tensor) -> int:
    """Sum of `hashes` over the elements of a floating-point tensor of any shape."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK[tensor.device.type]):
        total += hashes(chunk).sum(dtype=torch.int64)
    return int(total)


def hashes(tensor: Tensor) -> Tensor:
    """32-bit hash of every element of a floating-point tensor, int32 of its shape.

    Murmur3's last step (fmix32) on the float32 bits of the value: 0 for 0, and a different hash for
    every other float32, also if 16 of its bits are always 0, as for bf16.
    """
    bits = tensor.float().view(torch.int32)
    hashed = bits ^ _shifted(bits, 16)
    hashed.mul_(_FACTORS[0])
    hashed.bitwise_xor_(_shifted(hashed, 13)).mul_(_FACTORS[1])
    return hashed.bitwise_xor_(_shifted(hashed, 16))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; `>>` on int32 would copy the sign bit."""
    return (bits >> by).bitwise_and_(2 ** (32 - by) - 1)


def differing(sent: Digests, loaded: Sequence[Digests]) -> list[str]:
    """Modules that a replica has not loaded as they were sent, sorted by name.

    Args:
        sent: digests of whole tensors.
        loaded: digests of each rank of the replica. A part that n of its r ranks hold is added
            r / n times on each of them, so that every copy counts and the sum is r times the digest
            of the sent tensors.
    """
    names = sorted({*sent, *(name for one in loaded for name in one)})
    return [
        name
        for name in names
        if (len(loaded) * sent[name] - sum(one[name] for one in loaded)) % 2**64 != 0
    ]
