"""The conversations of an episode: which of them each of an agent's requests continues."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout.agents.choices import ChoiceWriter
from gapo_megatron.rollout.agents.conversation import Conversation, Message, num_repeated
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.requests import MODEL, read_message, read_request
from gapo_megatron.rollout.chat import ChatTemplate, cut_middle
from gapo_megatron.rollout.turns import check_stop
from gapo_megatron.types import TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import EnvironmentConfig


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Place:
    """Where a request goes on if it is the next to be answered."""

    request: Mapping[str, Any]
    """As `read_request` returns it."""
    conversation: Conversation
    """The one that it continues; or a new one, not yet among the episode's."""
    messages: list[Message]
    """What has then been said in the conversation."""
    tokens: Sequence[int]
    """Tokens that the conversation gets."""
    num_cut: int = 0
    """Tokens that were cut from results of calls."""

    @property
    def is_new(self) -> bool:
        """Whether the conversation begins here."""
        return not self.conversation.tokens

    @property
    def appended(self) -> list[int]:
        """Tokens to append to the response: the prompt has the first one of conversation 0."""
        return list(self.tokens[self.is_new and self.conversation.number == 0 :])


class Conversations:
    """What an agent and the model have said in an episode, in one conversation or several.

    A request that repeats all that was said in a conversation, up to and including the model's last
    turn, and adds messages continues it. Any other opens a new one, which the chat template renders
    from its messages alone. One request is answered (`ask`, then `say` for each of its choices)
    before the next is asked.

    Attributes:
        tokens: tokens of the response so far: the agent's, and the model's.
        turn: what the last request asks of the turn that answers it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        first: int,
        overrule: Callable[[str, Any], object],
        opens: Callable[[str], object],
        config: EnvironmentConfig,
    ) -> None:
        """Begin without a message.

        Args:
            tokenizer: the policy's, with its chat template.
            first: the prompt's token, with which the template begins (`first_token`).
            overrule: receives names and values of the sampling settings of a request.
            opens: receives why a request continues none of the conversations that there are.
            config: section `environment`.
        """
        self.tokens: list[int] = []
        self.turn = TurnSettings()
        self._config = config
        self._tokenizer = tokenizer
        self._first = first
        self._overrule = overrule
        self._opens = opens
        self._writer = ChoiceWriter(tokenizer, config.stop)
        self._templates: dict[str, ChatTemplate] = {}
        """The chat template by tools, as JSON."""
        self._all: list[Conversation] = []
        self._asked: Conversation
        """That of the last request's first choice."""
        self._num_read = 0
        """Its tokens before that choice."""
        self._sampling: Conversation
        """That of the current choice."""
        self._choices: list[dict[str, Any]] = []
        """Answers to the last request, until it has all."""
        self._num_sampled = 0
        """Tokens of these."""
        self._num_answered = 0
        """Requests that have their answer."""

    def read(self, body: Any) -> dict[str, Any]:
        """Read a request. RefusedError: it asks for what there is not."""
        request = read_request(
            body, overrule=self._overrule, has_grammars=self._config.structured_outputs
        )
        try:
            for text in request["stop"]:
                check_stop(text, self._tokenizer)
        except ConfigError as error:
            raise RefusedError(str(error), "stop") from None
        return request

    def place(self, request: Mapping[str, Any], *, prefers: Conversation | None = None) -> Place:
        """Where a request goes on if it is the next; changes nothing.

        What the chat template cannot continue, as it writes earlier turns anew, opens a
        conversation.

        Args:
            request: see `read`.
            prefers: the conversation that it continues if it may continue several.

        Raises:
            RefusedError: the chat template refuses its messages.
        """
        tokens = None
        if found := [one for one in self._all if one.is_continued_by(request)]:
            conversation = prefers if prefers in found else found[0]
            new = request["messages"][len(conversation.messages) :]
            messages, num_cut = self._without_middles(new)
            with contextlib.suppress(RefusedError):
                tokens = conversation.continuation(messages)
        if tokens is None:
            conversation = self._new(request["tools"])
            messages, num_cut = self._without_middles(request["messages"])
            tokens = conversation.opening(messages, first=self._first)
        return Place(
            request=request,
            conversation=conversation,
            messages=list(request["messages"]),
            tokens=tokens,
            num_cut=num_cut,
        )

    def place_of_choice(self, request: Mapping[str, Any]) -> Place:
        """Where the next choice of the last request is: after a copy of what the first has read."""
        return Place(
            request=request,
            conversation=self._new(self._asked.tools),
            messages=list(request["messages"]),
            tokens=self._asked.tokens[: self._num_read],
        )

    def ask(self, place: Place) -> list[int]:
        """Say what a request says, or begin the next choice of the last one.

        Returns:
            The tokens to append to the response.
        """
        request, conversation, appended = place.request, place.conversation, place.appended
        is_choice = bool(self._choices)
        if place.is_new:
            if self._all and not is_choice:
                self._opens(self._difference(request))
            self._all.append(conversation)
        conversation.messages = place.messages
        conversation.tokens += place.tokens
        self._sampling = conversation
        if not is_choice:
            self._asked, self._num_read = conversation, len(conversation.tokens)
        self.turn = TurnSettings(
            stop=request["stop"],
            max_tokens=request["max_tokens"],
            grammar=request["grammar"],
            num_alternatives=request["num_alternatives"],
            num_cut=place.num_cut,
            conversation=conversation.number,
        )
        self.tokens += appended
        return appended

    def say(
        self,
        turn: Sequence[int],
        log_probs: Sequence[float],
        alternatives: Sequence[Sequence[tuple[int, float]]],
        *,
        request: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Conversation] | None:
        """Answer the last request with a sampled turn of the model.

        Args:
            turn: its tokens.
            log_probs: the engine's, of each token.
            alternatives: at each of them, tokens and log-probs of those asked for.
            request: the request.

        Returns:
            Its answer, a `chat.completion`, and the conversation of the first choice; None while
            choices are missing.
        """
        conversation = self._sampling
        choice = self._writer.choice(
            turn, log_probs, alternatives, before=conversation.tokens, request=request
        )
        said = read_message(choice["message"], where="the model's turn")
        conversation.messages.append(said)
        conversation.tokens += turn
        self.tokens += turn
        self._choices.append({"index": len(self._choices), **choice})
        self._num_sampled += len(turn)
        if len(self._choices) < request["n"]:
            return None
        choices, num_sampled = self._choices, self._num_sampled
        self._choices, self._num_sampled = [], 0
        self._num_answered += 1
        answer = {
            "id": f"chatcmpl-{self._num_answered}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": choices,
            "usage": {
                "prompt_tokens": self._num_read,
                "completion_tokens": num_sampled,
                "total_tokens": self._num_read + num_sampled,
            },
        }
        return answer, self._asked

    def _new(self, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
        """A conversation that is not yet among the episode's."""
        key = json.dumps(tools)
        if key not in self._templates:
            options = {"tools": tools} if tools else {}
            self._templates[key] = ChatTemplate(self._tokenizer, options=options)
        return Conversation(len(self._all), self._templates[key], tools)

    def _without_middles(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages as the model reads them: long results of calls are cut."""
        read, num_cut = list[Message](), 0
        for one in messages:
            if one["role"] == "tool":
                most = self._config.max_call_tokens
                text, num_left_out = cut_middle(one["content"], self._tokenizer, max_tokens=most)
                one, num_cut = {**one, "content": text}, num_cut + num_left_out
            read.append(one)
        return read, num_cut

    def _difference(self, request: Mapping[str, Any]) -> str:
        """Why a request does not continue the conversation of which it repeats most."""
        messages = request["messages"]
        nearest = max(self._all, key=lambda one: one.num_same(messages))
        num_same, num_said = nearest.num_same(messages), len(nearest.messages)
        if num_same == len(messages):
            return f"messages has no message after the {num_same} that have been answered"
        if num_same < num_said:
            return f"messages[{num_same}] differs from what was said"
        if num_repeated(messages) > num_said:
            return f"messages[{num_repeated(messages) - 1}] is the assistant's, but was not said"
        if request["tools"] == nearest.tools:
            return f"{nearest.template.name} writes what was said anew before messages[{num_said}]"
        return f"tools differ from those of the conversation of {num_said} messages"
