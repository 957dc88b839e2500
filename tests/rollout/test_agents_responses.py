"""Agents that use OpenAI's Responses API hold the same conversations as by chat completions."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from gapo_megatron.rollout.agents import Session
from tests.messages import mentions
from tests.rollout.test_agents import (
    CALL,
    PROMPTS,
    SETTINGS,
    TOOLS,
    calculates,
    client_of,
    run,
    says,
)
from tests.rollout.test_agents_conversations import (
    answer,
    conversations_of,
    repeats,
    tokens_of,
    turns_of,
)

FLAT_TOOLS: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
ONE = {"prompts": PROMPTS[:1], "settings": replace(SETTINGS, num_samples=2)}


def opening(session: Session) -> list[Any]:
    return [
        {"role": "developer", "content": f"You are number {session.sample}."},
        {"role": "user", "content": [{"type": "input_text", "text": session.problem["prompt"]}]},
    ]


def result_of(call: Any) -> dict[str, Any]:
    value = eval(json.loads(call.arguments)["expression"])
    return {"type": "function_call_output", "call_id": call.call_id, "output": str(value)}


def collected(stream: Any) -> Any:
    """The last event's response; the pieces before make the same."""
    text, arguments, items, numbers = "", "", [], []
    for event in stream:
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        elif event.type == "response.output_item.done":
            items.append(event.item)
    assert numbers == [*range(len(numbers))]
    response = event.response
    assert [one.model_dump() for one in items] == [one.model_dump() for one in response.output]
    assert text == response.output_text
    assert arguments == "".join(
        one.arguments for one in response.output if one.type == "function_call"
    )
    return response


def sends_all(session: Session, *, streams: bool = False) -> str:
    """Each request holds all items so far."""
    create: Any = client_of(session).responses.create
    items = opening(session)
    first = create(model=session.model, input=items, tools=FLAT_TOOLS, stream=streams)
    first = collected(first) if streams else first
    message, call = first.output
    assert (message.content[0].text, first.status) == ("Let me see.", "completed")
    items += [*first.output, result_of(call)]
    second = create(model=session.model, input=items, tools=FLAT_TOOLS, stream=streams)
    second = collected(second) if streams else second
    return f"It is {second.output_text}"


def names(session: Session) -> str:
    """The second request names the response before; its instructions must come again."""
    create = client_of(session).responses.create
    system, user = opening(session)
    options: dict[str, Any] = {"model": session.model, "tools": FLAT_TOOLS}
    options |= {"instructions": system["content"], "temperature": 0.5, "store": True}
    first = create(input=[user], **options)
    (call,) = [one for one in first.output if one.type == "function_call"]
    second = create(input=[result_of(call)], previous_response_id=first.id, **options)
    assert second.previous_response_id == first.id != second.id
    assert second.usage is not None and second.usage.output_tokens > 0
    return f"It is {second.output_text}"


def mixes(session: Session) -> str:
    """The second request is a chat completion."""
    client = client_of(session)
    system, user = opening(session)
    first = client.responses.create(model=session.model, input=[system, user], tools=FLAT_TOOLS)
    _, call = first.output
    assert call.type == "function_call"
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages: Any = [
        {"role": "system", "content": system["content"]},
        {"role": "user", "content": user["content"][0]["text"]},
        {"role": "assistant", "content": first.output_text, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": result_of(call)["output"]},
    ]
    second = client.chat.completions.create(
        model=session.model,
        messages=messages,
        tools=TOOLS,  # type: ignore[arg-type]
    )
    return f"It is {second.choices[0].message.content}"


@pytest.mark.parametrize(
    "solve", [sends_all, lambda session: sends_all(session, streams=True), names, mixes]
)
def test_the_tokens_are_those_of_chat_completions(solve: Callable[[Session], str]) -> None:
    script = says(f"Let me see. {CALL}", "84")
    expected, _ = run(calculates, script)
    episodes, _ = run(solve, script)
    for one, other in zip(episodes, expected, strict=True):
        assert (one.failure, one.final_text) == ("", "It is 84")
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.is_sampled.tolist() == other.is_sampled.tolist()


def test_a_response_stands_for_the_messages_up_to_it() -> None:
    """It is gone on from; or, if its conversation has gone on, branched from."""

    def solve(session: Session) -> str:
        client = client_of(session)
        first = client.responses.create(model=session.model, input="q")
        said: Any = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and now?"},
        ]
        second = client.chat.completions.create(model=session.model, messages=said)
        options: Any = {"model": session.model}
        branch = client.responses.create(input="go on", previous_response_id=first.id, **options)
        said.append({"role": "assistant", "content": second.choices[0].message.content})
        said.append({"role": "user", "content": "go on"})
        third = client.responses.create(model=session.model, input=said)
        client.responses.create(input="more", previous_response_id=branch.id, **options)
        return client.responses.create(
            input="still more", previous_response_id=third.id, **options
        ).output_text

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        assert one.final_text == "still more 6"
        said = ["q 1", "and now? 2", "go on 3", "go on 4", "more 5", "still more 6"]
        assert turns_of(one) == [*zip((0, 0, 1, 0, 1, 0), said, strict=True)]
        branch: list[Any] = []
        for question, text in zip(("q", "go on", "more"), (said[0], *said[2::2]), strict=True):
            branch += [{"role": "user", "content": question}, answer(text)]
        assert conversations_of(one)[1] == tokens_of(branch)


