"""Responses of a generation: requests to the engine, and episodes made from completions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gapo_megatron.errors import RolloutError
from gapo_megatron.rollout.alternatives import joined_alternatives
from gapo_megatron.rollout.calls import Calls
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.journal import Reply
from gapo_megatron.rollout.turns import last_turn
from gapo_megatron.types import Episode, Prompt, TurnSettings


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of a generation."""

    num_samples: int
    """Responses per prompt."""
    max_response_tokens: int
    """A response that reaches it unfinished is `truncated`. The environment's tokens count."""
    seed: int
    """Seed of the run."""
    step: int = 0
    """Step of the run; each step draws different samples."""
    temperature: float = 1.0
    """> 0. Also the temperature of the log-probs."""
    top_p: float = 1.0
    """Nucleus of sampling, in (0, 1]."""
    keeps_routes: bool = False
    """Keep the routes that the engine returns; it must return them then."""


def request_seed(run_seed: int, step: int, prompt_id: str, sample: int, start: int = 0) -> int:
    """63-bit seed of a request: a hash of the arguments, which identify it in the run.

    `start` is the number of input tokens of the response: a request that continues a response, of
    an earlier step or after the environment's answer, must not draw the same random numbers again.
    """
    identity = [run_seed, step, prompt_id, sample, *([start] if start else [])]
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Responses:
    """The k responses to each of several prompts while they are generated.

    Attributes:
        groups: episodes of each prompt, in order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        begun: Mapping[str, tuple[Episode, ...]],
        settings: SamplingSettings,
        *,
        calls: Calls | None = None,
    ) -> None:
        """Start the responses.

        Args:
            prompts: prompts of the responses.
            begun: responses to some of the prompts, by id; the others start without tokens.
            settings: sampling settings.
            calls: where a turn of the model ends, and whether an environment answers it; None: at
                EOS, and nothing does.
        """
        self.groups = [
            list(begun.get(prompt.id) or _not_begun(prompt, settings.num_samples))
            for prompt in prompts
        ]
        self._settings = settings
        self._calls = calls
        self._num_open = [sum(not one.finished for one in group) for group in self.groups]
        self._places: dict[str, tuple[int, int]] = {}
        """Prompt and sample of each request, by name."""

    @property
    def num_whole(self) -> int:
        """Number of prompts whose responses are all finished."""
        return self._num_open.count(0)

    def unfinished(self) -> list[Episode]:
        """The responses that have not ended, in order."""
        return [one for group in self.groups for one in group if not one.finished]

    def begin(self) -> Iterator[Episode | Request]:
        """The unfinished responses, in order: requests for their rest, or episodes to answer."""
        for i, group in enumerate(self.groups):
            for sample, episode in enumerate(group):
                self._places[_name(episode)] = i, sample
                if episode.finished:
                    continue
                is_answered = self._calls and self._calls.is_next(episode)
                yield episode if is_answered else self._request(episode)

    def _request(self, episode: Episode) -> Request:
        """Request for the rest of a response."""
        settings, num_tokens = self._settings, len(episode.token_ids)
        context = episode.context()
        num_prompt = 1 if episode.turn.conversation else len(episode.prompt.token_ids)
        num_left = settings.max_response_tokens - num_tokens
        assert not (episode.turn.grammar and len(last_turn(episode))), episode.turn
        if episode.turn.max_tokens is not None:
            num_left = min(num_left, episode.turn.max_tokens - len(last_turn(episode)))
        seed = request_seed(
            settings.seed, settings.step, episode.prompt.id, episode.sample, num_tokens
        )
        return Request(
            name=_name(episode),
            prompt_ids=tuple(context[:num_prompt].tolist()),
            response_ids=context[num_prompt:],
            max_tokens=num_left,
            seed=seed,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop_ids=self._stop_ids(episode),
            grammar=episode.turn.grammar,
            num_alternatives=episode.turn.num_alternatives,
            num_routed=0 if episode.routes is None else len(episode.routes),
        )

    def _stop_ids(self, episode: Episode) -> tuple[int, ...]:
        if self._calls is None:
            return ()
        turns, turn = self._calls.turns, episode.turn
        if turn.grammar:  # it begins with the request: no text may interrupt it
            return tuple(sorted(turns.eos_token_ids))
        return turns.stop_ids_of(turn) if turn.stop else turns.stop_ids

    def take(self, completion: Completion) -> Episode | Request:
        """Add a request's tokens.

        Returns:
            The episode: finished, aborted, or at the end of a turn that the environment answers.
            Or the request that continues it, after a stop token that ended no turn.
            A turn may also end at its own limit (`TurnSettings.max_tokens`).
        """
        i, sample = self._places[completion.name]
        episode = _extend(
            self.groups[i][sample], completion, keeps_routes=self._settings.keeps_routes
        )
        is_cut = len(episode.token_ids) < self._settings.max_response_tokens and episode.truncated
        if completion.reason == "stop" or is_cut:
            at_stop = int(episode.token_ids[-1]) in self._stop_ids(episode)
            if at_stop and self._calls and not self._calls.turns.is_over(episode):
                return self._continue(episode)
            is_called = self._calls is not None and self._calls.is_called
            episode = replace(episode, truncated=False, finished=not is_called)
        return self._keep(episode)

    def answer(self, reply: Reply) -> Episode | Request:
        """Add the environment's answer to a turn.

        Returns:
            The episode, if it has ended; otherwise the request that continues it.
        """
        i, sample = self._places[f"{reply.prompt}/{reply.sample}"]
        episode = self.groups[i][sample]
        if reply.failure:
            episode = replace(episode, finished=True, failure=reply.failure)
        elif reply.tokens is None:
            episode = replace(episode, finished=True, final_text=reply.text)
        else:
            episode = self._append(episode, reply.tokens, reply.turn)
        if not episode.finished:
            return self._continue(episode)
        return self._keep(episode if len(episode.token_ids) else _without_turn(episode))

    def _continue(self, episode: Episode) -> Episode | Request:
        """The request for the rest of a response, if there is room for it."""
        episode = replace(episode, finished=False)
        if len(episode.token_ids) >= self._settings.max_response_tokens:
            return self._keep(replace(episode, finished=True, truncated=True))
        self._keep(episode)
        return self._request(episode)

    def _keep(self, episode: Episode) -> Episode:
        """Store an episode in place of its beginning."""
        if episode.finished and episode.alternatives is not None:  # no agent begins it anew
            episode = replace(episode, alternatives=None)
        i, sample = self._places[_name(episode)]
        self.groups[i][sample] = episode
        self._num_open[i] -= episode.finished
        return episode

    def _append(self, episode: Episode, answer: Sequence[int], turn: TurnSettings) -> Episode:
        """The response with the environment's tokens, to be continued by the model.

        If they leave no room for a sampled token they are dropped, since there would be nothing to
        learn, and the response is truncated.

        Raises:
            RolloutError: they open a conversation, but routes are kept.
        """
        num_tokens = len(episode.token_ids)
        if num_tokens + len(answer) >= self._settings.max_response_tokens:
            if self._calls:
                self._calls.counts[episode.prompt.id, episode.sample].num_cut += 1
            return replace(episode, truncated=True, finished=True)
        zeros = np.zeros(len(answer), np.float32)
        if turn.conversation and self._settings.keeps_routes:
            raise RolloutError(
                f"prompt {episode.prompt.id!r}, rollout {episode.sample}: the environment opens "
                "another conversation, of which no routes are kept; set objective.routing_replay "
                "('rollout') to 'trainer' or 'none'"
            )
        return replace(
            episode,
            token_ids=np.concatenate([episode.token_ids, np.asarray(answer, dtype=np.int32)]),
            log_probs=np.concatenate([episode.log_probs, zeros]),
            response_mask=np.concatenate([episode.is_sampled, zeros.astype(bool)]),
            conversations=_joined_conversations(episode, turn.conversation, len(answer)),
            turn=turn,
            finished=False,
        )


def _name(episode: Episode) -> str:
    """Name of a response's requests."""
    return f"{episode.prompt.id}/{episode.sample}"


