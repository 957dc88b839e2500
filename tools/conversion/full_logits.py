"""Full logits of a few sequences, to compare models; not for training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.policy.model import PolicyModel
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.types import Microbatch


@torch.no_grad()
def logits(stage: PolicyModel, groups: ParallelGroups, microbatch: Microbatch) -> Tensor | None:
    """Run one micro-batch through the whole model.

    Args:
        stage: this rank's part of the model.
        groups: this rank's parallel groups; without context parallelism.
        microbatch: this data parallel rank's micro-batch, of T tokens including padding.

    Returns:
        [T, vocabulary] float32 on every rank of the last pipeline stage, None elsewhere.

    Collectives: those of the forward pass; on the last stage all-gathers over the tensor parallel
    group.
    """
    assert groups.cp_size == 1

    def forward(iterator: Iterator[Microbatch], model: PolicyModel) -> tuple[Tensor, object]:
        given = next(iterator)
        hidden = model(
            input_ids=given.tokens,
            position_ids=given.position_ids,
            attention_mask=None,
            packed_seq_params=stage.packing(given),
        )
        return hidden, lambda hidden: (hidden.sum(), hidden[:, 0])

    # The schedule needs a scalar loss per micro-batch; the report returns the hidden states.
    with cpu.device_scope():
        report = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([microbatch]),
            model=[stage],
            num_microbatches=1,
            seq_length=microbatch.tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    if not groups.is_last_stage:
        return None
    (hidden,) = report
    # The output layer is sharded over the vocabulary, and hidden states perhaps over tokens.
    if stage.config.sequence_parallel:
        hidden = _gather(hidden, groups, dim=0)
    part = hidden.float() @ stage.head_weight.float().T
    return _gather(part, groups, dim=1)[:, : stage.unpadded_vocab_size]


def _gather(part: Tensor, groups: ParallelGroups, *, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(groups.tp_size)]
    dist.all_gather(parts, part.contiguous(), group=groups.tp_group)
    return torch.cat(parts, dim=dim)
