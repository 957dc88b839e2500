"""An engine that computes nothing: lengths with a tail, and decoding steps of modelled time."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri
from torch import Tensor

from gapo_megatron.errors import RolloutError
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts

_TOKEN = 7
"""The only one that it says."""


class CountedPace:
    """Counts modelled seconds; nobody waits.

    Attributes:
        seconds: modelled seconds so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self, seconds: float) -> None:
        """Let this time pass."""
        self.seconds += seconds


@dataclass(frozen=True)
class Lengths:
    """How many tokens a response takes: log-normal, cut at the request's own limit.

    Without a spread all take the median, rounded up. Part of the spread is the problem's: hard
    ones are long in all their responses.
    """

    median: float
    spread: float
    """Standard deviation of the logarithm."""
    problem_share: float = 0.5
    """Share of the variance of the logarithm that is the problem's; below 1."""

    def left(self, request: Request) -> int:
        """Tokens from where the request stands to EOS, at least one; by its name and seed alone.

        Those that are there already count: a response of n tokens is one of those longer than n,
        so that resumed responses have the lengths of those that were never interrupted.
        """
        if not self.spread:
            return max(1, math.ceil(self.median) - len(request.response_ids))
        problem, _, _ = request.name.rpartition("/")
        of_problem = ndtri(_uniform(problem)) * math.sqrt(self.problem_share)
        own_spread = self.spread * math.sqrt(1 - self.problem_share)
        centre = math.log(self.median) + self.spread * of_problem
        given = len(request.response_ids)
        longer = ndtr((centre - math.log(given)) / own_spread) if given else 1.0
        length = math.exp(centre - own_spread * ndtri(longer * _uniform(str(request.seed))))
        return max(1, math.ceil(length) - given)


def _uniform(name: str) -> float:
    """In (0, 1)."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52


@dataclass(frozen=True)
class Costs:
    """Modelled seconds of an engine's work."""

    step_s: Callable[[int, float], float]
    """One decoding step, by the requests that run and their mean tokens so far, prompt included."""
    prefill_token_s: float = 0.0
    """One given token of a request that begins."""
    weights_s: float = 0.0
    """One `update_weights`."""


class TimedEngine:
    """A `rollout.engine.Engine` whose work takes modelled time."""

    def __init__(
        self,
        lengths: Lengths,
        costs: Costs,
        pace: CountedPace,
        *,
        replicas: Replicas,
        max_sequence_tokens: int,
        num_places: int = 1024,
    ) -> None:
        self.replicas = replicas
        self.policy_version = 0
        self.max_sequence_tokens = max_sequence_tokens
        self.vocab_size = 100
        self.verify_bound = 0.01
        self._lengths, self._costs, self._pace = lengths, costs, pace
        self._num_places = num_places
        self._num_steps = 0
        self._context = 0
        """Tokens of the requests that run, prompts included."""
        self._waiting: deque[Request] = deque()
        self._places: dict[str, tuple[Request, int]] = {}
        """Requests that run, in order, and the decoding steps that were done before each."""
        self._ends: list[tuple[int, str]] = []
        """A heap: the decoding step that ends each of them."""
        self._awake = True

    def add(self, request: Request) -> None:
        self._require_awake("generate")
        self._waiting.append(request)

    def poll(self) -> list[Completion]:
        seconds = self._begin_waiting() * self._costs.prefill_token_s
        count = len(self._places)
        assert count, "nothing to generate"
        self._pace.take(seconds + self._costs.step_s(count, self._context / count))
        self._num_steps += 1
        self._context += count
        ended = []
        while self._ends and self._ends[0][0] == self._num_steps:
            _, name = heapq.heappop(self._ends)
            request, _ = self._places[name]
            is_cut = self._lengths.left(request) > request.max_tokens
            ended.append(self._end(name, "length" if is_cut else "stop"))
        return ended

    def abort(self) -> list[Completion]:
        ended = [self._end(name, "abort") for name in list(self._places)]
        ended += [_completion(request, 0, "abort") for request in self._waiting]
        self._waiting.clear()
        self._ends.clear()
        return ended

    def num_requests(self) -> tuple[int, int]:
        return len(self._places), len(self._waiting)

    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        self._require_awake("score")
        return [np.zeros(n, np.float32) for n in rollouts.num_sampled_tokens.tolist()]

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_awake("update_weights")
        for _ in tensors:
            pass
        on_received()
        self._pace.take(self._costs.weights_s)
        self.policy_version = policy_version

    def sleep(self) -> None:
        self._awake = False

    def wake(self) -> None:
        self._awake = True

    def _begin_waiting(self) -> int:
        """Give free places to requests that wait; returns the tokens that they are given."""
        num_given = 0
        while self._waiting and len(self._places) < self._num_places:
            request = self._waiting.popleft()
            self._places[request.name] = request, self._num_steps
            num_tokens = min(self._lengths.left(request), request.max_tokens)
            heapq.heappush(self._ends, (self._num_steps + num_tokens, request.name))
            num_given += len(request.prompt_ids) + len(request.response_ids)
        self._context += num_given
        return num_given

    def _end(self, name: str, reason: Any) -> Completion:
        request, begun = self._places.pop(name)
        num_tokens = self._num_steps - begun
        self._context -= len(request.prompt_ids) + len(request.response_ids) + num_tokens
        return _completion(request, num_tokens, reason)

    def _require_awake(self, action: str) -> None:
        if not self._awake:
            raise RolloutError(f"{action} needs an engine that is awake")


def _completion(request: Request, num_tokens: int, reason: Any) -> Completion:
    tokens = np.full(num_tokens, _TOKEN, np.int32)
    return Completion(request.name, tokens, np.zeros(num_tokens, np.float32), reason)