def _not_begun(prompt: Prompt, num_samples: int) -> list[Episode]:
    """The responses to a prompt before their first token."""
    no_ids, no_log_probs = np.empty(0, np.int32), np.empty(0, np.float32)
    episodes = [
        Episode(prompt, i, no_ids, no_log_probs, finished=False, failure=prompt.failure)
        for i in range(num_samples)
    ]
    if prompt.failure:
        return [_without_turn(replace(one, finished=True)) for one in episodes]
    return episodes


def _without_turn(episode: Episode) -> Episode:
    """An episode that ended before the model's first turn: unknown, as nothing can be judged.

    It has a token all the same, and no sampled one: passes over a batch's first sequences need it.
    """
    what = (
        "the environment's first message leaves no room in rollout.max_response_tokens"
        if episode.truncated
        else "the environment ended the episode before the model's first turn"
    )
    return replace(
        episode,
        token_ids=np.asarray(episode.prompt.token_ids[-1:], np.int32),
        log_probs=np.zeros(1, np.float32),
        response_mask=np.zeros(1, bool),
        failure=episode.failure or what,
    )


def _extend(episode: Episode, completion: Completion, *, keeps_routes: bool) -> Episode:
    """The response with the tokens of a completion.

    Raises:
        RolloutError: the engine has returned no routes or alternatives, or not those of all tokens.
    """
    mask, routes = None, None
    if episode.response_mask is not None:
        new = np.ones(len(completion.token_ids), dtype=bool)
        mask = np.concatenate([episode.response_mask, new])
    if keeps_routes:
        routes = _joined_routes(episode, completion)
    return replace(
        episode,
        token_ids=np.concatenate([episode.token_ids, completion.token_ids]),
        log_probs=np.concatenate([episode.log_probs, completion.log_probs]),
        truncated=completion.reason == "length",
        finished=completion.reason != "abort",
        response_mask=mask,
        conversations=_joined_conversations(
            episode, episode.turn.conversation, len(completion.token_ids)
        ),
        num_drafted=episode.num_drafted + completion.num_drafted,
        num_accepted=episode.num_accepted + completion.num_accepted,
        routes=routes,
        alternatives=joined_alternatives(episode, completion),
    )


