"""Digest of whole weights, the same in every parallel layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def weights_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of the names, dtypes, shapes and bits of whole tensors.

    Args:
        tensors: (name, whole tensor), the same on every rank and in any order; consumed.

    Collectives, over all ranks: those of `tensors`; a gather. Every rank digests its share.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    share = {
        name: tensor_sha256(tensor)
        for number, (name, tensor) in enumerate(tensors)
        if number % num_ranks == rank
    }
    shares: list[dict[str, str]] = [{}] * num_ranks
    dist.all_gather_object(shares, share)
    return combined({name: digest for one in shares for name, digest in one.items()})


def combined(digests: Mapping[str, str]) -> str:
    """`weights_sha256` of tensors whose `tensor_sha256` are given, by name."""
    lines = sorted(f"{name} {digest}" for name, digest in digests.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of the dtype, shape and bits of a tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    on_host = tensor.detach().contiguous().view(torch.uint8).cpu()
    digest.update(on_host.numpy().data)
    return digest.hexdigest()
