"""Undocumented parts of Megatron-core in use: model, gradients, groups, schedules.

`megatron_optimizer` has its distributed optimizer, `megatron_checkpoint` its checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.nn import Parameter

from gapo_megatron.compat.megatron_version import check_version, version
from gapo_megatron.compat.torch import deterministic_algorithms
from gapo_megatron.errors import ConfigError

Shape = tuple[int, ...]

_REPLACED = (
    (GPTModel, "_set_attention_backend"),
    (P2PCommunicator, "_communicate_shapes"),
    (DistributedDataParallel, "_make_backward_post_hook"),
)


def check() -> None:
    """Refuse a Megatron-core that is too old, or has not the methods that are replaced here.

    Raises:
        ConfigError: names the version, and the method, for which ours would not be called.
    """
    # Uses: the methods of `_REPLACED`
    # Versions: megatron-core 0.19.2
    # Upstream: beside the classes that replace them
    check_version()
    for owner, name in _REPLACED:
        if not hasattr(owner, name):
            raise ConfigError(
                f"megatron-core {version()} has no {owner.__name__}.{name}, which this package "
                "replaces: version 0.19.2 has it"
            )


# --- groups and schedules ------------------------------------------------------------------------


def groups_made() -> list[dist.ProcessGroup]:
    """All groups that Megatron-core has created; `destroy_model_parallel` does not close them."""
    # Uses: parallel_state._global_process_group_list
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#6897 (open issue), #6902, #7029 (open pull requests)
    return [group for group in parallel_state._global_process_group_list or [] if group]


def schedule_order(
    num_microbatches: int, num_chunks: int, pp_size: int
) -> Sequence[tuple[int, int]]:
    """Micro-batch and virtual stage of every forward pass of a pipeline rank, in order."""
    # Uses: pipeline_parallel.schedules.get_schedule_table
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    order: Sequence[tuple[int, int]] = schedules.get_schedule_table(
        num_microbatches, num_chunks, pp_size
    )
    return order


class ShapedCommunicator(P2PCommunicator):
    """Gets the shapes of tensors between stages from `shapes` instead of exchanging them."""

    # Uses: P2PCommunicator._communicate_shapes, replaced
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#7000 (merged, not in 0.19.2: one fixed shape), #1066, #5100
    #     (open)

    def shapes(
        self, send_next: Tensor | None, send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """To override: shapes of the tensors to receive from the previous and the next stage.

        Args:
            send_next: tensor sent to the next stage, or None.
            send_prev: tensor sent to the previous stage, or None.
            recv_prev: whether to receive from the previous stage.
            recv_next: whether to receive from the next stage.
        """
        raise NotImplementedError

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        return self.shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)


def received(stage: GPTModel) -> Tensor:
    """Hidden states that a stage received from the previous one, in the current pass."""
    # Uses: GPTModel.decoder.input_tensor
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    hidden: Tensor = stage.decoder.input_tensor
    return hidden


# --- gradients -----------------------------------------------------------------------------------


def main_grad(parameter: Any) -> Tensor:
    """The float32 buffer in which a parameter's gradients are summed."""
    # Uses: Parameter.main_grad
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    buffer: Tensor = parameter.main_grad
    return buffer


class ListeningModel(DistributedDataParallel):
    """Adds every gradient that autograd computes to its buffer, then calls `gradient_came`."""

    # Uses: DistributedDataParallel._make_backward_post_hook, replaced;
    #     Parameter.main_grad, .grad_added_to_main_grad (Transformer Engine sets the latter)
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#1129 (open, close to it), #6484 (merged: Megatron-FSDP v2 alone)

    def gradient_came(self, parameter: Parameter) -> None:
        """To override: a parameter's gradient of one micro-batch is in its buffer."""
        raise NotImplementedError

    def _make_backward_post_hook(self, param: Parameter) -> Callable[..., None]:
        weight: Any = param

        def hook(*_: Any) -> None:
            # None: our output layer added it to the buffer; Megatron-core's own hook refuses that.
            if weight.grad is not None and not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
            self.gradient_came(weight)

        return hook


class Bucket:
    """Parameters whose gradients are reduced together."""

    # Uses: bucket groups: params, grad_reduce_handle, start_grad_sync
    # Versions: megatron-core 0.19.2
    # Upstream: none found

    def __init__(self, bucket_group: Any) -> None:
        self._group = bucket_group
        self.params: Sequence[Parameter] = list(bucket_group.params)

    @property
    def is_on_its_way(self) -> bool:
        """Whether its reduction has started and has not been waited for."""
        return self._group.grad_reduce_handle is not None

    def start(self) -> None:
        """Start its reduction. Collective, over ranks with equal weights."""
        self._group.start_grad_sync()


