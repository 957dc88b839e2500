"""Undocumented parts of vLLM in use: what is wrong or slow in its build for CPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.triton_utils import dispatcher
from vllm.v1.sample import sampler

_rotate = RotaryEmbedding.forward_cpu
_rebind_kernels = dispatcher._rebind_kernels


def repair_on_cpu() -> None:
    """Make engines that are built from now on right, and quick to start, on a CPU.

    The kernel for rotary positions takes [T, N D]. Of queries [T, N, D], which latent attention
    gives it, it rotates one head of N.
    """
    # Uses: rotary_embedding.base.RotaryEmbedding.forward_cpu, replaced;
    #     v1.sample.sampler.batched_count_greater_than, replaced
    # Versions: vllm 0.32.0
    # Upstream: none found for the rotation on a CPU (on GPUs vllm-project/vllm#12777, merged), or
    #     the count (the same delay: torch-spyre/sendnn-inference#550, closed)
    RotaryEmbedding.forward_cpu = _rotate_every_head
    sampler.batched_count_greater_than = _ranks
    search_only_vllm()


def _rotate_every_head(
    rotary: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[T, N D] by vLLM's kernel, in place; [T, N, D] by torch."""
    rotate = _rotate if query.dim() == 2 else RotaryEmbedding.forward_native
    rotated: tuple[Tensor, Tensor | None] = rotate(rotary, positions, query, key)
    return rotated


def _ranks(log_probs: Tensor, values: Tensor) -> Tensor:
    """[B] int64: in each row of [B, V], how many log-probs are at least the row's value ([B, 1]).

    vLLM counts so with every log-prob that it returns, and nobody reads it here. Its own function
    is compiled, also with `enforce_eager`: by a C++ compiler at an engine's first log-prob.
    """
    return (log_probs >= values).sum(-1)


def search_only_vllm() -> None:
    """Let engines that start on a CPU look for vLLM's kernels in vLLM's modules only.

    vLLM looks for them in everything that any module holds, for 0.4 s of each engine's start. And
    the search fails once numba was imported, as drafts by n-grams do: it takes `vars` of
    everything, and those of llvmlite's library are a function.
    """
    # Uses: triton_utils.dispatcher._rebind_kernels, replaced by itself with fewer `sys.modules`
    # Versions: vllm 0.32.0, llvmlite 0.47.0
    # Upstream: none found (the search came with vllm-project/vllm#43048)
    dispatcher._rebind_kernels = _rebind_in_vllm


def _rebind_in_vllm(overrides: list[tuple[Any, Any]]) -> None:
    """Put replacements in the place of kernels, [(kernel, replacement)], in vLLM's modules."""
    loaded = list(sys.modules.items())  # other threads may import
    own = {name: one for name, one in loaded if name.partition(".")[0] == "vllm"}
    known = vars(dispatcher)
    known["sys"] = SimpleNamespace(modules=own)
    try:
        _rebind_kernels(overrides)
    finally:
        known["sys"] = sys
