"""Checks an implementation on this device: small shapes against the torch tiles in float64.

Takes milliseconds once Triton has compiled the kernels. Training runs the same compiled kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from gapo_megatron.logprob import tiles
from gapo_megatron.logprob.sequences import Sequences
from gapo_megatron.logprob.tiles import MAXIMUM, SUM_EXP, TARGET, WEIGHTED

NUM_ROWS, NUM_COLUMNS, HIDDEN_SIZE = 384, 4144, 192
"""Several blocks of rows, partial last tiles, several steps through H; 17 tiles of 256 columns, so
that a program of the forward kernel goes through two or three of them. All are multiples of 16, as
in models: for other numbers Triton compiles different code."""
INVERSE_TEMPERATURES = (1.0, 1.25)
"""Kernels may leave out the factor 1."""
EXACT = 1e-4
"""Largest absolute error of log-probs and entropies, and of gradients before rounding. float32 sums
and a GPU's exponential are within 2e-5; logits in 16 bits or factors in TF32 are off by more than
1e-3."""

SEQUENCE_LENGTHS = (700, 0, 1, 2500, 3)
"""Rows of sequences: none, one, part of a block, several blocks."""
EXACT_SUM = 1e-11
"""Largest absolute error of a sum of `SEQUENCE_LENGTHS` numbers of order one: float64 sums are
within 1e-12, and float32 sums off by 1e-6."""


def find_fault(code: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Run `softmax_stats` and `grad_logits` of an implementation, with and without entropy.

    At temperature 1 and at another; tiles of logits with labels, without any, and partial ones.

    Args:
        code: the implementation, a module like `tiles`.
        device: device to run on.
        dtype: 16-bit dtype of hidden states and weights.

    Returns:
        A description of the first fault; "" if there is none.
    """
    inputs = _problem(device, dtype)
    in_float64 = tuple(one.double() if one.is_floating_point() else one for one in inputs)
    for inverse_temperature, with_entropy in itertools.product(INVERSE_TEMPERATURES, (False, True)):
        found, again, expected = (
            _results(one, given, inverse_temperature, with_entropy=with_entropy)
            for one, given in ((code, inputs), (code, inputs), (tiles, in_float64))
        )
        for name, values in found.items():
            if not torch.equal(values, again[name]):
                return f"{name} is not reproducible: its bits differ (entropy: {with_entropy})"
            exact = expected[name]
            bound = EXACT + (torch.finfo(dtype).eps / 2 * exact.abs() if name == "dz" else 0)
            error = (values.double() - exact).abs()
            if not (error <= bound).all():  # NaN fails, too
                largest = float(error.max())
                return f"{name} is off by {largest:.2g} (entropy: {with_entropy})"
    return ""


def find_reduction_fault(name: Literal["torch", "triton"], device: torch.device) -> str:
    """Run the sums of `Sequences` and their gradient, beside those in torch on the CPU.

    Args:
        name: the implementation.
        device: device to run on.

    Returns:
        A description of the first fault; "" if there is none.
    """
    counts = torch.tensor(SEQUENCE_LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts)
    mixed = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    # Rows in order, as a micro-batch has them, and in any order, as the sums per c.
    for sequences in (
        replace(Sequences.of(ids, len(counts)), order=None),
        Sequences.of(ids[mixed], len(counts)),
    ):
        expected = _reduced(sequences)
        order = None if sequences.order is None else sequences.order.to(device)
        there = Sequences(
            sequences.ids.to(device), sequences.offsets.to(device), order, implementation=name
        )
        found, repeated = _reduced(there), _reduced(there)
        for what, values in found.items():
            if not torch.equal(values, repeated[what]):
                return f"{what} is not reproducible: its bits differ"
            error = (values.cpu() - expected[what]).abs()
            if not (error <= EXACT_SUM).all():  # NaN fails, too
                return f"{what} is off by {float(error.max()):.2g}"
    return ""


def _reduced(sequences: Sequences) -> dict[str, Tensor]:
    """Each result for the same random numbers."""
    device, generator = sequences.ids.device, torch.Generator().manual_seed(0)
    values = torch.randn(2, len(sequences.ids), generator=generator).to(device)
    log_probs = values[0].clone().requires_grad_()
    log_ratio = sequences.log_ratio(log_probs, values[1])
    upstream = torch.randn(len(log_ratio), generator=generator).double().to(device)
    (gradient,) = torch.autograd.grad(log_ratio, log_probs, upstream)
    return {
        "log-ratio": log_ratio.detach(),
        "gradient of a log-ratio": gradient.double(),
        "sum per sequence": sequences.sum(values.T.double()),
    }


def _problem(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, upstream gradients [2, R].

    In the first half of the rows some gradients are zero, and labels are anywhere. In the second
    half none is, and labels are among the first columns, so that there are tiles without a label;
    but one is the last column, after tiles without any.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(NUM_COLUMNS, HIDDEN_SIZE, generator=generator) * HIDDEN_SIZE**-0.5
    labels = torch.randint(NUM_COLUMNS, (NUM_ROWS,), generator=generator)
    half = NUM_ROWS // 2
    labels[half:] %= NUM_COLUMNS // 4
    labels[-1] = NUM_COLUMNS - 1
    upstream = torch.randn(2, NUM_ROWS, generator=generator)
    upstream[:, :half:3] = 0
    return (
        hidden.to(device, dtype),
        weight.to(device, dtype),
        labels.to(device),
        upstream.to(device),
    )


def _results(
    code: Any, inputs: tuple[Tensor, ...], inverse_temperature: float, *, with_entropy: bool
) -> dict[str, Tensor]:
    hidden, weight, labels, upstream = inputs
    stats = code.softmax_stats(
        hidden,
        weight,
        labels,
        inverse_temperature=inverse_temperature,
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
        inverse_temperature=inverse_temperature,
        maximum=stats[MAXIMUM],
        inverse_sum=stats[SUM_EXP].reciprocal(),
        grad_log_probs=upstream[0],
        entropy=results.get("entropy"),
        grad_entropy=upstream[1] if with_entropy else None,
    )
    sums = dz.double().sum(1)  # with what rounding takes from them, exact
    return results | {"dz": dz, "row sums of dz": sums if lost is None else sums + lost.double()}
