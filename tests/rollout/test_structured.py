"""Turns that a request holds to a grammar: real vLLM, the real `openai` client, random weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.agents import Session
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.agents.grammar import grammar_of
from gapo_megatron.rollout.calls import in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import begin, generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode
from tests.acting import acting_of
from tests.configs import config_of
from tests.messages import mentions
from tests.rollout.test_agents import EOS, FURTHER, PROMPTS, QUESTION, TOKENIZER, client_of
from tests.rollout.test_chat import ids_of
from tests.rollout_setup import SIZES, TOLERANCE, build_engine, process_group

MOST_TOKENS = 1500
CONFIG = {
    "model": {"precision": "fp32"},
    "data": {"max_prompt_tokens": 8},
    "batch": {"max_tokens_per_microbatch": 2000},
    "rollout": {"max_response_tokens": MOST_TOKENS, "enforce_eager": True},
    "environment": {"structured_outputs": True},
}
SETTINGS = SamplingSettings(num_samples=4, max_response_tokens=MOST_TOKENS, seed=7, step=3)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "unit": {"enum": ["kg", "cm"]}},
    "required": ["ok", "unit"],
    "additionalProperties": False,
}


def tool(name: str, *values: str) -> dict[str, Any]:
    parameters = {"properties": {"what": {"enum": [*values]}}, "required": ["what"]}
    parameters |= {"type": "object", "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("look", "up", "down"), tool("go", "left", "right")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(TOKENIZER), "max_position_embeddings": 2048}
    sizes["eos_token_id"] = EOS
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    config = config_of(CONFIG, {"model": {"hf_dir": str(folder)}})
    with process_group():
        engine = build_engine(config)
        yield engine
        engine.close()


def play(engine: RolloutEngine, solve: Any) -> list[Episode]:
    agents = Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig(structured_outputs=True))
    acting = acting_of(
        agents,
        eos_token_ids=[EOS],
        run=in_thread,
        max_response_tokens=MOST_TOKENS,
        structured_outputs=True,
    )
    calls = acting.calls("step_3", engine.replicas)
    groups = generate(engine, [begin(agents, PROMPTS[0])], SETTINGS, calls=calls)
    assert groups is not None
    return [*groups[0]]


def test_a_turn_is_held_to_its_grammar(engine: RolloutEngine) -> None:
    asked: dict[int, dict[str, Any]] = {
        0: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        1: {"tools": TOOLS, "tool_choice": "required"},
        2: {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
        3: {"response_format": {"type": "json_object"}, "max_tokens": 4},
    }
    asked[0] |= {"logprobs": True, "top_logprobs": 2}
    for one in asked.values():
        one["temperature"] = 0.0  # overruled, and so the samples differ

    def solve(session: Session) -> str:
        client = client_of(session)
        create = functools.partial(client.chat.completions.create, model=session.model)
        first = create(messages=[QUESTION], **asked[session.sample]).choices[0]
        # The next turn is free, and may be of any length.
        tools = {"tools": TOOLS} if session.sample in (1, 2) else {}
        create(messages=[QUESTION, first.message, FURTHER], max_tokens=20, **tools)
        entries = first.logprobs.model_dump()["content"] if first.logprobs else None
        return str(json.dumps([first.finish_reason, first.message.model_dump(), entries]))

    episodes = play(engine, solve)
    assert [one.failure for one in episodes] == [""] * 4
    said = [json.loads(one.final_text or "") for one in episodes]
    found = json.loads(said[0][1]["content"])
    assert found.keys() == {"ok", "unit"} and found["ok"] in (True, False)
    assert found["unit"] in ("kg", "cm") and said[0][0] == "stop"
    pairs = [one["top_logprobs"] for one in said[0][2]]
    assert {len(one) for one in pairs} == {2} and said[3][2] is None
    # Where the grammar allows one token alone, any other is excluded.
    forced = [first["logprob"] == 0 for first, _ in pairs]
    assert forced == [second["logprob"] == -9999 for _, second in pairs]
    assert {*forced} == {True, False}
    for number, names in ((1, {"look", "go"}), (2, {"go"})):
        (call,) = said[number][1]["tool_calls"]
        assert said[number][0] == "tool_calls" and call["function"]["name"] in names
        (value,) = json.loads(call["function"]["arguments"]).values()
        assert value in ("up", "down", "left", "right")
    assert said[3][0] == "length" and said[3][1]["content"].lstrip().startswith("{")

    # A free turn has the policy's log-probs; one with a grammar those of fewer tokens.
    rollouts = Rollouts.of(
        [np.asarray(one.prompt.token_ids, np.int32) for one in episodes],
        [one.token_ids for one in episodes],
        response_masks=[one.response_mask for one in episodes],
    )
    for one, scores in zip(episodes, engine.score(rollouts), strict=True):
        log_probs = one.log_probs[one.is_sampled]
        first_turn = int(np.flatnonzero(np.diff(np.flatnonzero(one.is_sampled)) > 1)[0]) + 1
        assert np.abs(log_probs - scores)[first_turn:].max() < TOLERANCE
        assert len(scores) > first_turn
        assert (log_probs - scores)[:first_turn].min() > -TOLERANCE
        assert (log_probs - scores)[:first_turn].max() > 1
        assert (log_probs <= 0).all()


def test_with_tools_a_turn_in_a_format_may_be_a_call(engine: RolloutEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "x"}}

    def solve(session: Session) -> str:
        answer = client_of(session).chat.completions.create(
            model=session.model, messages=[QUESTION], tools=TOOLS, response_format=schema
        )
        message = answer.choices[0].message
        found = [json.loads(one.function.arguments) for one in message.tool_calls or ()]
        return json.dumps(found[0] if found else json.loads(message.content))

    for one in play(engine, solve):
        assert json.loads(one.final_text or "").keys() in ({"what"}, {"ok", "unit"}), one

    # Few samples may all be of one kind: the grammar itself has each call, and the answer.
    tag = grammar_of(schema, tool_choice="auto", tools=TOOLS, is_allowed=True)
    chosen = json.loads(tag)["format"]
    *called, answer = chosen["elements"]
    assert (chosen["type"], len(called), answer["json_schema"]) == ("or", len(TOOLS), SCHEMA)
    for one, call in zip(TOOLS, called, strict=True):
        begin, arguments, _ = call["elements"]
        assert begin["value"].startswith(f'<tool_call>\n{{"name": "{one["function"]["name"]}"')
        assert arguments["json_schema"] == one["function"]["parameters"]


def test_the_tokenizers_eos_ends_no_request_that_does_not_name_it(engine: RolloutEngine) -> None:
    """vLLM has the tokenizer, for the grammars; `data.end_tokens` decides where a turn ends."""
    for number in range(8):
        start = np.empty(0, np.int32)
        engine.add(Request(str(number), (5,), start, 300, number, 1.0, 1.0, stop_ids=(7,)))
    found = []
    while len(found) < 8:
        found += engine.poll()
    assert any(EOS in one.token_ids[:-1].tolist() for one in found)
    assert all(one.reason == "length" or one.token_ids[-1] == 7 for one in found)


def test_the_responses_api_has_the_same_grammars(engine: RolloutEngine) -> None:
    named = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    flat: Any = [{"type": "function", **one["function"]} for one in TOOLS]

    def solve(session: Session) -> str:
        create: Any = client_of(session).responses.create
        first = create(model=session.model, input="q", text={"format": named}, tools=[])
        second = create(
            model=session.model,
            input="go",
            previous_response_id=first.id,
            max_output_tokens=9,
        )
        assert second.output_text and json.loads(first.output_text).keys() == {"ok", "unit"}
        return str(first.output_text)

    def calls(session: Session) -> str:
        create: Any = client_of(session).responses.create
        choice = {"type": "function", "name": "go"}
        found = create(model=session.model, input="q", tools=flat, tool_choice=choice)
        (call,) = found.output
        return str(call.name)

    assert not any(one.failure for one in play(engine, solve))
    assert {one.final_text for one in play(engine, calls)} == {"go"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, ["response_format", "schema"]),
        ({"response_format": {"type": "grammar"}}, ["response_format", "grammar"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            ["response_format", "grammar"],
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
                }
            },
            ["response_format", "xgrammar"],
        ),
        ({"tool_choice": "required"}, ["tool_choice", "required", "tools"]),
        ({"tool_choice": "must", "tools": TOOLS}, ["tool_choice", "must"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS},
            ["tool_choice", "fly"],
        ),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, ["tool_choice", "custom"]),
        ({"response_format": {"type": "json_object"}, "stop": ["x"]}, ["stop", "x"]),
    ],
)
def test_what_no_grammar_can_be_made_of_is_refused(
    engine: RolloutEngine, change: dict[str, Any], words: list[str]
) -> None:
    """By an error to the agent: the engine, and the other episodes, go on."""

    def solve(session: Session) -> str:
        create = functools.partial(
            client_of(session).chat.completions.create,
            model=session.model,
            messages=[QUESTION],
            max_tokens=3,
        )
        if session.sample:
            create()
            return ""
        with pytest.raises(openai.BadRequestError, match=mentions(*words)):
            create(**change)
        return str(create().choices[0].finish_reason)

    first, *others = play(engine, solve)
    assert first.failure == "" and first.final_text in ("length", "stop")
    assert not any(one.failure for one in others)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": {"old_log_probs": "rollout"}}, ["objective.old_log_probs", "rollout"]),
        (
            {"objective": {"importance_weights": "token"}},
            ["objective.importance_weights", "token"],
        ),
        ({"rollout": {"draft": "ngram"}}, ["rollout.draft", "ngram"]),
        ({"rollout": {"engine": "engine.py:Engine"}}, ["rollout.engine", "engine.py:Engine"]),
    ],
)
def test_what_needs_the_policys_log_probs_is_refused(
    changes: dict[str, Any], words: list[str]
) -> None:
    settings: list[dict[str, Any]] = [CONFIG, changes]
    with pytest.raises((ConfigError, ValueError), match=mentions(*words, "structured_outputs")):
        config_of(*settings)


def test_only_an_agent_can_ask_for_a_grammar() -> None:
    config = EnvironmentConfig(kind="tools", structured_outputs=True)
    with pytest.raises(ConfigError, match=mentions("environment.structured_outputs", "tools")):
        environments.check(config)


def test_several_conversations_are_those_of_the_engine(engine: RolloutEngine) -> None:
    """Two choices, one of them continued, and a rewritten history: each with its own log-probs."""

    def solve(session: Session) -> None:
        create: Any = functools.partial(
            client_of(session).chat.completions.create, model=session.model, max_tokens=12
        )
        first, second = create(messages=[QUESTION], n=2).choices
        create(messages=[QUESTION, second.message, FURTHER])
        create(messages=[QUESTION, {"role": "assistant", "content": "no"}, FURTHER])
        create(messages=[QUESTION, first.message, FURTHER])

    episodes = play(engine, solve)
    assert [one.failure for one in episodes] == [""] * 4
    prompts, responses, masks, log_probs = [], [], [], []
    for one in episodes:
        assert one.conversations is not None
        starts = np.flatnonzero(np.diff(one.is_sampled.astype(int)) == 1) + 1
        assert one.conversations[starts].tolist() == [0, 1, 1, 2, 0]
        opening = TOKENIZER.apply_chat_template(
            [QUESTION], tokenize=False, add_generation_prompt=True
        )
        for number in range(3):
            (places,) = np.nonzero(one.conversations == number)
            places = places[number > 0 :]  # the first token of the template begins the others, too
            tokens, is_sampled = one.token_ids[places], one.is_sampled[places]
            prompts.append(np.asarray(one.prompt.token_ids, np.int32))
            responses.append(tokens)
            masks.append(is_sampled)
            log_probs.append(one.log_probs[places][is_sampled])
            if number < 2:
                read = ids_of(TOKENIZER, opening)[1:]
                assert tokens[: len(read)].tolist() == read and is_sampled[len(read)]
    rollouts = Rollouts.of(prompts, responses, response_masks=masks)
    for sampled, scores in zip(log_probs, engine.score(rollouts), strict=True):
        assert np.abs(sampled - scores).max() < TOLERANCE
