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
        rounding: `LowRankAdapter.merge_rounding`; None if no merged weights are sent.
        scale: factor of B A; None without an adapter.
    """

    def __init__(self, policy: Policy, needs: Needs, *, keeps_factors: bool = False) -> None:
        """Begin a sync.

        Args:
            policy: unchanged; offloaded weights return to the device (`Policy.begin_pass`).
            needs: needs of the engine, the same on every rank; ignored without an adapter.
            keeps_factors: copy the factors to the host now, because the policy's memory will be
                freed while they are needed.

        Collectives: with `keeps_factors` those of `factors`, if any are sent; if weights are
        merged, a sum.
        """
        self._policy = policy
        self._adapter = adapter = low_rank_adapter(policy)
        self.brings_weights = adapter is None or needs != "factors"
        self.brings_factors = adapter is not None and needs != "merged"
        self.rounding: float | None = None
        self.scale = None if adapter is None else adapter.scale
        self._kept: list[Factors] | None = None
        policy.begin_pass()
        if adapter is not None and not self.brings_factors:
            self.rounding = adapter.merge_rounding(policy.stages)
        elif keeps_factors and adapter is not None:
            self._kept = [
                (module, a.to("cpu", copy=True), b.to("cpu", copy=True))
                for module, a, b in self.factors()
            ]

    def factors(self) -> Iterable[Factors]:
        """The policy's factors; unless they were kept, they may share memory with it.

        Collectives: unless they were kept, those of the adapter's `whole_factors`.
        """
        assert self._adapter is not None, "a policy without an adapter has no factors"
        if self._kept is not None:
            return self._kept
        return self._adapter.whole_factors(self._policy.stages)

    def factor_shards(self) -> tuple[Exported, Callable[[str], Tensor]]:
        """The factors to send, for `transfer.send`; they share memory with the policy."""
        assert self._adapter is not None, "a policy without an adapter has no factors"
        shards = self._adapter.factor_shards(self._policy.stages)
        return self._adapter.exported, shards.__getitem__

    def weight_shard(self, name: str) -> Tensor:
        """This rank's shard of a weight to send, for `transfer.send`."""
        with self._sent_weights():
            return self._policy.shard(name)

    @contextlib.contextmanager
    def weights(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The weights to send, like `Policy.iterate_hf_weights`; the block must consume them all.

        Weights beneath factors are those of the base: the adapter is off in the block, and restored
        on any exit.

        Collectives: those of `Policy.iterate_hf_weights`.

        Raises:
            WeightSyncError: the block has left some.
        """
        with self._sent_weights():
            weights = self._policy.iterate_hf_weights()
            yield weights
            for name, _ in weights:
                raise WeightSyncError(f"weight sync: the engine has not taken {name}")

    def _sent_weights(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the policy exports what is sent: merged, unless factors follow."""
        if self._adapter is None or not self.brings_factors:
            return contextlib.nullcontext()
        return self._adapter.switched_off()
