"""Agents with the real `openai` client: their requests are turns of an episode."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import openai

from gapo_megatron.rollout.agents import Session
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.calls import in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import begin, generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Prompt
from tests.acting import acting_of
from tests.rollout.test_chat import ids_of, tokenizer_of
from tests.scripted_engine import ScriptedEngine

TOKENIZER = tokenizer_of("qwen2_5_training")
EOS = TOKENIZER.eos_token_id
PROMPTS = [
    Prompt(str(i), (5,), answer="84", level="easy", row={"prompt": f"{i} * 7"}) for i in range(3)
]
SETTINGS = SamplingSettings(num_samples=4, max_response_tokens=2000, seed=7, step=3)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'


def client_of(session: Session) -> openai.OpenAI:
    return openai.OpenAI(base_url=session.base_url, api_key=session.api_key)


def says(*turns: str) -> Callable[[Request], Sequence[int]]:
    """The n-th turn of every episode."""

    def script(request: Request) -> list[int]:
        number = request.response_ids.tolist().count(EOS) // 3  # one ends the turn, two around it
        return [*ids_of(TOKENIZER, turns[min(number, len(turns) - 1)]), EOS]

    return script


def run(
    solve: Callable[..., Any],
    script: Callable[[Request], Sequence[int]],
    *,
    settings: SamplingSettings = SETTINGS,
    prompts: Sequence[Prompt] = PROMPTS,
    **options: Any,
) -> tuple[list[Episode], Agents]:
    agents = Agents(TOKENIZER, functools.partial(solve))
    acting = acting_of(
        agents, eos_token_ids=[EOS], run=in_thread, max_response_tokens=2000, **options
    )
    engine = ScriptedEngine(script)
    calls = acting.calls("step_3", engine.replicas)
    groups = generate(engine, [begin(agents, one) for one in prompts], settings, calls=calls)
    assert groups is not None and calls.num_open == 0
    return [one for group in groups for one in group], agents


def ask(session: Session, messages: list[Any], **options: Any) -> Any:
    answer = client_of(session).chat.completions.create(
        model=session.model, messages=messages, **options
    )
    return answer.choices[0].message


def calculates(session: Session) -> str:
    """Two turns with a tool; the first message differs among the samples."""
    messages: list[Any] = [
        {"role": "system", "content": f"You are number {session.sample}."},
        {"role": "user", "content": session.problem["prompt"]},
    ]
    message = ask(session, messages, tools=TOOLS)
    (call,) = message.tool_calls
    value = eval(json.loads(call.function.arguments)["expression"])
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(value)}]
    return "It is " + ask(session, messages, tools=TOOLS).content


def test_the_tokens_are_the_conversation_of_the_template() -> None:
    episodes, agents = run(calculates, says(f"Let me see. {CALL}", "84"))
    assert len(episodes) == 12
    for one in episodes:
        assert (one.failure, one.final_text) == ("", "It is 84")
        assert agents.judge(one) == ("It is 84", "84")
        messages = [
            {"role": "system", "content": f"You are number {one.sample}."},
            {"role": "user", "content": f"{one.prompt.id} * 7"},
        ]
        options = {"tools": TOOLS, "tokenize": False}
        opening = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, **options)
        said = ids_of(TOKENIZER, f"Let me see. {CALL}")
        tail = "<|im_end|>\n<|im_start|>user\n<tool_response>\n84\n</tool_response><|im_end|>\n"
        tail = ids_of(TOKENIZER, tail + "<|im_start|>assistant\n")
        expected = [*ids_of(TOKENIZER, opening), *said, *tail, *ids_of(TOKENIZER, "84"), EOS]
        assert [*one.prompt.token_ids, *one.token_ids.tolist()] == expected
        sampled = one.token_ids[one.is_sampled].tolist()
        assert sampled == [*said, EOS, *ids_of(TOKENIZER, "84"), EOS]
        assert (one.log_probs[one.is_sampled] == -1).all()
        assert (one.log_probs[~one.is_sampled] == 0).all()
