"""Agents that ask for a stream get the same turn as server-sent events; keys in another header."""

from __future__ import annotations

from typing import Any

import openai

from gapo_megatron.rollout.agents import Session
from tests.rollout.test_agents import CALL, TOOLS, run, says


def collected(session: Session, messages: list[Any], client: openai.OpenAI) -> dict[str, Any]:
    """The turn that the stream's pieces make."""
    stream = client.chat.completions.create(
        model=session.model,
        messages=messages,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, calls, usage, reasons = "", [], None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons += [choice.finish_reason]
    assert usage is not None and usage.completion_tokens > 0
    return {"text": text, "calls": calls, "usage": usage, "reasons": reasons}


def test_a_stream_is_the_same_turn() -> None:
    def solve(session: Session) -> str:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        messages: list[Any] = [{"role": "user", "content": session.problem["prompt"]}]
        first = collected(session, messages, client)
        (call,) = first["calls"]
        assert (call.index, call.function.name) == (0, "calculator")
        assert (first["text"], first["reasons"]) == ("Let me see.", ["tool_calls"])
        call = call.model_dump(exclude_none=True)
        messages += [{"role": "assistant", "content": first["text"], "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "84"}]
        second = collected(session, messages, client)
        assert second["reasons"] == ["stop"]
        total = second["usage"].total_tokens
        return f"{second['text']} {total}"

    episodes, _ = run(solve, says(f"Let me see. {CALL}", "It is 84"))
    for one in episodes:
        num_tokens = len(one.prompt.token_ids) + len(one.token_ids)
        assert (one.failure, one.final_text) == ("", f"It is 84 {num_tokens}")
