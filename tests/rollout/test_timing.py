"""When turns and calls took place; no claim here is about how long anything takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.rollout.calls import Calls, in_thread
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.journal import JOURNAL_FOLDER
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.run.generation_ranks import TIMELINES
from gapo_megatron.run.orders import pack, unpack
from gapo_megatron.types import Episode, Prompt, Span, Timeline
from tests.acting import EOS, calls_of
from tests.rollout.test_sample import length_of
from tests.rollout.test_samples import config_with, setup_of
from tests.scripted_engine import ScriptedEngine, ThreadReplicas

SETTINGS = SamplingSettings(num_samples=2, max_response_tokens=100, seed=7)
PROMPTS = [Prompt("a", (10,), answer=""), Prompt("b", (11,), answer="")]
ROUNDING_S = 0.0011


def answers_once(episode: Episode) -> list[int] | None:
    """Two tokens after the first turn; for the second sample of `b` there is no answer."""
    if (episode.prompt.id, episode.sample) == ("b", 1):
        raise OSError("no network")
    return [60, 61] if episode.response_mask is None else None


def spans_of(calls: Calls, **options: Any) -> dict[str, tuple[Span, ...]]:
    """The spans of a generation, by episode, after a check of their order."""
    engine = ScriptedEngine(lambda request: [5, 5, EOS], **options)
    assert generate(engine, PROMPTS, SETTINGS, calls=calls) is not None
    assert calls.timing is not None
    found = {f"{one.id}{i}": calls.timing.spans(one.id, i) for one in PROMPTS for i in range(2)}
    for spans in found.values():
        times = [time for one in spans for time in (one.start_s, one.end_s)]
        assert all(now >= before - ROUNDING_S for before, now in pairwise(times))
        assert times[0] >= 0
    return found


def kinds(spans: tuple[Span, ...]) -> list[tuple[bool, int, bool]]:
    return [(one.is_call, one.num_tokens, one.failed) for one in spans]


TURN, CALL, END, FAILED = (False, 3, False), (True, 2, False), (True, 0, False), (True, 0, True)


def test_an_episodes_turns_and_calls_are_noted_in_order() -> None:
    found = spans_of(calls_of(answers_once, run=in_thread), num_places=2)
    assert kinds(found.pop("b1")) == [TURN, FAILED]
    assert {name: kinds(one) for name, one in found.items()} == {
        name: [TURN, CALL, TURN, END] for name in ("a0", "a1", "b0")
    }


def test_a_replayed_call_has_no_length_and_the_journal_no_clock(tmp_path: Path) -> None:
    spans_of(calls_of(answers_once, run_dir=tmp_path))
    (path,) = (tmp_path / JOURNAL_FOLDER).iterdir()
    assert "began_s" not in path.read_text()
    found = spans_of(calls_of(answers_once, run_dir=tmp_path))
    assert kinds(found["b1"]) == [TURN, FAILED] and kinds(found["a0"]) == [TURN, CALL, TURN, END]
    assert all(one.start_s == one.end_s for spans in found.values() for one in spans if one.is_call)


def test_every_rank_has_the_timelines_of_the_samples(tmp_path: Path) -> None:
    """Of responses that other ranks have sampled, too."""
    plain = config_with(7)
    config = plain.model_copy(
        update={
            "environment": EnvironmentConfig(kind="tests.two_turn:TwoTurn"),
            "run": plain.run.model_copy(update={"output_dir": str(tmp_path)}),
        }
    )
    setups = [setup_of(config, replicas=replicas) for replicas in ThreadReplicas.of(3, size=1)]
    for setup in setups:
        setup.rollouter.environment.respond = lambda episode: None
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda setup: setup.collect(2), setups))
    first = found[0]
    assert [(one.step, one.problem, one.sample) for one in first.timelines] == [
        (2, one.problem, one.sample) for one in first.samples
    ]
    assert len(first.samples) == 7 and all(one.timelines == first.timelines for one in found)
    for one in first.timelines:
        num_tokens = length_of(one.problem, one.sample)
        assert kinds(one.spans) == [(False, num_tokens, False), (True, 0, False)]


def test_timelines_cross_to_the_training_side_unchanged() -> None:
    spans = (Span(False, 0.001, 0.25, 3), Span(True, 0.25, 1.5, 0, failed=True))
    timelines = [Timeline(2, "p\u2028", 1, spans), Timeline(2, "q", 0, spans[:1])]
    sent = unpack(pack([asdict(one) for one in timelines]))
    assert TIMELINES.validate_python(sent) == timelines
