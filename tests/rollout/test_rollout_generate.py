"""Generation with any engine and environment, by scripted engines without vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import RewardConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import DataError, RewardError, RolloutError
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.generate import Hooks, generate
from gapo_megatron.rollout.journal import Reply
from gapo_megatron.rollout.progress import Heartbeat
from gapo_megatron.rollout.requests import Responses, SamplingSettings, request_seed
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.types import Episode, Prompt, TurnSettings
from tests.acting import acting_of, calls_of
from tests.dist import run_distributed
from tests.messages import mentions
from tests.rollout.test_sample import ATTEMPT, config_of, length_of
from tests.scripted_engine import LoneReplicas, ScriptedEngine, place_of
from tests.two_turn import TwoTurn
from tests.waiting import wait_until

EOS = 1
SETTINGS = SamplingSettings(num_samples=4, max_response_tokens=40, seed=7, step=3)
PROMPTS = [Prompt(str(i), (10 + i,), answer="") for i in range(8)]


def of_some_length(request: Request) -> list[int]:
    """`length_of` tokens per request, the last EOS, regardless of tokens so far."""
    left = length_of(*place_of(request)) - len(request.response_ids)
    return [5] * (left - 1) + [EOS]


def tokens_of(groups: Any) -> list[list[list[int]]]:
    return [[one.token_ids.tolist() for one in group] for group in groups]


def finished_of(groups: Any) -> dict[tuple[str, int], Episode]:
    return {
        (prompt.id, sample): one
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for sample, one in enumerate(group)
        if one.finished
    }


# --- what is asked for, and until when ------------------------------------------------------------


def test_an_engine_that_loses_a_request_is_an_error() -> None:
    """Otherwise it would be polled forever, and count as alive."""

    class Forgetful(ScriptedEngine):
        def add(self, request: Request) -> None:
            if place_of(request) != ("7", 3):
                super().add(request)

        def poll(self) -> list[Completion]:
            return super().poll() if self._open else []

    with pytest.raises(RolloutError, match=r"\b1\b"):
        generate(Forgetful(of_some_length), PROMPTS, SETTINGS)


def test_every_response_is_asked_for_in_order_and_with_its_own_seed() -> None:
    engine = ScriptedEngine(of_some_length)
    settings = replace(SETTINGS, temperature=0.5, top_p=0.9)
    groups = generate(engine, PROMPTS, settings)
    assert [one.name for one in engine.asked] == [f"{i}/{j}" for i in range(8) for j in range(4)]
    for request in engine.asked:
        problem, sample = place_of(request)
        assert request.seed == request_seed(7, 3, problem, sample)
        assert (request.max_tokens, request.temperature, request.top_p) == (40, 0.5, 0.9)
        assert tuple(request.prompt_ids) == PROMPTS[int(problem)].token_ids
        assert not len(request.response_ids)
    for i, group in enumerate(groups or []):
        for sample, one in enumerate(group):
            assert len(one.token_ids) == length_of(str(i), sample) and one.finished
            assert one.log_probs.tolist() == [-1.0] * len(one.token_ids)
            assert (one.truncated, one.response_mask) == (False, None)


def test_seeds_are_fixed_and_apart() -> None:
    assert request_seed(0, 0, "p", 0) == 105696400331299797
    seeds = {
        request_seed(run, step, prompt, sample)
        for run in range(3)
        for step in range(5)
        for prompt in ("1", "11", "p")
        for sample in range(8)
    }
    # Going on, also within the step that has begun, meets other random numbers.
    seeds |= {request_seed(0, 0, "p", 0, start) for start in range(1, 10)}
    assert len(seeds) == 3 * 5 * 3 * 8 + 9
    assert request_seed(0, 0, "p", 0, 0) == request_seed(0, 0, "p", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_responses_are_handed_over_when_they_end_and_once() -> None:
    engine = ScriptedEngine(of_some_length)
    calls: list[list[Episode]] = []
    still_running = []

    def on_ended(ended: Sequence[Episode]) -> None:
        calls.append(list(ended))
        still_running.append(sum(engine.num_requests()) > 0)

    def handed_over() -> dict[tuple[str, int], Episode]:
        everything = [one for ended in calls for one in ended]
        found = {(one.prompt.id, one.sample): one for one in everything}
        assert len(found) == len(everything)
        return found

    hooks = Hooks(on_ended=on_ended)
    first = generate(engine, PROMPTS, SETTINGS, num_groups=3, hooks=hooks)
    assert first is not None
    assert handed_over() == finished_of(first)  # the same objects: episodes are equal to no other
    assert sum(map(bool, calls)) > 3 and [] in calls
    assert not still_running[0] and all(still_running[1:])
    num_whole = sum(all(one.finished for one in group) for group in first)
    assert 3 <= num_whole < 8
    calls.clear()
    begun = {prompt.id: group for prompt, group in zip(PROMPTS, first, strict=True)}
    rest = generate(engine, PROMPTS, SETTINGS, begun=begun, hooks=hooks)
    assert handed_over() == finished_of(rest) and len(handed_over()) == 32
    assert len(calls[0]) == len(finished_of(first))
    alone = generate(ScriptedEngine(of_some_length), PROMPTS, SETTINGS)
    assert tokens_of(rest) == tokens_of(alone)


def test_whatever_raises_leaves_no_request_behind() -> None:
    def fail(ended: Sequence[Episode]) -> None:
        if ended:
            raise RewardError("no worker can start")

    engine = ScriptedEngine(of_some_length)
    with pytest.raises(RewardError):
        generate(engine, PROMPTS, SETTINGS, hooks=Hooks(on_ended=fail))
    assert engine.num_requests() == (0, 0) and engine.num_steps == 1


def test_an_engine_that_has_ended_hands_over_until_the_last_one_has() -> None:
    """Called without new episodes, to feed the verifier workers and to report progress."""
    calls: list[Sequence[Episode]] = []
    asked: list[float] = []

    def should_abort(elapsed_s: float) -> bool:
        asked.append(elapsed_s)
        return False

    hooks = Hooks(on_ended=calls.append, should_abort=should_abort)
    assert generate(ScriptedEngine(of_some_length), PROMPTS, SETTINGS, hooks=hooks) is not None
    assert len(asked) == 2 + 1  # eleven steps, with a question before each eighth, and one after
    assert calls[-2] and not calls[-1]


def test_a_replica_that_is_told_to_abort_ends_all_of_them() -> None:
    class Replicas(LoneReplicas):
        def gather(self, groups: Sequence[Any]) -> list[Any]:
            return [*groups, replace(groups[0], aborted=True)]

    hooks = Hooks(should_abort=lambda elapsed_s: False)
    engine = ScriptedEngine(of_some_length)
    assert generate(engine, PROMPTS, SETTINGS, hooks=hooks) is not None
    engine = ScriptedEngine(of_some_length, replicas=Replicas())
    assert generate(engine, PROMPTS, SETTINGS, hooks=hooks) is None
    engine = ScriptedEngine(of_some_length)
    told = Hooks(should_abort=lambda elapsed_s: True)
    assert generate(engine, PROMPTS, SETTINGS, hooks=told) is None
    assert engine.num_steps == 0 and engine.num_requests() == (0, 0)


@pytest.mark.parametrize(
    ("token_ids", "named"),
    [
        ((), ["'bad'", 0, 9960]),
        ((2,) * 9961, ["'bad'", 9961, 9960]),
        ((2, 100_000), ["'bad'", 100_000, 99_999]),
        ((2, -1), ["'bad'", -1, 99_999]),
    ],
)
def test_bad_prompts_are_named_before_generation(
    token_ids: tuple[int, ...], named: list[Any]
) -> None:
    engine = ScriptedEngine(of_some_length)
    with pytest.raises(DataError, match=mentions(*named)):
        generate(engine, [*PROMPTS, Prompt("bad", token_ids, answer="")], SETTINGS)
    assert not engine.asked


def beats(folder: str) -> int:
    """Rank 0 has ended; rank 1 generates, freezes for a while, and ends."""
    heart = Heartbeat(dist.group.WORLD)
    lively, frozen, thawed = (Path(folder, name) for name in ("lively", "frozen", "thawed"))
    if dist.get_rank() == 1:

        def is_lively() -> bool:
            heart.beat(ended=False)
            return lively.exists()

        wait_until(is_lively, "rank 0 to see beats")
        frozen.touch()
        wait_until(thawed.exists, "rank 0 to have looked")
        heart.wait_for_all(on_beat=lambda: None, meanwhile=lambda: None)
        return 0

    wait_until(lambda: heart.beat(ended=True), "a beat of rank 1")
    wait_until(lambda: heart.beat(ended=True), "another")
    lively.touch()
    wait_until(frozen.exists, "rank 1 to freeze")
    num_beats = sum(heart.beat(ended=True) for _ in range(1000))
    assert not heart.all_ended
    thawed.touch()
    heart.wait_for_all(on_beat=lambda: None, meanwhile=lambda: None)
    return num_beats


def test_a_rank_that_freezes_while_it_generates_is_missed(tmp_path: Path) -> None:
    """Its own watch is frozen too, so the others must not wait for it forever."""
    num_beats, _ = run_distributed(beats, 2, str(tmp_path))
    assert num_beats <= 1, "at most the one that was under way"


# --- an environment that answers ------------------------------------------------------------------

GIVEN = (90, 91, 92)


def in_two_turns(request: Request) -> list[int]:
    """Two tokens and EOS, then a different number of tokens."""
    said = request.response_ids.tolist()
    if GIVEN[-1] in said:
        begun = len(said) - said.index(GIVEN[-1]) - 1
        return [*[7] * (1 + place_of(request)[1]), EOS][begun:]
    return [5, 5, EOS][len(said) :]


def test_the_model_goes_on_from_what_the_environment_says() -> None:
    engine = ScriptedEngine(in_two_turns)
    calls: list[Episode] = []
    groups = generate(
        engine,
        PROMPTS[:2],
        SETTINGS,
        calls=calls_of(TwoTurn(GIVEN).respond),
        hooks=Hooks(calls.extend),
    )
    for prompt, group in zip(PROMPTS, groups or [], strict=False):
        for sample, one in enumerate(group):
            said = [7] * (1 + sample) + [EOS]
            assert one.token_ids.tolist() == [5, 5, EOS, *GIVEN, *said]
            sampled = [True] * 3 + [False] * 3 + [True] * len(said)
            assert one.response_mask is not None and one.response_mask.tolist() == sampled
            assert one.log_probs.tolist() == [-1.0 if is_ours else 0.0 for is_ours in sampled]
            assert one.finished and not one.truncated
            assert (one.token_ids.dtype, one.log_probs.dtype) == (np.int32, np.float32)
            first, second = [r for r in engine.asked if r.name == f"{prompt.id}/{sample}"]
            # Tokens as they are, and other random numbers.
            assert tuple(second.prompt_ids) == tuple(first.prompt_ids) == prompt.token_ids
            assert second.response_ids.tolist() == [5, 5, EOS, *GIVEN]
            assert (first.max_tokens, second.max_tokens) == (40, 34)
            assert second.seed == request_seed(7, 3, prompt.id, sample, 6) != first.seed
    # An episode ends once, as a whole.
    assert len(calls) == 8 and {*calls} == {one for group in groups or [] for one in group}


def test_the_token_limit_counts_what_the_environment_says() -> None:
    def run(limit: int) -> Episode:
        settings = replace(SETTINGS, num_samples=1, max_response_tokens=limit)
        engine = ScriptedEngine(in_two_turns)
        groups = generate(engine, PROMPTS[:1], settings, calls=calls_of(TwoTurn(GIVEN).respond))
        assert groups is not None
        return groups[0][0]

    whole = [5, 5, EOS, *GIVEN, 7, EOS]
    for limit in (2, 7, 8):
        one = run(limit)
        assert one.token_ids.tolist() == whole[:limit]
        assert one.truncated == (limit < 8) and one.finished
    for limit in (3, 4, 5, 6):  # no room for a token of the model: nothing to learn from
        one = run(limit)
        assert one.token_ids.tolist() == whole[:3] and one.response_mask is None
        assert one.truncated and one.finished


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_episode_goes_on_wherever_it_was_interrupted(num_steps: int) -> None:
    """Before the environment's answer, right after it, or later; it is called once."""
    respond = TwoTurn(GIVEN).respond
    settings = replace(SETTINGS, num_samples=2)
    engine = ScriptedEngine(in_two_turns)
    whole = generate(engine, PROMPTS[:1], settings, calls=calls_of(respond))
    # Problem 1 is whole after so many steps, and problem 0 stops there.
    engine = ScriptedEngine(
        lambda request: [6] * num_steps if place_of(request)[0] == "1" else in_two_turns(request)
    )
    first = generate(
        engine,
        PROMPTS[:2],
        settings,
        num_groups=1,
        calls=calls_of(lambda one: None if one.prompt.id == "1" else respond(one)),
    )
    assert first is not None and whole is not None
    (opened, _) = first
    assert sum(one.finished for one in opened) == (num_steps >= 5) + (num_steps >= 6)
    rest = generate(engine, PROMPTS[:1], settings, begun={"0": opened}, calls=calls_of(respond))
    assert rest is not None and tokens_of(rest) == tokens_of(whole)
    for one, expected in zip(rest[0], whole[0], strict=True):
        assert one.response_mask is not None and expected.response_mask is not None
        assert one.response_mask.tolist() == expected.response_mask.tolist()
        assert one.log_probs.tolist() == expected.log_probs.tolist()


