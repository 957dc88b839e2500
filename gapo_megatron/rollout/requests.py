"""The responses of one generation: what is asked of the engine, and what has come of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.types import Episode, Prompt, Rollout

NOT_BEGUN = Rollout(np.empty(0, np.int32), np.empty(0, np.float32), truncated=False, finished=False)
"""A response before its first token."""

Respond = Callable[[Episode], Sequence[int] | None]
"""`Environment.respond`."""


def end(_: Episode) -> None:
    """The answer of an environment of one turn: the episode has ended."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the responses of one generation are drawn."""

    num_samples: int
    """Responses per prompt."""
    max_response_tokens: int
    """A response that reaches it without an end is `truncated`. The environment's tokens count."""
    seed: int
    """Seed of the run."""
    step: int
    """Step of the run; another step draws other samples."""
    temperature: float = 1.0
    """> 0. Log-probs are those at this temperature."""
    top_p: float = 1.0
    """Nucleus of sampling, in (0, 1]."""


def request_seed(run_seed: int, step: int, prompt_id: str, sample: int, start: int = 0) -> int:
    """63-bit seed of one request: a hash of what identifies it in the run.

    `start` tokens are there already: a request that goes on, in a further draw of dynamic sampling
    or after the environment's answer, must not meet the same random numbers again.
    """
    identity = [run_seed, step, prompt_id, sample, *([start] if start else [])]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def num_sampled(rollout: Rollout, first: int | None = None) -> int:
    """Tokens that the model sampled, of the whole response or of its `first` tokens."""
    if rollout.response_mask is None:
        return len(rollout.token_ids[:first])
    return int(rollout.response_mask[:first].sum())


class Responses:
    """The k responses to each of some prompts, as far as they have come.

    Attributes:
        rollouts: rollouts of each prompt, in order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        begun: Mapping[str, tuple[Rollout, ...]],
        settings: SamplingSettings,
        respond: Respond,
    ) -> None:
        """`begun` has the responses to some of the prompts, by id; the others have no token yet."""
        not_begun = (NOT_BEGUN,) * settings.num_samples
        self.rollouts = [list(begun.get(prompt.id, not_begun)) for prompt in prompts]
        self._prompts = prompts
        self._settings = settings
        self._respond = respond
        self._num_open = [sum(not one.finished for one in group) for group in self.rollouts]
        self._places: dict[str, tuple[int, int]] = {}
        """Prompt and sample of each request, by name."""

    @property
    def num_whole(self) -> int:
        """Prompts whose responses are all finished."""
        return self._num_open.count(0)

    @property
    def episodes(self) -> list[Episode]:
        """All responses, prompt after prompt."""
        return [
            Episode(prompt, sample, rollout)
            for prompt, group in zip(self._prompts, self.rollouts, strict=True)
            for sample, rollout in enumerate(group)
        ]

    def requests(self) -> list[Request]:
        """Ask for the rest of every response that is not finished, in order."""
        return [
            self.request(i, sample)
            for i, group in enumerate(self.rollouts)
            for sample, rollout in enumerate(group)
            if not rollout.finished
        ]

    def request(self, i: int, sample: int) -> Request:
        """Ask for the rest of response number `sample` to prompt i."""
        settings, prompt = self._settings, self._prompts[i]
        token_ids = self.rollouts[i][sample].token_ids
        name = f"{prompt.id}/{sample}"
        self._places[name] = i, sample
        return Request(
            name=name,
            prompt_ids=prompt.token_ids,
            response_ids=token_ids,
            max_tokens=settings.max_response_tokens - len(token_ids),
            seed=request_seed(settings.seed, settings.step, prompt.id, sample, len(token_ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
        )

    def take(self, completion: Completion) -> Episode | Request:
        """Add what a request brought, and at EOS what the environment answers.

        Returns:
            The episode, if it has ended or was aborted; else the request that goes on with it.
        """
        i, sample = self._places[completion.name]
        rollout = _extend(self.rollouts[i][sample], completion)
        if completion.reason == "stop":
            answer = self._respond(Episode(self._prompts[i], sample, rollout))
            if answer is not None:
                rollout = self._append(rollout, answer)
        self.rollouts[i][sample] = rollout
        self._num_open[i] -= rollout.finished
        if completion.reason == "stop" and not rollout.finished:
            return self.request(i, sample)
        return Episode(self._prompts[i], sample, rollout)

    def _append(self, rollout: Rollout, answer: Sequence[int]) -> Rollout:
        """The response with the environment's tokens, which the model goes on from.

        Where they leave no room for a token of the model they are left out: nothing could be
        learned from them, and the response is truncated.
        """
        num_tokens = len(rollout.token_ids)
        if num_tokens + len(answer) >= self._settings.max_response_tokens:
            return replace(rollout, truncated=True)
        zeros = np.zeros(len(answer), np.float32)
        return replace(
            rollout,
            token_ids=np.concatenate([rollout.token_ids, np.asarray(answer, dtype=np.int32)]),
            log_probs=np.concatenate([rollout.log_probs, zeros]),
            response_mask=np.concatenate([rollout.is_sampled, zeros.astype(bool)]),
            finished=False,
        )


def _extend(so_far: Rollout, completion: Completion) -> Rollout:
    """The response with the tokens that a request brought."""
    mask = None
    if so_far.response_mask is not None:
        new = np.ones(len(completion.token_ids), dtype=bool)
        mask = np.concatenate([so_far.response_mask, new])
    return Rollout(
        token_ids=np.concatenate([so_far.token_ids, completion.token_ids]),
        log_probs=np.concatenate([so_far.log_probs, completion.log_probs]),
        truncated=completion.reason == "length",
        finished=completion.reason != "abort",
        carried=so_far.carried,
        response_mask=mask,
    )
