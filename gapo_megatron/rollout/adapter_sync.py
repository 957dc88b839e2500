"""What a weight sync sends for a policy with low-rank factors: never more than the engine needs.

An engine that computes with factors gets the weights beneath them once, then only the factors: it
and the policy then compute the same sum W x + scale * B A x. Any other engine gets the matrix
W + scale * B A, rounded to the dtype of W. Rounding to 16 bits can lose most of a small update, so
its share is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from gapo_megatron.errors import WeightSyncError
from gapo_megatron.policy import Policy
from gapo_megatron.policy.adapters import LowRankAdapter
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout.engine import AdapterEngine, Engine, Needs
from gapo_megatron.types import Factors


def low_rank_adapter(policy: Policy) -> LowRankAdapter | None:
    """The policy's adapter if it adds factors beside frozen weights."""
    return policy.adapter if isinstance(policy.adapter, LowRankAdapter) else None


def needs_of(engine: Engine) -> Needs:
    """What a sync must bring; an engine that knows no factors needs merged weights."""
    if not hasattr(engine, "update_adapter"):
        return "merged"
    return cast(AdapterEngine, engine).needs


def update_adapter(
    engine: Engine, factors: Iterable[Factors], *, scale: float | None, policy_version: int
) -> None:
    """Replace the adapter of an engine whose `needs_of` asks for factors.

    Collectives, errors: those of `AdapterEngine.update_adapter`.
    """
    assert scale is not None, "a policy without an adapter sends no factors"
    cast(AdapterEngine, engine).update_adapter(factors, scale=scale, policy_version=policy_version)


class Sending:
    """The parts of one sync: whole weights, factors, or first the one and then the other.

    Without an adapter, the policy's weights.

    Attributes:
        brings_weights, brings_factors: which parts there are.
        rounding: `Merged.rounding` once merged weights are sent; otherwise None.
        scale: factor of B A; None without an adapter.
    """

    def __init__(self, policy: Policy, needs: Needs, *, keeps_factors: bool = False) -> None:
        """Begin a sync.

        Args:
            policy: unchanged.
            needs: of the engine, the same on every rank; ignored without an adapter.
            keeps_factors: copy the factors to the host now, because the policy's memory will be
                freed while they are needed.

        Collectives: with `keeps_factors` those of the policy's `iterate_factors`.
        """
        self._policy = policy
        self._adapter = adapter = low_rank_adapter(policy)
        self.brings_weights = adapter is None or needs != "factors"
        self.brings_factors = adapter is not None and needs != "merged"
        self.rounding: float | None = None
        self.scale = None if adapter is None else adapter.scale
        self._kept: list[Factors] | None = None
        if keeps_factors and adapter is not None:
            self._kept = [
                (module, a.to("cpu", copy=True), b.to("cpu", copy=True))
                for module, a, b in self.factors()
            ]

    def factors(self) -> Iterable[Factors]:
        """The policy's factors; unless they were kept, they may share memory with it.

        Collectives: unless they were kept, those of the policy's `iterate_factors`.
        """
        assert self._adapter is not None, "a policy without an adapter has no factors"
        if self._kept is not None:
            return self._kept
        return self._policy.iterate_factors()

    def weight_shards(self) -> Callable[[str], Tensor]:
        """The weights to send, for `transfer.send`: a function that returns this rank's shards.

        Sets `rounding` if the adapter is merged in.

        Collectives: if the adapter is merged in, those of `Policy.merge_rounding`.
        """
        policy, adapter = self._policy, self._adapter
        if adapter is None:
            return policy.shard
        if not self.brings_factors:
            self.rounding = policy.merge_rounding()
            return policy.shard

        def base(name: str) -> Tensor:
            with adapter.switched_off():
                return policy.shard(name)

        return base

    def factor_shards(self) -> tuple[Exported, Callable[[str], Tensor]]:
        """The factors to send, for `transfer.send`; they share memory with the policy."""
        assert self._adapter is not None, "a policy without an adapter has no factors"
        return self._adapter.exported, self._policy.factor_shards().__getitem__

    @contextlib.contextmanager
    def weights(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The weights to send, like `Policy.iterate_hf_weights`; the block must consume them all.

        Within the block the adapter of a policy is switched off, whoever stops and wherever.

        Collectives: those of `Policy.iterate_hf_weights`; for merged weights, before them, those of
        `factors`.

        Raises:
            WeightSyncError: the block has left some.
        """
        with contextlib.ExitStack() as stack:
            if self._adapter is not None:
                stack.enter_context(self._adapter.switched_off())
            weights, merged = self._policy.iterate_hf_weights(), None
            if self._adapter is not None and not self.brings_factors:
                merged = Merged(weights, self.factors(), scale=self._adapter.scale)
                weights = merged.tensors()
            yield weights
            for name, _ in weights:
                raise WeightSyncError(f"weight sync: the engine has not taken {name}")
        self.rounding = None if merged is None else merged.rounding


class Merged:
    """Weights with an adapter merged in, and what the rounding costs.

    Attributes:
        squared_update: sum over all elements of (scale * B A) ** 2.
        squared_rounding: the same of the differences between rounded and exact sums.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], factors: Iterable[Factors], *, scale: float
    ) -> None:
        """Nothing is computed before `tensors`.

        Args:
            weights: (Hugging Face name, tensor) beneath the adapter; any other tensors too.
            factors: held until their weight comes.
            scale: factor of B A.
        """
        self.squared_update = self.squared_rounding = 0.0
        self._weights = weights
        self._factors = factors
        self._scale = scale

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, those of adapted layers as round(W + scale * B A).

        Raises:
            WeightSyncError: factors belong to no weight; names them.
        """
        waiting = {f"{module}.weight": (a, b) for module, a, b in self._factors}
        for name, weight in self._weights:
            found = waiting.pop(name, None)
            yield name, weight if found is None else self._merge(weight, *found)
        if waiting:
            raise WeightSyncError(f"factors without a weight: {', '.join([*waiting][:5])}")

    @property
    def rounding(self) -> float:
        """Size of the rounding errors relative to the update's (Frobenius norms); 0 without one.

        At 1 the rounding is as large as the update.
        """
        if self.squared_update == 0:
            return 0.0
        return (self.squared_rounding / self.squared_update) ** 0.5

    def _merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        # Wide enough that the sum's own rounding is small beside that of the result.
        wide = torch.float32 if weight.dtype.itemsize == 2 else torch.float64
        update = self._scale * (b.to(weight.device, wide) @ a.to(weight.device, wide))
        exact = weight.to(wide) + update
        rounded = exact.to(weight.dtype)
        self.squared_update += float(update.square().sum(dtype=torch.float64))
        self.squared_rounding += float((rounded - exact).square().sum(dtype=torch.float64))
        return rounded
