"""Environments that are slow, have side effects, or are broken: the engine decodes on."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import DataError, MachineError
from gapo_megatron.rollout import calls as calls_module
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.call_metrics import (
    call_metrics,
    count_drafts,
    draft_metrics,
    sum_calls,
)
from gapo_megatron.rollout.calls import Acting, in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.generate import Hooks, begin, generate
from gapo_megatron.rollout.journal import JOURNAL_FOLDER, remove_journals, to_line
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Episode, Prompt, TurnSettings
from tests.acting import EOS, acting_of, calls_of
from tests.dist import run_distributed
from tests.messages import mentions
from tests.rollout.test_chat import tokenizer_of
from tests.scripted_engine import LoneReplicas, ScriptedEngine
from tests.waiting import HANG_S

SETTINGS = SamplingSettings(num_samples=4, max_response_tokens=200, seed=7, step=3)
PROMPTS = [Prompt(str(i), (10 + i,), answer="") for i in range(16)]
NUM_TURNS = 3


def draws(request: Request) -> list[int]:
    """Tokens that depend on the seed and on everything before, as a model's do."""
    seed = [request.seed, *request.prompt_ids, *request.response_ids.tolist()]
    generator = np.random.default_rng(seed)
    return [*generator.integers(2, 50, generator.integers(1, 9)).tolist(), EOS]


def answer_of(episode: Episode) -> list[int] | None:
    """Two tokens made of the model's last, for some turns."""
    turns = int((episode.token_ids == EOS).sum())
    return None if turns >= NUM_TURNS else [60 + turns, int(episode.token_ids[-2])]


def content_of(groups: Any) -> list[Any]:
    return [
        (one.prompt.id, one.sample, one.token_ids.tolist(), one.is_sampled.tolist(), one.failure)
        for group in groups
        for one in group
    ]


def run(respond: Callable[[Episode], Any], *, calls: Any = None, **options: Any) -> list[Any]:
    engine = ScriptedEngine(draws, num_places=20)
    calls = calls or calls_of(respond, run=in_thread, **options)
    groups = generate(engine, PROMPTS, SETTINGS, calls=calls)
    assert calls.num_open == 0
    return content_of(groups)


def test_tokens_do_not_depend_on_how_fast_the_environment_answers() -> None:
    """At once, in any order, and not before nothing else is left to decode."""
    expected = run(answer_of, calls=calls_of(answer_of))
    assert sum(not all(mask) for _, _, _, mask, _ in expected) == 64

    def at_random(episode: Episode) -> Any:
        time.sleep(random.uniform(0, 0.02))
        return answer_of(episode)

    assert run(at_random) == expected
    assert run(answer_of, max_concurrent=1) == expected

    engine = ScriptedEngine(draws)
    is_idle = threading.Event()

    def last(episode: Episode) -> Any:
        assert is_idle.wait(HANG_S)
        return answer_of(episode)

    calls = calls_of(last, run=in_thread)
    poll, replies = engine.poll, calls.replies
    engine.poll = lambda: (is_idle.clear(), poll())[1]  # type: ignore[method-assign]
    calls.replies = lambda *, wait_s: (wait_s and is_idle.set(), replies(wait_s=wait_s))[1]  # type: ignore[method-assign]
    assert content_of(generate(engine, PROMPTS, SETTINGS, calls=calls)) == expected


def test_the_engine_decodes_while_calls_are_open() -> None:
    """An answer that only comes after more decoding steps would otherwise never come."""
    decoded = threading.Event()
    engine = ScriptedEngine(lambda request: [5] * (1 if request.name == "0/0" else 50) + [EOS])
    engine.before_step = lambda: decoded.set() if engine.num_steps == 40 else None

    def respond(episode: Episode) -> None:
        if (episode.prompt.id, episode.sample) == ("0", 0):
            assert decoded.wait(HANG_S)

    calls = calls_of(respond, run=in_thread, call_timeout_s=1000)
    assert generate(engine, PROMPTS, SETTINGS, calls=calls) is not None
    assert decoded.is_set()


