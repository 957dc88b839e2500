"""Agents with the real `openai` client: their requests are turns of an episode."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.agents import Session, live
from gapo_megatron.rollout.agents.conversations import Conversations
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.live import AgentError
from gapo_megatron.rollout.calls import Acting, in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import Hooks, begin, generate
from gapo_megatron.rollout.journal import JOURNAL_FOLDER
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests.acting import acting_of
from tests.messages import mentions
from tests.rollout.test_chat import ids_of, tokenizer_of
from tests.scripted_engine import ScriptedEngine
from tests.tokenizers import byte_level
from tests.waiting import HANG_S, wait_until

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
    agents: Agents | None = None,
    settings: SamplingSettings = SETTINGS,
    prompts: Sequence[Prompt] = PROMPTS,
    tokenizer: Any = TOKENIZER,
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> tuple[list[Episode], Agents]:
    agents = agents or Agents(tokenizer, functools.partial(solve), EnvironmentConfig())
    acting = acting_of(
        agents,
        eos_token_ids=[EOS],
        run=in_thread,
        max_response_tokens=2000,
        tokenizer=tokenizer,
        **options,
    )
    engine = engine or ScriptedEngine(script)
    calls = acting.calls("step_3", engine.replicas)
    groups = generate(engine, [begin(agents, one) for one in prompts], settings, calls=calls)
    assert groups is not None and calls.num_open == 0
    return [one for group in groups for one in group], agents


def ask(session: Session, messages: list[Any], **options: Any) -> Any:
    answer = client_of(session).chat.completions.create(
        model=session.model, messages=messages, **options
    )
    return answer.choices[0].message


def test_an_agent_gets_the_row_without_its_answer() -> None:
    row = {"prompt": "6 * 7", "reward_model": {"ground_truth": "42", "style": "rule"}}
    prompt = Prompt("a", (5,), "42", row=row, answer_key="reward_model.ground_truth")
    given: list[Any] = []

    def solve(session: Session) -> str:
        given.append(session.problem)
        return str(ask(session, [QUESTION]).content)

    run(solve, says("42"), prompts=[prompt])
    expected = {"id": "a", "level": "", "prompt": "6 * 7", "reward_model": {"style": "rule"}}
    assert given and all(one == expected for one in given)
    assert prompt.row == row


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


def once(session: Session) -> None:
    ask(session, [{"role": "user", "content": "q"}])


def test_hundreds_of_sessions_wait_at_once() -> None:
    """Every agent asks before the first is answered; plain and `async` agents alike."""
    settings = replace(SETTINGS, num_samples=70)
    gate = threading.Barrier(210)

    async def solve(session: Session) -> str:
        client = openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),  # 30 ms less for each
        )
        messages: Any = [{"role": "user", "content": "q"}]
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        gate.wait(HANG_S)  # all have begun, and none has ended
        assert answer.choices[0].finish_reason == "stop"
        return f"{session.problem['id']}/{session.sample}"

    episodes, _ = run(solve, says("84"), settings=settings, max_concurrent=300, call_timeout_s=900)
    assert [one.final_text for one in episodes] == [f"{i}/{k}" for i in range(3) for k in range(70)]


def test_an_answer_has_counts_and_log_probs() -> None:
    seen: list[Any] = []

    def solve(session: Session) -> None:
        client = client_of(session)
        assert [one.id for one in client.models.list()] == [session.model]
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
        seen.append(
            client.chat.completions.create(model=session.model, messages=messages, logprobs=True)
        )

    (episode, *_), agents = run(solve, says("84"), prompts=PROMPTS[:1])
    answer = seen[0]
    num_turn = int(episode.is_sampled.sum())
    assert answer.usage.completion_tokens == num_turn
    assert answer.usage.total_tokens == 1 + len(episode.token_ids)
    entries = answer.choices[0].logprobs.content
    assert "".join(one.token for one in entries) == "84<|im_end|>"
    assert [one.logprob for one in entries] == [-1.0] * num_turn
    assert episode.final_text is None and agents.judge(episode) == ("84", "84")


def test_sampling_settings_of_a_request_are_overruled_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def solve(session: Session) -> None:
        ask(session, [{"role": "user", "content": "q"}], temperature=0.25, seed=3, user="me")

    episodes, _ = run(solve, says("eighty-four"))
    assert not any(one.failure or one.truncated for one in episodes)
    for name, value in {"temperature": 0.25, "seed": 3}.items():
        assert sum(f"{name} = {value}" in one for one in caplog.messages) == 1


QUESTION = {"role": "user", "content": "q"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
FURTHER = {"role": "user", "content": "and now?"}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"n": 0}, ["n", "0", "16"]),
    ({"n": 17}, ["n", "17", "16"]),
    ({"n": "2"}, ["n", "2", "16"]),
    ({"response_format": {"type": "json_object"}}, ["response_format", "json_object"]),
    ({"stop": [5]}, ["stop", "5"]),
    ({"stop": ["a", "</töol>"]}, ["stop", "</töol>", "ASCII"]),
    ({"stop": [str(i) for i in range(17)]}, ["stop", "17", "16"]),
    ({"stop": ""}, ["stop", "1"]),
    ({"max_tokens": 0}, ["max_tokens", "0", "1"]),
    ({"max_tokens": 5, "max_completion_tokens": "x"}, ["max_completion_tokens", "x"]),
    ({"tool_choice": "required"}, ["tool_choice", "required"]),
    ({"logit_bias": {"5": 1}}, ["logit_bias"]),
    ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs", "21", "20"]),
    ({"model": "gpt-4o"}, ["gpt-4o", "policy"]),
    ({"messages": []}, ["messages"]),
    ({"messages": [{"role": "critic", "content": "q"}]}, ["role", "critic"]),
    (
        {"messages": [QUESTION, {"role": "assistant", "refusal": "no"}, QUESTION]},
        ["messages[1]", "refusal"],
    ),
    ({"messages": [QUESTION, {"role": "assistant", "content": "a"}]}, ["messages", "assistant"]),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": 5}, QUESTION]},
        ["messages[1].tool_calls", "5", "list"],
    ),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        ["messages[0].content", "image_url"],
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, ["tools", "custom"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], words: list[str]) -> None:
    """With an error that the client does not try again; the verdict's reason says it."""
    seen: list[openai.APIStatusError] = []

    def solve(session: Session) -> None:
        request = {"model": session.model, "messages": [QUESTION]} | change
        try:
            client_of(session).chat.completions.create(**request)
        except openai.APIStatusError as error:
            seen.append(error)
            raise

    episodes, _ = run(solve, says("84"), prompts=PROMPTS[:1])
    assert len(seen) == 4 and {one.status_code for one in seen} <= {400, 404}
    for one, error in zip(episodes, seen, strict=True):
        assert re.search(mentions(*words), str(error)) and re.search(mentions(*words), one.failure)
        assert one.token_ids.tolist() == [*one.prompt.token_ids] and not one.is_sampled.any()


