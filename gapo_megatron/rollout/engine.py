"""Interface of an engine: the methods that rollouts, evaluation and weight sync call.

`rollout/vllm` implements it; so do tests/scripted_engine.py and tests/transformers_engine.py.
`rollout.generate` decides which responses to sample, in which order, with which seeds, and when to
stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Factors

Needs = Literal["merged", "base", "factors"]
"""What a sync of a policy with an adapter must bring an engine. `merged`: weights that contain the
adapter, since the engine cannot compute with factors. `base`: the weights beneath the adapter, then
the factors. `factors`: those alone, since the engine still has the weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A response to sample, from its first token or continued."""

    name: str
    """Unique among the requests that the engine holds; may be reused after the request's end."""
    prompt_ids: Sequence[int]
    """Tokens of the prompt; at least one."""
    response_ids: np.ndarray
    """[n] int32, tokens of the response so far: input, like the prompt."""
    max_tokens: int
    """Largest number of tokens to sample, at least 1."""
    seed: int
    """63 bits. Samples depend only on the input tokens, the weights and this seed."""
    temperature: float
    """> 0."""
    top_p: float
    """Nucleus sampling, in (0, 1]."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the request, EOS included; they stay in the response. Empty: EOS tokens of
    the model's files."""
    grammar: str = ""
    """A structural tag that the output must match (`TurnSettings.grammar`); empty: none."""
    num_routed: int = 0
    """First input tokens whose routes are kept from earlier requests (`Completion.routes`)."""
    num_alternatives: int = 0
    """Most likely tokens to return at the place of each sampled one, 0 to 20; samples and their
    log-probs do not depend on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Result of a request: the sampled tokens, without the input tokens."""

    name: str
    """Name of the request."""
    token_ids: np.ndarray
    """[n] int32, the EOS or stop token included when the model sampled it."""
    log_probs: np.ndarray
    """[n] float32, log-probs of the sampling distribution: at the request's temperature,
    renormalised over the nucleus if `top_p` < 1, and over what a grammar allows."""
    reason: Literal["stop", "length", "abort"]
    """Why it ended: at EOS or a stop token, at `max_tokens`, or aborted after any number of tokens.
    """
    num_drafted: int = 0
    """Tokens that a draft proposed (`rollout.draft`); 0 if the request was aborted: not known."""
    num_accepted: int = 0
    """Those of them that were accepted, the few after EOS or a stop token included."""
    routes: np.ndarray | None = None
    """[n, layers, experts per token] uint8, of an engine that returns routes
    (`objective.routing_replay` = "rollout"): the experts that the model chose for each token of
    input and output after the first `Request.num_routed`, but for the last token, which it has not
    read. The order of a token's experts, and rows of layers without experts, mean nothing. None:
    the engine returns none, or has none of an aborted request."""
    alternative_ids: np.ndarray | None = None
    """[n, m] int32, the m = `Request.num_alternatives` most likely tokens at the place of each
    sampled one, which need not be among them; the most likely first. None: m or n is 0."""
    alternative_log_probs: np.ndarray | None = None
    """[n, m] float32, their log-probs in the sampling distribution; -inf of tokens that it
    excludes."""


class Engine(Protocol):
    """One rank's part of an engine that generates at the policy's weights.

    The ranks of a replica call every method in the same order with equal arguments, and get equal
    results. Replicas are independent: each may call as often as it has work.

    An engine is awake (it generates and scores) or asleep (the trainer has its memory). It may
    start in either state. A method that the state forbids raises RolloutError.
    """

    replicas: Replicas
    """Replicas: which ranks form an engine, and how all ranks communicate."""
    policy_version: int
    """Version of the weights it generates with; -1 before the first `update_weights` and during
    every call of it."""
    max_sequence_tokens: int
    """Largest number of prompt and response tokens of a sequence."""
    vocab_size: int
    """Tokens are 0 to `vocab_size` - 1."""
    verify_bound: float
    """Largest allowed mean difference per token between its log-probs and the trainer's at the same
    weights; depends on its rounding (`rollout.verify`)."""

    def add(self, request: Request) -> None:
        """Queue a request; requests begin in the order in which they are added.

        The first request, and the first after `abort` or `score`, starts from an empty cache, so
        that its bits do not depend on earlier generations. `generate` ends with `abort`.
        """

    def poll(self) -> Sequence[Completion]:
        """Take one decoding step and return the requests that ended in it, often none.

        Call it only while the engine has requests: `rollout.generate` counts them.

        Collectives: the engine's own, within the replica.

        Raises:
            RolloutError: a request ended neither at EOS or a stop token, nor at `max_tokens`.
        """

    def abort(self) -> Sequence[Completion]:
        """Drop all requests and return their tokens so far. The engine is idle afterwards.

        Also called after an exception, so that no request stays in the engine.
        """

    def num_requests(self) -> tuple[int, int]:
        """Numbers of requests that run, and that wait for a slot or for cache memory."""

    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        """The engine's log-probs of given tokens, at temperature 1.

        Args:
            rollouts: B sequences with their tokens, no prompt empty; the engine must hold no
                request.

        Returns:
            B arrays of float32, one value for each response token that the model sampled
            (`Rollouts.is_sampled`).

        Collectives: the engine's own, within the replica.
        """

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace all weights and clear caches of the old weights; the engine is awake afterwards.

        Args:
            tensors: (Hugging Face name, whole tensor), every tensor of the model once, those of a
                module consecutively; the same on every rank. Streamed; the engine may hold tensors
                until the call returns, and callers must not overwrite them before.
            policy_version: the engine's new version.
            on_received: called when the tensors are no longer needed, before the engine allocates
                its KV cache.

        Collectives: those of `tensors`, in lockstep on all ranks.

        Raises:
            WeightSyncError: a tensor is missing, extra, repeated or misshapen, or the engine has
                loaded other values; names it. The weights are then undefined, the version is -1.
        """

    def sleep(self) -> None:
        """Release memory to the trainer. Does nothing if asleep.

        The weights are lost, except of an `AdapterEngine` that still needs factors alone.
        """

    def wake(self) -> None:
        """Allocate the memory of the weights, which `update_weights` must then fill if lost.

        Does nothing if awake: `update_weights` then overwrites the weights in place.
        """


class AdapterEngine(Engine, Protocol):
    """An engine that can compute with the factors of an adapter beside its weights.

    Any other engine gets merged weights: the sum W + scale * B A, rounded to the dtype of W.
    """

    needs: Needs
    """What the next sync of a policy with an adapter must bring; the same on every rank."""

    def update_adapter(
        self, factors: Iterable[Factors], *, scale: float, policy_version: int
    ) -> None:
        """Replace the adapter beside the weights and clear caches; the engine is awake afterwards.

        Only if `needs` is `factors`: the engine then holds the weights beneath the adapter.
        `update_weights` brings those, and removes an earlier adapter; until the factors have come,
        the version stays -1.

        Args:
            factors: factors of every adapted layer once; the same on every rank. The engine may
                hold tensors until the call returns.
            scale: factor of B A.
            policy_version: the engine's new version; -1 during the call.

        Collectives: those of `factors`, in lockstep on all ranks.

        Raises:
            WeightSyncError: factors are missing, extra or misshapen; names them. The adapter is
                then undefined, the version is -1. On every rank.
        """
