"""Partial rollouts with an environment: what is interrupted goes on, and no call is made twice."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron.checkpoint.open_groups import from_content, to_content
from gapo_megatron.rollout.calls import Calls, in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import Hooks, generate
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.types import Episode, Prompt, TurnSettings
from tests.acting import EOS, acting_of, calls_of
from tests.scripted_engine import LoneReplicas, ScriptedEngine, ThreadReplicas, place_of

SETTINGS = SamplingSettings(num_samples=3, max_response_tokens=200, seed=7)
PROMPTS = [Prompt(str(i), (10 + i,), answer="") for i in range(12)]
GIVEN = 60
"""The environment's tokens are from here on, the model's below."""
Group = tuple[Episode, ...]


def turn(problem: str, sample: int, number: int) -> list[int]:
    length = (7 * int(problem) + 5 * sample + 11 * number) % 40
    return [*[2 + number] * length, EOS]


def say(request: Request) -> list[int]:
    """The rest of a turn, whatever has been interrupted."""
    problem, sample = place_of(request)
    tokens = request.response_ids.tolist()
    number = sum(token >= GIVEN for token in tokens)
    given = [i for i, token in enumerate(tokens) if token >= GIVEN]
    done = len(tokens) - (given[-1] + 1 if given else 0)
    return turn(problem, sample, number)[done:]


def answer_of(episode: Episode) -> Any:
    """A token for each of some turns; then the end, with or without a text, or a failure."""
    number, place = int((~episode.is_sampled).sum()), int(episode.prompt.id) + episode.sample
    if number < int(episode.prompt.id) % 5:
        # Some turns have a limit of their own: also after an interruption in their middle.
        most = 30 if place % 2 else None
        return [GIVEN + number], TurnSettings(max_tokens=most, num_alternatives=place % 3)
    if place % 4 == 0:
        raise ValueError(f"no answer to {place}")
    return ["", f"text {place}", None][place % 3]


def content_of(groups: Sequence[Group]) -> dict[tuple[str, int], Any]:
    return {
        (one.prompt.id, one.sample): (
            *(one.token_ids.tolist(), one.is_sampled.tolist(), one.log_probs.tolist()),
            *(one.failure, one.final_text, one.truncated, one.turn, alternatives_of(one)),
        )
        for group in groups
        for one in group
    }


def alternatives_of(episode: Episode) -> list[tuple[int, int, float]]:
    return [] if episode.alternatives is None else episode.alternatives.tolist()


def stored(groups: Sequence[Group], *, step: int) -> list[Group]:
    """The open groups as the next step has them, after a stop and a resume in between."""
    if not groups:
        return []
    rollouts = to_rollouts(groups, policy_version=step).carried()
    opened = to_episodes(rollouts, [group[0].prompt for group in groups])
    assert content_of(opened) == content_of(groups)
    resumed = from_content(to_content(opened))
    assert content_of(resumed) == content_of(groups)
    return resumed


class Asked:
    """An environment that counts what it is asked."""

    def __init__(self, respond: Callable[[Episode], Any] = answer_of) -> None:
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self.alternatives: dict[tuple[str, int, int], list[tuple[int, int, float]]] = {}
        self._respond = respond
        self._lock = threading.Lock()

    def __call__(self, episode: Episode) -> Any:
        key = episode.prompt.id, episode.sample, len(episode.token_ids)
        with self._lock:
            self.counts[key] += 1
            self.alternatives[key] = alternatives_of(episode)
        return self._respond(episode)


class Slowly:
    """Makes a call in every fourth decoding step, and where the generation waits for one."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._begun: deque[Callable[[], None]] = deque()

    def begin(self, call: Callable[[], None]) -> None:
        self._begun.append(call)

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps % 4 == 0:
            self.end_one()

    def end_one(self) -> None:
        if self._begun:
            self._begun.popleft()()

    def watch(self, calls: Calls) -> Calls:
        replies = calls.replies

        def wait(*, wait_s: float) -> Any:
            if wait_s:
                self.end_one()
            return replies(wait_s=wait_s)

        calls.replies = wait  # type: ignore[method-assign]
        return calls