def test_an_agent_goes_on_after_a_refusal() -> None:
    """The request has nothing new: the last message is the model's."""

    def solve(session: Session) -> str:
        message = ask(session, [QUESTION])
        said = [QUESTION, {"role": "assistant", "content": message.content}]
        try:
            ask(session, said)
        except openai.BadRequestError as error:
            assert re.search(mentions("messages", "assistant"), str(error))
            if session.sample:
                raise
        return ask(
            session, [*said[:1], {**said[1], "content": f" {message.content}\n"}, FURTHER]
        ).content

    (good, *bad), _ = run(solve, says("84", "12"), prompts=PROMPTS[:1])
    assert (good.failure, good.final_text) == ("", "12")
    assert all(re.search(mentions("refused", "messages", "assistant"), one.failure) for one in bad)


def test_a_call_with_half_a_character_is_text() -> None:
    """JSON can spell it, but no client can be sent it: not a failure of the server."""
    said = CALL.replace("12 * 7", r"\ud83d")

    def solve(session: Session) -> str:
        message = ask(session, [QUESTION], tools=TOOLS)
        assert message.tool_calls is None
        return str(message.content)

    episodes, _ = run(solve, says(said), prompts=PROMPTS[:1])
    assert [(one.failure, one.final_text) for one in episodes] == [("", said)] * 4


