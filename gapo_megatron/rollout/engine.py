"""Interface of an engine: the few methods that rollouts, evaluation and weight sync call.

`rollout/vllm` is the first implementation; tests/scripted_engine.py and
tests/transformers_engine.py are two more. Which responses are wanted, in which order, with which
seeds, and when it is enough, is decided above it, by `rollout.generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One response to be sampled, from its first token or from where it stands."""

    name: str
    """Unique among the requests that the engine holds; may be used again once it has ended."""
    prompt_ids: Sequence[int]
    """Tokens of the prompt; at least one."""
    response_ids: np.ndarray
    """[n] int32 tokens of the response that are there already: given, like the prompt."""
    max_tokens: int
    """Tokens to sample at most; at least one."""
    seed: int
    """63 bits: the samples depend on the given tokens, the weights and this, on nothing else."""
    temperature: float
    """> 0."""
    top_p: float
    """Nucleus, in (0, 1]."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Result of a request: the tokens that were sampled, without those that were given."""

    name: str
    """Name of the request."""
    token_ids: np.ndarray
    """[n] int32, the EOS token included when the model sampled it."""
    log_probs: np.ndarray
    """[n] float32, of the distribution sampled from: at the request's temperature, renormalised
    over the nucleus when `top_p` < 1."""
    reason: Literal["stop", "length", "abort"]
    """EOS was sampled; `max_tokens` were; or the request was aborted, with any number of tokens."""


class Engine(Protocol):
    """One rank's part of an engine that generates at the policy's weights.

    The ranks of one replica call every method in the same order with equal arguments, and get
    equal results. Replicas share nothing: each may call as often as it has work.

    An engine is awake (it generates and scores) or asleep (the trainer has its memory). It may
    start in either state. A method that the state forbids raises RolloutError.
    """

    replicas: Replicas
    """Replicas: which ranks form one engine, and how all ranks communicate."""
    policy_version: int
    """Version of the weights it generates with; -1 from the beginning of an `update_weights` to its
    end, and before the first."""
    max_sequence_tokens: int
    """Prompt and response tokens of the longest sequence it takes."""
    vocab_size: int
    """Tokens are 0 to `vocab_size` - 1."""
    verify_bound: float
    """The largest mean difference per token between its log-probs and the trainer's at the same
    weights, by what it rounds (`rollout.verify`)."""

    def add(self, request: Request) -> None:
        """Queue a request; requests begin in the order in which they are added.

        An engine without any request begins from an empty cache, so that its bits do not depend
        on what it generated before.
        """

    def poll(self) -> Sequence[Completion]:
        """Take one decoding step, and hand out the requests that it has ended, often none.

        To be called while there are requests: `rollout.generate` counts them.

        Collectives: the engine's own, within the replica.

        Raises:
            RolloutError: a request ended otherwise than by EOS or `max_tokens`.
        """

    def abort(self) -> Sequence[Completion]:
        """Drop all requests, and hand out what there is of them. The engine is idle then.

        Also called to leave no request behind when something has raised.
        """

    def num_requests(self) -> tuple[int, int]:
        """Requests that run, and requests that wait for a place or for room in the cache."""

    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        """Log-probs the engine gives to tokens it is shown, at temperature 1.

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
        """Replace all weights, and forget what was cached of the old ones; generates afterwards.

        Args:
            tensors: (Hugging Face name, whole tensor), every tensor of the model once, those of one
                module next to each other; the same on every rank. Streamed; the engine may
                hold what it is given until the call returns; callers do not overwrite it meanwhile.
            policy_version: becomes the engine's.
            on_received: called once the tensors are of no more use, before the engine takes memory
                for its KV cache.

        Collectives: those of `tensors`, in lockstep on all ranks.

        Raises:
            WeightSyncError: a tensor is missing, extra, twice or misshapen, or is not what the
                engine has now; names it. The weights are then undefined, and the version is -1.
        """

    def sleep(self) -> None:
        """Leave the memory to the trainer. Weights are lost. Nothing happens when asleep."""

    def wake(self) -> None:
        """Take back the memory for the weights, which `update_weights` then must fill.

        Nothing happens when awake: `update_weights` then overwrites the weights in place.
        """
