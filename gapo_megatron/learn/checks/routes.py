"""Routes: the experts that a model's routers choose for each token, in every layer with experts.

The updates of a step replay them: a ratio then says how the weights have changed, and does not
jump where a change as small as rounding has sent a token to another expert. The gate's values are
always those of the current weights, so that the router is trained.

They are recorded by the pass of the old log-probs (`objective.routing_replay` = "trainer"). Updates
are packed like it, micro-batch for micro-batch: a rank replays the rows that it has recorded
itself, and none travel. Or they are the engine's ("rollout"), which travel with the tokens
(`Rollouts.routes`), and which the pass of the old log-probs follows, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.megatron_router import layers_with_experts
from gapo_megatron.device import to_device
from gapo_megatron.errors import RolloutError
from gapo_megatron.policy import Policy
from gapo_megatron.policy.context import held_positions, num_chunks
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import ChooseExperts, Microbatch

Routes = dict[int, Tensor]
"""Experts of a micro-batch's tokens, padding included: number of the layer -> [tokens of this rank,
experts per token] in ascending order; uint8 if it holds their numbers, otherwise int16."""

_SHARES = ("same_routes", "engine_same_routes")
"""Shares that the metrics have: compared with what updates replay, and with the engine's routes at
the weights that the step begins with."""


@dataclass
class Recorded:
    """What this rank has recorded and counted in a step, which a stop must save."""

    routes: dict[int, list[Routes]] = field(default_factory=dict)
    """Number of a mini-batch -> routes of its micro-batches, on the policy's device, until its
    update is done. Also those of the sequences that measure rounding, until they have."""
    counts: Tensor | None = None
    """[layers, experts + 4] int64 on the policy's device, of the tokens that this rank computes: of
    each expert; then for each of `_SHARES` compared, and of these with the same experts. None for a
    model without experts."""


def counts_shape(policy: Policy) -> tuple[int, int]:
    """Shape of `Recorded.counts` of a model with experts."""
    num_experts = policy.stages[0].geometry.num_experts
    return policy.hf_config.num_hidden_layers, num_experts + 2 * len(_SHARES)


@dataclass(frozen=True)
class Known:
    """Routes of a micro-batch's tokens on this rank, and of which tokens."""

    routes: Routes
    is_known: Tensor | None = None
    """[tokens of this rank] bool; None: of all."""