def test_half_a_character_of_an_agent_is_replaced() -> None:
    """As a tool brings it from the web; clients send it as an escape."""

    def solve(session: Session) -> str:
        url = f"{session.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {session.api_key}"}

        tool = TOOLS[0]["function"] | {"description": "counts \ude00"}
        tools = [{"type": "function", "function": tool}]

        def post(messages: list[Any]) -> Any:
            body = json.dumps({"model": session.model, "messages": messages, "tools": tools})
            answer = httpx.post(url, content=body, headers=headers, timeout=HANG_S)
            return answer.raise_for_status().json()["choices"][0]["message"]

        function = {"name": "calculator", "arguments": r'{"expression": "\ud83d"}'}
        other = {"id": "call_9", "type": "function", "function": function}
        before = [
            {"role": "user", "content": "before"},
            {"role": "assistant", "content": "", "tool_calls": [other]},
            {"role": "tool", "tool_call_id": "call_9", "content": "error"},
        ]
        asked = [*before, {"role": "user", "content": "what is \ud83d?"}]
        said = post(asked)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "\ude00!"}
        return str(post([*asked, said, result])["content"])

    (one, *_), _ = run(solve, says("", CALL, "84"), prompts=PROMPTS[:1])
    assert (one.failure, one.final_text) == ("", "84")
    whole = TOKENIZER.decode(one.token_ids)
    assert "what is ??" in whole and "\n?!\n" in whole and whole.count("system\n") == 1


def test_a_key_of_no_session_is_refused() -> None:
    def solve(session: Session) -> str:
        number, _, secret = session.api_key.partition("-")
        statuses = []
        for key in (
            "x",
            f"{number}-x",
            f"{int(number) + 1000}-{secret}",
            session.api_key + "x",
        ):
            client = openai.OpenAI(base_url=session.base_url, api_key=key)
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            statuses.append(httpx.get(f"{session.base_url}/models").status_code)
        assert httpx.get(session.base_url.removesuffix("/v1")).status_code == 404
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for body in (b"{", b"[]", b"5", b"x" * (2**24 + 1)):
            url = f"{session.base_url}/chat/completions"
            statuses.append(
                httpx.post(url, content=body, headers=headers, timeout=HANG_S).status_code
            )
        return str(statuses)

    (one,), _ = run(
        solve, says("84"), prompts=PROMPTS[:1], settings=replace(SETTINGS, num_samples=1)
    )
    assert "before the model's first turn" in one.failure
    assert one.final_text == str([401] * 4 + [400, 400, 400, 413])


@pytest.mark.parametrize(
    ("given", "outside"),
    [
        ({}, ["corp.internal", "example.org"]),
        ({"NO_PROXY": "corp.internal"}, ["example.org"]),
        ({"no_proxy": "corp.internal, 127.0.0.1"}, ["example.org"]),
        ({"no_proxy": "corp.internal", "NO_PROXY": "example.org"}, ["example.org"]),
        ({"NO_PROXY": "*"}, []),
        ({"no_proxy": "*"}, []),
    ],
)
def test_exceptions_from_a_proxy_stay(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], outside: list[str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
        if name in given:
            monkeypatch.setenv(name, given[name])
    Agents(TOKENIZER, functools.partial(once), EnvironmentConfig())
    hosts = ["127.0.0.1", "corp.internal", "example.org"]
    assert [one for one in hosts if not urllib.request.proxy_bypass(one)] == outside


@pytest.mark.parametrize("name", ["read", "place"])
def test_a_request_that_fails_for_any_reason_is_answered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Conversations, name)

    def fails_at_first(conversations: Conversations, given: Any, **options: Any) -> Any:
        if "fails" in str(given):
            raise ZeroDivisionError("no such case")
        return real(conversations, given, **options)

    monkeypatch.setattr(Conversations, name, fails_at_first)

    def solve(session: Session) -> str:
        with pytest.raises(openai.BadRequestError, match="no such case"):
            ask(session, [{"role": "user", "content": "fails"}])
        return ask(session, [QUESTION]).content

    episodes, _ = run(solve, says("84"), prompts=PROMPTS[:1])
    assert [one.final_text for one in episodes] == ["84"] * 4


# --- broken agents --------------------------------------------------------------------------------


def _raises(session: Session) -> None:
    once(session)
    raise ValueError("no such tool")


