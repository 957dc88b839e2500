"""What an agent asks of a turn: texts that end it, its length. And what clients send besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gapo_megatron.rollout.agents import Session
from gapo_megatron.rollout.engine import Request
from gapo_megatron.types import Episode
from tests.rollout.test_agents import (
    CALL,
    EOS,
    FURTHER,
    PROMPTS,
    QUESTION,
    SETTINGS,
    TOKENIZER,
    TOOLS,
    ask,
    client_of,
    run,
    says,
)
from tests.rollout.test_chat import ids_of
from tests.scripted_engine import ScriptedEngine
from tests.waiting import HANG_S

ONE = {"prompts": PROMPTS[:1], "settings": replace(SETTINGS, num_samples=2)}


def would_say(*turns: str) -> Callable[[Request], list[int]]:
    """What the n-th turn of an episode would be up to EOS, each piece up to a stop token."""
    whole = [[*ids_of(TOKENIZER, turn), EOS] for turn in turns]
    begun: dict[tuple[int, ...], list[int]] = {}
    """What is left to say after some tokens: of the turn that they are in."""
    numbers: dict[str, int] = {}

    def script(request: Request) -> list[int]:
        before = tuple([*request.response_ids.tolist(), hash(request.name)])
        if before in begun:
            rest = begun[before]
        else:
            number = numbers[request.name] = numbers.get(request.name, -1) + 1
            rest = whole[number]
        ends = [i for i, one in enumerate(rest) if one in request.stop_ids]
        said = rest[: ends[0] + 1]
        begun[(*before[:-1], *said, before[-1])] = rest[len(said) :]
        return said

    return script


def turns_of(episode: Episode) -> list[list[int]]:
    """The tokens of each of the model's turns."""
    bounds = np.flatnonzero(np.diff(np.r_[False, episode.is_sampled, False]))
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [episode.token_ids[a:b].tolist() for a, b in pairs]


@pytest.mark.parametrize("stop", ["\nObservation:", ["zzz", "\nObservation:", "Observation:"]])
def test_a_text_of_the_request_ends_its_turn(stop: Any, tmp_path: Path) -> None:
    """The sampled tokens stay; the message ends before the text, and the next request repeats it.

    A resumed run reads from its journal where the turn ended.
    """
    made_up = "Search: x > 1.\nObservation: I make it up: 85"

    def asks_twice(session: Session) -> str:
        answer = client_of(session).chat.completions.create(
            model=session.model, messages=[QUESTION], stop=stop
        )
        (first,) = answer.choices
        assert (first.message.content, first.finish_reason) == ("Search: x > 1.", "stop")
        return str(ask(session, [QUESTION, first.message, FURTHER]).content)

    engine = ScriptedEngine(would_say(made_up, made_up))
    episodes, _ = run(asks_twice, lambda _: [], engine=engine, run_dir=tmp_path, **ONE)
    for one in episodes:
        # The second turn had no such text.
        assert (one.failure, one.final_text, one.truncated) == ("", made_up, False)
        first, second = turns_of(one)
        whole = [*ids_of(TOKENIZER, made_up), EOS]
        assert second == whole and first == whole[: len(first)]
        assert TOKENIZER.decode(first) == "Search: x > 1.\nObservation:"
        # The template ends a turn that the model has not ended.
        middle = TOKENIZER.decode(one.token_ids).partition("Observation:")[2]
        assert middle.startswith("<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n")
    assert len(engine.asked) > 4  # ":" may complete the text, and did not always

    again = ScriptedEngine(would_say(made_up, made_up))
    repeated, _ = run(lambda session: "other", lambda _: [], engine=again, run_dir=tmp_path, **ONE)
    for one, other in zip(repeated, episodes, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.final_text, one.failure) == (made_up, "")


