"""Environments of the package `verifiers` as agents, with an engine that follows a script."""

from __future__ import annotations

import copy
import functools
import gc
import re
import sys
from collections import Counter
from typing import Any

import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import verifiers as judges
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.agents import verifiers
from gapo_megatron.rollout.engine import Request
from gapo_megatron.types import Outcome, Prompt
from tests.messages import mentions
from tests.needs import by_hand
from tests.rollout.test_agents import EOS, SETTINGS, TOKENIZER, run, says
from tests.rollout.test_agents_conversations import turns_of
from tests.rollout.test_chat import ids_of
from tests.verifiers_setup import env

__all__ = ["env"]
KIND = "gapo_megatron.rollout.agents.verifiers"
ENV: dict[str, Any] = {"taskset": {"id": "reverse_text"}}


def check(env: dict[str, Any]) -> None:
    """What a run does before any model is built."""
    environments.check(EnvironmentConfig(kind=f"{KIND}:play", settings={"env": env}))


def changed(env: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The table with another value at `a.b.c`."""
    env = copy.deepcopy(env)
    *tables, key = name.split(".")
    functools.reduce(lambda table, one: table.setdefault(one, {}), tables, env)[key] = value
    return env


def test_without_the_package_its_name_and_the_setting_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match=mentions("environment.settings.env", "pip install")):
        check(ENV)


def judge(response: str, **settings: Any) -> Any:
    found = judges.load(f"{KIND}:reward", settings, setting="reward.kind")
    row = {"task": 3, "key": "ab", "prompt": "3 * 7"}
    return found.judge(response, "", row, correct_above=0.5)


@pytest.mark.parametrize("value, outcome", [(1.0, "CORRECT"), (0.25, "WRONG"), (-1e-300, "WRONG")])
def test_the_reward_is_the_verdict(value: float, outcome: str) -> None:
    verdict = judge(f"{verifiers.SCORED}{value!r}")
    assert (verdict.outcome, verdict.grade) == (Outcome[outcome], value)


@pytest.mark.parametrize("text", ["1.0", "", "84", f" {verifiers.SCORED}1.0"])
def test_what_the_model_says_is_no_reward(text: str) -> None:
    """At the token limit the verifier reads the model's last turn."""
    assert judge(text).outcome is Outcome.UNKNOWN
    assert judge(text, unscored=0.0).outcome is Outcome.WRONG


def test_a_reward_that_is_no_number_is_unknown() -> None:
    assert judge(f"{verifiers.SCORED}{float('nan')!r}").outcome is Outcome.UNKNOWN


# With the package.


def rows_of(env: dict[str, Any]) -> list[dict[str, Any]]:
    tasks = verifiers.load_environment(env).taskset
    return [verifiers.row_of(one, name="product") for one in tasks]


def play(env: dict[str, Any], *turns: str, rows: list[dict[str, Any]] | None = None) -> list[Any]:
    by_hand("verifiers.v1")
    rows = rows_of(env) if rows is None else rows
    prompts = [Prompt(one["id"], (5,), answer="", row=one) for one in rows]
    episodes, _ = run(functools.partial(verifiers.play, env=env), says(*turns), prompts=prompts)
    return episodes


@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_is_the_conversation_and_its_reward(env: dict[str, Any], stream: bool) -> None:
    by_hand("verifiers.v1")
    episodes = play(changed(env, "agent.harness.stream", stream), "Let me see.", "14, or 21")
    assert len(episodes) == 4 * SETTINGS.num_samples
    for one in episodes:
        number = one.prompt.row["task"]
        verdict = judge(str(one.final_text))
        assert (one.failure, verdict.grade) == ("", [0.0, 0.0, 1.0, 1.0][number])
        messages = [
            {"role": "system", "content": "Compute."},
            {"role": "user", "content": f"{number} * 7"},
            {"role": "assistant", "content": "Let me see."},
            {"role": "user", "content": "Are you sure?"},
        ]
        text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = [*ids_of(TOKENIZER, text), *ids_of(TOKENIZER, "14, or 21"), EOS]
        assert [*one.prompt.token_ids, *one.token_ids.tolist()] == expected
        said = [*ids_of(TOKENIZER, "Let me see."), EOS, *ids_of(TOKENIZER, "14, or 21"), EOS]
        assert one.token_ids[one.is_sampled].tolist() == said


def test_attempts_are_conversations_and_their_mean_reward_counts(env: dict[str, Any]) -> None:
    """Of an environment of the package that runs its agent several times at once."""
    by_hand("verifiers.v1")
    rows, counts = rows_of(env), Counter[str]()
    prompts = [Prompt(one["id"], (5,), answer="", row=one) for one in rows]
    best_of_3 = {**env, "id": "best-of-n", "n": 3}

    def script(request: Request) -> list[int]:
        counts[request.name] += 1
        return [*ids_of(TOKENIZER, "14" if counts[request.name] == 2 else "0"), EOS]

    episodes, _ = run(functools.partial(verifiers.play, env=best_of_3), script, prompts=prompts)
    for one in episodes:
        assert [number for number, _ in turns_of(one)] == [0, 1, 2]
        expected = {0: 2 / 3, 2: 1 / 3}.get(one.prompt.row["task"], 0.0)
        assert judge(str(one.final_text)).grade == expected


def test_an_agent_that_is_not_trained_needs_a_model_of_its_own(env: dict[str, Any]) -> None:
    """The package's simulated user, whose turns would be learned."""
    by_hand("verifiers.v1")
    agent = env["agent"]
    table = {"taskset": env["taskset"], "id": "user-sim", "assistant": agent, "user": agent}
    for one in play(table, "0", "###DONE###", rows=rows_of(env)[:1]):
        assert re.search(mentions("user", "environment.settings.env.user.client"), one.failure)


def test_nothing_of_an_episode_stays_in_memory(env: dict[str, Any]) -> None:
    """Without `compat.verifiers` the package keeps an HTTP client for every session."""
    by_hand("verifiers.v1")
    from verifiers.v1.clients import EvalClient

    assert all(one.final_text for one in play(env, "0"))
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, EvalClient)]


def test_failures_are_unknown_verdicts_with_a_reason(env: dict[str, Any]) -> None:
    by_hand("verifiers.v1")
    rows = rows_of(env)[:1]
    stale = [{**rows[0], "key": "0"}]
    late = changed(changed(env, "agent.timeout.scoring", 0.2), "taskset.task.fails", "time")
    for settings, given, why in [
        (changed(env, "taskset.task.fails", "reward"), rows, "no such reward"),
        (late, rows, "time limit"),
        (env, stale, "has changed"),
        (env, [{**rows[0], "task": 99}], "no task 99"),
        (env, [{"id": "0", "prompt": "0 * 7"}], "prepare_data"),
    ]:
        for one in play(settings, "0", rows=given):
            assert why in one.failure and one.final_text is None, (why, one.failure)


def test_settings_that_the_package_refuses_are_named(env: dict[str, Any]) -> None:
    by_hand("verifiers.v1")
    check(env)
    for name, value, *said in [
        ("taskset.id", "no_such_taskset", "no_such_taskset"),
        ("agent.harness.id", "no_such_harness", "no_such_harness"),
        ("taskset.num_task", 3, "num_task"),
        ("agent.client", {"base_url": "http://127.0.0.1:1/v1"}, "client"),
    ]:
        with pytest.raises(ConfigError, match=mentions("environment.settings.env", *said)):
            check(changed(env, name, value))
