"""Agents that use what people build agents with: each holds the conversation of the plain client.

The packages are not among the requirements: without one, its test is skipped (`by_hand`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from gapo_megatron.rollout.agents import Session
from gapo_megatron.types import Episode
from tests.needs import by_hand
from tests.rollout.test_agents import (
    CALL,
    PROMPTS,
    SETTINGS,
    TOKENIZER,
    ask,
    run,
    says,
)
from tests.rollout.test_chat import ids_of

SCRIPT = says(f"Let me see. {CALL}", "84")
ONE = {"prompts": PROMPTS[:1], "settings": replace(SETTINGS, num_samples=2)}


def calculator(expression: str) -> str:
    """The value of an expression."""
    return str(eval(expression))


def opened(session: Session) -> tuple[str, str]:
    return f"You are number {session.sample}.", str(session.problem["prompt"])


def langchain(session: Session, *, streams: bool = False, **options: Any) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=session.model,
        base_url=session.base_url,
        api_key=session.api_key,  # type: ignore[arg-type]
        streaming=streams,
        temperature=0.3,
        **options,
    )
    decorated = tool(calculator)
    bound = model.bind_tools([decorated])
    system, user = opened(session)
    messages: list[Any] = [SystemMessage(system), HumanMessage(user)]
    messages.append(bound.invoke(messages))
    messages += [decorated.invoke(one) for one in messages[-1].tool_calls]
    return str(bound.invoke(messages).text)


def litellm(session: Session, *, streams: bool = False) -> str:
    import litellm

    def complete(messages: list[Any]) -> Any:
        answer = litellm.completion(
            model=f"openai/{session.model}",
            api_base=session.base_url,
            api_key=session.api_key,
            messages=messages,
            tools=[SCHEMA],
            temperature=0.3,
            stream=streams,
        )
        if streams:
            answer = litellm.stream_chunk_builder([*answer], messages=messages)
        return answer.choices[0].message

    system, user = opened(session)
    messages: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
    ]
    first = complete(messages)
    messages.append(first.model_dump())
    for call in first.tool_calls:
        value = calculator(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return str(complete(messages).content)


def openai_agents(session: Session, *, is_response: bool) -> str:
    import agents

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    kind = agents.OpenAIResponsesModel if is_response else agents.OpenAIChatCompletionsModel
    system, user = opened(session)
    agent = agents.Agent(
        name="solver",
        instructions=system,
        tools=[agents.function_tool(calculator)],
        model=kind(model=session.model, openai_client=client),
    )

    async def play() -> str:
        return str((await agents.Runner.run(agent, user)).final_output)

    return asyncio.run(play())


def pydantic_ai(session: Session, *, is_response: bool) -> str:
    import pydantic_ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    kind = models.OpenAIResponsesModel if is_response else models.OpenAIChatModel
    system, user = opened(session)
    agent = pydantic_ai.Agent(
        kind(session.model, provider=provider), instructions=system, tools=[calculator]
    )

    async def play() -> str:
        return str((await agent.run(user)).output)

    return asyncio.run(play())


def smolagents(session: Session) -> str:
    import smolagents

    model = smolagents.OpenAIModel(
        model_id=session.model, api_base=session.base_url, api_key=session.api_key
    )
    system, user = opened(session)
    messages = [
        smolagents.ChatMessage(role="system", content=[{"type": "text", "text": system}]),
        smolagents.ChatMessage(role="user", content=[{"type": "text", "text": user}]),
    ]
    return str(model.generate(messages).content)


SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


AGENTS: list[tuple[str, str, Callable[[Session], str]]] = [
    ("langchain", "langchain_openai", langchain),
    ("langchain, streamed", "langchain_openai", lambda one: langchain(one, streams=True)),
    (
        "langchain, responses",
        "langchain_openai",
        lambda one: langchain(one, use_responses_api=True),
    ),
    (
        "langchain, responses, streamed",
        "langchain_openai",
        lambda one: langchain(one, use_responses_api=True, streams=True),
    ),
    (
        "langchain, responses by id",
        "langchain_openai",
        lambda one: langchain(one, use_responses_api=True, use_previous_response_id=True),
    ),
    ("litellm", "litellm", litellm),
    ("litellm, streamed", "litellm", lambda one: litellm(one, streams=True)),
    ("openai agents", "agents", lambda one: openai_agents(one, is_response=False)),
    ("openai agents, responses", "agents", lambda one: openai_agents(one, is_response=True)),
    ("pydantic ai", "pydantic_ai", lambda one: pydantic_ai(one, is_response=False)),
    ("pydantic ai, responses", "pydantic_ai", lambda one: pydantic_ai(one, is_response=True)),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "solve"), [one[1:] for one in AGENTS], ids=[one[0] for one in AGENTS]
)
def test_a_framework_holds_the_same_conversation(
    package: str, solve: Callable[[Session], str]
) -> None:
    """Two turns with a tool: what follows the description of the tool is equal, to the token."""
    by_hand(package)
    episodes, _ = run(solve, SCRIPT, **ONE)
    call = ids_of(TOKENIZER, f"Let me see. {CALL}<|im_end|>")
    middle = "\n<|im_start|>user\n<tool_response>\n84\n</tool_response><|im_end|>\n"
    tail = [*ids_of(TOKENIZER, f"{middle}<|im_start|>assistant\n"), *ids_of(TOKENIZER, "84")]
    for one in episodes:
        assert (one.failure, one.final_text) == ("", "84")
        tokens = one.token_ids.tolist()
        begin, rest = _parts(one)
        assert rest == [*call, *tail, TOKENIZER.eos_token_id]
        text = TOKENIZER.decode(tokens[: len(begin)])
        assert text.index(f"You are number {one.sample}.") < text.index("<tools>")
        assert text.endswith(
            f"<|im_start|>user\n{one.prompt.row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        )


def _parts(episode: Episode) -> tuple[list[int], list[int]]:
    first = int(episode.is_sampled.argmax())
    return episode.token_ids[:first].tolist(), episode.token_ids[first:].tolist()


@pytest.mark.filterwarnings("ignore")
def test_smolagents_sends_what_the_plain_client_sends() -> None:
    by_hand("smolagents")

    def plain(session: Session) -> str:
        system, user = opened(session)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
        ]
        return str(ask(session, messages).content)

    expected, _ = run(plain, says("84"), **ONE)
    episodes, _ = run(smolagents, says("84"), **ONE)
    for one, other in zip(episodes, expected, strict=True):
        assert (one.failure, one.final_text) == ("", "84")
        assert one.token_ids.tolist() == other.token_ids.tolist()