def _joined_conversations(episode: Episode, number: int, num_new: int) -> np.ndarray | None:
    """The conversation of each token, after new ones of `number`."""
    before = episode.conversations
    if before is None and not number:
        return None
    if before is None:
        before = np.zeros(len(episode.token_ids), np.int32)
    return np.concatenate([before, np.full(num_new, number, np.int32)])


def _joined_routes(episode: Episode, completion: Completion) -> np.ndarray | None:
    """Routes of the tokens up to the last of a completion, which the model has not read.

    An aborted request may have none: the request that continues it then returns those of all tokens
    that have none yet.
    """
    routes, new = episode.routes, completion.routes
    if new is not None and len(new):
        new = new.reshape(len(new), -1)
        routes = new if routes is None else np.concatenate([routes, new])
    num_tokens = len(episode.prompt.token_ids) + len(episode.token_ids) + len(completion.token_ids)
    is_whole = routes is not None and len(routes) == num_tokens - 1
    is_wrong = routes is not None and routes.dtype != np.uint8
    if is_wrong or not (is_whole or completion.reason == "abort"):
        found = "no routes" if routes is None else f"{routes.dtype} routes of {len(routes)} tokens"
        raise RolloutError(
            f"prompt {episode.prompt.id!r}, rollout {episode.sample}: {found} of "
            f"{num_tokens - 1}; objective.routing_replay ('rollout') needs an engine that returns "
            "them all, as uint8"
        )
    return routes
