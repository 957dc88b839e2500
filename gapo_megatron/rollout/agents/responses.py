"""OpenAI's Responses API, as chat completions of the same conversations.

What a request says becomes the messages of a chat completion, and its answer the output items of a
response. `previous_response_id` stands for the messages up to the response that it names: if its
conversation has gone on since, the request opens a new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapo_megatron.rollout.agents.conversation import Conversation
from gapo_megatron.rollout.agents.errors import RefusedError

_SAME = {
    *("model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream"),
    *("stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "stop"),
}
"""Fields that mean what they mean in a chat completion."""
_READ = {
    *("input", "instructions", "previous_response_id", "tools", "tool_choice", "text"),
    *("max_output_tokens", "reasoning", "include"),
}
_ONLY: dict[str, Any] = {"background": False, "truncation": "disabled"}
_PARTS = ("text", "input_text", "output_text")
_LOG_PROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What a response stands for in later requests."""

    conversation: Conversation
    num_messages: int
    """Messages of the conversation up to the response, its own included."""
    has_instructions: bool
    """Whether the first of them came of `instructions`, which no later request inherits."""


class Responses:
    """The responses of a session: what is known of its conversations in this form."""

    def __init__(self) -> None:
        """No response yet."""
        self._known: dict[str, _Known] = {}
        """The responses so far, by id."""

    def to_chat(self, body: Any) -> tuple[dict[str, Any], Conversation | None]:
        """The request as one for a chat completion.

        Args:
            body: the request, as JSON values.

        Returns:
            The request, and the conversation of the response that it names, if it names one.

        Raises:
            RefusedError: names the field, its value and the rule.
        """
        if not isinstance(body, Mapping):
            raise RefusedError("the request must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in _ONLY:
                if value != _ONLY[name]:
                    raise RefusedError(f"{name} ({value!r:.100}) must be {_ONLY[name]!r}", name)
            elif name not in _READ | _SAME:
                raise RefusedError(f"{name} ({value!r:.100}) is not supported here", name)
        chat = {name: value for name, value in given.items() if name in _SAME}
        messages: list[Mapping[str, Any]] = [*_messages(given.get("input", []))]
        conversation = None
        if (previous := given.get("previous_response_id")) is not None:
            known = self._known.get(str(previous))
            if known is None:
                raise RefusedError(
                    f"previous_response_id ({previous!r:.100}) must be that of a response of this "
                    f"session, of which there are {len(self._known)}",
                    "previous_response_id",
                )
            conversation = known.conversation
            said = conversation.messages[known.has_instructions : known.num_messages]
            messages = [*said, *messages]
        if given.get("instructions"):
            messages = [{"role": "system", "content": given["instructions"]}, *messages]
        chat["messages"] = messages
        chat |= _options(given)
        return chat, conversation

    def answer(
        self, body: Mapping[str, Any], completion: Mapping[str, Any], conversation: Conversation
    ) -> dict[str, Any]:
        """The response to a request.

        Args:
            body: the request.
            completion: the `chat.completion` that answers it.
            conversation: its conversation, the answer included.
        """
        (choice,) = completion["choices"]
        number = completion["id"].rpartition("-")[2]
        self._known[f"resp_{number}"] = _Known(
            conversation, len(conversation.messages), bool(body.get("instructions"))
        )
        is_cut = choice["finish_reason"] == "length"
        usage = completion["usage"]
        shown = ("instructions", "max_output_tokens", "previous_response_id", "text", "reasoning")
        return {
            **{name: body.get(name) for name in shown},
            "id": f"resp_{number}",
            "object": "response",
            "created_at": completion["created"],
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "metadata": body.get("metadata") or {},
            "model": completion["model"],
            "output": _items(choice, number=number, status="incomplete" if is_cut else "completed"),
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "temperature": None,
            "top_p": None,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def stream_of(body: Mapping[str, Any], response: Mapping[str, Any]) -> str | None:
    """The response as server-sent events, if the request asks for a stream: each item in one piece.

    Args:
        body: the request, which has been answered.
        response: see `Responses.answer`.
    """
    if body.get("stream") is not True:
        return None
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for i, item in enumerate(response["output"]):
        events += _item_events(item, i)
    events.append({"type": f"response.{response['status']}", "response": response})
    return "".join(
        f"event: {one['type']}\ndata: {json.dumps({**one, 'sequence_number': i})}\n\n"
        for i, one in enumerate(events)
    )


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a chat completion that have another form here."""
    chat: dict[str, Any] = {}
    if "tools" in given:
        chat["tools"] = _tools(given["tools"])
    choice = given.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    text = given.get("text", {})
    if not isinstance(text, Mapping):
        raise RefusedError(f"text ({text!r:.100}) must be an object", "text")
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        named = {key: value for key, value in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": named}
    chat["response_format"] = form
    chat["verbosity"] = text.get("verbosity")
    chat["max_completion_tokens"] = given.get("max_output_tokens")
    reasoning = given.get("reasoning")
    chat["reasoning_effort"] = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    include = given.get("include", [])
    if not isinstance(include, list):
        raise RefusedError(f"include ({include!r:.100}) must be a list", "include")
    chat["logprobs"] = True if _LOG_PROBS in include else None
    return chat


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Functions in the form of a chat completion."""
    is_list = isinstance(tools, list)
    if not is_list or any(
        not isinstance(one, Mapping) or one.get("type") != "function" for one in tools
    ):
        raise RefusedError(f"tools ({tools!r:.100}) must be a list of functions", "tools")
    kept = ("name", "description", "parameters", "strict")
    return [
        {
            "type": "function",
            "function": {key: one[key] for key in kept if one.get(key) is not None},
        }
        for one in tools
    ]


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages of an `input`: a text of the user, or a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RefusedError(f"input ({given!r:.100}) must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            content = _content(item.get("content"), where=where)
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), where=where)
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise RefusedError(
                f"{where} ({item!r:.100}) must be of type message, function_call or "
                "function_call_output",
                where,
            )
    return messages


def _content(content: Any, *, where: str) -> Any:
    """Content with its parts of text in the form of a chat completion."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
            raise RefusedError(f"{where}: a part must be a text, not {part!r:.100}", where)
    return [{"type": "text", "text": part.get("text")} for part in content]


def _items(choice: Mapping[str, Any], *, number: str, status: str) -> list[dict[str, Any]]:
    """The output items of a turn: its text, and its calls."""
    message, items = choice["message"], list[dict[str, Any]]()
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        entries = (choice["logprobs"] or {}).get("content") or []
        text = message["content"] or ""
        items.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": status,
                "content": [
                    {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
                ],
            }
        )
    for call in calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                **call["function"],
                "status": status,
            }
        )
    return items


def _item_events(item: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """The events of an item."""
    place = {"item_id": item["id"], "output_index": index}
    added = {**item, "status": "in_progress"}
    if item["type"] == "message":
        part: dict[str, Any] = item["content"][0]
        added["content"] = []
        at = {**place, "content_index": 0}
        begun = {**part, "text": "", "logprobs": []}
        told = {**at, "logprobs": part["logprobs"]}
        between = [
            {"type": "response.content_part.added", **at, "part": begun},
            {"type": "response.output_text.delta", **told, "delta": part["text"]},
            {"type": "response.output_text.done", **told, "text": part["text"]},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    else:
        added["arguments"] = ""
        kind, arguments = "response.function_call_arguments", item["arguments"]
        between = [
            {"type": f"{kind}.delta", **place, "delta": arguments},
            {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": added},
        *between,
        {"type": "response.output_item.done", "output_index": index, "item": dict(item)},
    ]