def _leaves(session: Session) -> None:
    once(session)
    sys.exit(3)


def _hangs(session: Session) -> None:
    once(session)
    threading.Event().wait()


def _hangs_at_once(session: Session) -> None:
    threading.Event().wait()


def _floods(session: Session) -> None:
    ask(session, [{"role": "user", "content": "many words " * 5_000}])


def _never_asks(session: Session) -> str:
    return "84"


def _returns_a_number(session: Session) -> Any:
    once(session)
    return 84


def _asks_at_once(session: Session) -> None:
    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(once, session) for _ in range(8)]:
            one.result()


def _forks(session: Session) -> str:
    once(session)
    if child := os.fork():
        os.waitpid(child, 0)
    return "84"


BROKEN: list[tuple[Callable[[Session], Any], str]] = [
    (_raises, "no such tool"),
    (_leaves, "SystemExit"),
    (_hangs, "call_timeout_s"),
    (_hangs_at_once, "call_timeout_s"),
    (_floods, "rollout.max_response_tokens"),
    (_never_asks, "before the model's first turn"),
    (_returns_a_number, "int"),
    (_asks_at_once, ""),
    (_forks, ""),
    (calculates, ""),
]


@pytest.mark.filterwarnings("ignore")
def test_broken_agents_are_unknown_and_harm_no_other() -> None:
    settings = replace(SETTINGS, num_samples=len(BROKEN))
    script = says(f"Let me see. {CALL}", "84")

    def solve(session: Session) -> Any:
        return BROKEN[session.sample % len(BROKEN)][0](session)

    expected, _ = run(calculates, script, settings=settings)
    episodes, agents = run(solve, script, settings=settings, call_timeout_s=12, max_concurrent=100)
    for one, good in zip(episodes, expected, strict=True):
        agent, reason = BROKEN[one.sample % len(BROKEN)]
        assert one.finished and (reason in one.failure if reason else not one.failure)
        if agent is calculates:
            assert one.token_ids.tolist() == good.token_ids.tolist()
    assert not agents._live and not agents._server._sessions
    # They are a batch: rows of the table, of which the unknown ones may have no sampled token.
    judged = [Verdict(Outcome.UNKNOWN if one.failure else Outcome.CORRECT) for one in episodes]
    size = settings.num_samples
    groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
    verdicts = [judged[i : i + size] for i in range(0, len(episodes), size)]
    table = to_rollouts(groups, verdicts).table
    assert (table["num_sampled_tokens"] == 0).sum() == 3 * 3


# --- the life of a session ------------------------------------------------------------------------


def agent_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("agent ")}


def test_no_session_is_left_by_a_response_that_is_cut_off() -> None:
    """At the token limit while the model speaks: the agent's request gets an error."""
    errors: list[openai.BadRequestError] = []

    def solve(session: Session) -> None:
        try:
            once(session)
        except openai.BadRequestError as error:
            errors.append(error)
            raise

    before = agent_threads()
    for _ in range(3):
        episodes, agents = run(
            solve, lambda _: [5] * 900, settings=replace(SETTINGS, max_response_tokens=400)
        )
        assert all(one.truncated and not one.failure for one in episodes)
        assert not agents._live and not agents._server._sessions
        assert agents.judge(episodes[0])[1] == "84"
    wait_until(lambda: agent_threads() <= before, "the agents' end")
    assert len(errors) == 3 * 12 and all("has ended" in str(one) for one in errors)


def test_a_late_agent_leaves_the_session_of_a_later_generation() -> None:
    """Problem and sample are the same: held-out problems are asked in every evaluation."""
    released, returned = threading.Event(), threading.Event()
    sessions: list[Session] = []

    def solve(session: Session) -> str:
        sessions.append(session)
        is_first = len(sessions) == 1
        message = ask(session, [QUESTION])
        if is_first:
            assert released.wait(HANG_S)
        else:
            released.set()
            assert returned.wait(HANG_S)
        return ask(session, [QUESTION, message, FURTHER]).content

    agents = Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig())
    acting = acting_of(
        agents, eos_token_ids=[EOS], run=in_thread, call_timeout_s=5, max_response_tokens=2000
    )

    def failure(name: str, acting: Acting) -> str:
        engine = ScriptedEngine(says("84", "12"))
        calls = acting.calls(name, engine.replicas)
        prompts = [begin(agents, PROMPTS[0])]
        groups = generate(engine, prompts, replace(SETTINGS, num_samples=1), calls=calls)
        assert groups is not None
        return groups[0][0].failure

    def watch(late: Any) -> None:
        wait_until(lambda: not late.is_running, "the late call's end")
        returned.set()

    assert "call_timeout_s" in failure("evaluation_0", acting)
    watcher = threading.Thread(target=watch, args=acting.running)
    watcher.start()
    patient = acting.config.model_copy(update={"call_timeout_s": int(HANG_S)})
    assert failure("evaluation_1", replace(acting, config=patient)) == ""
    watcher.join()
    assert not agents._live and not agents._server._sessions and not acting.open


