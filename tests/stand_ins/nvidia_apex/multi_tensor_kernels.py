"""Kernels over lists of tensors, as apex's `amp_C` and Transformer Engine have them, on a CPU.

Whatever the real ones refuse is refused here, and what they would silently get wrong (other dtypes
than the first tensor's, an empty tensor) as well. `calls` counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

calls: Counter[str] = Counter()

Lists = list[list[Tensor]]


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    _check("multi_tensor_l2norm", chunk_size, noop_flag, tensor_lists, depth=1)
    norms = torch.stack([one.double().norm() for one in tensor_lists[0]])
    if not norms.isfinite().all():
        noop_flag.fill_(1)
    return norms.norm().float().view(1), norms.float() if per_tensor else torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    _check("multi_tensor_scale", chunk_size, noop_flag, tensor_lists, depth=2)
    _check_numbers(float, scale=scale)
    for source, target in zip(*tensor_lists, strict=True):
        if not source.isfinite().all():
            noop_flag.fill_(1)  # and scales all the same
        target.copy_(source.float() * float(np.float32(scale)))


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Gradients, weights, first and second moments; `mode` 1: decoupled weight decay."""
    _check("multi_tensor_adam", chunk_size, noop_flag, tensor_lists, depth=4)
    _check_numbers(
        float, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay
    )
    _check_numbers(int, step=step, mode=mode, bias_correction=bias_correction)
    assert mode == 1, "not of this stand-in"
    single = [np.float32(one) for one in (lr, beta1, beta2, epsilon, weight_decay)]
    rate, first, second, eps, decay = (float(one) for one in single)
    corrections = [np.float32(1 - one**step) if bias_correction else 1 for one in (first, second)]
    for grad, weight, exp_avg, exp_avg_sq in zip(*tensor_lists, strict=True):
        wide, p = grad.float(), weight.float()
        exp_avg.mul_(first).add_(wide * float(np.float32(1) - np.float32(first)))
        exp_avg_sq.mul_(second).add_(wide * wide * float(np.float32(1) - np.float32(second)))
        unbiased = exp_avg / float(corrections[0])
        update = unbiased / ((exp_avg_sq / float(corrections[1])).sqrt() + eps) + decay * p
        weight.copy_(p - rate * update)


def _check(name: str, chunk_size: Any, noop_flag: Tensor, lists: Lists, *, depth: int) -> None:
    calls[name] += 1
    _check_numbers(int, chunk_size=chunk_size)
    if noop_flag.dtype != torch.int32:
        raise RuntimeError(f"expected scalar type Int but found {noop_flag.dtype}")
    if len(lists) != depth:
        raise RuntimeError("tensor_lists.size() != depth")
    if not lists[0]:
        raise IndexError("the real one reads the first tensor of an empty list")
    first = lists[0][0]
    for tensors in lists:
        if len(tensors) != len(lists[0]):
            raise RuntimeError("Size mismatch among tensor lists")
        for one, other in zip(tensors, lists[0], strict=True):
            if not one.is_contiguous() or one.numel() != other.numel():
                raise RuntimeError("A tensor was not contiguous, or of another size.")
            if one.device != first.device or noop_flag.device != first.device:
                raise RuntimeError("A tensor was not on the same device as the first tensor")
            if one.numel() == 0:
                raise RuntimeError("the real one would not launch what is before an empty tensor")
            if one.dtype != torch.float32:  # all that Megatron-core's optimizer hands over
                raise RuntimeError(f"float32 was read where {one.dtype} is")


def _check_numbers(kind: type, **numbers: Any) -> None:
    """As pybind11 converts: an int is a float, a float is no int, and a tensor neither."""
    for name, value in numbers.items():
        if not isinstance(value, int) and not (kind is float and isinstance(value, float)):
            raise TypeError(f"incompatible function arguments: {name}={value!r}")