# --- broken environments --------------------------------------------------------------------------


def _hang(_: Episode) -> None:
    threading.Event().wait()


def _raise(_: Episode) -> None:
    raise ValueError("no such tool")


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def _raise_mute(_: Episode) -> None:
    raise _Mute


def _leave(_: Episode) -> None:
    sys.exit(3)


def _count_forever(_: Episode) -> Any:
    return iter(int, 1)


BROKEN: list[tuple[Callable[[Episode], Any], str]] = [
    (_hang, "call_timeout_s"),
    (_raise, "no such tool"),
    (_leave, "SystemExit"),
    (_raise_mute, "_Mute"),
    (_count_forever, "iterator"),
    (lambda _: b"text", "bytes"),
    (lambda _: "\ud800", "surrogates"),
    (lambda _: "a" * 1_000_001, "1000001"),
    (lambda _: [1.5], "float"),
    (lambda _: [True], "bool"),
    (lambda _: [-1], "-1"),
    (lambda _: [100_000], "100000"),
    (lambda _: np.zeros((300, 3), np.int64), "ndarray"),
    (lambda _: {5: 6}, "dict"),
    (lambda _: [], "no token"),
    (lambda _: ([5], TurnSettings(max_tokens=0)), "max_tokens (0)"),
    (lambda _: ([5], TurnSettings(grammar="{}")), "structured_outputs"),
]


@pytest.mark.parametrize("num_tokens", [199, 200, 201, 10**6])
def test_tokens_without_room_truncate_a_response(num_tokens: int) -> None:
    """However many: an unknown verdict would be a way out of a wrong one."""
    settings = SamplingSettings(num_samples=1, max_response_tokens=200, seed=7)
    calls = calls_of(lambda _: [5] * num_tokens, max_response_tokens=200)
    groups = generate(ScriptedEngine(draws), PROMPTS[:1], settings, calls=calls)
    assert groups is not None
    (one,) = groups[0]
    assert one.truncated and not one.failure and one.response_mask is None
    assert one.token_ids[-1] == EOS
    sums = sum_calls(groups, [0], calls.counts)
    assert call_metrics(sums)[0]["environment/cut_share"] == 1


def test_broken_environments_are_unknown_and_harm_no_other() -> None:
    """Calls of 17 kinds, with the good ones between them; none is wrong, none ends the run."""
    kinds = [*BROKEN, (answer_of, ""), (answer_of, "")]
    place = {
        (prompt.id, sample): kinds[(18 * i + sample) % len(kinds)]
        for i, prompt in enumerate(PROMPTS)
        for sample in range(18)
    }
    settings = SamplingSettings(num_samples=18, max_response_tokens=200, seed=7, step=3)
    expected = generate(ScriptedEngine(draws), PROMPTS, settings, calls=calls_of(answer_of))
    calls = calls_of(
        lambda one: place[one.prompt.id, one.sample][0](one),
        run=in_thread, call_timeout_s=6, max_response_tokens=200, max_concurrent=300,
    )  # fmt: skip
    groups = generate(ScriptedEngine(draws), PROMPTS, settings, calls=calls)
    assert groups is not None and expected is not None
    num_broken = 0
    for group, goods in zip(groups, expected, strict=True):
        for one, good in zip(group, goods, strict=True):
            _, reason = place[one.prompt.id, one.sample]
            assert one.finished and (reason in one.failure if reason else not one.failure)
            if not reason:
                assert one.token_ids.tolist() == good.token_ids.tolist()
            num_broken += bool(reason)
    assert num_broken >= 200


def test_all_calls_of_an_episode_have_one_limit() -> None:
    calls = calls_of(_hang, run=in_thread, episode_timeout_s=1, call_timeout_s=1000)
    settings = SamplingSettings(num_samples=1, max_response_tokens=200, seed=7)
    groups = generate(ScriptedEngine(draws), PROMPTS[:1], settings, calls=calls)
    assert groups is not None
    assert re.search(mentions("environment.episode_timeout_s", 1), groups[0][0].failure)