# What an environment says after each of the model's turns: the conversation, and its tokens.
TALKS = ((1, (80, 81)), (0, (90,)), (1, (91, 92)), (2, (80,)))


def respond_in_conversations(episode: Episode) -> tuple[tuple[int, ...], TurnSettings] | None:
    num_turns = int((episode.token_ids == EOS).sum())
    if num_turns > len(TALKS):
        return None
    number, tokens = TALKS[num_turns - 1]
    return tokens, TurnSettings(conversation=number)


def in_conversations(request: Request) -> list[int]:
    """What it says tells what it has read: the sum of it all, and EOS."""
    read = [*request.prompt_ids, *request.response_ids.tolist()]
    asked = max(i for i, token in enumerate(read) if token not in (7, EOS) and token < 1000)
    said = [7, 1000 + sum(read[: asked + 1]) % 1000, EOS]
    return said[len(read) - asked - 1 :]


def test_the_model_reads_the_conversation_that_goes_on_and_no_other() -> None:
    engine = ScriptedEngine(in_conversations)
    settings = replace(SETTINGS, num_samples=1)
    groups = generate(engine, PROMPTS[:1], settings, calls=calls_of(respond_in_conversations))
    ((one,),) = groups or []
    read, said, numbers = {0: [10], 1: [], 2: []}, [], []
    for number, tokens in ((0, ()), *TALKS):
        read[number] += tokens
        turn = [7, 1000 + sum(read[number]) % 1000, EOS]
        read[number] += turn
        said += [*tokens, *turn]
        numbers += [number] * len([*tokens, *turn])
    assert one.token_ids.tolist() == said
    assert one.conversations is not None and one.conversations.tolist() == numbers
    assert (one.num_conversations, one.conversations.dtype) == (3, np.int32)
    for request in engine.asked:
        number = numbers[settings.max_response_tokens - request.max_tokens]
        whole = read[number]
        tokens = [*request.prompt_ids, *request.response_ids.tolist()]
        assert tokens == whole[: len(tokens)] and len(request.prompt_ids) == 1
    assert len({request.seed for request in engine.asked}) == len(engine.asked) == 5
    # Verifiers read the turns as they came, the last of them with nothing but its conversation.
    assert one.context(len(said) - 3).tolist() == [80]


