"""What pipeline stages send each other, when both sides know its shape.

Micro-batches differ in length. Megatron-core therefore sends the shape of every tensor ahead of it,
and each stage waits for its device to read it. Here every stage has packed the same micro-batches:
it knows how long they are, and the order in which Megatron-core's schedule deals with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

Shape = tuple[int, int, int]


class PlannedCommunicator(P2PCommunicator):
    """Megatron-core's, for one pass; answers for shapes instead of asking its neighbours."""

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape]) -> None:
        """Take the shapes of what travels, by micro-batch.

        Args:
            pp_group: the pipeline.
            config: of the model.
            shapes: hidden states of each micro-batch, as one rank of a stage holds them.
        """
        super().__init__(pp_group, config)
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        forward, backward = received(
            len(shapes), num_chunks, pp_rank=pp_group.rank(), pp_size=pp_group.size()
        )
        self._activations = iter([shapes[i] for i in forward])
        self._gradients = iter([shapes[i] for i in backward])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Shapes of what comes from the stage before and from the one after; no communication."""
        nothing = (0, 0, 0)
        return (
            next(self._activations) if recv_prev else nothing,
            next(self._gradients) if recv_next else nothing,
        )


def received(
    num_microbatches: int, num_chunks: int, *, pp_rank: int, pp_size: int
) -> tuple[list[int], list[int]]:
    """Micro-batches whose activations, and whose gradients, a stage receives, in that order.

    Args:
        num_microbatches: a multiple of `pp_size` with virtual stages.
        num_chunks: virtual stages of every rank.
        pp_rank: the stage.
        pp_size: of the pipeline.
    """
    # Virtual stages take turns after groups of `pp_size` micro-batches.
    table = get_schedule_table(num_microbatches, num_chunks, pp_size)
    is_first, is_last = pp_rank == 0, pp_rank == pp_size - 1
    # Backward, virtual stages come in the opposite order: the table's first is the model's last.
    forward = [i for i, chunk in table if not (is_first and chunk == 0)]
    backward = [i for i, chunk in table if not (is_last and chunk == 0)]
    return forward, backward