def test_a_response_picks_its_conversation_among_equal_ones() -> None:
    def solve(session: Session) -> None:
        create: Any = functools.partial(client_of(session).responses.create, model=session.model)
        equal = [create(input="q") for _ in range(3)]
        for i in (1, 0, 2):
            create(input=str(i), previous_response_id=equal[i].id)

    episodes, _ = run(solve, says("84"), **ONE)
    for one in episodes:
        assert [number for number, _ in turns_of(one)] == [0, 1, 2, 1, 0, 2]


def test_a_text_is_the_users_and_a_turn_may_be_cut() -> None:
    seen: list[Any] = []

    def solve(session: Session) -> str:
        create = client_of(session).responses.create
        first = create(model=session.model, input="q", max_output_tokens=3)
        assert first.incomplete_details is not None
        assert (first.status, first.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        second = create(
            model=session.model,
            input="and now?",
            previous_response_id=first.id,
            include=["message.output_text.logprobs"],
            reasoning={"effort": "low"},
        )
        (message,) = second.output
        assert message.type == "message" and message.content[0].type == "output_text"
        seen.append([one.logprob for one in message.content[0].logprobs or ()])
        return second.output_text

    episodes, _ = run(solve, says("eighty-four"), **ONE)
    assert [(one.failure, one.final_text) for one in episodes] == [("", "eighty-four")] * 2
    assert all(one == [-1.0] * len(one) and len(one) > 3 for one in seen)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"previous_response_id": "resp_7"}, ["previous_response_id", "resp_7"]),
    ({"input": 5}, ["input", "5"]),
    ({"input": [{"type": "reasoning", "summary": []}]}, ["input[0]", "reasoning"]),
    ({"input": [{"type": "item_reference", "id": "x"}]}, ["input[0]", "item_reference"]),
    ({"input": [5]}, ["input[0]", "5"]),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ["input[0]", "input_image"],
    ),
    ({"tools": [{"type": "web_search"}]}, ["tools", "web_search"]),
    ({"conversation": "x"}, ["conversation"]),
    ({"background": True}, ["background", "True"]),
    ({"text": {"format": {"type": "json_object"}}}, ["structured_outputs", "json_object"]),
    ({"tool_choice": "required", "tools": FLAT_TOOLS}, ["structured_outputs", "required"]),
    ({"tool_choice": {"type": "mcp"}, "tools": FLAT_TOOLS}, ["tool_choice", "mcp"]),
    ({"include": 5}, ["include", "5"]),
    ({"text": 5}, ["text", "5"]),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], words: list[str]) -> None:
    def solve(session: Session) -> str:
        client = client_of(session)
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{"model": session.model, "input": "q"} | change)
        assert re.search(mentions(*words), str(error.value)), str(error.value)
        return client.responses.create(model=session.model, input="q").output_text

    episodes, _ = run(solve, says("84"), **ONE)
    assert [(one.failure, one.final_text) for one in episodes] == [("", "84")] * 2


def test_other_instructions_are_another_conversation() -> None:
    """No instructions are inherited from the response before; each conversation has its own."""

    def solve(session: Session) -> None:
        create: Any = functools.partial(client_of(session).responses.create, model=session.model)
        first = create(input="q", instructions="Be brief.")
        others = [
            create(input="and now?", previous_response_id=first.id, instructions=one)
            for one in ("Be long.", None, "Be brief.")
        ]
        for one, instructions in zip(others, ("Be long.", None, "Be brief."), strict=True):
            create(input="go on", previous_response_id=one.id, instructions=instructions)

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        assert [number for number, _ in turns_of(one)] == [0, 1, 2, 0, 1, 2, 0]
        systems = ["Be brief.", "Be long.", ""]
        for number, (tokens, system) in enumerate(zip(conversations_of(one), systems, strict=True)):
            before = {0: 4, 1: 2, 2: 3}[number]
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            for question, i in (("q", 1), ("and now?", before), ("go on", before + 3)):
                messages += [{"role": "user", "content": question}, answer(f"{question} {i}")]
            assert tokens == tokens_of(messages)