@pytest.mark.parametrize("num_steps", range(1, 15))
def test_conversations_go_on_wherever_they_were_interrupted(num_steps: int) -> None:
    settings = replace(SETTINGS, num_samples=1)
    whole = generate(
        ScriptedEngine(in_conversations),
        PROMPTS[:1],
        settings,
        calls=calls_of(respond_in_conversations),
    )
    engine = ScriptedEngine(
        lambda request: [6] * num_steps if request.name == "1/0" else in_conversations(request)
    )
    first = generate(
        engine,
        PROMPTS[:2],
        settings,
        num_groups=1,
        calls=calls_of(lambda one: None if one.prompt.id == "1" else respond_in_conversations(one)),
    )
    assert first is not None and whole is not None
    (opened,) = to_episodes(to_rollouts([first[0]]).carried(), PROMPTS[:1])
    rest = generate(
        engine,
        PROMPTS[:1],
        settings,
        begun={"0": opened},
        calls=calls_of(respond_in_conversations),
    )
    ((one,),), ((expected,),) = rest or [], whole
    for name in ("token_ids", "conversations", "response_mask", "log_probs"):
        assert getattr(one, name).tolist() == getattr(expected, name).tolist()


def test_a_conversation_has_the_next_number_and_no_routes() -> None:
    settings = replace(SETTINGS, num_samples=1)
    groups = generate(
        ScriptedEngine(in_conversations),
        PROMPTS[:1],
        settings,
        calls=calls_of(lambda one: ((80,), TurnSettings(conversation=2))),
    )
    ((one,),) = groups or []
    assert re.search(mentions("conversation", "2", "0 to 1"), one.failure)
    # The weights are verified with conversation 0 (`first_sequences`).
    first = SimpleNamespace(
        respond=lambda one: ((80,), TurnSettings(conversation=1)), moves_first=True
    )
    calls = acting_of(first).calls("step_0", LoneReplicas())
    groups = generate(ScriptedEngine(in_conversations), PROMPTS[:1], settings, calls=calls)
    ((one,),) = groups or []
    assert re.search(mentions("conversation", "1", "0", "begins"), one.failure)
    responses = Responses(PROMPTS[:1], {}, replace(settings, keeps_routes=True))
    [*responses.begin()]
    with pytest.raises(RolloutError, match=mentions("conversation", "routing_replay", "trainer")):
        responses.answer(Reply("0", 0, (80,), turn=TurnSettings(conversation=1)))


