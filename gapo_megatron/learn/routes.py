"""Routes: the experts that a model's routers choose for each token, in every layer with experts.

The pass of the old log-probs records them, and the updates of the same step replay them: a ratio
then says how the weights have changed, and does not jump where a change as small as rounding has
sent a token to another expert. The gate's values are always those of the current weights, so that
the router is trained. Updates are packed like the pass of the old log-probs, micro-batch for
micro-batch: a rank replays the rows that it has recorded itself, and none travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.models.tables import geometry_of
from gapo_megatron.policy import Policy
from gapo_megatron.types import ChooseExperts, Microbatch

Routes = dict[int, Tensor]
"""Experts of a micro-batch's tokens, padding included: number of the layer -> [tokens of this rank,
experts per token] in ascending order; uint8 if it holds their numbers, otherwise int16."""


@dataclass
class Recorded:
    """What this rank has recorded and counted in a step, which a stop must save."""

    routes: dict[int, list[Routes]] = field(default_factory=dict)
    """Number of a mini-batch -> routes of its micro-batches, on the policy's device, until its
    update is done. Also those of the sequences that measure rounding, until they have."""
    counts: Tensor | None = None
    """[layers, experts + 2] int64 on the policy's device, of the tokens that this rank computes: of
    each expert, compared, and of these with the same experts. None for a model without experts."""


class StepRoutes:
    """The routes of a step's mini-batches on this rank, and what the metrics count of them.

    A model without experts has none: every method then returns what it is given, or nothing.

    Args:
        policy: the policy; its device holds the routes.
        recorded: from the same step, before it was interrupted; updated in place.
        replays: whether updates replay what was recorded; otherwise they only compare.
    """

    def __init__(self, policy: Policy, recorded: Recorded | None = None, *, replays: bool) -> None:
        recorded = recorded or Recorded()
        self._policy = policy
        self._replays = replays
        self._num_experts = geometry_of(policy.hf_config).num_experts
        if self._num_experts and recorded.counts is None:
            shape = (policy.hf_config.num_hidden_layers, self._num_experts + 2)
            recorded.counts = torch.zeros(shape, dtype=torch.int64, device=policy.device)
        self._counts = recorded.counts
        self._routes = recorded.routes

    def recording(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Micro-batches of mini-batch `number` whose next pass, without gradients, records."""
        if not self._num_experts:
            return [*microbatches]
        recorded = self._routes[number] = [{} for _ in microbatches]
        return [
            replace(microbatch, choose_experts=recorder(routes, num_experts=self._num_experts))
            for microbatch, routes in zip(microbatches, recorded, strict=True)
        ]

    def following(
        self, number: int, microbatches: Sequence[Microbatch], *, counts: bool = True
    ) -> list[Microbatch]:
        """Micro-batches of mini-batch `number` whose passes replay what was recorded, if they do.

        Args:
            number: the mini-batch; nothing is replayed if it was not recorded.
            microbatches: its micro-batches.
            counts: count the routes of the next passes for the metrics, each once.
        """
        if not self._num_experts:
            return [*microbatches]
        recorded = self._routes.get(number, [{} for _ in microbatches])
        return [
            replace(microbatch, choose_experts=self._follower(microbatch, routes, counts=counts))
            for microbatch, routes in zip(microbatches, recorded, strict=True)
        ]

    def tracing(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """For passes that only score: the first records, later ones follow; none is counted."""
        if number not in self._routes:
            return self.recording(number, microbatches)
        return self.following(number, microbatches, counts=False)

    def other_way(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Like `tracing` after its first pass, as if `replays` had the other value."""
        if not self._num_experts:
            return [*microbatches]
        recorded = self._routes[number]
        return [
            replace(one, choose_experts=None if self._replays else replayer(routes))
            for one, routes in zip(microbatches, recorded, strict=True)
        ]

    def has(self, number: int) -> bool:
        """Whether the routes of mini-batch `number` were recorded."""
        return number in self._routes

    def forget(self, number: int) -> None:
        """Free the routes of mini-batch `number`, which no further pass follows."""
        self._routes.pop(number, None)

    def summarize(self) -> dict[str, float]:
        """`experts/*` (docs/metrics.md) of the step, the same on every rank.

        Collectives: for a model with experts an all-reduce of [layers, experts + 2] int64 over all
        ranks: each counts its own layers and tokens.
        """
        if self._counts is None:
            return {}
        counts = self._counts.clone()
        dist.all_reduce(counts)
        counts = counts.cpu()
        return summarize(counts[counts.any(dim=1)])

    def _follower(self, microbatch: Microbatch, routes: Routes, *, counts: bool) -> ChooseExperts:
        replayed = replayer(routes) if self._replays else None
        if not counts:
            return replayed or _own_choice
        is_token = own_tokens(self._policy, microbatch)
        counted: set[int] = set()

        def choose(layer: int, own: Tensor) -> Tensor:
            chosen = own if replayed is None else replayed(layer, own)
            if layer not in counted:  # not again where the layer is recomputed
                counted.add(layer)
                self._count(layer, own, chosen, routes.get(layer), is_token)
            return chosen

        return choose

    def _count(
        self, layer: int, own: Tensor, chosen: Tensor, recorded: Tensor | None, is_token: Tensor
    ) -> None:
        """Add a layer's tokens; nothing is read from the device."""
        assert self._counts is not None
        counts, num_experts = self._counts[layer], self._num_experts
        counts.scatter_add_(0, chosen.flatten(), is_token.repeat_interleave(chosen.shape[1]))
        if recorded is not None:
            is_same = (own == recorded).all(dim=1)
            counts[num_experts] += is_token.sum()
            counts[num_experts + 1] += (is_token * is_same).sum()


def recorder(routes: Routes, *, num_experts: int) -> ChooseExperts:
    """The routers' own choice, kept in `routes`."""
    dtype = torch.uint8 if num_experts <= 256 else torch.int16

    def record(layer: int, own: Tensor) -> Tensor:
        routes[layer] = own.to(dtype)
        return own

    return record


def replayer(routes: Routes) -> ChooseExperts:
    """What `routes` hold; the routers' own choice if they were not recorded."""

    def replay(layer: int, own: Tensor) -> Tensor:
        return routes[layer].long() if routes else own

    return replay


def own_tokens(policy: Policy, microbatch: Microbatch) -> Tensor:
    """[tokens of a router on this rank] int64: 1 for a token, 0 for padding."""
    groups, is_token = policy.groups, ~microbatch.is_padding[0]
    if policy.stages[0].config.sequence_parallel:  # a router has its rank's share
        is_token = is_token.chunk(groups.tp_size)[groups.tp_rank]
    return is_token.long()


def summarize(counts: Tensor) -> dict[str, float]:
    """Metrics of the layers with experts.

    Args:
        counts: [layers, experts + 2] int64 over all ranks: tokens of each expert, tokens whose
            routes were compared, and those of them that agree.
    """
    load, compared, same = counts[:, :-2].double(), counts[:, -2], counts[:, -1]
    if not len(counts):
        return {}
    metrics = {
        "experts/max_load": float((load.amax(dim=1) / load.mean(dim=1)).mean()),
        "experts/dead_share": float((load == 0).double().mean()),
    }
    if compared.any():
        metrics["experts/same_routes_share"] = int(same.sum()) / int(compared.sum())
        metrics["experts/same_routes_share_min"] = float((same.double() / compared).min())
    return metrics


def _own_choice(_: int, own: Tensor) -> Tensor:
    return own
