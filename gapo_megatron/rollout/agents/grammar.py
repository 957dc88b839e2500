"""What a request's `response_format` and `tool_choice` demand of a turn, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gapo_megatron.rollout.agents.errors import RefusedError

_MOST_SPACES = 1
"""White space in a row between parts of JSON: unlimited, a turn may never end."""
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(
    given: Any,
    *,
    tool_choice: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    is_allowed: bool,
) -> str:
    """The structural tag (xgrammar's, as JSON) of a request; empty if any text will do.

    A call is written as `environments.tools` reads it. With tools that need not be called, a turn
    is a call or an answer in the format.

    Args:
        given: `response_format` of the request; None: text.
        tool_choice: `auto`, `none`, `required`, or an object that names a function.
        tools: as in the request.
        is_allowed: whether the engine can hold a turn to a grammar
            (`environment.structured_outputs`).

    Raises:
        RefusedError: names the field, its value and the rule; for instance a JSON schema that the
            engine cannot hold a turn to.
    """
    schema = _read_format(given)
    called = [] if tool_choice == "none" else [one["function"] for one in tools or ()]
    if isinstance(tool_choice, Mapping):
        name = _name_of(tool_choice)
        called = [one for one in called if one.get("name") == name]
    must_call = tool_choice not in ("auto", "none")
    if must_call and not called:
        raise RefusedError(f"tool_choice ({tool_choice!r:.100}) needs its tools", "tool_choice")
    if schema is None and not must_call:
        return ""
    if not is_allowed:
        field, value = ("tool_choice", tool_choice) if must_call else ("response_format", given)
        raise RefusedError(
            f"{field} ({value!r:.100}) needs environment.structured_outputs = true", field
        )
    formats, schemas = [_call(one) for one in called], [_parameters(one) for one in called]
    if not must_call and schema is not None:
        formats.append(_json(schema))
        schemas.append(schema)
    chosen = formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
    tag = json.dumps({"type": "structural_tag", "format": chosen})
    from gapo_megatron.compat.vllm_grammar import check_grammar

    try:
        check_grammar(tag, schemas)
    except (ValueError, TypeError, RecursionError) as error:
        field = "tools" if must_call else "response_format"
        raise RefusedError(f"{field}: no grammar can be made of it: {error}", field) from None
    return tag


def _read_format(given: Any) -> dict[str, Any] | None:
    """The JSON schema of a `response_format`; None: text."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    named = given.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, dict):
        raise RefusedError(
            f"response_format ({given!r:.100}) must be of type text, json_object or json_schema, "
            "the last with a json_schema that has a schema",
            "response_format",
        )
    return schema


def _name_of(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RefusedError(
            f"tool_choice ({choice!r:.100}) must be 'auto', 'none', 'required' or name a function",
            "tool_choice",
        )
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or _ANY_OBJECT)


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_SPACES}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a function, as Qwen's and Hermes' templates write it."""
    begin = f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": '
    parts = [_text(begin), _json(_parameters(function)), _text("}\n</tool_call>")]
    return {"type": "sequence", "elements": parts}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