@pytest.mark.parametrize("name", ["read", "place", "ask"])
def test_a_session_that_is_closed_as_its_request_is_read_answers_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, episode = agent_threads(), Episode(PROMPTS[0], 0, np.empty(0, int), np.empty(0))
    agents = Agents(TOKENIZER, functools.partial(once), EnvironmentConfig())
    real = getattr(Conversations, name)

    def closed_meanwhile(conversations: Conversations, given: Any, **options: Any) -> Any:
        agents.close(episode)
        return real(conversations, given, **options)

    monkeypatch.setattr(Conversations, name, closed_meanwhile)
    with pytest.raises(AgentError, match="has ended"):
        agents.respond(episode)
    wait_until(lambda: agent_threads() <= before, "the agent's end")


def test_closing_a_session_never_waits_for_its_queue() -> None:
    """Another thread may take a request between two looks at it."""

    class Contested(queue.SimpleQueue[Any]):
        def empty(self) -> bool:
            return False  # until the other thread came

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert not block or super().qsize(), "it waits"
            return super().get(block, timeout)

    agents = Agents(TOKENIZER, functools.partial(once), EnvironmentConfig())
    agent = agents._new_agent(Episode(PROMPTS[0], 0, np.empty(0, int), np.empty(0)))
    agent._events = Contested()
    answer = agent.post({}, is_repeated=False)
    agent.close()
    with pytest.raises(RefusedError, match="has ended"):
        answer.result(0)


def test_a_repeated_request_gets_the_same_answer() -> None:
    """The client sends it again if a connection breaks; the first was answered, or will be."""

    def solve(session: Session) -> str:
        body = {"model": session.model, "messages": [QUESTION]}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=0.001)
        headers["x-stainless-retry-count"] = "1"
        answers = [httpx.post(url, json=body, headers=headers, timeout=HANG_S) for _ in range(2)]
        assert answers[0].json() == answers[1].json()
        return str(answers[0].json()["choices"][0]["message"]["content"])

    episodes, _ = run(solve, says("84"), prompts=PROMPTS[:1])
    assert [(one.failure, one.final_text) for one in episodes] == [("", "84")] * 4


# --- replays --------------------------------------------------------------------------------------


def test_another_process_continues_the_episodes(tmp_path: Path) -> None:
    """Killed between two calls: agents begin anew, and are answered from the recorded turns."""
    script = says(f"Let me see. {CALL}", "84")
    expected, _ = run(calculates, script)
    begun: list[Session] = []

    def solve(session: Session) -> str:
        begun.append(session)
        return calculates(session)

    class KilledError(BaseException):
        pass

    engine, before = ScriptedEngine(script), agent_threads()

    def kill() -> None:
        if len([one for one in engine.asked if one.response_ids.tolist().count(EOS) > 3]) > 5:
            raise KilledError

    engine.before_step = kill
    with pytest.raises(KilledError):
        run(solve, script, engine=engine, run_dir=tmp_path)
    wait_until(lambda: agent_threads() <= before, "the agents' end")
    begun.clear()
    episodes, _ = run(solve, script, run_dir=tmp_path)
    assert 0 < len(begun) <= 12
    for one, other in zip(episodes, expected, strict=True):
        assert (one.failure, one.final_text) == ("", "It is 84")
        assert one.token_ids.tolist() == other.token_ids.tolist()
    # A third start asks nobody.
    begun.clear()
    again, _ = run(solve, script, run_dir=tmp_path)
    assert not begun and [one.final_text for one in again] == ["It is 84"] * 12