def test_a_batch_of_two_turns_counts_what_the_model_sampled() -> None:
    """Verdicts, made in a worker, are on the last turn; open episodes keep their masks."""
    config = config_of(2, oversampling=2, partial_rollouts=True)
    problems = [Prompt(str(i), (10 + i,), answer=f"7 {EOS}") for i in range(8)]
    engine = ScriptedEngine(in_two_turns)
    with rewards.start_pool(RewardConfig(kind="exact"), num_workers=1) as pool:
        rollouter = Rollouter(
            engine,
            PromptSource(problems, seed=0),
            pool,
            acting_of(TwoTurn(GIVEN, first=(8,))),
            batch=config.batch,
            sampling=replace(SETTINGS, step=0),
            reward=config.reward,
        )
        sampled = rollouter.collect(0, attempt=ATTEMPT, stopwatch=Stopwatch())
    assert sampled is not None
    assert sampled.rewards.reshape(-1, 4).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
    # 3 + 2 to 3 + 5 tokens.
    assert sampled.metrics["rollout/response_length/mean"] == 6.5
    assert sampled.metrics["reward/mean"] == 0.25
    opened = rollouter.gather_open_groups()
    assert len(opened) == 2
    # What the model has read first is the prompt from here on, also where it is still open.
    assert sampled.rows_here == [*range(8)]
    for row, problem in enumerate(sampled.table["problem"]):
        assert sampled.prompt_ids[row].tolist() == [8, 10 + problem]
    for one in (one for group in opened for one in group):
        assert one.prompt.token_ids == (8, 10 + int(one.prompt.id))
        assert one.response_mask is not None and (~one.response_mask).sum() == 3
