"""Sampled turns of the model as choices of a `chat.completion`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import DataError
from gapo_megatron.rewards.final_answer import CALL, CLOSE, marked_text, special_tokens
from gapo_megatron.rollout.environments.tools import find_calls, read_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_EXCLUDED = -9999.0
"""Log-prob of a token that the sampling distribution excludes: OpenAI's, as JSON has no -inf."""


class ChoiceWriter:
    """Writes the model's turns of an episode as choices; ids of their calls are unique in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        """Begin an episode.

        Args:
            tokenizer: the policy's.
            stop: texts that end every turn (`environment.stop`).
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._special = special_tokens(tokenizer)
        self._num_calls = 0

    def choice(
        self,
        turn: Sequence[int],
        log_probs: Sequence[float],
        alternatives: Sequence[Sequence[tuple[int, float]]],
        *,
        before: Sequence[int],
        request: Mapping[str, Any],
    ) -> dict[str, Any]:
        """A turn as a choice, but for its `index`.

        Args:
            turn: its tokens.
            log_probs: the engine's, of each token.
            alternatives: at each of them, tokens and log-probs of those asked for.
            before: tokens of the conversation before it.
            request: the request that it answers (`read_request`).
        """
        message = self._message(turn, before=before, request=request)
        logprobs = None
        if request["logprobs"]:
            entries = self._log_probs([*zip(turn, log_probs, strict=True)])
            for entry, pairs in zip(entries, alternatives, strict=True):
                entry["top_logprobs"] = self._log_probs(pairs)
            logprobs = {"content": entries, "refusal": None}
        return {
            "message": message,
            "finish_reason": self._finish_reason(turn, message, request=request),
            "logprobs": logprobs,
        }

    def _message(
        self, turn: Sequence[int], *, before: Sequence[int], request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The turn as a message, its calls parsed if the agent has said what tools there are."""
        text = marked_text(self._tokenizer, turn, before=before)
        whole = str(self._tokenizer.decode([*turn]))
        if stop := [one for one in request["stop"] if one in whole]:
            text = _cut(text, stop)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not request["tools"] or request["tool_choice"] == "none":
            return message
        calls = [_read_call(one) for one in find_calls(text)]
        if not calls or None in calls:
            return message
        thought, ended, said = text.rpartition(CLOSE)
        message["content"] = f"{thought}{ended}{said.partition(CALL[0])[0]}".strip() or None
        message["tool_calls"] = []
        for call in calls:
            self._num_calls += 1
            # Nine letters and digits: Mistral's template takes no other.
            id = f"call{self._num_calls:05d}"
            message["tool_calls"].append({"id": id, "type": "function", "function": call})
        return message

    def _finish_reason(
        self, turn: Sequence[int], message: Mapping[str, Any], *, request: Mapping[str, Any]
    ) -> str:
        whole = str(self._tokenizer.decode([*turn]))
        is_ended = turn[-1] in self._special or any(
            one in whole for one in (*self._stop, *request["stop"])
        )
        if len(turn) == request["max_tokens"] and not is_ended:
            return "length"
        return "tool_calls" if message.get("tool_calls") else "stop"

    def _log_probs(self, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        entries = list[dict[str, Any]]()
        for token, log_prob in pairs:
            text = str(self._tokenizer.decode([token]))
            value = max(float(log_prob), _EXCLUDED)
            entries.append({"token": text, "bytes": [*text.encode()], "logprob": value})
        return entries


def _cut(text: str, stop: Sequence[str]) -> str:
    """What precedes the first of the texts."""
    found = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(found, default=len(text))]


def _read_call(text: str) -> dict[str, str] | None:
    """A call of a tool as in a message of the API; None: it cannot be read."""
    try:
        name, arguments = read_call(text)
    except DataError:
        return None
    if not isinstance(arguments, dict | str):
        return None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
