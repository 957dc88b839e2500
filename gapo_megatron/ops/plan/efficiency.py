"""Shares of a device's peaks that are reached, and costs of calls: the only free numbers.

The defaults are assumptions for GPUs of the Hopper generation, each with what it rests on. None has
been measured with this package on a GPU. `tools/plan.py calibrate` replaces them by measured ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gapo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares are of a data-sheet peak, in (0, 1]; seconds are for one of what the name says."""

    matmul: float = 0.45
    """Share of the peak operations, over a whole layer or head with norms and copies. Megatron-LM's
    README reports 41 to 48 % of the peak for dense models on H100, communication included."""
    bandwidth: float = 0.7
    """Share of the memory bandwidth, in decoding and optimizer. Assumed: kernels that only stream
    reach 0.8 to 0.9, small ones less."""
    communication: float = 0.75
    """Share of a link's or network's bandwidth. NCCL's tests reach about 0.8 on NVLink with large
    messages; layers send smaller ones."""
    layer_s: float = 1e-4
    """A layer's forward pass of one micro-batch beyond its products: kernel launches. Assumed."""
    collective_s: float = 2e-5
    """Latency of one collective. Assumed."""
    update_s: float = 0.05
    """One optimizer step beyond its bytes: gradient norm, flags, metrics. Assumed."""
    decode_step_s: float = 0.006
    """One decoding step beyond its bytes: scheduling, launches, sampling. Assumed."""
    decode_sequence_s: float = 2e-5
    """One sequence in one decoding step: every request draws from its own seed. Assumed."""
    verdict_s: float = 3.1e-3
    """One verdict on one worker: mathematics, benchmarks/RESULTS.md (639 a second on two workers).
    Programs take longer."""
    tensor_s: float = 5e-4
    """One Hugging Face tensor of a weight sync beyond its bytes: names, checks, copies. Assumed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0 or (field.name in SHARES and value > 1):
                rule = "above 0 and at most 1" if field.name in SHARES else "above 0"
                raise ConfigError(f"efficiency {field.name} ({value!r}) must be {rule}")


SHARES = ("matmul", "bandwidth", "communication")
