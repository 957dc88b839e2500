"""Communication between pipeline stages when both sides know the shapes.

Because micro-batches differ in length, Megatron-core sends the shape of every tensor first, and
each stage waits for its device to read it. Here every stage has packed the same micro-batches, so
it knows their lengths and the order of Megatron-core's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.megatron import ShapedCommunicator, schedule_order

Shape = tuple[int, int, int]


class PlannedCommunicator(ShapedCommunicator):
    """Megatron-core's communicator for one pass, with planned shapes instead of exchanged ones.

    A tensor of another shape but the planned size would be received without an error. So sent
    tensors are compared with the plan, and at the end the plan must be used up: a schedule in
    another order than planned is an error.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        shapes: Sequence[Shape],
        *,
        forward_only: bool,
    ) -> None:
        """Plan the shapes of one pass.

        Args:
            pp_group: the pipeline parallel group.
            config: the model's Megatron-core config.
            shapes: shapes of each micro-batch's hidden states on a rank of a stage.
            forward_only: no gradients are sent.
        """
        super().__init__(pp_group, config)
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        plan = travelling(len(shapes), num_chunks, pp_rank=pp_group.rank(), pp_size=pp_group.size())
        self._place = f"pipeline rank {pp_group.rank()} of {pp_group.size()}"
        self._shapes = {
            name: iter([shapes[i] for i in order])
            for name, order in plan.items()
            if not (forward_only and name.endswith("gradient"))
        }

    def check_finished(self) -> None:
        """Assert that everything planned was sent and received."""
        left = {name: len(list(shapes)) for name, shapes in self._shapes.items()}
        assert not any(left.values()), f"{self._place}: planned, but not communicated: {left}"

    def shapes(
        self, send_next: Tensor | None, send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Shapes to receive from the previous and the next stage; no communication."""
        for name, tensor in (
            ("sent activation", send_next),
            ("sent gradient", send_prev),
        ):
            if tensor is not None:
                planned, found = self._next(name), tuple(tensor.shape)
                assert found == planned, f"{self._place}: {name} {found} must be {planned}"
        nothing = (0, 0, 0)
        return (
            self._next("received activation") if recv_prev else nothing,
            self._next("received gradient") if recv_next else nothing,
        )

    def _next(self, name: str) -> Shape:
        shape = next(self._shapes.get(name, iter(())), None)
        assert shape is not None, f"{self._place}: {name} was not planned"
        return shape


def travelling(
    num_microbatches: int, num_chunks: int, *, pp_rank: int, pp_size: int
) -> dict[str, list[int]]:
    """Micro-batches whose activations and gradients a stage sends and receives, in order.

    Args:
        num_microbatches: a multiple of `pp_size` with virtual stages.
        num_chunks: virtual stages of every rank.
        pp_rank: the stage.
        pp_size: pipeline parallel size.
    """
    # Virtual stages take turns after groups of `pp_size` micro-batches.
    table = schedule_order(num_microbatches, num_chunks, pp_size)
    is_first, is_last = pp_rank == 0, pp_rank == pp_size - 1
    # The model's first stage receives no activation and sends no gradient; the last likewise.
    first, last = 0, num_chunks - 1
    # Backward runs virtual stages in reverse: the table's first is the model's last.
    return {
        "received activation": [i for i, chunk in table if not (is_first and chunk == first)],
        "sent activation": [i for i, chunk in table if not (is_last and chunk == last)],
        "received gradient": [i for i, chunk in table if not (is_last and chunk == first)],
        "sent gradient": [i for i, chunk in table if not (is_first and chunk == last)],
    }


class WithGradients(torch.autograd.Function):
    """Returns `value`; its gradients at `inputs` are the given ones, None meaning zeros."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.saved_tensors, strict=True)
        return None, None, *(torch.zeros_like(x) if g is None else g * upstream for g, x in pairs)