def test_the_length_of_a_turn_is_the_requests_own() -> None:
    """Also where tokens that might have completed a text have interrupted it."""
    asked: list[dict[str, Any]] = [
        {"max_tokens": 9, "stop": [">>>"]},
        {"max_completion_tokens": 7, "max_tokens": 1, "stop": [">"]},
        {},
    ]
    texts = ("x>1; y>2; and so on", "a b c d>", "a b c d e f g h")
    whole = [ids_of(TOKENIZER, one) for one in texts]
    assert len(whole[0]) > 9 and len(whole[1]) == 7 < len(whole[2])
    reasons: list[str] = []

    def solve(session: Session) -> str:
        messages: list[Any] = [QUESTION]
        for one in asked:
            answer = client_of(session).chat.completions.create(
                model=session.model, messages=messages, **one
            )
            (choice,) = answer.choices
            reasons.append(choice.finish_reason)
            messages += [choice.message, FURTHER]
        return str(choice.message.content)

    engine = ScriptedEngine(would_say(*texts))
    episodes, _ = run(solve, lambda _: [], engine=engine, **ONE)
    for one in episodes:
        assert not one.failure and not one.truncated and one.final_text == texts[2]
        # The second is complete: the token that completes its text is the last that it may have.
        assert turns_of(one) == [whole[0][:9], whole[1], [*whole[2], EOS]]
    assert sorted(reasons) == sorted(["length", "stop", "stop"] * 2)
    assert len(engine.asked) > 3 * len(episodes)


def test_the_room_in_the_response_is_the_smaller_limit() -> None:
    """A turn that fills the response truncates it, whatever its own limit is."""

    def solve(session: Session) -> None:
        ask(session, [QUESTION], max_tokens=2 + session.sample)

    opening = TOKENIZER.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    room = len(ids_of(TOKENIZER, opening)) - 1 + 3
    settings = replace(SETTINGS, num_samples=3, max_response_tokens=room)
    texts = would_say("one two three four five")
    (shorter, equal, longer), _ = run(solve, texts, settings=settings, prompts=PROMPTS[:1])
    assert [len(one.token_ids) for one in (shorter, equal, longer)] == [room - 1, room, room]
    assert [one.truncated for one in (shorter, equal, longer)] == [False, True, True]


def test_a_repeated_request_may_have_another_temperature() -> None:
    def solve(session: Session) -> str:
        url = f"{session.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {session.api_key}"}
        body = {"model": session.model, "messages": [QUESTION]}

        def post(retry: str, **more: Any) -> httpx.Response:
            headers["x-stainless-retry-count"] = retry
            return httpx.post(url, json=body | more, headers=headers, timeout=HANG_S)

        first = post("0", temperature=0.7)
        assert post("1", temperature=1, seed=5, user="me", tools=None).json() == first.json()
        assert post("1", stop=["x"]).json()["id"] != first.json()["id"]  # another request
        return str(first.json()["choices"][0]["message"]["content"])

    episodes, _ = run(solve, says("84"), **ONE)
    assert [(one.failure, one.final_text) for one in episodes] == [("", "84")] * 2


def test_what_clients_add_to_requests_and_messages_changes_nothing() -> None:
    """Fields as openai, LangChain, LiteLLM and others send them."""
    plain: list[Any] = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
    ]
    added: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {**QUESTION, "name": None},
    ]
    fields = {
        **{"n": 1, "stop": None, "tool_choice": "auto", "parallel_tool_calls": None},
        **{"logit_bias": {}, "modalities": ["text"], "top_logprobs": 0, "functions": None},
        **{"response_format": {"type": "text"}, "metadata": {}, "store": False, "audio": None},
        **{"reasoning_effort": "low", "verbosity": "low", "user": "x", "service_tier": "auto"},
    }

    def solve(session: Session) -> str:
        opening, more = (plain, {}) if session.sample == 0 else (added, fields)
        client = client_of(session)
        answer = client.post(
            "/chat/completions",
            body={"model": session.model, "messages": opening, "tools": TOOLS, **more},
            cast_to=httpx.Response,
        ).json()
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result: dict[str, Any] = {"role": "tool", "tool_call_id": call["id"], "content": "84"}
        if session.sample:
            call["index"], call["extra_content"] = 0, None
            message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
            message |= {"reasoning_content": "", "provider_specific_fields": {}, "name": "agent"}
            message["content"] = [{"type": "text", "text": message["content"] + "\n"}]
            result["content"] = [{"type": "text", "text": "84"}]
        messages = [*opening, message, result]
        answer = client.post(
            "/chat/completions",
            body={"model": session.model, "messages": messages, "tools": TOOLS, **more},
            cast_to=httpx.Response,
        ).json()
        return str(answer["choices"][0]["message"]["content"])

    (one, other), _ = run(solve, says(f"Let me see. {CALL}", "84"), **ONE)
    assert (one.failure, one.final_text) == (other.failure, other.final_text) == ("", "84")
    assert one.token_ids.tolist() == other.token_ids.tolist()