def test_no_thread_is_left_for_a_call() -> None:
    """The system's limit of threads ends the episode, not the run."""
    num_begun = 0

    def starts_half(function: Callable[[], None]) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun % 2:
            raise RuntimeError("can't start new thread")
        function()

    calls = calls_of(answer_of, run=starts_half, max_concurrent=1)
    groups = generate(ScriptedEngine(draws), PROMPTS, SETTINGS, calls=calls)
    failures = [one.failure for group in groups or [] for one in group]
    assert "could not begin: can't start new thread" in failures[0]
    assert 0 < failures.count("") < len(failures)


def test_calls_that_were_given_up_keep_their_places_until_they_return() -> None:
    """No more run at once than may, in later steps neither, and nothing waits for them for good."""
    lock, num_running, most, released = threading.Lock(), 0, 0, threading.Event()

    def respond(episode: Episode) -> Any:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        assert released.wait(HANG_S)
        with lock:
            num_running -= 1
        return answer_of(episode)

    environment = SimpleNamespace(respond=respond)
    acting = acting_of(environment, run=in_thread, max_concurrent=3, call_timeout_s=2)
    for step in range(2):
        engine = ScriptedEngine(draws)
        calls = acting.calls(f"step_{step}", engine.replicas)
        groups = generate(engine, PROMPTS, SETTINGS, calls=calls)
        failures = [one.failure for group in groups or [] for one in group]
        assert sum("could not begin" in one for one in failures) == 64 - 3 * (step == 0)
        assert all("environment.call_timeout_s (2)" in one for one in failures)
    assert (num_running, most) == (3, 3)
    released.set()
    calls = acting.calls("step_2", engine.replicas)
    assert content_of(generate(engine, PROMPTS, SETTINGS, calls=calls)) == run(answer_of)
    assert most == 3


@pytest.mark.parametrize(
    ("hangs", "may_repeat", "limit_s"),
    [(True, False, 0.01), (True, True, HANG_S), (False, False, HANG_S)],
)
def test_a_stop_waits_only_for_calls_that_end_soon_and_may_not_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, may_repeat: bool, limit_s: float
) -> None:
    """Their answers are recorded: after the stop no episode is unknown."""
    monkeypatch.setattr(calls_module, "_STOP_WAIT_S", limit_s)
    asked: list[Episode] = []
    is_aborted, released = threading.Event(), threading.Event()

    def should_abort(_: float) -> bool:
        if len(asked) == 4:
            is_aborted.set()
        return is_aborted.is_set()

    def respond(episode: Episode) -> None:
        asked.append(episode)
        (released if hangs else is_aborted).wait()

    environment = SimpleNamespace(respond=respond, may_repeat=may_repeat)
    replicas = LoneReplicas()
    calls = acting_of(environment, run_dir=tmp_path, run=in_thread).calls("step_0", replicas)
    hooks = Hooks(should_abort=should_abort)
    assert generate(ScriptedEngine(draws), PROMPTS[:1], SETTINGS, calls=calls, hooks=hooks) is None

    if not hangs:  # nobody is asked again
        environment.respond = None
        again = acting_of(environment, run_dir=tmp_path).calls("step_0", replicas)
        (group,) = generate(ScriptedEngine(draws), PROMPTS[:1], SETTINGS, calls=again) or []
        assert not any(one.failure for one in group)
    released.set()


# --- ranks of a replica ---------------------------------------------------------------------------


class Watched(ScriptedEngine):
    """Remembers before which decoding step each request was added."""

    def add(self, request: Request) -> None:
        super().add(request)
        self.added.append((self.num_steps, request.name, request.seed))

    added: list[Any]