def buckets(wrapped: DistributedDataParallel) -> list[Bucket]:
    """Gradient buckets of one virtual stage: the data parallel groups', then the experts'."""
    # Uses: DistributedDataParallel.bucket_groups, .expert_parallel_bucket_groups
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    return [
        Bucket(group) for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups)
    ]


# --- model ---------------------------------------------------------------------------------------


class HiddenStatesModel(GPTModel):
    """A model that returns hidden states and calls `choose_attention` for the environment."""

    # Uses: LanguageModule._set_attention_backend, replaced; `output_processor` of forward (public)
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#7362 (merged, not in 0.19.2: called no more), #7444
    #     (open: the environment's choice stays), #6019 (open)

    _has_chosen_attention = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self._has_chosen_attention:
            raise ConfigError(
                f"megatron-core {version()} does not call GPTModel._set_attention_backend, which "
                "this package replaces: version 0.19.2 does"
            )

    def choose_attention(self) -> None:
        """To override: set Transformer Engine's environment, once, while the model is built."""

    def _set_attention_backend(self) -> None:
        self._has_chosen_attention = True
        self.choose_attention()

    def forward(self, *arguments: Any, **settings: Any) -> Tensor:
        """Hidden states [T (/ tp under sequence parallelism), 1, H] instead of logits."""
        hidden: Tensor = super().forward(*arguments, **settings, output_processor=_as_they_are)
        return hidden


def _as_they_are(*, hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def set_rotary_frequencies(model: GPTModel, frequencies: Tensor) -> None:
    """Use these frequencies [R / 2] instead of Megatron-core's own; R elements are rotated."""
    # Uses: RotaryEmbedding.inv_freq
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    model.rotary_pos_emb.inv_freq = frequencies


def share_rotary_tables(rotary: Any) -> None:
    """Round the lengths of rotary tables up to powers of two.

    Megatron-core caches the last 32 tables on the device, one per length of a micro-batch's longest
    sequence, which rarely repeats: 0.4 GB for 26k positions. All powers of two together take as
    much as two tables. Transformer Engine's kernel takes any table that is long enough.
    """
    # Uses: RotaryEmbedding.get_rotary_seq_len, replaced
    # Versions: megatron-core 0.19.2
    # Upstream: none found (close to it NVIDIA/Megatron-LM#1646, #1649, open)
    exact = rotary.get_rotary_seq_len

    def rounded(*arguments: Any, **settings: Any) -> int:
        return 1 << (exact(*arguments, **settings) - 1).bit_length()

    rotary.get_rotary_seq_len = rounded


def combine_experts_in_order(model: nn.Module) -> None:
    """Sum a token's experts in a fixed order, without Transformer Engine's kernel.

    On a GPU, Megatron-core sums them by atomics in any order: with equal weights log-probs would
    differ between passes, and a recomputed layer from its own forward pass. It also has a sorted
    kernel, which it uses when torch requires deterministic algorithms. On a CPU both give the same
    bits.
    """
    # Uses: MoELayer.token_dispatcher.combine_postprocess, replaced
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#7149, #6547 (open), #5718 (merged, documentation)
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            combine = functools.partial(_in_order, dispatcher.combine_postprocess)
            dispatcher.combine_postprocess = combine


def _in_order(combine: Callable[[Tensor], Tensor], permuted: Tensor) -> Tensor:
    with deterministic_algorithms():
        return combine(permuted)


def spread_tokens_evenly(model: nn.Module) -> None:
    """Give every expert the same number of tokens, whatever the router chooses."""
    # Uses: routers: routing (to know one), topk, the outputs (probs, choices)
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#2917 (merged: a forced imbalance); the public
    #     `moe_router_force_load_balancing` draws at random
    for module in model.modules():
        if hasattr(module, "routing"):
            module.register_forward_hook(_share_equally)


def _share_equally(router: Any, _: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    probs, choices = output
    num_tokens, num_experts = choices.shape
    chosen = router.topk
    first = torch.arange(num_tokens)[:, None] * chosen
    places = (first + torch.arange(chosen)) % num_experts
    return probs, torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, places, True)


def leave_grad_mode(model: GPTModel) -> None:
    """Let residual additions keep the caller's grad mode; Megatron-core switches gradients on.

    Without gradients, an addition with a norm would keep its inputs for a backward pass.
    """
    # Uses: TransformerLayer.bias_dropout_add_exec_handler
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    for layer in model.decoder.layers:
        layer.bias_dropout_add_exec_handler = contextlib.nullcontext
