"""Checks an implementation on this device: small shapes against float64.

Takes milliseconds once Triton has compiled the kernels. Training runs the same compiled kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapo_megatron.logprob.statistics import MAXIMUM, SUM_EXP, TARGET, WEIGHTED

NUM_ROWS, NUM_COLUMNS, HIDDEN_SIZE = 384, 1200, 192
"""Several blocks of rows, partial last tiles, several steps through H. All are multiples of 16, as
in models: for other numbers Triton compiles different code."""
INVERSE_TEMPERATURE = 1.25
EXACT = 1e-4
"""Largest absolute error of log-probs and entropies, and of gradients before rounding. float32 sums
and a GPU's exponential are within 2e-5; logits in 16 bits or factors in TF32 are off by more than
1e-3."""


def find_fault(code: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Run `softmax_stats` and `grad_logits` of an implementation, with and without entropy.

    Args:
        code: the implementation, a module like `tiles`.
        device: device to run on.
        dtype: 16-bit dtype of hidden states and weights.

    Returns:
        A description of the first fault; "" if there is none.
    """
    for with_entropy in (False, True):
        found, expected = _found(code, device, dtype, with_entropy), _expected(device, dtype)
        for name, (values, repeated) in found.items():
            if not torch.equal(values, repeated):
                return f"{name} is not reproducible: its bits differ (entropy: {with_entropy})"
            exact = expected[f"{name} with entropy" if with_entropy else name]
            bound = EXACT + (torch.finfo(dtype).eps / 2 * exact.abs() if name == "dz" else 0)
            error = (values.double() - exact).abs()
            if not (error <= bound).all():  # NaN fails, too
                largest = float(error.max())
                return f"{name} is off by {largest:.2g} (entropy: {with_entropy})"
    return ""


def _problem(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, upstream gradients [2, R], some of them zero."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(NUM_COLUMNS, HIDDEN_SIZE, generator=generator) * HIDDEN_SIZE**-0.5
    labels = torch.randint(NUM_COLUMNS, (NUM_ROWS,), generator=generator)
    upstream = torch.randn(2, NUM_ROWS, generator=generator)
    upstream[:, ::3] = 0
    return (
        hidden.to(device, dtype),
        weight.to(device, dtype),
        labels.to(device),
        upstream.to(device),
    )


def _found(
    code: Any, device: torch.device, dtype: torch.dtype, with_entropy: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each result, twice."""
    hidden, weight, labels, upstream = _problem(device, dtype)

    def run() -> dict[str, Tensor]:
        stats = code.softmax_stats(
            hidden,
            weight,
            labels,
            inverse_temperature=INVERSE_TEMPERATURE,
            with_entropy=with_entropy,
        )
        log_sum = stats[SUM_EXP].log()
        results = {"log-prob": stats[TARGET] - stats[MAXIMUM] - log_sum}
        if with_entropy:
            results["entropy"] = log_sum - stats[WEIGHTED] / stats[SUM_EXP]
        dz, lost = code.grad_logits(
            hidden,
            weight,
            labels,
            inverse_temperature=INVERSE_TEMPERATURE,
            maximum=stats[MAXIMUM],
            inverse_sum=stats[SUM_EXP].reciprocal(),
            grad_log_probs=upstream[0],
            entropy=results.get("entropy"),
            grad_entropy=upstream[1] if with_entropy else None,
        )
        assert lost is not None, f"{dtype} is not of 16 bits"
        return results | {"dz": dz, "row sums of dz": dz.double().sum(1) + lost.double()}

    first, second = run(), run()
    return {name: (values, second[name]) for name, values in first.items()}


def _expected(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All results in float64."""
    hidden, weight, labels, upstream = _problem(device, dtype)
    z = (hidden.double() @ weight.double().T) * INVERSE_TEMPERATURE
    log_p = z.log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1)
    g, e = upstream.double()[:, :, None]
    is_label = torch.nn.functional.one_hot(labels, NUM_COLUMNS)
    dz = INVERSE_TEMPERATURE * g * (is_label - p)
    with_entropy = dz - INVERSE_TEMPERATURE * e * p * (log_p + entropy[:, None])
    log_prob = log_p.gather(1, labels[:, None])[:, 0]
    return {
        "log-prob": log_prob,
        "log-prob with entropy": log_prob,
        "entropy with entropy": entropy,
        "dz": dz,
        "dz with entropy": with_entropy,
        "row sums of dz": dz.sum(1),
        "row sums of dz with entropy": with_entropy.sum(1),
    }
