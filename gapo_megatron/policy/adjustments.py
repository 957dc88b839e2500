"""What is changed in the libraries' layers once a stage is built, and why.

None of it can be said by a field of TransformerConfig.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from gapo_megatron.policy.attention import deterministic_algorithms


def fuse_weight_gradients(model: nn.Module) -> None:
    """Let Transformer Engine's linears add to `main_grad` (float32) in the product itself.

    Otherwise every micro-batch writes a bf16 gradient of every weight and then adds it: 12 bytes of
    traffic a parameter, and a rounding. As a field of TransformerConfig it would ask for apex's
    extension too, on behalf of the output layer, whose forward pass never runs here: the head's
    own product adds to `main_grad` already (`logprob`).
    """
    linears: list[Any] = [
        module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")
    ]
    # A version that calls it something else would be slower without a word.
    assert linears, "no linear of Transformer Engine's has fuse_wgrad_accumulation"
    for linear in linears:
        linear.fuse_wgrad_accumulation = True


def combine_experts_in_order(model: nn.Module) -> None:
    """Add up the experts of a token in one order, without Transformer Engine's kernel.

    Megatron-core scatters them by atomics on a GPU, in whatever order they come: at equal weights
    log-probs would differ from pass to pass, and a recomputed layer from its own forward pass. It
    has a sorted kernel too, which it takes where torch asks for deterministic ones. On a CPU both
    give the same bits.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            combine = functools.partial(_in_order, dispatcher.combine_postprocess)
            dispatcher.combine_postprocess = combine


def _in_order(combine: Callable[[Tensor], Tensor], permuted: Tensor) -> Tensor:
    with deterministic_algorithms():
        return combine(permuted)


def share_rotary_tables(rotary: Any) -> None:
    """Ask for tables of rotary angles of few lengths: of powers of two.

    Megatron-core keeps the last 32 that it was asked for on the device, by the length of a
    micro-batch's longest sequence, which is seldom the same twice: 0.4 GB of 26k positions. All
    powers of two together take two tables. Transformer Engine's kernel looks positions up, and
    takes any table that is long enough.
    """
    exact = rotary.get_rotary_seq_len

    def rounded(*arguments: Any, **settings: Any) -> int:
        return 1 << (exact(*arguments, **settings) - 1).bit_length()

    rotary.get_rotary_seq_len = rounded
