"""Requests of agents: which fields of a chat completion are read, overruled or refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from gapo_megatron.io.documents import sendable
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.grammar import grammar_of
from gapo_megatron.rollout.alternatives import MOST_ALTERNATIVES

MODEL = "policy"
"""Name of the model in requests and answers."""

_READ = {
    *("messages", "model", "tools", "tool_choice", "logprobs", "top_logprobs"),
    *("stop", "max_tokens", "max_completion_tokens", "response_format", "n"),
}
_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort", "verbosity"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Fields that the run's own settings overrule: a policy is trained as it samples."""
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "stream", "stream_options", "prompt_cache_retention"),
}
"""Fields that concern other services, or the form of the answer (`stream_of`)."""
_ONLY: dict[str, tuple[Any, str]] = {
    "modalities": (["text"], "the policy writes text"),
    "logit_bias": ({}, "the policy is trained as it samples"),
}
"""Fields with the only value that they may have beside null, and why."""
_ROLES = ("system", "user", "assistant", "tool")
_REPEATED = {
    *("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"),
    *("provider_specific_fields", "thinking_blocks"),
}
"""Fields that clients send, empty, with messages of the assistant that have none of them."""
_MOST_STOPS = 16
_MOST_CHOICES = 16


def read_request(
    body: Any, *, overrule: Callable[[str, Any], object], has_grammars: bool
) -> dict[str, Any]:
    """A request with messages in one form, so that equal ones compare equal.

    Args:
        body: the request, as JSON values.
        overrule: receives names and values of fields that the run's own settings overrule.
        has_grammars: `environment.structured_outputs`.

    Returns:
        `messages`, `tools` (None without any), `tool_choice`, `logprobs`, `n`; and `stop`,
        `max_tokens`, `grammar`, `num_alternatives` as in `TurnSettings`.

    Raises:
        RefusedError: names the field, its value and the rule.
    """
    if not isinstance(body, Mapping):
        raise RefusedError("the request must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _SAMPLING:
            overrule(name, value)
        elif name in _ONLY:
            only, why = _ONLY[name]
            if value != only:
                raise RefusedError(f"{name} ({value!r:.100}) must be {only!r} here: {why}", name)
        elif name not in _READ | _WITHOUT_EFFECT:
            raise RefusedError(f"{name} ({value!r:.100}) is not supported here", name)
    if given.get("model") != MODEL:
        message = f"model ({given.get('model')!r:.100}) must be {MODEL!r} (session.model)"
        raise RefusedError(message, "model", status=404)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none", "required") and not isinstance(choice, Mapping):
        raise RefusedError(
            f"tool_choice ({choice!r:.100}) must be 'auto', 'none', 'required' or name a function",
            "tool_choice",
        )
    tools, stop = _read_tools(given.get("tools")), _read_stop(given.get("stop", ()))
    grammar = grammar_of(
        given.get("response_format"), tool_choice=choice, tools=tools, is_allowed=has_grammars
    )
    if grammar and stop:
        raise RefusedError(
            f"stop ({stop!r:.100}) must be empty where response_format or tool_choice decide how "
            "the turn ends",
            "stop",
        )
    return {
        "messages": _read_messages(given.get("messages")),
        "tools": tools,
        "tool_choice": choice,
        "logprobs": given.get("logprobs") is True,
        "num_alternatives": _read_top_log_probs(given),
        "stop": stop,
        "grammar": grammar,
        "max_tokens": _read_max_tokens(given),
        "n": _read_num_choices(given.get("n", 1)),
    }


def digest_of(body: Any) -> str:
    """A digest of a request, equal for those equal in all that is not overruled or ignored."""
    if isinstance(body, Mapping):
        ignored = _SAMPLING | _WITHOUT_EFFECT
        body = {k: v for k, v in body.items() if v is not None and k not in ignored}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def stream_of(body: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """The answer as server-sent events, if the request asks for a stream: each turn in one piece.

    Args:
        body: the request, which has been answered.
        answer: a `chat.completion`.
    """
    if body.get("stream") is not True:
        return None
    head, chunks = {**answer, "object": "chat.completion.chunk", "usage": None}, []
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        piece = {key: value for key, value in choice.items() if key != "message"}
        chunks.append({**head, "choices": [{**piece, "delta": delta}]})
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    texts = [*(json.dumps(one) for one in chunks), "[DONE]"]
    return "".join(f"data: {text}\n\n" for text in texts)


def read_message(message: Any, *, where: str) -> dict[str, Any]:
    """A message with the fields that chat templates read.

    Raises:
        RefusedError: names the message, the value and the rule.
    """
    if not isinstance(message, Mapping):
        raise RefusedError(f"{where} must be an object", where)
    given = {name: value for name, value in message.items() if value not in (None, [])}
    role = given.pop("role", None)
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise RefusedError(f"{where}.role ({role!r:.100}) must be of {', '.join(_ROLES)}", where)
    read: dict[str, Any] = {"role": role, "content": _text(given.pop("content", ""), where=where)}
    if role == "assistant" and "tool_calls" in given:
        calls = given.pop("tool_calls")
        if not isinstance(calls, list):
            raise RefusedError(f"{where}.tool_calls ({calls!r:.100}) must be a list", where)
        read["tool_calls"] = [_read_tool_call(one, where=where) for one in calls]
    if role == "tool":
        read["tool_call_id"] = str(given.pop("tool_call_id", ""))
    if "name" in given:
        read["name"] = str(given.pop("name"))
    if role == "assistant":
        given = {k: v for k, v in given.items() if v or k not in _REPEATED}
    if given:
        raise RefusedError(f"{where}: {', '.join(given)} is not supported here", where)
    return read


def _text(content: Any, *, where: str) -> str:
    """Text of a message, which may have several parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RefusedError(f"{where}.content must be text, not {part!r:.100}", where)
    return "".join(part["text"] for part in parts)


def _read_tool_call(call: Any, *, where: str) -> dict[str, Any]:
    """A call of a tool, with its arguments as an object: templates write them so."""
    try:
        function = call["function"]
        name, arguments, id = function["name"], function["arguments"], call["id"]
    except (TypeError, KeyError) as error:
        raise RefusedError(f"{where}.tool_calls: {error} is missing", where) from None
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # otherwise the model's own words
            arguments = sendable(json.loads(arguments))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages must be a list of at least one message", "messages")
    read = [read_message(one, where=f"messages[{i}]") for i, one in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise RefusedError("messages: the last is the assistant's, whose turn it is", "messages")
    return read


def _read_num_choices(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_CHOICES:
        raise RefusedError(
            f"n ({value!r:.100}) must be a whole number from 1 to {_MOST_CHOICES}", "n"
        )
    return value


def _read_stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
        raise RefusedError(f"stop ({stop!r:.100}) must be a text or a list of texts", "stop")
    if len(texts) > _MOST_STOPS:
        raise RefusedError(f"stop has {len(texts)} texts; at most {_MOST_STOPS}", "stop")
    return tuple(dict.fromkeys(texts))


def _read_top_log_probs(given: Mapping[str, Any]) -> int:
    value = given.get("top_logprobs", 0)
    if type(value) is not int or not 0 <= value <= MOST_ALTERNATIVES:
        raise RefusedError(
            f"top_logprobs ({value!r:.100}) must be a whole number from 0 to {MOST_ALTERNATIVES}",
            "top_logprobs",
        )
    if value and given.get("logprobs") is not True:
        raise RefusedError(
            f"top_logprobs ({value}) needs logprobs = true, or of a response that include has "
            "'message.output_text.logprobs'",
            "top_logprobs",
        )
    return value


def _read_max_tokens(given: Mapping[str, Any]) -> int | None:
    """The newer name goes before the older one."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise RefusedError(f"{name} ({value!r:.100}) must be a whole number from 1", name)
        if value is not None:
            return value
    return None


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    is_list = isinstance(tools, list)
    if not is_list or any(
        not isinstance(one, Mapping)
        or one.get("type") != "function"
        or not isinstance(one.get("function"), Mapping)
        for one in tools
    ):
        raise RefusedError(f"tools ({tools!r:.100}) must be a list of functions", "tools")
    return [dict(one) for one in tools]
