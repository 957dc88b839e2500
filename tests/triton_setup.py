"""Problems and float64 references for the Triton kernels, sized for where they run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapo_megatron.logprob import triton_kernels
from gapo_megatron.logprob.tiles import MAXIMUM, SUM_EXP, TARGET, WEIGHTED
from gapo_megatron.logprob.triton_kernels import grad_logits, softmax_stats
from tests import logprob_setup

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies no bfloat16. Inputs of 16 bits are exact in float32, products as well.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# Several blocks of rows, several tiles in a share of the vocabulary, several steps through H, and
# none of them whole.
NUM_ROWS, NUM_COLUMNS, HIDDEN_SIZE = (20, 300, 24) if INTERPRETED else (700, 5003, 200)
TILE = 32 if INTERPRETED else 256
INVERSE_TEMPERATURE = 1 / 0.7


def on_kernels(test: Callable[..., None]) -> Callable[..., None]:
    if INTERPRETED:
        return test
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    needs_gpu = pytest.mark.skipif(
        not has_hopper, reason="no Hopper GPU; test_in_the_interpreter runs it"
    )
    return pytest.mark.gpu(needs_gpu(test))


def problem(
    num_rows: int = NUM_ROWS,
    num_columns: int = NUM_COLUMNS,
    *,
    hidden_size: int = HIDDEN_SIZE,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return logprob_setup.problem(
        num_rows, num_columns, hidden_size=hidden_size, device=DEVICE, **options
    )


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.double() @ weight.double().T


def reference_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    *,
    inverse_temperature: float = INVERSE_TEMPERATURE,
) -> torch.Tensor:
    """[4, R] float64, from whole logits."""
    z = logits(hidden, weight) * inverse_temperature
    maximum = z.amax(dim=1)
    inside = (columns >= 0) & (columns < len(weight))
    target = z.gather(1, columns.clamp(0, len(weight) - 1)[:, None])[:, 0]
    distance = z - maximum[:, None]
    weighted = torch.where(distance.exp() > 0, distance.exp() * distance, 0)
    return torch.stack(
        [maximum, distance.exp().sum(1), torch.where(inside, target, 0), weighted.sum(1)]
    )


def log_prob_and_entropy(stats: torch.Tensor) -> torch.Tensor:
    """[2, R]."""
    log_sum = stats[SUM_EXP].log()
    log_prob = (stats[TARGET] - stats[MAXIMUM]) - log_sum
    return torch.stack([log_prob, log_sum - stats[WEIGHTED] / stats[SUM_EXP]])


def gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    *,
    code: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = grad_logits,
    inverse_temperature: float = INVERSE_TEMPERATURE,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`grad_logits` given the statistics over all columns and upstream gradients [1 or 2, R]."""
    with_entropy = len(upstream) == 2
    return code(
        hidden,
        weight,
        columns,
        inverse_temperature=inverse_temperature,
        maximum=stats[MAXIMUM],
        inverse_sum=stats[SUM_EXP].reciprocal(),
        grad_log_probs=upstream[0],
        entropy=log_prob_and_entropy(stats)[1] if with_entropy else None,
        grad_entropy=upstream[1] if with_entropy else None,
    )


def reference_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    upstream: torch.Tensor,
    *,
    inverse_temperature: float = INVERSE_TEMPERATURE,
) -> torch.Tensor:
    """[R, V] float64, by autograd."""
    z = logits(hidden, weight).requires_grad_()
    log_p = torch.log_softmax(z * inverse_temperature, dim=1)
    outputs = torch.stack([log_p.gather(1, columns[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)])
    torch.autograd.backward(outputs[: len(upstream)], upstream.double())
    assert z.grad is not None
    return z.grad


def upstream_gradients(num_rows: int, *, with_entropy: bool) -> torch.Tensor:
    """[1 or 2, R]; every third row is zero, of the others some in the first or the last alone."""
    random = torch.Generator().manual_seed(1)
    upstream = torch.randn(1 + with_entropy, num_rows, generator=random)
    upstream[:, ::3] = 0
    upstream[0, 1::6] = 0
    upstream[-1, 2::6] = 0
    return upstream.to(DEVICE)


run_stats = functools.partial(
    softmax_stats, inverse_temperature=INVERSE_TEMPERATURE, with_entropy=True
)

KINDS = ["plain", "peaked", "offset200", "offset-200", "offset-10000"]


def bound(kind: str) -> float:
    """Absolute error of log-prob and entropy: 1e-5, or the last bits of logits that large."""
    largest = 60.0 if kind == "peaked" else 0.0
    if kind.startswith("offset"):
        largest = abs(float(kind.removeprefix("offset")))
    # Sums of H addends that large are some of their last bits (2**-24 of them) off.
    return max(1e-5, 4 * 2**-24 * largest * INVERSE_TEMPERATURE)


def compile_for_hopper(name: str, dtype: str, *, with_entropy: bool) -> Any:
    """Compile a kernel of `triton_kernels` for compute capability 9.0, as `triton.compile` returns.

    Args:
        name: `_stats_kernel` or `_grad_kernel`.
        dtype: Triton's name of a 16-bit dtype, `bf16` or `fp16`.
        with_entropy: whether the entropy, or its gradient, is computed too.
    """
    kernel, tile = getattr(triton_kernels, name), triton_kernels._TILES[9, 2]
    matrices = {
        "hidden": f"tensordesc<{dtype}[{tile.rows}, {tile.depth}]>",
        "weight": f"tensordesc<{dtype}[{tile.columns}, {tile.depth}]>",
        "dz": f"tensordesc<{dtype}[{tile.rows}, {tile.columns // 2}]>",
    }
    numbers = dict.fromkeys(["num_rows", "num_columns", "hidden_size"], "i32")
    known = {**matrices, **numbers, "inverse_temperature": "fp32", "columns": "*i64"}
    constants: dict[str, Any] = {"WITH_ENTROPY": with_entropy}
    if not with_entropy:
        constants |= {"entropy": None, "grad_entropy": None}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else known.get(argument, "*fp32")
        for argument in kernel.arg_names
    }
    return triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", 90, 32),
        options=tile.options(),
    )
