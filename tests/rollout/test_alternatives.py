"""Requests with `top_logprobs`: answered from the engine's values, and by a resumed run alike."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import ConfigError, RolloutError
from gapo_megatron.rollout.agents import Session
from gapo_megatron.rollout.agents.environment import Agents
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.live import AgentError
from gapo_megatron.rollout.agents.requests import MODEL, read_request
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.generate import Hooks, begin, generate
from gapo_megatron.rollout.requests import Responses, SamplingSettings
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Episode, TurnSettings
from tests.acting import acting_of
from tests.messages import mentions
from tests.rollout.test_agents import EOS, FURTHER, PROMPTS, QUESTION, TOKENIZER, client_of
from tests.rollout.test_chat import ids_of
from tests.rollout.test_partial_calls import stored
from tests.scripted_engine import ScriptedEngine, alternatives_to, place_of

SETTINGS = SamplingSettings(num_samples=2, max_response_tokens=2000, seed=7)
ASSISTANT = ids_of(TOKENIZER, "<|im_start|>assistant\n")
ASKED = (5, None, 2, 20)
"""Alternatives that an agent asks for, turn by turn; None: no log-probs."""
Answers = dict[tuple[str, int], list[str]]
"""What each agent has been answered, by problem and sample, when it ran last: JSON."""


def turn_of(problem: str, sample: int, number: int) -> list[int]:
    """When the first problem has ended, the others are in their third and in their first turn."""
    count = (1 + sample, 3, 9)[int(problem)]
    words = " ".join(str(100 + number + i) for i in range(count))
    return [*ids_of(TOKENIZER, words), EOS]


def say(request: Request) -> list[int]:
    """The rest of a turn, whatever has been interrupted."""
    tokens, size = request.response_ids.tolist(), len(ASSISTANT)
    ends = [i for i in range(size, len(tokens) + 1) if tokens[i - size : i] == ASSISTANT]
    return turn_of(*place_of(request), len(ends) - 1)[len(tokens) - ends[-1] :]


def asks(answers: Answers, session: Session) -> str:
    """Four turns with the log-probs of `ASKED`, two by chat completions and two as responses."""
    client, seen = client_of(session), list[str]()
    answers[session.problem["id"], session.sample] = seen
    messages: Any = [QUESTION]
    for number, count in enumerate(ASKED):
        options: dict[str, Any] = {} if count is None else {"top_logprobs": count}
        if number < 2:
            answer = client.chat.completions.create(
                model=session.model, messages=messages, logprobs=count is not None, **options
            )
            (choice,) = answer.choices
            text = choice.message.content
            seen.append(choice.model_dump_json())
        else:
            response: Any = client.responses.create(
                model=session.model,
                input=messages,
                include=["message.output_text.logprobs"],
                **options,
            )
            text = response.output_text
            seen.append(json.dumps([one.model_dump() for one in response.output]))
        messages = [*messages, {"role": "assistant", "content": text}, FURTHER]
    return str(text)


def agents_of(solve: Callable[[Session], Any]) -> Agents:
    return Agents(TOKENIZER, functools.partial(solve), EnvironmentConfig())


def play(
    solve: Callable[[Session], Any],
    *,
    engine: ScriptedEngine | None = None,
    begun: dict[str, tuple[Episode, ...]] | None = None,
    num_groups: int | None = None,
    **options: Any,
) -> list[tuple[Episode, ...]]:
    """A generation with agents that begin anew; they are asked before the next decoding step."""
    agents, engine = agents_of(solve), engine or ScriptedEngine(say)
    acting = acting_of(
        agents, eos_token_ids=[EOS], tokenizer=TOKENIZER, max_response_tokens=2000, **options
    )
    groups = generate(
        engine,
        [begin(agents, one) for one in PROMPTS],
        SETTINGS,
        calls=acting.calls("step_0", engine.replicas),
        begun=begun,
        num_groups=num_groups,
        hooks=Hooks(keeps_unfinished=num_groups is not None),
    )
    assert groups is not None
    return groups


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Answers, list[Episode]]:
    answers: Answers = {}
    episodes = [one for group in play(functools.partial(asks, answers)) for one in group]
    assert [one.failure for one in episodes] == [""] * len(episodes) == [""] * len(answers)
    assert all(one.alternatives is None for one in episodes)
    return answers, episodes


def entries_of(seen: str) -> list[dict[str, Any]] | None:
    """The log-probs of an answer."""
    answer = json.loads(seen)
    if isinstance(answer, list):
        (message,) = answer
        return list(message["content"][0]["logprobs"])
    return answer["logprobs"] and list(answer["logprobs"]["content"])


def test_an_answer_has_the_most_likely_tokens_of_the_engine(
    undisturbed: tuple[Answers, list[Episode]],
) -> None:
    """With their own log-probs, exactly; a token that cannot be sampled has -9999."""
    answers, episodes = undisturbed
    for one in episodes:
        place = one.prompt.id, one.sample
        starts = np.flatnonzero(np.diff(one.is_sampled.astype(int)) > 0) + 1
        for number, (count, start) in enumerate(zip(ASKED, starts, strict=True)):
            entries = entries_of(answers[place][number])
            if count is None:
                assert entries is None
                continue
            tokens = np.array(turn_of(*place, number), np.int32)
            ids, log_probs = alternatives_to(tokens, start, count)
            assert entries is not None and len(entries) == len(tokens)
            for row, entry in enumerate(entries):
                assert (entry["token"], entry["logprob"]) == (TOKENIZER.decode([tokens[row]]), -1)
                found, texts = entry["top_logprobs"], [TOKENIZER.decode([i]) for i in ids[row]]
                assert [one["token"] for one in found] == texts
                assert [bytes(one["bytes"]).decode() for one in found] == texts
                expected = [max(float(one), -9999.0) for one in log_probs[row]]
                assert [one["logprob"] for one in found] == expected
                assert all(one.keys() == {"token", "bytes", "logprob"} for one in found)


class KilledError(BaseException):
    pass


def test_a_run_that_was_killed_answers_the_same(
    undisturbed: tuple[Answers, list[Episode]], tmp_path: Path
) -> None:
    """Its journal has the calls until then; the agents begin anew, and are answered again."""
    expected, _ = undisturbed
    engine = ScriptedEngine(say)

    def kill() -> None:
        if sum(place_of(one)[0] == "1" for one in engine.asked) == 2 * 3:  # in the third turn
            raise KilledError

    engine.before_step = kill
    with pytest.raises(KilledError):
        play(functools.partial(asks, {}), engine=engine, run_dir=tmp_path)
    answers: Answers = {}
    groups = play(functools.partial(asks, answers), run_dir=tmp_path)
    assert not any(one.failure for group in groups for one in group)
    # The first of all had returned: nobody asks it again.
    assert answers == {place: seen for place, seen in expected.items() if place != ("0", 0)}


def test_an_episode_that_was_cut_within_a_turn_answers_the_same(
    undisturbed: tuple[Answers, list[Episode]],
) -> None:
    """At a later step, after a checkpoint of its group, with agents that begin anew."""
    expected, _ = undisturbed
    first: Answers = {}
    groups = play(functools.partial(asks, first), num_groups=1)
    done, *opened = groups
    cut = [one for group in opened for one in group]
    assert all(one.finished for one in done) and not any(one.finished for one in cut)
    for one in cut:
        assert one.alternatives is not None and one.is_sampled[-1] and one.token_ids[-1] != EOS
        assert one.alternatives["place"][-1] == len(one.token_ids) - 1
        given = one.for_user().alternatives
        assert given is not None and given.tolist() == one.alternatives.tolist()
        with pytest.raises(ValueError, match="read-only"):
            given["token"] = 0
    answers: Answers = {}
    begun = {group[0].prompt.id: group for group in (done, *stored(opened, step=0))}
    play(functools.partial(asks, answers), begun=begun)
    assert answers == {place: seen for place, seen in expected.items() if place[0] != "0"}
    assert {place: seen for place, seen in first.items() if place[0] == "0"} == {
        place: seen for place, seen in expected.items() if place[0] == "0"
    }


def test_an_agent_that_asks_for_others_than_it_did_is_unknown() -> None:
    ((one, *_), *_) = play(functools.partial(asks, {}))
    assert one.alternatives is None  # as of an agent that asked for none
    agents = agents_of(functools.partial(asks, {}))
    with pytest.raises(AgentError, match=mentions("5 top_logprobs", "had 0")):
        agents.respond(replace(one, finished=False, final_text=None))
    agents.close(one)


@pytest.mark.parametrize("cut", [lambda one: None, lambda one: one[:, 1:], lambda one: one[1:]])
def test_an_engine_without_them_is_named(cut: Callable[[Any], Any]) -> None:
    class Without(ScriptedEngine):
        def poll(self) -> list[Completion]:
            return [
                replace(one, alternative_ids=cut(one.alternative_ids))
                if one.alternative_ids is not None and one.alternative_ids.size
                else one
                for one in super().poll()
            ]

    with pytest.raises(RolloutError, match=mentions("prompt '0'", "num_alternatives (5)")):
        play(functools.partial(asks, {}), engine=Without(say))


def test_an_aborted_request_may_have_no_token() -> None:
    settings = replace(SETTINGS, num_samples=1)
    none = np.empty(0, np.int32), np.empty(0, np.float32)
    one = Episode(PROMPTS[0], 0, *none, finished=False, turn=TurnSettings(num_alternatives=3))
    responses = Responses(PROMPTS[:1], {PROMPTS[0].id: (one,)}, settings)
    (request,) = responses.begin()
    assert isinstance(request, Request) and request.num_alternatives == 3
    episode = responses.take(Completion(request.name, *none, "abort"))
    assert isinstance(episode, Episode) and episode.alternatives is None


def read(**fields: Any) -> dict[str, Any]:
    request = {"model": MODEL, "messages": [QUESTION], **fields}
    return read_request(request, overrule=defaultdict(list).get, has_grammars=False)


@pytest.mark.parametrize("value", [-1, 21, True, 2.0, "3", [5]])
def test_a_number_outside_of_the_apis_is_refused(value: Any) -> None:
    with pytest.raises(RefusedError, match=mentions("top_logprobs", value, 20)) as error:
        read(logprobs=True, top_logprobs=value)
    assert error.value.param == "top_logprobs"
    settings = TurnSettings(num_alternatives=value)
    not_begun = Episode(PROMPTS[0], 0, np.empty(0, np.int32), np.empty(0, np.float32))
    with pytest.raises(ConfigError, match=mentions("num_alternatives", value, 20)):
        Turns(TOKENIZER, (), eos_token_ids=[EOS]).check(settings, not_begun)


def test_they_are_a_part_of_the_log_probs() -> None:
    for more in ({}, {"logprobs": False}, {"logprobs": None}):
        with pytest.raises(RefusedError, match=mentions("top_logprobs (3)", "logprobs = true")):
            read(top_logprobs=3, **more)
        assert read(top_logprobs=0, **more)["num_alternatives"] == 0
    for count in (0, 1, 20):
        assert read(logprobs=True, top_logprobs=count)["num_alternatives"] == count
    assert read(logprobs=True, top_logprobs=None)["num_alternatives"] == 0


def test_a_response_shows_them_only_if_it_includes_log_probs() -> None:
    refusals: list[str] = []

    def solve(session: Session) -> str:
        create: Any = client_of(session).responses.create
        with pytest.raises(openai.BadRequestError) as error:
            create(model=session.model, input="q", top_logprobs=3)
        refusals.append(str(error.value))
        return str(create(model=session.model, input="q", top_logprobs=0).output_text)

    groups = play(solve)
    assert not any(one.failure for group in groups for one in group)
    assert all("message.output_text.logprobs" in one for one in refusals) and refusals