def test_a_stop_within_agents_tools_makes_nothing_unknown(tmp_path: Path) -> None:
    """Their calls end with the generation, are not recorded, and so are made again."""
    before, stopped, waiting = agent_threads(), threading.Event(), []

    def solve(session: Session) -> str:
        once(session)
        waiting.append(session)
        assert stopped.wait(HANG_S)
        return "84"

    agents = Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig())
    acting = acting_of(
        agents, eos_token_ids=[EOS], run=in_thread, run_dir=tmp_path, max_response_tokens=2000
    )
    engine = ScriptedEngine(says("84"))
    calls = acting.calls("step_3", engine.replicas)
    hooks = Hooks(should_abort=lambda _: len(waiting) == 12)
    prompts = [begin(agents, one) for one in PROMPTS]
    assert generate(engine, prompts, SETTINGS, calls=calls, hooks=hooks) is None
    stopped.set()
    wait_until(lambda: agent_threads() <= before, "the agents' end")
    wait_until(lambda: not any(one.is_running for one in acting.running), "the calls' end")
    assert not agents._live and not agents._server._sessions
    records = (tmp_path / JOURNAL_FOLDER / "step_3_0.jsonl").read_text().splitlines()
    read = (json.loads(one.partition(" ")[2]) for one in records)
    replies = [one for one in read if "call" in one]
    assert len(records) == 3 * 12 and len(replies) == 12
    assert not any(one["failure"] for one in replies)


def test_an_agent_that_repeats_otherwise_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued in another process, with a clock in its question."""
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    (episode, *_), _ = run(calculates, says(f"Let me see. {CALL}", "84"), prompts=PROMPTS[:1])
    end = int(np.flatnonzero(episode.is_sampled)[-1]) + 1
    whole = replace(episode, finished=False, final_text=None)
    assert end == len(whole.token_ids)
    opening = TOKENIZER.apply_chat_template([FURTHER], add_generation_prompt=True, tokenize=False)
    other = ids_of(TOKENIZER, opening)[1:]
    first = next(i for i, (a, b) in enumerate(zip(other, whole.token_ids, strict=False)) if a != b)
    for solve, word in {
        calculates: "",
        (lambda session: ask(session, [FURTHER])): f"other tokens from token {first} of",
        (lambda session: "84"): "returned",
    }.items():
        agents = Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig())
        if not word:
            assert agents.respond(whole) == "It is 84"
        else:
            with pytest.raises(AgentError, match=word):
                agents.respond(whole)
        agents.close(whole)


# --- the config -----------------------------------------------------------------------------------


def test_a_function_with_a_session_is_an_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("def solve(session, *, file, top=5): ...\ndef other(client): ...\n")
    config = EnvironmentConfig(kind=f"{path}:solve", settings={"file": "x"})
    environments.check(config)
    assert isinstance(environments.build(config, TOKENIZER), Agents)
    for settings, words in (({}, ["file"]), ({"file": 1, "tpo": 2}, ["tpo", "top"])):
        with pytest.raises(ConfigError, match=mentions("environment.kind", *words)):
            environments.check(config.model_copy(update={"settings": settings}))
    with pytest.raises(ConfigError, match=mentions("model.hf_dir")):
        environments.build(config, byte_level())


def test_the_documents_agent_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    text = text.partition("## Agents that use the `openai` client")[2]
    code, section = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.S)[0] for kind in ("python", "toml")
    )
    (tmp_path / "agent.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(**tomllib.loads(section)["environment"])
    environments.check(config)
    agents = environments.build(config, TOKENIZER)
    engine = ScriptedEngine(says(f"Let me see. {CALL}", "It is 84."))
    calls = acting_of(agents, eos_token_ids=[EOS], run=in_thread, max_response_tokens=2000).calls(
        "step_0", engine.replicas
    )
    groups = generate(engine, [begin(agents, PROMPTS[0])], SETTINGS, calls=calls)
    assert groups is not None
    for one in groups[0]:
        assert not one.failure and agents.judge(one) == ("It is 84.", "84")
        assert "<tool_response>\n84\n</tool_response>" in TOKENIZER.decode(one.token_ids.tolist())
