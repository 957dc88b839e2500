"""Agents with several conversations in an episode: rewritten histories, sub-agents, choices."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.rollout.agents import Session, live
from gapo_megatron.rollout.agents.conversation import first_token
from gapo_megatron.rollout.agents.conversations import Conversations
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.agents.live import AgentError
from gapo_megatron.rollout.chat import ChatTemplate
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import begin
from gapo_megatron.types import Episode, TurnSettings
from tests.messages import mentions
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
from tests.rollout.test_chat import ids_of, tokenizer_of
from tests.scripted_engine import ScriptedEngine
from tests.waiting import HANG_S, wait_until

ONE: dict[str, Any] = {"prompts": PROMPTS[:1], "settings": replace(SETTINGS, num_samples=2)}
OTHER = {"role": "user", "content": "something else"}
SYSTEM = {"role": "system", "content": "Be brief."}


def repeats() -> Callable[[Request], Sequence[int]]:
    """Each turn repeats the user's last message, and says which of the episode's turns it is."""
    counts = Counter[str]()

    def script(request: Request) -> list[int]:
        read = TOKENIZER.decode([*request.prompt_ids, *request.response_ids.tolist()])
        last = read.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        counts[request.name] += 1
        return [*ids_of(TOKENIZER, f"{last} {counts[request.name]}"), EOS]

    return script


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tokens_of(messages: Sequence[Any], **options: Any) -> list[int]:
    """What the template makes of a conversation, up to the end of the model's last turn."""
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, **options)
    return ids_of(TOKENIZER, text.removesuffix("\n"))


def conversations_of(episode: Episode) -> list[list[int]]:
    """The tokens of each conversation, as the model has read them."""
    numbers = episode.conversations
    if numbers is None:
        numbers = np.zeros(len(episode.token_ids), int)
    found = [episode.token_ids[numbers == i].tolist() for i in range(numbers.max() + 1)]
    return [[*episode.prompt.token_ids, *found[0]], *found[1:]]


def turns_of(episode: Episode) -> list[tuple[int, str]]:
    """Conversation and text of each of the model's turns; checks what belongs to all tokens."""
    assert not episode.failure, episode.failure
    assert (episode.log_probs == -episode.is_sampled.astype(int)).all()
    edges = np.flatnonzero(np.diff(episode.is_sampled, prepend=False, append=False))
    numbers = episode.conversations
    if numbers is None:
        numbers = np.zeros(len(episode.token_ids), int)
    found, begin = [], 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        assert len({*numbers[begin:end].tolist()}) == 1
        *said, last = episode.token_ids[start:end].tolist()
        assert last == EOS
        found.append((int(numbers[start]), TOKENIZER.decode(said)))
        begin = end
    return found


OPENED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (lambda said: [SYSTEM, *said, FURTHER], {}, ["messages[0]"]),
    (lambda said: [OTHER], {}, ["messages[0]"]),
    (lambda said: [QUESTION], {}, ["messages", "1"]),
    (lambda said: [said[0], answer("85"), FURTHER], {}, ["messages[1]"]),
    (lambda said: [*said, answer("a"), FURTHER], {}, ["messages[2]"]),
    (lambda said: [*said, OTHER, answer("a"), FURTHER], {}, ["messages[3]"]),
    (lambda said: [*said, FURTHER], {"tools": TOOLS}, ["tools"]),
]


