"""Adapters: which of the model's weights are trained, and which are exported."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Adapter(Protocol):
    """The trained part of a policy's model. The policy asks instead of assuming "every weight".

    The rest of the package only knows the architecture's own parameters, which `models` gives
    rules for. Gradient buffers and optimizer are made for the parameters with `requires_grad`.
    Checkpoints hold every parameter and resume them all, an adapter's own too, under the names
    that its modules give them; Megatron-core finds the shards of parameters that an adapter adds
    only if their module describes them (`sharded_state_dict`).
    """

    def attach(self, stage: nn.Module) -> None:
        """Freeze, wrap or extend a stage's modules.

        Called once for every virtual stage of a rank, after it is built and before its gradient
        buffers and the optimizer are. Parameters of an adapter's own must have their first values,
        and be on the device and of the dtype of their module.
        """

    def base_name(self, name: str) -> str | None:
        """The name that a parameter has without the adapter; None: it is the adapter's own.

        Parameters with a base name are loaded from a model's folder and must be all of the
        model's. Every other one keeps the value that it has.

        Args:
            name: name of a parameter of a stage, or its key in a checkpoint of the policy.
        """

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        """The shard to export for a parameter with a base name: what the model computes with.

        Args:
            stage: the stage that has the parameter.
            name: the parameter's name in the stage.
            weight: the parameter, detached, on the policy's device.

        Returns:
            `weight` itself, or a tensor of its shape and dtype. No collectives.
        """


class FullWeights:
    """Every weight is trained, and exported as it is."""

    def attach(self, stage: nn.Module) -> None:
        """Nothing is added, and every parameter has `requires_grad`."""

    def base_name(self, name: str) -> str | None:
        """Every parameter is the architecture's."""
        return name

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        """The weight itself."""
        return weight


FULL_WEIGHTS = FullWeights()
