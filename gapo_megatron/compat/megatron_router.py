"""Undocumented parts of Megatron-core in use: how the routers of a model choose experts.

Megatron-core has a replay of its own (`moe_enable_routing_replay`). Its routers register in a list
of the process: the models of other passes, and layers that predict further tokens, are in it too.
And it replays recomputed layers in the order of the forward passes, though a micro-batch may have
no backward pass. So each router gets an object of ours where it looks for that one, and every layer
is told the micro-batch that it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gapo_megatron.types import ChooseExperts

_NAME = "choose_experts"


def set_choice(packed: PackedSeqParams, choose: ChooseExperts | None) -> None:
    """Let `choose` choose the experts of a micro-batch, also where its layers are recomputed.

    Args:
        packed: the micro-batch's layout, which is passed to every layer.
        choose: None: the router's own choice.
    """
    # Uses: TransformerLayer.forward's packed_seq_params, the same object in a recomputation
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    setattr(packed, _NAME, choose)


def open_routers(model: GPTModel) -> None:
    """Let `set_choice` choose experts in the layers of `model`, and fix their order.

    The chosen experts of a token are ordered by their number. Megatron-core orders them by score
    only where there are gradients: sums over them then differ in their last bits between the pass
    of the old log-probs and the update, and ratios from 1.

    Args:
        model: a stage of the policy; only the layers of its decoder take part.
    """
    # Uses: TransformerLayer.layer_number, .mlp; MoELayer.router: router_replay, num_experts
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#2101, #2693 (merged: the replay)
    for number, layer in _with_experts(model):
        router: Any = layer.mlp.router
        assert not router.config.moe_router_fusion, "the fused router asks nobody"
        router.router_replay = opened = _Choice(number)
        layer.register_forward_pre_hook(opened.begin_layer, with_kwargs=True)


def layers_with_experts(stages: Sequence[GPTModel]) -> list[int]:
    """Numbers in the whole model, from 0, of these stages' layers with experts."""
    # Uses: TransformerLayer.layer_number, .mlp
    # Versions: megatron-core 0.19.2
    # Upstream: as of `open_routers`
    return [number for stage in stages for number, _ in _with_experts(stage)]


def _with_experts(model: GPTModel) -> Iterator[tuple[int, Any]]:
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            yield layer.layer_number - 1, layer


def keep_biases(stages: Sequence[GPTModel]) -> None:
    """Keep the correction biases of sigmoid routers as they are loaded, once all stages are built.

    Otherwise every backward pass counts the tokens of experts, and every update sums the counts
    over ranks and adds a multiple of a sign to the biases: of a zero, too, which makes -0.0 0.0.
    """
    # Uses: TransformerConfig.moe_router_enable_expert_bias, as finalize_model_grads reads it;
    #     TopKRouter.enable_expert_bias, as _apply_expert_bias reads it
    # Versions: megatron-core 0.19.2
    # Upstream: none found; 0.19.2 has TopKRouter.frozen_expert_bias, but goes on counting
    for stage in stages:
        stage.config.moe_router_enable_expert_bias = False
        for module in stage.modules():
            if isinstance(module, TopKRouter):
                module.enable_expert_bias = False


class _Choice:
    """In place of Megatron-core's `RouterReplay`, of one layer."""

    # Uses: TopKRouter.router_replay: get_replay_topk, as topk_routing_with_score_function calls it
    # Versions: megatron-core 0.19.2
    # Upstream: as of `open_routers`

    def __init__(self, layer: int) -> None:
        self._layer = layer
        # Of the layer's last pass: it keeps that micro-batch's routes on the device until the next.
        self._choose: ChooseExperts | None = None

    def begin_layer(self, _: Any, __: Any, arguments: dict[str, Any]) -> None:
        self._choose = getattr(arguments.get("packed_seq_params"), _NAME, None)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_choice: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, topk] of the chosen experts, with their gradient, and these experts.

        Args:
            scores: [tokens, experts] by which the router chooses; with a bias, if it has one, and
                then it takes the gate's values, without bias, at the experts returned.
            topk: experts of a token.
            num_groups: groups of experts; None: there are none.
            group_topk: groups that a token's experts are in; None: any.
            own_choice: the router's own rule.
        """
        with torch.no_grad():
            _, chosen = own_choice(scores, topk, num_groups, group_topk)
            chosen = chosen.sort(dim=1).values
            if self._choose is not None:
                chosen = self._choose(self._layer, chosen)
        assert chosen.shape == (len(scores), topk), "recorded in another micro-batch"
        return scores.gather(1, chosen), chosen