def _ask_on_two_ranks() -> Any:
    rank = dist.get_rank()
    replicas = Replicas.create(2, gloo_group=dist.group.WORLD)
    engine = Watched(draws, replicas=replicas, num_places=20)
    engine.added, asked = [], []

    def respond(episode: Episode) -> Any:
        asked.append(rank)
        time.sleep(random.uniform(0, 0.01))
        return answer_of(episode)

    class First:
        """Begins in another way on each rank, and fails on one."""

        def begin(self, prompt: Prompt) -> Any:
            if prompt.id == PROMPTS[rank].id:
                raise ValueError(f"rank {rank}")
            return [rank + 4]

    calls = calls_of(respond, replicas=replicas, run=in_thread)
    prompts = calls.agree([begin(First(), one) for one in PROMPTS[:3]])  # type: ignore[arg-type]
    begun = [(one.token_ids, one.failure) for one in prompts]
    groups = generate(engine, PROMPTS, SETTINGS, calls=calls)
    counts = {place: (one.num_calls, one.seconds) for place, one in calls.counts.items()}
    return engine.added, {*asked}, content_of(groups), counts, begun


def test_the_ranks_of_a_replica_add_the_same_requests_at_the_same_steps() -> None:
    (added, asked, content, *same), (others, by_other, *rest) = run_distributed(
        _ask_on_two_ranks, 2
    )
    assert added == others and len(added) == NUM_TURNS * 64
    assert (asked, by_other) == ({0}, set())
    assert [content, *same] == rest
    assert content == run(answer_of)
    begun = same[-1]
    assert begun[0] == (PROMPTS[0].token_ids, "begin: ValueError: rank 0")
    assert begun[1:] == [((4,), "")] * 2


@pytest.mark.parametrize(
    "begins", [_raise, _leave, *(lambda _, one=one: one for one in (None, ["5"], [1.5], [], [-1]))]
)
def test_a_begin_that_fails_makes_its_verdicts_unknown(begins: Callable[[Any], Any]) -> None:
    """And nobody else's: the engine gets the requests of the other problem."""
    first, second = PROMPTS[:2]
    environment: Any = SimpleNamespace(
        begin=lambda prompt: begins(prompt) if prompt.id == first.id else prompt.token_ids,
        respond=lambda _: None,
    )
    calls = acting_of(environment).calls("step_0", ScriptedEngine(draws).replicas)
    prompts = calls.agree([begin(environment, one) for one in (first, second)])
    groups = generate(ScriptedEngine(lambda request: [4, EOS]), prompts, SETTINGS, calls=calls)
    assert groups is not None
    assert all(one.failure.startswith("begin: ") for one in groups[0])
    assert not any(one.is_sampled.any() for one in groups[0])
    assert not any(one.failure for one in groups[1])


# --- the journal ----------------------------------------------------------------------------------


def test_a_resumed_run_reads_answers_and_repeats_no_call(tmp_path: Path) -> None:
    """Also with the last line interrupted, and by another number of replicas."""
    asked: list[Any] = []

    def respond(episode: Episode) -> Any:
        asked.append((episode.prompt.id, episode.sample, len(episode.token_ids)))
        return answer_of(episode)

    def journaled(number: int) -> Any:
        replicas = Replicas(rank=number, world_size=4, size=1)
        return calls_of(respond, replicas=replicas, name="step_3", run_dir=tmp_path)

    replies: list[Any] = []
    first = journaled(0)
    settle = first._caller._settle

    class KilledError(BaseException):
        pass

    def killed(call: Any, **result: Any) -> None:
        if len(asked) >= 50:
            raise KilledError  # after the call has begun, before its answer is recorded
        replies.append(result)
        settle(call, **result)

    first._caller._settle = killed
    with pytest.raises(KilledError):  # every reply before is on disk
        generate(ScriptedEngine(draws), PROMPTS, SETTINGS, calls=first)
    assert len(asked) == 50 and len(replies) == 49
    path = tmp_path / JOURNAL_FOLDER / "step_3_0.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"begun": "0123')

    engine = ScriptedEngine(draws)
    groups = generate(engine, PROMPTS, SETTINGS, calls=journaled(0))
    assert (
        len(asked)
        == len({*asked})
        == 50 + sum(not one.failure for group in groups or [] for one in group) * NUM_TURNS - 49
    )
    (failed,) = [one for group in groups or [] for one in group if one.failure]
    assert (failed.prompt.id, failed.sample) == asked[49][:2] and "interrupted" in failed.failure
    expected = {one[:2]: one for one in run(answer_of)}
    for one in content_of(groups):
        if not one[-1]:
            assert one == expected[one[:2]]
    # A third start, as another replica, asks for nothing, and is told the same.
    again = generate(ScriptedEngine(draws), PROMPTS, SETTINGS, calls=journaled(2))
    assert content_of(again) == content_of(groups) and len(asked) == len({*asked})
    assert [*path.parent.iterdir()] == [path]


