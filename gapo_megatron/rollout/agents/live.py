"""An agent that runs beside its episode: it asks, the engine samples, it reads the answer."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.errors import said
from gapo_megatron.rollout.agents.conversation import Conversation
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.requests import is_same_request
from gapo_megatron.rollout.agents.responses import Responses
from gapo_megatron.rollout.agents.session import Session
from gapo_megatron.types import Episode, TurnSettings


class AgentError(Exception):
    """The agent has failed, or does not fit its episode: the verdict is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    body: Any
    is_repeated: bool
    """Whether the client sends it again, for want of an answer to the first."""
    is_response: bool
    """Whether it is one of the Responses API, not for a chat completion."""
    answer: Future[dict[str, Any]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _End:
    """The agent has returned a text or None, or raised."""

    text: str | None = None
    error: str = ""


class _Closed:
    """The episode has ended."""


class LiveAgent:
    """An agent in a thread of its own. A second thread, `Environment.respond`'s, plays the model.

    The agent's requests come from the server by `post`. They are read, and answered, in `follow`
    alone, so that the conversation has one thread at a time.
    """

    def __init__(
        self, agent: Callable[[Session], Any], session: Session, conversation: Conversation
    ) -> None:
        """Nothing runs before `start`."""
        self.session = session
        self.conversation = conversation
        self._agent = agent
        self._events: queue.SimpleQueue[_Request | _End | _Closed] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._ended: _End | None = None
        self._open: _Request | None = None
        """The request that the model's next turn answers."""
        self._last: tuple[Any, dict[str, Any]] | None = None
        """The request before, and its answer."""
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
        tokens = self.conversation.tokens
        return self._open is not None and tokens == episode.token_ids[: len(tokens)].tolist()

    def follow(self, episode: Episode) -> tuple[list[int], TurnSettings] | str | None:
        """Answer the agent's requests with the model's turns, until the turns run out.

        Returns:
            The tokens of the agent's next request, and what it asks of the turn; or what the agent
            has returned.

        Raises:
            AgentError: it has raised, returned too early, or asks otherwise than in the episode.
        """
        tokens, is_sampled = self.conversation.tokens, episode.is_sampled
        while len(tokens) < len(episode.token_ids):
            if self._open is None:
                event = self._next()
                if isinstance(event, _End):
                    raise AgentError(f"{_DIFFERS}: it returned")
            start = len(tokens)
            num_sampled = int(is_sampled[start:].cumprod().sum())
            if tokens != episode.token_ids[:start].tolist() or not num_sampled:
                first = _first_difference(tokens, episode.token_ids.tolist())
                raise AgentError(
                    f"{_DIFFERS}: its request has other tokens from token {first} of the "
                    "response on"
                )
            turn = slice(start, start + num_sampled)
            self._answer(episode.token_ids[turn].tolist(), episode.log_probs[turn].tolist())
        event = self._next()
        return event.text if isinstance(event, _End) else event

    def close(self) -> None:
        """The episode has ended: requests get an error, now and later. Never waits."""
        with self._lock:
            self._is_closed = True
            left, self._open = [self._open], None
            while not self._events.empty():
                event = self._events.get()
                left.append(event if isinstance(event, _Request) else None)
            self._events.put(_Closed())
        for request in left:
            if request is not None and not request.answer.done():
                request.answer.set_exception(_ended())

    def _next(self) -> tuple[list[int], TurnSettings] | _End:
        """Tokens and settings of the agent's next request, or its end."""
        while True:
            event = self._events.get()
            if isinstance(event, _Closed):
                # A hung agent keeps its place among `environment.max_concurrent`.
                self._thread.join()
                raise AgentError("the episode has ended")
            if isinstance(event, _End):
                if event.error:
                    raise AgentError(self._refusal or event.error)
                return event
            if self._last and event.is_repeated and is_same_request(event.body, self._last[0]):
                event.answer.set_result(self._last[1])
                continue
            try:
                asked, said_before = event.body, self.conversation.messages
                if event.is_response:
                    asked = self._responses.to_chat(event.body, said_before)
                tokens = self.conversation.ask(asked)
            except Exception as error:  # a body may have any JSON value anywhere
                refused = error if isinstance(error, RefusedError) else RefusedError(said(error))
                self._refusal = f"a request was refused: {refused}"
                event.answer.set_exception(refused)
                continue
            with self._lock:
                if not self._is_closed:
                    self._open, self._refusal = event, ""
                    return tokens, self.conversation.turn
            event.answer.set_exception(_ended())

    def _answer(self, turn: list[int], log_probs: list[float]) -> None:
        """Answer the open request with a turn of the model."""
        with self._lock:
            request, self._open = self._open, None
            if request is None:
                raise AgentError("the episode has ended")
            if self._ended:
                how = f"raised {self._ended.error}" if self._ended.error else "returned"
                raise AgentError(f"the agent {how}, while a request of its own was open")
        answer = self.conversation.say(turn, log_probs)
        if request.is_response:
            num_said = len(self.conversation.messages)
            answer = self._responses.answer(request.body, answer, num_said=num_said)
        self._last = request.body, answer
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


_DIFFERS = "the agent did not repeat what it did when the response was sampled"


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of equal tokens at the beginning."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


async def _awaited(result: Any) -> Any:
    return await result


def _ended() -> RefusedError:
    return RefusedError("the episode has ended: at a limit of the run, or with the generation")
