"""Adapters: which of the model's weights are trained, and which are exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from gapo_megatron.policy.export import Exported
from gapo_megatron.policy.model import PolicyModel
from gapo_megatron.types import Factors


class Adapter(Protocol):
    """Decides which parameters of the model are trained, and what is exported.

    The rest of the package only knows the architecture's own parameters, for which `models` has
    rules. Gradient buffers and optimizer cover the parameters with `requires_grad`. Checkpoints
    save and resume every parameter, the adapter's too, under its module's name; of an adapter that
    can be switched off, only what is trained, and the digest of the base. What an adapter adds is
    in the submodule `model.OWN` of a stage, which must describe its shards to Megatron-core
    (`sharded_state_dict`); the architecture's parameters keep their names.
    """

    def attach(self, stage: PolicyModel) -> None:
        """Freeze, wrap or extend a stage's modules.

        Called once for every virtual stage of a rank, after the stage is built and before its
        gradient buffers and the optimizer are. The adapter must initialise its own parameters, on
        the device and in the dtype of their module.
        """

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        """The shard to export of an architecture's parameter: the weight as the model uses it.

        Args:
            stage: the stage that has the parameter.
            name: the parameter's name in the stage.
            weight: the parameter, detached, on the policy's device.

        Returns:
            `weight` itself, or a tensor of its shape and dtype. No collectives.
        """

    def switched_off(self) -> AbstractContextManager[None] | None:
        """A block in which the stages compute, and `merge` returns, the weights that were loaded.

        They are then the base: frozen, and the same in every checkpoint. None: the adapter has no
        such switch, and a policy that needs the weights that were loaded keeps a copy.
        """


@runtime_checkable
class LowRankAdapter(Protocol):
    """What an `Adapter` has beside its own methods if it adds factors to frozen weights."""

    scale: float
    """Factor of B A."""
    exported: Exported
    """The factors, and which rank holds them."""

    def whole_factors(self, stages: Sequence[PolicyModel]) -> Iterator[Factors]:
        """Yield the whole factors of every adapted layer, unrounded, on every rank.

        They may share memory with the policy, whose weights must be on the device
        (`Policy.begin_pass`). Collective.
        """

    def factor_shards(self, stages: Sequence[PolicyModel]) -> Mapping[str, Tensor]:
        """This rank's shards of all factors, by the names of `exported`. No collectives."""

    def merge_rounding(self, stages: Sequence[PolicyModel]) -> float:
        """Size of the rounding errors of `merge` relative to the update's. Collective."""

    def switched_off(self) -> AbstractContextManager[None]:
        """`Adapter.switched_off`, which such an adapter always has."""


class FullWeights:
    """Train every weight, and export it as it is."""

    def attach(self, stage: PolicyModel) -> None:
        """Add nothing; every parameter has `requires_grad`."""

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight

    def switched_off(self) -> None:
        """None: the weights that were loaded are overwritten."""


FULL_WEIGHTS = FullWeights()