def test_a_call_is_on_disk_before_it_begins(tmp_path: Path) -> None:
    found: list[Any] = []

    def respond(episode: Episode) -> None:
        found.append(calls_of(respond, run_dir=tmp_path)._caller._journal.find(episode))  # type: ignore[union-attr]

    run(respond, run_dir=tmp_path)
    assert len(found) == 64 and all("interrupted" in one.failure for one in found)


def _raise_at_first(episode: Episode) -> Any:
    raise KeyError("not found")


@pytest.mark.parametrize(
    "change",
    [
        *({"settings": {"a": 1}}, {"code": "b"}),
        *({"call_timeout_s": 61}, {"episode_timeout_s": 601}),
        {"template_variables": {"enable_thinking": False}},
    ],
)
def test_another_environments_answers_are_not_its(tmp_path: Path, change: Any) -> None:
    """A tool that is mended, and goes on in the same folder, must not meet its former errors."""
    assert all(one[-1] for one in run(_raise_at_first, run_dir=tmp_path))
    assert run(_raise_at_first, run_dir=tmp_path, max_concurrent=2) == run(
        answer_of, run_dir=tmp_path
    )
    assert run(answer_of, run_dir=tmp_path, **change) == run(answer_of)


def test_a_recorded_call_counts_once_in_the_episodes_limit(tmp_path: Path) -> None:
    """6 s of 10 s are spent by a call before the kill: 4 s are left, as if nothing had happened."""
    first = Episode(PROMPTS[0], 0, np.array([5, EOS], np.int32), np.zeros(2, np.float32))
    second = replace(first, token_ids=np.array([5, EOS, 60, EOS], np.int32))
    calls = calls_of(answer_of, run_dir=tmp_path, episode_timeout_s=10)
    calls.ask(first)
    path = tmp_path / JOURNAL_FOLDER / "step_0_0.jsonl"
    begun, ended = map(_record, path.read_bytes().splitlines())
    path.write_bytes(to_line(begun) + to_line(ended | {"seconds": 6.0}))
    calls = calls_of(answer_of, run_dir=tmp_path, episode_timeout_s=10)
    for episode in (first, second):
        calls.ask(episode)
        (reply,) = calls.replies(wait_s=0.0)
        assert not reply.failure and reply.tokens