@pytest.mark.parametrize(("change", "options", "words"), OPENED)
def test_a_request_that_repeats_no_conversation_opens_one(
    change: Any, options: dict[str, Any], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And the first can still be continued. A line of the log says once what differed."""

    def solve(session: Session) -> None:
        said = [QUESTION, answer(ask(session, [QUESTION]).content)]
        ask(session, change(said), **options)
        ask(session, [*said[:1], answer(f" {said[1]['content']}\n"), FURTHER])

    episodes, agents = run(solve, repeats(), **ONE)
    second = change([QUESTION, answer("q 1")])
    for one in episodes:
        said = f"{second[-1]['content']} 2"
        assert turns_of(one) == [(0, "q 1"), (1, said), (0, "and now? 3")]
        first = [QUESTION, answer("q 1"), FURTHER, answer("and now? 3")]
        assert conversations_of(one) == [
            tokens_of(first),
            tokens_of([*second, answer(said)], **options),
        ]
        assert agents.judge(one) == ("and now? 3", "84")
    found = [line for line in caplog.messages if "continues no conversation" in line]
    assert len(found) == 1 and re.search(mentions(*words), found[0])


def test_two_conversations_take_turns() -> None:
    """Each goes on where it was, and no token is there twice."""

    def solve(session: Session) -> None:
        both: list[list[Any]] = [[QUESTION], [SYSTEM, OTHER]]
        for _ in range(3):
            for messages in both:
                messages += [answer(ask(session, messages).content), FURTHER]

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        said = ["q 1", "something else 2", *(f"and now? {i}" for i in range(3, 7))]
        assert turns_of(one) == [(i % 2, text) for i, text in enumerate(said)]
        for number, opening in enumerate(([QUESTION], [SYSTEM, OTHER])):
            messages: list[Any] = [*opening]
            for text in said[number::2]:
                messages += [answer(text), FURTHER]
            assert conversations_of(one)[number] == tokens_of(messages[:-1])


@pytest.mark.parametrize("streams", [False, True])
def test_choices_are_turns_after_copies_of_what_the_first_has_read(streams: bool) -> None:
    """A later request goes on from the choice that it repeats."""

    def choices(session: Session, messages: list[Any], n: int) -> list[str]:
        create: Any = client_of(session).chat.completions.create
        options = {"stream": streams}
        if streams:
            options["stream_options"] = {"include_usage": True}  # type: ignore[assignment]
        found = create(model=session.model, messages=messages, n=n, **options)
        if not streams:
            assert [one.index for one in found.choices] == [*range(n)]
            texts, usage = [one.message.content for one in found.choices], found.usage
        else:
            texts, usage = [""] * n, None
            for chunk in found:
                usage = chunk.usage or usage
                for one in chunk.choices:
                    texts[one.index] += one.delta.content or ""
        # The prompt counts once, as in OpenAI's API.
        read = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert usage.prompt_tokens == len(ids_of(TOKENIZER, read))
        assert usage.completion_tokens == sum(len(ids_of(TOKENIZER, one)) + 1 for one in texts)
        return texts

    def solve(session: Session) -> None:
        first = ask(session, [QUESTION]).content
        messages = [QUESTION, answer(first), OTHER]
        texts = choices(session, messages, 3)
        choices(session, [*messages, answer(texts[1]), FURTHER], 2)
        ask(session, [*messages, answer(texts[0]), FURTHER])

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        said = [(0, "q 1"), *((i, f"something else {i + 2}") for i in range(3))]
        said += [(1, "and now? 5"), (3, "and now? 6"), (0, "and now? 7")]
        assert turns_of(one) == said
        read = [QUESTION, answer("q 1"), OTHER]
        assert conversations_of(one) == [
            tokens_of([*read, answer("something else 2"), FURTHER, answer("and now? 7")]),
            tokens_of([*read, answer("something else 3"), FURTHER, answer("and now? 5")]),
            tokens_of([*read, answer("something else 4")]),
            tokens_of([*read, answer("something else 3"), FURTHER, answer("and now? 6")]),
        ]


def test_a_copy_has_the_sampled_tokens_and_not_those_of_their_text() -> None:
    """Also in a conversation whose turn the template would write with other tokens."""
    odd = [*ids_of(TOKENIZER, "84"), *ids_of(TOKENIZER, "  "), EOS]

    def solve(session: Session) -> None:
        messages = [QUESTION, answer(ask(session, [QUESTION]).content.strip()), FURTHER]
        client_of(session).chat.completions.create(model=session.model, messages=messages, n=2)  # type: ignore[arg-type]

    episodes, _ = run(solve, lambda _: odd, **ONE)
    for one in episodes:
        first, second = conversations_of(one)
        assert first == second and first.count(odd[-2]) > 0 and first[-len(odd) :] == odd
        assert one.is_sampled.sum() == 3 * len(odd)


def test_calls_of_tools_have_ids_of_their_own_by_which_choices_differ() -> None:
    """The texts of the choices are the same."""

    def solve(session: Session) -> None:
        found = client_of(session).chat.completions.create(
            model=session.model,
            messages=[QUESTION],  # type: ignore[list-item]
            tools=TOOLS,  # type: ignore[arg-type]
            n=3,
        )
        calls = [one.message.tool_calls[0].id for one in found.choices if one.message.tool_calls]
        assert calls == ["call00001", "call00002", "call00003"]
        for i in (2, 1):
            result = {"role": "tool", "tool_call_id": calls[i], "content": str(i)}
            ask(session, [QUESTION, found.choices[i].message, result], tools=TOOLS)

    episodes, _ = run(solve, says(CALL, "84"), **ONE)
    for one in episodes:
        assert [number for number, _ in turns_of(one)] == [0, 1, 2, 2, 1]
        whole = [TOKENIZER.decode(tokens) for tokens in conversations_of(one)]
        assert [text.count("<tool_response>\n") for text in whole] == [0, 1, 1]
        assert "<tool_response>\n2\n" in whole[2]


# --- at the same time -----------------------------------------------------------------------------


async def talk(session: Session, question: str) -> str:
    """A sub-agent that asks twice."""
    async with openai.AsyncOpenAI(
        base_url=session.base_url,
        api_key=session.api_key,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        messages: Any = [{"role": "user", "content": question}]
        for further in (True, False):
            found = await client.chat.completions.create(model=session.model, messages=messages)
            text = str(found.choices[0].message.content)
            messages += [answer(text), FURTHER] if further else []
    return text


def test_requests_at_the_same_time_are_answered_one_after_another() -> None:
    async def solve(session: Session) -> str:
        texts = await asyncio.gather(*(talk(session, f"{i}?") for i in range(6)))
        return " ".join(re.sub(r" \d+$", "", one) for one in texts)

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        turns = turns_of(one)
        assert one.final_text == " ".join(["and now?"] * 6) and len(turns) == 12
        assert sorted(number for number, _ in turns) == sorted([*range(6)] * 2)
        openings = set()
        for number, tokens in enumerate(conversations_of(one)):
            first, second = (text for at, text in turns if at == number)
            question, _, _ = first.rpartition(" ")
            opening = [{"role": "user", "content": question}]
            openings.add(question)
            assert tokens == tokens_of([*opening, answer(first), FURTHER, answer(second)])
        assert openings == {f"{i}?" for i in range(6)}


def test_all_requests_get_an_error_when_the_episode_ends() -> None:
    """At the token limit while the model answers the second of four, and two wait."""
    errors: list[str] = []
    agents = agents_of(lambda session: solve(session))
    all_ask = functools.cache(lambda: wait_until(lambda: waiting(agents) == 3, "three requests"))

    def solve(session: Session) -> None:
        def once(i: int) -> None:
            try:
                ask(session, [{"role": "user", "content": str(i)}])
            except openai.BadRequestError as error:
                errors.append(str(error))

        with ThreadPoolExecutor(4) as pool:
            [*pool.map(once, range(4))]

    settings = replace(SETTINGS, num_samples=1, max_response_tokens=400)
    turns = iter([[5, EOS], [5] * 900])
    engine = ScriptedEngine(lambda _: next(turns), before_step=all_ask)
    (episode,), _ = run(
        solve, repeats(), agents=agents, engine=engine, prompts=PROMPTS[:1], settings=settings
    )
    assert episode.truncated and not episode.failure and not agents._live
    wait_until(lambda: len(errors) == 3, "the errors")
    assert all("has ended" in one for one in errors)


def test_an_agent_may_return_before_all_its_requests_are_answered() -> None:
    """What is sampled already stays a turn, also in a replay; what waits then is not asked."""

    def ask_aside(session: Session, message: Any) -> None:
        def once() -> None:
            with contextlib.suppress(openai.APIError):
                ask(session, [message])

        threading.Thread(target=once, daemon=True).start()

    def solve(session: Session, agents: list[Agents], *, waits: bool = False) -> str:
        text = str(ask(session, [QUESTION]).content)
        (agent,) = agents[0]._live.values()
        ask_aside(session, OTHER)
        wait_until(lambda: len(agent.conversations._all) == 2, "the second request")
        if waits:
            ask_aside(session, FURTHER)
            wait_until(lambda: waiting(agents[0]) == 1, "the third")
        return text

    def await_return() -> None:
        (agent,) = agents._live.values()
        if len(engine.asked) == 2:
            wait_until(lambda: agent._ended is not None, "the agent's return")

    found: list[Agents] = []
    agents = agents_of(lambda session: solve(session, found, waits=True))
    found.append(agents)
    engine = ScriptedEngine(repeats(), before_step=await_return)
    settings = replace(SETTINGS, num_samples=1)
    (one,), _ = run(
        solve, repeats(), agents=agents, engine=engine, prompts=PROMPTS[:1], settings=settings
    )
    assert turns_of(one) == [(0, "q 1"), (1, "something else 2")] and one.final_text == "q 1"
    other = agents_of(lambda session: solve(session, [other]))
    whole = replace(one, finished=False, final_text=None)
    assert other.respond(whole) == "q 1"
    other.close(whole)


# --- requests that are sent again -----------------------------------------------------------------


def test_a_request_of_long_ago_that_is_sent_again_gets_its_answer() -> None:
    """Whatever has been asked since; and its conversation is where it was."""

    def solve(session: Session) -> None:
        url, headers = f"{session.base_url}/chat/completions", {"X-API-Key": session.api_key}

        def post(messages: list[Any], *, retry: int = 0, **options: Any) -> Any:
            body = {"model": session.model, "messages": messages, **options}
            headers["x-stainless-retry-count"] = str(retry)
            return httpx.post(url, json=body, headers=headers, timeout=HANG_S).json()

        first = post([QUESTION], n=2)
        second = post([OTHER])
        third = post([QUESTION, first["choices"][1]["message"], FURTHER])
        assert post([QUESTION], retry=1, n=2) == first
        assert post([OTHER], retry=1) == second
        assert post([QUESTION, first["choices"][1]["message"], FURTHER], retry=2) == third
        # Another request, though it is sent again; and one that is not sent again.
        assert post([QUESTION], retry=1)["id"] not in {one["id"] for one in (first, second, third)}
        assert post([OTHER])["choices"][0]["message"]["content"] == "something else 6"

    episodes, _ = run(solve, repeats(), **ONE)
    for one in episodes:
        assert [number for number, _ in turns_of(one)] == [0, 1, 2, 1, 3, 4]


# --- replays --------------------------------------------------------------------------------------


def first_episode(solve: Callable[[Session], Any]) -> Episode:
    """The first response to the first problem, as a resumed run has it."""
    settings = replace(SETTINGS, num_samples=1)
    (episode,), _ = run(solve, repeats(), prompts=PROMPTS[:1], settings=settings)
    assert not episode.failure
    return replace(episode, finished=False, final_text=None)


def up_to(episode: Episode, num_turns: int) -> Episode:
    """The episode when it had so many turns."""
    end = np.flatnonzero(np.diff(episode.is_sampled, append=False))[2 * num_turns - 1] + 1
    names = ("token_ids", "log_probs", "response_mask", "conversations")
    return replace(episode, **{name: getattr(episode, name)[:end] for name in names})


def agents_of(solve: Callable[[Session], Any]) -> Agents:
    agents = Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig())
    begin(agents, PROMPTS[0])
    return agents


def replay(agents: Agents, episode: Episode) -> Any:
    """What the agent, begun anew, answers to the episode; its session ends in any case."""
    try:
        return agents.respond(episode)
    finally:
        agents.close(episode)


def waiting(agents: Agents) -> int:
    """Requests of the only agent that wait for their turn, read or not."""
    return sum(len(one._waiting) + one._events.qsize() for one in agents._live.values())


def in_parallel(session: Session, order: Sequence[int], agents: list[Agents] | None = None) -> str:
    """Three sub-agents that ask twice. In a replay each begins when those before it wait."""

    def sub(i: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"{i}?"}]
        messages += [answer(ask(session, messages).content), FURTHER]
        return str(ask(session, messages).content)

    with ThreadPoolExecutor(3) as pool:
        begun = []
        for count, i in enumerate(order, 1):
            begun.append((i, pool.submit(sub, i)))
            if agents and count < len(order):
                wait_until(lambda count=count: waiting(agents[0]) == count, "a request")
        return " ".join(one.result() for _, one in sorted(begun))


def in_turns(session: Session) -> str:
    """What `in_parallel` does, in a fixed order: 0, 1, 2, and again."""
    all_messages: list[list[Any]] = [[{"role": "user", "content": f"{i}?"}] for i in range(3)]
    for messages in all_messages:
        messages += [answer(ask(session, messages).content), FURTHER]
    return " ".join(str(ask(session, messages).content) for messages in all_messages)


def test_a_replay_may_ask_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others take, if all that wait have their turn later."""
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    episode = first_episode(in_turns)
    assert [number for number, _ in turns_of(episode)] == [0, 1, 2, 0, 1, 2]
    found: list[Agents] = []
    agents = agents_of(lambda session: in_parallel(session, (2, 1, 0), found))
    found.append(agents)
    assert replay(agents, episode) == "and now? 4 and now? 5 and now? 6"


def test_a_replay_goes_on_with_the_numbers_of_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the requests that come first have no turn yet."""
    monkeypatch.setattr(live, "_QUIET_S", HANG_S)
    whole = first_episode(in_turns)
    found: list[Agents] = []
    agents = agents_of(lambda session: in_parallel(session, (2, 1, 0), found))
    found.append(agents)
    tokens, turn = replay(agents, up_to(whole, 1))
    expected = [*tokens_of([{"role": "user", "content": "2?"}]), *ids_of(TOKENIZER, "\n")]
    expected += ids_of(TOKENIZER, "<|im_start|>assistant\n")
    assert isinstance(turn, TurnSettings)
    assert (turn.conversation, [*tokens]) == (1, expected)


def test_choices_are_given_again() -> None:
    def solve(session: Session, *, n: int = 2) -> str:
        found = client_of(session).chat.completions.create(
            model=session.model,
            messages=[QUESTION],  # type: ignore[list-item]
            n=n,
        )
        texts = [str(one.message.content) for one in found.choices]
        ask(session, [QUESTION, answer(texts[-1]), FURTHER])
        return " ".join(texts)

    episode = first_episode(solve)
    assert replay(agents_of(solve), episode) == "q 1 q 2"


def asks(*conversations: list[Any], **options: Any) -> Callable[[Session], str]:
    def solve(session: Session) -> str:
        for messages in conversations:
            client_of(session).chat.completions.create(
                model=session.model, messages=messages, **options
            )
        return "done"

    return solve


@pytest.mark.parametrize(
    ("solve", "word"),
    [
        (asks([QUESTION], [OTHER]), ""),
        (asks([QUESTION], [FURTHER]), "other tokens from token"),
        (asks([QUESTION], [QUESTION, answer("q 1"), OTHER]), "other tokens from token"),
        (asks([QUESTION], n=2), "other tokens from token"),
        (asks([QUESTION]), "returned"),
        (lambda session: "done", "returned"),
    ],
)
def test_an_agent_that_differs_is_told(
    solve: Callable[[Session], str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_QUIET_S` decides only for an agent that waits for an answer, and does nothing else."""
    episode = first_episode(asks([QUESTION], [OTHER]))
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    if word:
        with pytest.raises(AgentError, match=f"did not repeat.*{word}"):
            replay(agents_of(solve), episode)
    else:
        assert replay(agents_of(solve), episode) == "done"


def test_a_template_that_writes_earlier_turns_anew_opens_conversations() -> None:
    """Qwen3's drops the thinking before the last question, and keeps it before a tool's result."""
    tokenizer, why = tokenizer_of("qwen3"), list[str]()
    conversations = Conversations(
        tokenizer,
        first=first_token(tokenizer),
        overrule=lambda *_: None,
        opens=why.append,
        config=EnvironmentConfig(),
    )
    turn = ids_of(tokenizer, "<think>\na\n</think>\n\nb<|im_end|>")
    messages, numbers = [QUESTION], []
    for new in ({"role": "tool", "content": "84", "tool_call_id": "1"}, FURTHER, None):
        request = conversations.read({"model": "policy", "messages": messages})
        place = conversations.place(request)
        numbers.append(place.conversation.number)
        conversations.ask(place)
        nothing = [0.0] * len(turn), [()] * len(turn)
        said, _ = conversations.say(turn, *nothing, request=request) or ({}, None)
        messages = [*messages, said["choices"][0]["message"], new]
    assert numbers == [0, 0, 1]
    last = messages[:-2]
    assert list(place.tokens) == ChatTemplate(tokenizer).opening(last)
    (line,) = why
    assert re.search(mentions("qwen3", "anew", "messages[4]"), line)
