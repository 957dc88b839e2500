"""Random numbers of a token's place in the run, for losses that decide by chance.

There is no generator and no state: a number is a hash of the run's seed, the step, the problem, the
sample and the token. So it is the same in every layout, packing and order of updates, and after a
resume. Two passes over the same tokens in one step see the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from gapo_megatron.logprob import Sequences

_STRIDE = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
"""Constants of SplitMix64 (Steele, Lea and Flood, 2014)."""


def keys_of(table: np.ndarray) -> torch.Tensor:
    """[B] int64: a hash of the problem and the sample of each row of a table (`rollouts.ROW`)."""
    problems, samples = (
        torch.from_numpy(table[name].astype(np.int64)) for name in ("problem", "sample")
    )
    return _mixed(_mixed(problems) + samples)


def with_step(keys: torch.Tensor, *, seed: int, step: int) -> torch.Tensor:
    """[B] int64: `keys_of` of the sequences, mixed with the run's seed and the step."""
    for number in (seed, step):
        keys = _mixed(keys + number)
    return keys


def uniforms(keys: torch.Tensor, sequences: Sequences | None) -> torch.Tensor:
    """Numbers in [0, 1), of 53 bits.

    Args:
        keys: [B] int64, of `with_step`.
        sequences: the tokens of each sequence; None: one number for each sequence.

    Returns:
        [T] float64, by the place of each token among those of its sequence that the model sampled;
        or [B]. Nothing waits for the device.
    """
    if sequences is not None:
        places = torch.arange(len(sequences.ids), device=keys.device)
        if sequences.order is not None:
            places = torch.empty_like(places).scatter_(0, sequences.order, places)
        places = places - sequences.offsets[sequences.ids]
        keys = keys[sequences.ids] + places * _signed(_STRIDE)
    return _shifted(_mixed(keys), 11).double() * 2.0**-53


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output for each int64: a bijection whose result looks random."""
    values = values + _signed(_STRIDE)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, _SHIFTS[-1])


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Right shift as of unsigned integers: zeros come in from the left."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned integer."""
    return number - (1 << 64) if number >> 63 else number