def _record(line: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(line.partition(b" ")[2])
    return record


def test_a_damaged_journal_names_its_line(tmp_path: Path) -> None:
    """One changed byte anywhere; and a FIFO in its place, which nobody writes to."""
    run(answer_of, run_dir=tmp_path)
    path = tmp_path / JOURNAL_FOLDER / "step_0_0.jsonl"
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(100):
        place = generator.randrange(len(whole) - 1)  # without the end: a cut off line is no damage
        damaged = bytearray(whole)
        damaged[place] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        number = whole[:place].count(b"\n") + 1
        with pytest.raises(DataError, match=mentions(f"{path}:{number}")):
            calls_of(answer_of, run_dir=tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MachineError, match=mentions(path)):
        calls_of(answer_of, run_dir=tmp_path)


def test_a_journal_of_another_version_is_read_or_named(tmp_path: Path) -> None:
    """Settings of turns came later; what else is missing, or unknown, is an error."""
    played = run(answer_of, run_dir=tmp_path)
    path = tmp_path / JOURNAL_FOLDER / "step_0_0.jsonl"
    records = [_record(line) for line in path.read_bytes().splitlines()]

    def rewrite(remove: str, **more: Any) -> None:
        kept = [{key: one for key, one in record.items() if key != remove} for record in records]
        changed = (one if "begun" in one else one | more for one in kept)
        path.write_bytes(b"".join(map(to_line, changed)))

    rewrite("turn")
    assert run(answer_of, run_dir=tmp_path) == played
    number = next(i for i, one in enumerate(records, 1) if "call" in one)
    for remove, more in (("tokens", {}), ("", {"later": 1})):
        rewrite(remove, **more)
        with pytest.raises(DataError, match=mentions(f"{path}:{number}", "version", "remove")):
            calls_of(answer_of, run_dir=tmp_path)


def test_journals_of_saved_steps_are_removed(tmp_path: Path) -> None:
    names = ["step_3_0", "step_3_12", "step_4_0", "step_30_0", "evaluation_3_0", "evaluation_4_0"]
    folder = tmp_path / JOURNAL_FOLDER
    folder.mkdir()
    for name in names:
        (folder / f"{name}.jsonl").touch()
    (folder / "notes.txt").touch()
    remove_journals(tmp_path, before=4)
    left = {path.name for path in folder.iterdir()}
    assert left == {"step_4_0.jsonl", "step_30_0.jsonl", "evaluation_4_0.jsonl", "notes.txt"}
    remove_journals(tmp_path / "none", before=4)


def test_only_draft_tokens_of_this_step_count() -> None:
    """Those of earlier steps have versions; of ranks that only generate, no log-probs."""
    tokens, versions = np.zeros(10, np.int32), np.zeros(6, np.int32)
    one = Episode(PROMPTS[0], 0, tokens, np.zeros(10, np.float32), num_drafted=4, num_accepted=2)
    parts = [count_drafts([[one, replace(one, carried_versions=versions)]]), count_drafts([])]
    assert draft_metrics(parts) == {
        "rollout/draft_acceptance": 4 / 8,
        "rollout/draft_share": 4 / (10 + 4),
    }
    assert draft_metrics([count_drafts([])] * 2) == {}


# --- the document ---------------------------------------------------------------------------------


def test_the_documents_environment_answers_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).parents[2] / "docs/environments.md"
    text = document.read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    section = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1])
    (tmp_path / "search.py").write_text(code)
    (tmp_path / "facts.txt").write_text("the moon is far\nthe sun is farther\nthe moon is old\n")
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(**section["environment"])
    environments.check(config)
    tokenizer = tokenizer_of("qwen2_5")
    environment = environments.build(config, tokenizer)
    eos = tokenizer.eos_token_id
    turns = Turns(tokenizer, config.stop, eos_token_ids=[eos])
    acting = Acting(environment, config, turns, max_response_tokens=200, vocab_size=1000)

    def script(request: Request) -> list[int]:
        said = tokenizer.encode("<search>moon far</search>")[len(request.response_ids) :]
        ends = [i + 1 for i, token in enumerate(said) if token in request.stop_ids]
        return said[: ends[0]] if ends else [*tokenizer.encode("far"), eos]

    engine = ScriptedEngine(script)
    calls = acting.calls("step_0", engine.replicas)
    settings = SamplingSettings(num_samples=1, max_response_tokens=200, seed=7)
    groups = generate(engine, [Prompt("0", (5,), answer="far")], settings, calls=calls)
    assert groups is not None and not groups[0][0].failure
    appended = tokenizer.decode(groups[0][0].token_ids[~groups[0][0].is_sampled].tolist())
    assert appended == (
        "<|im_end|>\n<|im_start|>user\nthe moon is far<|im_end|>\n<|im_start|>assistant\n"
    )
    assert environment.judge(groups[0][0]) == ("far", "far")


def test_a_close_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """As one that an older environment has for purposes of its own, without an argument."""
    environment = SimpleNamespace(respond=lambda _: None, close=lambda: None)
    calls = acting_of(environment).calls("step_0", ScriptedEngine(draws).replicas)
    assert len(run(environment.respond, calls=calls)) > 1
    assert sum("close" in one for one in caplog.messages) == 1