def go_on(
    replicas: Replicas, asked: Asked, prompts: Sequence[Prompt], wanted: int
) -> tuple[list[Group], list[Episode]]:
    """Steps until every group is complete; all engines take equally many.

    Returns:
        The groups, and the episodes that a step has left unfinished.
    """
    slowly = Slowly()
    engine = ScriptedEngine(say, replicas=replicas, num_places=10, before_step=slowly.step)
    # Two calls at a time: others wait for their turn when a step ends.
    acting = acting_of(SimpleNamespace(respond=asked), run=slowly.begin, max_concurrent=2)
    waiting, opened, done = list(prompts), list[Group](), list[Group]()
    left: list[Episode] = []
    for step in range(100):
        new, waiting = waiting[: wanted + 2 - len(opened)], waiting[wanted + 2 - len(opened) :]
        mine = [*(group[0].prompt for group in opened), *new]
        numbers = replicas.gather([len(mine)])
        if not any(numbers):
            return done, left
        several = replicas.world_size > 1
        groups = generate(
            engine,
            mine,
            replace(SETTINGS, step=step),
            calls=slowly.watch(acting.calls(f"step_{step}", replicas)),
            begun={group[0].prompt.id: group for group in opened},
            num_groups=replicas.tally(min(wanted, sum(numbers))) if several else wanted,
            hooks=Hooks(keeps_unfinished=True, should_abort=lambda _: False),
        )
        assert groups is not None and engine.num_requests() == (0, 0)
        assert not slowly._begun, "a call whose answer nobody takes"
        whole = [group for group in groups if all(one.finished for one in group)]
        done += whole
        opened = stored([group for group in groups if group not in whole], step=step)
        left += [one for group in opened for one in group if not one.finished]
    raise AssertionError("it never ends")


@pytest.mark.parametrize("num_engines", [1, 2])
def test_interrupted_episodes_end_as_undisturbed_ones_and_every_call_is_made_once(
    num_engines: int,
) -> None:
    """Also the way in which an episode has ended is there when its group is whole."""
    undisturbed = Asked()
    whole = generate(
        ScriptedEngine(say), PROMPTS, SETTINGS, calls=calls_of(undisturbed, run=in_thread)
    )
    assert whole is not None
    expected = content_of(whole)
    assert {bool(one[3]) for one in expected.values()} == {False, True}
    assert {one[4] for one in expected.values()} >= {None, ""} and max(
        undisturbed.counts.values()
    ) == 1

    asked = Asked()
    if num_engines == 1:
        parts = [go_on(LoneReplicas(), asked, PROMPTS, 3)]
    else:
        ranks = ThreadReplicas.of(num_engines, size=1)
        with ThreadPoolExecutor(num_engines) as threads:
            parts = [
                *threads.map(
                    lambda one: go_on(one, asked, PROMPTS[one.rank :: num_engines], 3), ranks
                )
            ]
    done, left = ([one for part in parts for one in part[i]] for i in (0, 1))
    assert content_of(done) == expected
    # In a turn, some of them with a limit of its own, or before the answer to one.
    waits = [len(one.token_ids) > 0 and one.token_ids[-1] == EOS for one in left]
    assert {*waits} == {False, True}
    assert any(one.turn.max_tokens for one in left)
    assert asked.counts == undisturbed.counts
    assert asked.alternatives == undisturbed.alternatives
    assert sum(map(bool, asked.alternatives.values())) > 10


def test_calls_that_never_answer_hold_a_step_up_to_their_limit_only() -> None:
    """The others' answers are taken meanwhile; a later step has an unknown verdict."""
    release = threading.Event()

    def respond(episode: Episode) -> Any:
        if episode.prompt.id == "0":
            release.wait(60)
        return None

    calls = calls_of(respond, run=in_thread, call_timeout_s=1)
    engine = ScriptedEngine(lambda request: [5] * (1 if place_of(request)[0] == "0" else 9) + [EOS])
    hooks = Hooks(keeps_unfinished=True)
    found = generate(engine, PROMPTS[:3], SETTINGS, calls=calls, num_groups=2, hooks=hooks)
    release.set()
    assert found is not None and all(one.finished for group in found for one in group)
    assert all("call_timeout_s (1)" in one.failure for one in found[0])
    assert not any(one.failure for group in found[1:] for one in group)


def test_calls_that_have_not_begun_wait_for_the_next_step() -> None:
    """One call at a time: the group that ends first has its three, and one may have begun."""
    asked = Asked(lambda episode: None)
    calls = calls_of(asked, run=in_thread, max_concurrent=1)
    engine = ScriptedEngine(lambda request: [5] * int(place_of(request)[0]) + [EOS])
    hooks = Hooks(keeps_unfinished=True)
    found = generate(engine, PROMPTS[:3], SETTINGS, calls=calls, num_groups=1, hooks=hooks)
    assert found is not None and all(one.finished for one in found[0])
    assert 3 <= sum(asked.counts.values()) <= 4