class StepRoutes:
    """The routes of a step's mini-batches on this rank, and what the metrics count of them.

    A model without experts has none: every method then returns what it is given, or nothing.

    Args:
        policy: the policy; its device holds the routes.
        rollouts: the step's batch, with the tokens that this rank computes.
        recorded: from the same step, before it was interrupted; updated in place.
        replayed: routes that updates replay: "trainer": those recorded; "rollout": the engine's,
            of `rollouts`; "none": updates only compare with those recorded.
    """

    def __init__(
        self,
        policy: Policy,
        rollouts: Rollouts,
        recorded: Recorded | None = None,
        *,
        replayed: Literal["none", "trainer", "rollout"],
    ) -> None:
        recorded = recorded or Recorded()
        self._policy = policy
        self._rollouts = rollouts
        self._replayed = replayed
        self._num_experts = policy.stages[0].geometry.num_experts
        if self._num_experts and recorded.counts is None:
            shape = counts_shape(policy)
            recorded.counts = torch.zeros(shape, dtype=torch.int64, device=policy.device)
        self._counts = recorded.counts
        self._routes = recorded.routes

    def recording(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Micro-batches of mini-batch `number` whose next pass, without gradients, records.

        The engine's routes are not recorded: that pass follows them.
        """
        if not self._num_experts:
            return [*microbatches]
        if self._replayed == "rollout":
            return self._marked(number, microbatches, share="engine_same_routes")
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
        # In mini-batch 0 the weights are still those that the step begins with.
        at_begin = self._replayed == "rollout" and number == 0
        share = "engine_same_routes" if at_begin else "same_routes"
        return self._marked(number, microbatches, share=share if counts else None, load=counts)

    def tracing(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Passes that only score: the first records, later ones replay; none is counted."""
        if not self.has(number):
            return self.recording(number, microbatches)
        return self.following(number, microbatches, counts=False)

    def other_way(self, number: int, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The opposite routing from the updates': free if they replay, replayed if not."""
        if not self._num_experts:
            return [*microbatches]
        if self._replayed != "none":
            return [replace(one, choose_experts=None) for one in microbatches]
        return [
            replace(one, choose_experts=replayer(routes))
            for one, routes in zip(microbatches, self._routes[number], strict=True)
        ]

    def has(self, number: int) -> bool:
        """Whether there are routes of mini-batch `number`, recorded or the engine's."""
        return self._replayed == "rollout" or number in self._routes

    def forget(self, number: int) -> None:
        """Free the routes of mini-batch `number`, which no further pass follows."""
        self._routes.pop(number, None)

    def summarize(self) -> dict[str, float]:
        """`experts/*` (docs/metrics.md) of the step, the same on every rank.

        Collectives: for a model with experts an all-reduce of [layers, experts + 4] int64 over all
        ranks: each counts its own layers and tokens.
        """
        if self._counts is None:
            return {}
        counts = self._counts.clone()
        dist.all_reduce(counts)
        counts = counts.cpu()
        return summarize(counts[counts.any(dim=1)])

    def _marked(
        self,
        number: int,
        microbatches: Sequence[Microbatch],
        *,
        share: str | None,
        load: bool = False,
    ) -> list[Microbatch]:
        """Micro-batches that follow; counted for a share of the metrics, and for the load."""
        if self._replayed == "rollout":
            known = [routes_of_engine(self._policy, self._rollouts, one) for one in microbatches]
        else:
            recorded = self._routes.get(number, [{} for _ in microbatches])
            known = [Known(routes) for routes in recorded]
        return [
            replace(one, choose_experts=self._follower(one, routes, share=share, load=load))
            for one, routes in zip(microbatches, known, strict=True)
        ]

    def _follower(
        self, microbatch: Microbatch, known: Known, *, share: str | None, load: bool
    ) -> ChooseExperts:
        follow = Known({}) if self._replayed == "none" else known
        replayed = replayer(follow.routes, follow.is_known)
        if share is None:
            return replayed
        groups, is_token = self._policy.groups, ~microbatch.is_padding[0]
        if self._policy.stages[0].config.sequence_parallel:  # a router has its rank's share
            is_token = is_token.chunk(groups.tp_size)[groups.tp_rank]
        is_compared = is_token if known.is_known is None else is_token & known.is_known
        first = self._num_experts + 2 * _SHARES.index(share)
        counted: set[int] = set()

        def choose(layer: int, own: Tensor) -> Tensor:
            chosen = replayed(layer, own)
            if layer not in counted and self._counts is not None:
                counted.add(layer)  # not again where the layer is recomputed
                counts = self._counts[layer]
                if load:
                    tokens = is_token.long().repeat_interleave(chosen.shape[1])
                    counts.scatter_add_(0, chosen.flatten(), tokens)
                if layer in known.routes:
                    is_same = (own == known.routes[layer]).all(dim=1)
                    counts[first] += is_compared.sum()
                    counts[first + 1] += (is_compared & is_same).sum()
            return chosen

        return choose


def routes_of_engine(policy: Policy, rollouts: Rollouts, microbatch: Microbatch) -> Known:
    """The engine's routes of this rank's tokens of a micro-batch, in its own layers.

    Args:
        policy: its parallel sizes decide which tokens and layers are this rank's.
        rollouts: with the tokens and routes of the micro-batch's sequences.
        microbatch: packed by `policy` from `rollouts`.

    Raises:
        RolloutError: they are not those of this model's layers and experts; names the sequence.
    """
    groups, layers = policy.groups, layers_with_experts(policy.stages)
    num_layers, multiple = policy.hf_config.num_hidden_layers, num_chunks(groups.cp_size)
    geometry = policy.stages[0].geometry
    # All tokens, packed as `batching.pack` packs them.
    num_tokens = microbatch.tokens.shape[1] * groups.cp_size
    packed = np.zeros((num_tokens, num_layers, geometry.experts_per_token), np.uint8)
    is_known, edges = np.zeros(num_tokens, np.bool_), [0]
    fed_lengths = rollouts.num_fed_tokens[list(microbatch.indices)].tolist()
    for i, fed in zip(microbatch.indices, fed_lengths, strict=True):
        start, routes = edges[-1], rollouts.routes_of(i)
        if routes is not None:
            wanted, largest = num_layers * geometry.experts_per_token, routes.max(initial=0)
            if routes.shape[1] != wanted or largest >= geometry.num_experts:
                raise RolloutError(
                    f"sequence {i}: the engine's routes have {routes.shape[1]} experts a token, up "
                    f"to {largest}; objective.routing_replay ('rollout') needs {wanted} "
                    f"({num_layers} layers x {geometry.experts_per_token}), below "
                    f"{geometry.num_experts}"
                )
            end = start + min(len(routes), fed)
            packed[start:end].reshape(end - start, -1)[:] = routes[: end - start]
            is_known[start:end] = True
        edges.append(start + fed + -fed % multiple)
    if edges[-1] < num_tokens:
        edges.append(num_tokens)  # padding
    # This rank's, as `policy.context` and sequence parallelism cut them.
    if groups.cp_size > 1:
        cp_rank, cp_size = groups.cp_rank, groups.cp_size
        held = held_positions(torch.tensor(edges), cp_rank=cp_rank, cp_size=cp_size).numpy()
        packed, is_known = packed[held], is_known[held]
    if policy.stages[0].config.sequence_parallel:
        packed, is_known = (
            np.split(one, groups.tp_size)[groups.tp_rank] for one in (packed, is_known)
        )
    own = np.ascontiguousarray(packed[:, layers].swapaxes(0, 1))
    on_device, known = to_device([own, is_known], policy.device)
    on_device.copy_(on_device.sort(dim=2).values)  # in place: both are views of one buffer
    return Known(dict(zip(layers, on_device, strict=True)), known)


def recorder(routes: Routes, *, num_experts: int) -> ChooseExperts:
    """The routers' own choice, kept in `routes`."""
    dtype = torch.uint8 if num_experts <= 256 else torch.int16

    def record(layer: int, own: Tensor) -> Tensor:
        routes[layer] = own.to(dtype)
        return own

    return record


def replayer(routes: Routes, is_known: Tensor | None = None) -> ChooseExperts:
    """What `routes` hold; the routers' own choice if they hold nothing, or not of that token."""

    def replay(layer: int, own: Tensor) -> Tensor:
        if not routes:
            return own
        chosen = routes[layer].long()
        return chosen if is_known is None else torch.where(is_known[:, None], chosen, own)

    return replay


def summarize(counts: Tensor) -> dict[str, float]:
    """Metrics of the layers with experts.

    Args:
        counts: [layers, experts + 4] int64 over all ranks: see `Recorded.counts`.
    """
    if not len(counts):
        return {}
    load = counts[:, : -2 * len(_SHARES)].double()
    metrics = {
        "experts/max_load": float((load.amax(dim=1) / load.mean(dim=1)).mean()),
        "experts/dead_share": float((load == 0).double().mean()),
    }
    for name, (compared, same) in zip(
        _SHARES, counts[:, -2 * len(_SHARES) :].T.split(2), strict=True
    ):
        if compared.any():
            metrics[f"experts/{name}_share"] = int(same.sum()) / int(compared.sum())
            metrics[f"experts/{name}_share_min"] = float((same.double() / compared).min())
    return metrics
