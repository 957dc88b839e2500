"""An agent that runs beside its episode: it asks, the engine samples, it reads the answer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gapo_megatron.errors import said
from gapo_megatron.rollout.agents.conversation import Conversation
from gapo_megatron.rollout.agents.conversations import Conversations, Place
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.replay import DIFFERS, Turn, turns_of
from gapo_megatron.rollout.agents.requests import digest_of
from gapo_megatron.rollout.agents.responses import Responses
from gapo_megatron.rollout.agents.session import Session
from gapo_megatron.rollout.alternatives import alternatives_of
from gapo_megatron.types import Episode, TurnSettings

_QUIET_S = 10.0
"""How long an agent that has begun anew may do nothing while it asks what has no turn: its requests
may come in another order, but then others follow."""


class AgentError(Exception):
    """The agent has failed, or does not fit its episode: the verdict is unknown."""


@dataclass(slots=True, eq=False)
class _Request:
    body: Any
    is_repeated: bool
    """Whether the client sends it again, for want of an answer to the first."""
    is_response: bool
    """Whether it is one of the Responses API, not for a chat completion."""
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    digest: str = ""
    """Of what it asks (`digest_of`); empty until it is read, as what follows."""
    read: Mapping[str, Any] = field(default_factory=dict)
    """See `Conversations.read`."""
    prefers: Conversation | None = None
    """See `Conversations.place`."""


@dataclass(frozen=True, slots=True)
class _End:
    """The agent has returned a text or None, or raised."""

    text: str | None = None
    error: str = ""


class _Closed:
    """The episode has ended."""


class LiveAgent:
    """An agent in a thread of its own. A second thread, `Environment.respond`'s, plays the model.

    The agent's requests come from the server by `post`, any number at a time. They are read, and
    answered one after another, in `follow` alone, so that the conversations have one thread at a
    time.
    """

    def __init__(
        self, agent: Callable[[Session], Any], session: Session, conversations: Conversations
    ) -> None:
        """Nothing runs before `start`."""
        self.session = session
        self.conversations = conversations
        self._agent = agent
        self._events: queue.SimpleQueue[_Request | _End | _Closed] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._ended: _End | None = None
        self._is_over = False
        """Whether the agent has ended, and all that it asked before is read."""
        self._waiting: list[_Request] = []
        """Requests that wait for their turn, in the order in which they came."""
        self._open: _Request | None = None
        """The request that the model's next turn answers."""
        self._answers: dict[tuple[bool, str], dict[str, Any]] = {}
        """The answers so far, by `is_response` and digest of the request."""
        self._refusal = ""
        self._responses = Responses()
        name = f"agent {session.problem['id']}/{session.sample}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the agent. RuntimeError: the system has no more threads."""
        self._thread.start()

    def post(
        self, body: Any, *, is_repeated: bool, is_response: bool = False
    ) -> Future[dict[str, Any]]:
        """Hand over a request; its answer is a `chat.completion`, or a RefusedError.

        Of the Responses API (`is_response`) it is a `response`.
        """
        request = _Request(body, is_repeated, is_response)
        request.answer.set_running_or_notify_cancel()  # from now on nobody can cancel it
        with self._lock:
            if self._is_closed:
                request.answer.set_exception(_ended())
            elif self._ended:
                request.answer.set_exception(RefusedError("the agent has returned"))
            else:
                self._events.put(request)
        return request.answer

    def fits(self, episode: Episode) -> bool:
        """Whether the agent waits for the last turn of this episode."""
        tokens = self.conversations.tokens
        return self._open is not None and tokens == episode.token_ids[: len(tokens)].tolist()

    def follow(self, episode: Episode) -> tuple[list[int], TurnSettings] | str | None:
        """Answer the agent's requests with the model's turns, until the turns run out.

        The requests of an agent that has begun anew may come in another order: each turn answers
        the one that has its tokens.

        Returns:
            The tokens of the agent's next request, and what it asks of the turn; or what the agent
            has returned.

        Raises:
            AgentError: it has raised, returned too early, or asks otherwise than in the episode.
        """
        num_followed = len(self.conversations.tokens)
        turns = [one for one in turns_of(episode) if one.end > num_followed]
        for i, turn in enumerate(turns):
            if len(self.conversations.tokens) < turn.start:
                self._take(turns[i:])
            self._answer(episode, turn)
        return self._next()

    def close(self) -> None:
        """The episode has ended: requests get an error, now and later. Never waits."""
        with self._lock:
            self._is_closed = True
            left = [*self._waiting, *([self._open] if self._open else [])]
            self._waiting, self._open = [], None
            with contextlib.suppress(queue.Empty):
                while True:  # `follow` may take one at the same time
                    event = self._events.get_nowait()
                    left += [event] if isinstance(event, _Request) else []
            self._events.put(_Closed())
        for request in left:
            if not request.answer.done():
                request.answer.set_exception(_ended())

    def _next(self) -> tuple[list[int], TurnSettings] | str | None:
        """Tokens and settings of the next turn, or what the agent has returned.

        Of an agent that has returned nothing more is sampled, whatever waits.
        """
        while self._ended is None:
            if (request := self._open) is not None:
                return self._ask(request, self._place_of_choice(request))
            for request, place in self._places():
                return self._ask(request, place)
            self._read_events()
        return self._returned(self._ended)

    def _take(self, turns: Sequence[Turn]) -> None:
        """Open the request that the first of the turns to come answers.

        Raises:
            AgentError: there is none: the agent has returned, or it does nothing while a request of
                its own waits that no turn answers.
        """
        turn = turns[0]
        if (request := self._open) is not None:
            place = self._place_of_choice(request)
            if not turn.answers(place):
                raise AgentError(turn.difference(place))
            self._ask(request, place)
            return
        while True:
            others = list[Place]()
            for request, place in self._places():
                if turn.answers(place):
                    self._ask(request, place)
                    return
                others.append(place)
            if self._is_over and self._ended:
                self._returned(self._ended)
                raise AgentError(f"{DIFFERS}: it returned")
            strange = [one for one in others if not any(turn.may_answer(one) for turn in turns)]
            try:
                self._read_events(timeout_s=_QUIET_S if strange else None)
            except queue.Empty:
                raise AgentError(turn.difference(strange[0])) from None

    def _returned(self, end: _End) -> str | None:
        """What the agent has returned. AgentError: it has raised."""
        if end.error:
            raise AgentError(self._refusal or end.error)
        return end.text

    def _place_of_choice(self, request: _Request) -> Place:
        return self.conversations.place_of_choice(request.read)

    def _places(self) -> Iterator[tuple[_Request, Place]]:
        """The requests that wait, with their places now. Answers repeated ones, refuses others."""
        for request in [*self._waiting]:
            answer = self._answers.get((request.is_response, request.digest))
            if request.is_repeated and answer:
                if self._claim(request):
                    request.answer.set_result(answer)
                continue
            try:
                place = self.conversations.place(request.read, prefers=request.prefers)
            except Exception as error:  # whatever a template does with the messages
                if self._claim(request):
                    self._refuse(request, error)
                continue
            yield request, place

    def _read_events(self, *, timeout_s: float | None = None) -> None:
        """Wait for events, and take all that there are.

        Raises:
            AgentError: the episode has ended.
            queue.Empty: nothing has happened for `timeout_s`.
        """
        event = self._events.get(timeout=timeout_s)
        while True:
            if isinstance(event, _Closed):
                self._end_closed()
            if isinstance(event, _End):
                self._is_over = True
                return
            self._read(event)
            if self._events.empty():
                return
            event = self._events.get()

    def _end_closed(self) -> NoReturn:
        """Wait for the agent: one that hangs keeps its place among `environment.max_concurrent`."""
        self._thread.join()
        raise AgentError("the episode has ended")

    def _read(self, request: _Request) -> None:
        """Read a request, which waits from now on."""
        try:
            asked = request.body
            if request.is_response:
                asked, request.prefers = self._responses.to_chat(asked)
            request.read = self.conversations.read(asked)
            request.digest = digest_of(request.body)
        except Exception as error:  # a body may have any JSON value anywhere
            self._refuse(request, error)
            return
        with self._lock:
            if not self._is_closed:
                self._waiting.append(request)
                return
        request.answer.set_exception(_ended())

    def _refuse(self, request: _Request, error: Exception) -> None:
        refused = error if isinstance(error, RefusedError) else RefusedError(said(error))
        self._refusal = f"a request was refused: {refused}"
        request.answer.set_exception(refused)

    def _claim(self, request: _Request) -> bool:
        """Let a request wait no longer; False: it has got an error, as the episode has ended."""
        with self._lock:
            if not self._is_closed:
                self._waiting.remove(request)
            return not self._is_closed

    def _ask(self, request: _Request, place: Place) -> tuple[list[int], TurnSettings]:
        """Open a request at its place: the model's next turn answers it."""
        tokens = self.conversations.ask(place)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed and request is not self._open:
                self._waiting.remove(request)
                self._open, self._refusal = request, ""
        if is_closed:
            self._end_closed()
        return tokens, self.conversations.turn

    def _answer(self, episode: Episode, turn: Turn) -> None:
        """Answer the open request with a turn of the model; or begin to, if it has several."""
        with self._lock:
            request, ended = self._open, self._ended
        if request is None:
            raise AgentError("the episode has ended")
        if ended is not None and ended.error:
            raise AgentError(f"the agent raised {ended.error}, while a request of its own was open")
        alternatives = alternatives_of(episode, range(turn.start, turn.end))
        asked, given = request.read["num_alternatives"], {*map(len, alternatives)}
        if given != {asked}:
            raise AgentError(f"{DIFFERS}: it asks for {asked} top_logprobs, and had {given.pop()}")
        tokens = slice(turn.start, turn.end)
        answered = self.conversations.say(
            episode.token_ids[tokens].tolist(),
            episode.log_probs[tokens].tolist(),
            alternatives,
            request=request.read,
        )
        if answered is None:
            return
        answer, conversation = answered
        if request.is_response:
            answer = self._responses.answer(request.body, answer, conversation)
        with self._lock:
            if self._open is None:
                raise AgentError("the episode has ended")
            self._open = None
        self._answers[request.is_response, request.digest] = answer
        request.answer.set_result(answer)

    def _run(self) -> None:
        """Run the agent; its thread."""
        try:
            text = self._agent(self.session)
            if inspect.isawaitable(text):
                text = asyncio.run(_awaited(text))
            if text is not None and not isinstance(text, str):
                raise TypeError(f"the agent returned {type(text).__name__}, not a text or None")
            end = _End(text)
        except BaseException as error:  # whatever a user's code raises, SystemExit included
            end = _End(error=said(error))
        with self._lock:
            self._ended = end
            self._events.put(end)


async def _awaited(result: Any) -> Any:
    return await result


def _ended() -> RefusedError:
    return RefusedError("the episode has ended: at a limit of the run, or with the generation")
