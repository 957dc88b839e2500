"""The weights that were loaded, for the reference log-probs of the KL term."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gapo_megatron.policy.adapters import Adapter
from gapo_megatron.policy.offload import WeightOffload


class Reference:
    """Switches to the weights that were loaded: turns an adapter off, or uses a copy.

    Args:
        adapter: attached to the stages.
        trained: the weights that are trained; frozen ones never change.
        offload: brings the weights back to their device.
        keeps_copy: whether to keep a copy in host memory if the adapter has no switch.
    """

    def __init__(
        self,
        adapter: Adapter,
        trained: Sequence[Tensor],
        offload: WeightOffload,
        *,
        keeps_copy: bool,
    ) -> None:
        self._adapter = adapter
        self._trained = trained
        self._offload = offload
        self._keeps_copy = keeps_copy and adapter.switched_off() is None
        self.copy: list[Tensor] | None = None

    def loaded(self) -> None:
        """Note that the weights are the reference from now on."""
        self.copy = self._snapshot() if self._keeps_copy else None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the reference within the block; then the current weights return bitwise.

        Raises:
            RuntimeError: no copy is kept, and the adapter has no switch.
        """
        if (base := self._adapter.switched_off()) is not None:
            with base:
                yield
            return
        if self.copy is None:
            raise RuntimeError("reference weights are kept only when objective.kl_coef > 0")
        current = self._snapshot()
        self._restore(self.copy)
        try:
            yield
        finally:
            self._restore(current)

    def _snapshot(self) -> list[Tensor]:
        self._offload.to_device()
        return [parameter.detach().to("cpu", copy=True) for parameter in self._trained]

    @torch.no_grad()
    def _restore(self, weights: Sequence[Tensor]) -> None:
        self._offload.to_device()
        for parameter, weight in zip(self._trained, weights, strict=True):
            parameter.copy_(weight)
