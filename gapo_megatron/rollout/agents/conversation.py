"""An agent's requests as turns of an episode: messages become tokens, sampled turns answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.final_answer import marked_text, special_tokens
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.requests import MODEL, read_message, read_request
from gapo_megatron.rollout.chat import ChatTemplate, cut_middle
from gapo_megatron.rollout.environments.tools import find_calls
from gapo_megatron.rollout.turns import check_stop
from gapo_megatron.types import TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import EnvironmentConfig


class Conversation:
    """What an agent and the model have said in an episode.

    The agent's n-th request is answered by the model's n-th turn. Each request must repeat what has
    been said; only the messages after that become tokens, so that no sampled token is tokenised
    again.

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
        config: EnvironmentConfig,
    ) -> None:
        """Begin without a message.

        Args:
            tokenizer: the policy's, with its chat template.
            first: the prompt's token, with which the template begins (`first_token`).
            overrule: receives names and values of the sampling settings of a request.
            config: section `environment`.
        """
        self.tokens: list[int] = []
        self.turn = TurnSettings()
        self._config = config
        self._special = special_tokens(tokenizer)
        self._tokenizer = tokenizer
        self._first = first
        self._template = ChatTemplate(tokenizer)
        self._overrule = overrule
        self._request: dict[str, Any] = {}
        self._said: list[dict[str, Any]] = []
        self._num_calls = 0

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """What has been said, the last request and its answer included."""
        return self._said

    def ask(self, body: Any) -> list[int]:
        """Take the agent's next request.

        Returns:
            The tokens that it appends to the response.

        Raises:
            RefusedError: it does not continue the conversation, or asks for what there is not.
        """
        request = read_request(
            body, overrule=self._overrule, has_grammars=self._config.structured_outputs
        )
        try:
            for text in request["stop"]:
                check_stop(text, self._tokenizer)
        except ConfigError as error:
            raise RefusedError(str(error), "stop") from None
        is_first = not self._said
        new = request["messages"] if is_first else self._new_messages(request)
        new, num_cut = self._without_middles(new)
        tokens = self._open(request, new) if is_first else self._continue(new)
        self._request, self._said = request, request["messages"]
        self.turn = TurnSettings(
            stop=request["stop"],
            max_tokens=request["max_tokens"],
            grammar=request["grammar"],
            num_cut=num_cut,
        )
        self.tokens += tokens
        return tokens

    def say(self, turn: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        """The answer to the last request, a `chat.completion`: a sampled turn of the model."""
        message = self._message(turn)
        self._said = [*self._said, read_message(message, where="the model's turn")]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": self._finish_reason(turn, message),
            "logprobs": None,
        }
        if self._request["logprobs"]:
            choice["logprobs"] = {"content": self._log_probs(turn, log_probs), "refusal": None}
        num_prompt, num_turn = 1 + len(self.tokens), len(turn)
        self.tokens += turn
        return {
            "id": f"chatcmpl-{len(self._said)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_turn,
                "total_tokens": num_prompt + num_turn,
            },
        }

    def _without_middles(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], int]:
        """The messages as the model reads them: long results of calls are cut."""
        read, num_cut = list[Mapping[str, Any]](), 0
        for one in messages:
            if one["role"] == "tool":
                most = self._config.max_call_tokens
                text, num_left_out = cut_middle(one["content"], self._tokenizer, max_tokens=most)
                one, num_cut = {**one, "content": text}, num_cut + num_left_out
            read.append(one)
        return read, num_cut

    def _open(self, request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of the first request but for the very first, which every conversation has."""
        if request["tools"]:
            self._template = ChatTemplate(self._tokenizer, options={"tools": request["tools"]})
        if messages[-1]["role"] == "assistant":
            raise RefusedError(
                "messages: the last is the assistant's, whose turn it is", "messages"
            )
        try:
            tokens = self._template.opening(messages)
        except Exception as error:  # whatever a template raises
            raise RefusedError(f"messages: {self._template.name}: {error}", "messages") from None
        if tokens[:1] != [self._first]:
            raise RefusedError(
                f"messages: {self._template.name} begins this conversation with another token than "
                "all others",
                "messages",
            )
        return tokens[1:]

    def _new_messages(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a request after what has been said."""
        messages, said = request["messages"], self._said
        if request["tools"] != self._request["tools"]:
            raise RefusedError("tools must be those of the session's first request", "tools")
        for i, ours in enumerate(said):
            if i >= len(messages) or not _is_same(messages[i], ours):
                raise RefusedError(
                    f"messages[{i}] must be what was said: a request must repeat the session's "
                    f"{len(said)} messages, the model's as they were returned, and add others",
                    f"messages[{i}]",
                )
        new: list[dict[str, Any]] = messages[len(said) :]
        if not new or any(one["role"] == "assistant" for one in new):
            raise RefusedError(
                f"messages: after the {len(said)} messages of the session there must be new ones, "
                f"none of the assistant; there are {len(new)}",
                "messages",
            )
        return new

    def _continue(self, new: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of messages after what has been said."""
        try:
            return self._template.continuation(self.tokens[-1], new)
        except (ConfigError, ValueError) as error:
            raise RefusedError(f"messages: {error}", "messages") from None
        except Exception as error:  # whatever a template raises
            raise RefusedError(f"messages: {self._template.name}: {error}", "messages") from None

    def _message(self, turn: Sequence[int]) -> dict[str, Any]:
        """The model's turn as a message, its calls parsed if the agent has said what tools are."""
        text = marked_text(self._tokenizer, turn, before=[self._first, *self.tokens])
        whole = str(self._tokenizer.decode([*turn]))
        if stop := [one for one in self.turn.stop if one in whole]:
            text, whole = _cut(text, stop), _cut(whole, stop)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not self._request["tools"] or self._request["tool_choice"] == "none":
            return message
        calls = [_read_call(one) for one in find_calls(whole)]
        if not calls or None in calls:
            return message
        shown = text if "<tool_call>" in text else whole  # it may be a special token
        message["content"] = shown.partition("<tool_call>")[0].strip() or None
        message["tool_calls"] = []
        for call in calls:
            self._num_calls += 1
            # Nine letters and digits: Mistral's template takes no other.
            id = f"call{self._num_calls:05d}"
            message["tool_calls"].append({"id": id, "type": "function", "function": call})
        return message

    def _finish_reason(self, turn: Sequence[int], message: Mapping[str, Any]) -> str:
        whole = str(self._tokenizer.decode([*turn]))
        is_ended = turn[-1] in self._special or any(
            one in whole for one in (*self._config.stop, *self.turn.stop)
        )
        if len(turn) == self.turn.max_tokens and not is_ended:
            return "length"
        return "tool_calls" if message.get("tool_calls") else "stop"

    def _log_probs(self, turn: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
        entries = []
        for token, log_prob in zip(turn, log_probs, strict=True):
            text = str(self._tokenizer.decode([token]))
            entry = {"token": text, "bytes": [*text.encode()], "logprob": float(log_prob)}
            entries.append({**entry, "top_logprobs": []})
        return entries


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template begins every conversation.

    Raises:
        ConfigError: there is no template, or it begins with text; names the tokenizer.
    """
    template = ChatTemplate(tokenizer)
    token = template.opening([{"role": "user", "content": "A question."}])[0]
    if token not in special_tokens(tokenizer):
        text = str(tokenizer.decode([token]))
        raise ConfigError(
            f"{template.name} must begin conversations with a special token, not with token "
            f"{token} ({text!r})"
        )
    return token


def _cut(text: str, stop: Sequence[str]) -> str:
    """What precedes the first of the texts."""
    found = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(found, default=len(text))]


def _is_same(message: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a message is one that was said; the model's: up to its name and white space."""
    if ours["role"] != "assistant":
        return message == ours

    def compared(one: Mapping[str, Any]) -> dict[str, Any]:
        return {**one, "content": one["content"].strip(), "name": None}

    return compared(message) == compared(ours)


def _read_call(text: str) -> dict[str, str] | None:
    """A call of a tool as in a message of the API; None: it cannot be read."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
