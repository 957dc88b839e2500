"""Environments behind an address, against server processes that work, and that fail."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import EnvironmentConfig, RewardConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.answers import split_answer
from gapo_megatron.rollout.chat import cut_middle
from gapo_megatron.rollout.environments import openenv
from gapo_megatron.rollout.environments import served as served_module
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests import configs
from tests.acting import acting_of
from tests.gym_servers import FOREIGN, LONG
from tests.messages import mentions
from tests.needs import by_hand
from tests.rollout.test_chat import tokenizer_of
from tests.rollout.test_sample import ATTEMPT, config_of
from tests.scripted_engine import ScriptedEngine, place_of
from tests.waiting import HANG_S

TOKENIZER = tokenizer_of("qwen2_5")
EOS = TOKENIZER.eos_token_id
KINDS = ("nemo_gym", "openenv")
SCHEMES = {"nemo_gym": "http", "openenv": "ws"}
TOOL = {"type": "function", "name": "guess", "parameters": {}, "strict": True}
REPLIES = ("hang", "half", "closed", "die", "not_json", "a_list")


def server_of(kind: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gym_servers", kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port.isdigit()
    return process, f"{SCHEMES[kind]}://127.0.0.1:{port}"


@contextmanager
def served(kind: str) -> Iterator[str]:
    process, url = server_of(kind)
    try:
        yield url
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with served("nemo_gym") as nemo_gym, served("openenv") as openenv:
        yield {"nemo_gym": nemo_gym, "openenv": openenv}


def environment_of(kind: str, url: str, *, timeout_s: int = 60, **settings: Any) -> Any:
    observation = {"observation": "text"} if kind == "openenv" else {}
    config = EnvironmentConfig(
        kind=kind, settings={"url": url, **observation, **settings}, call_timeout_s=timeout_s
    )
    return environments.build(config, TOKENIZER)


def prompt_of(kind: str, *, fault: str = "", secret: int = 7, id: str = "0") -> Prompt:
    row: dict[str, Any] = {"id": id, "prompt": "Guess a number."}
    if kind == "nemo_gym":
        request = {"input": [{"role": "user", "content": row["prompt"]}], "tools": [TOOL]}
        row |= {"secret": secret, "fault": fault, "responses_create_params": request}
    else:
        row["reset"] = {"seed": secret, "fault": fault}
    return Prompt(id, (5,), answer="-", row=row)


def turns_of(kind: str, *guesses: int) -> list[str]:
    """What the model says: a call for each guess, and the last guess as its answer."""
    if kind == "openenv":
        return [str(one) for one in guesses]
    return [*map(call, guesses), f"It is {guesses[-1]}."]


def call(number: Any, name: str = "guess") -> str:
    body = json.dumps({"name": name, "arguments": {"number": number}})
    return f"<tool_call>\n{body}\n</tool_call>"


def verdict_of(judge: Any, episode: Episode, *, correct_above: float = 0.5) -> Any:
    """As with `reward.kind = "environment"`, without its workers."""
    pool: Any = SimpleNamespace(correct_above=correct_above, takes_verdicts=lambda name: True)
    return rewards.ask_judge(judge, episode, pool=pool)


def play(
    environment: Any, prompt: Prompt, turns: list[str], *, cuts: list[int] | None = None
) -> tuple[Verdict, str]:
    """Verdict on an episode of these turns, as a run makes it, and all that was appended.

    `cuts` gets the number of tokens that were cut from each answer.
    """
    tokens, mask, appended, text = [], [], "", None
    moves = [None, *turns] if getattr(environment, "moves_first", False) else list(turns)
    failure, episode = "", Episode(prompt, 0, np.array([], np.int32), np.array([], np.float32))
    for said in moves:
        if said is not None:
            own = [*TOKENIZER.encode(said, add_special_tokens=False), EOS]
            tokens += own
            mask += [True] * len(own)
        episode = Episode(
            prompt,
            0,
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            response_mask=None if all(mask) else np.array(mask),
        )
        try:
            answer = environment.respond(episode)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            break
        if isinstance(answer, str):
            text = answer
            break
        answer, turn = split_answer(answer)
        if cuts is not None:
            cuts.append(turn.num_cut)
        tokens += answer
        mask += [False] * len(answer)
        appended += TOKENIZER.decode(answer)
    arrays = (np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))
    episode = Episode(prompt, 0, *arrays, failure=failure, final_text=text)
    environment.close(episode)
    judged = verdict_of(environment.judge, episode)
    assert isinstance(judged, Verdict)
    return judged, appended


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("guesses", "grade"), [((7,), 1.0), ((9, 7), 0.75), ((9, 8, 6, 7), 0.25)])
def test_the_server_answers_and_gives_the_verdict(
    kind: str, guesses: tuple[int, ...], grade: float, urls: dict[str, str]
) -> None:
    environment = environment_of(kind, urls[kind])
    verdict, appended = play(environment, prompt_of(kind), turns_of(kind, *guesses))
    assert verdict.grade == grade
    assert verdict.outcome is (Outcome.CORRECT if grade > 0.5 else Outcome.WRONG)
    hints = {"nemo_gym": ["lower", "higher", "right"], "openenv": ["Guess.", "wrong"]}[kind]
    expected = {"nemo_gym": hints[2:] if len(guesses) == 1 else hints[::2], "openenv": hints[:1]}
    assert all(one in appended for one in expected[kind])


NEMO_FAULTS = [
    *(f"{stage}:{fault}" for stage in ("seed", "tool") for fault in ("status", *REPLIES[:4])),
    *(f"verify:{fault}" for fault in ("status", *REPLIES, "judge_failed", "no_reward")),
    *(f"verify:{reward}" for reward in ("nan", "infinite", "text", "null", "true")),
]
OPENENV_FAULTS = [
    *(f"{stage}:{fault}" for stage in ("reset", "step") for fault in ("error", "other", *REPLIES)),
    *("reset:no_observation", "step:no_done"),
    *(f"step:{reward}" for reward in ("nan", "infinite", "text", "null", "true")),
    *("end:null", "end:nan"),
]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("nemo_gym", fault) for fault in NEMO_FAULTS),
        *(("openenv", fault) for fault in OPENENV_FAULTS),
    ],
)
def test_a_server_that_fails_is_an_unknown_verdict(
    kind: str, fault: str, urls: dict[str, str]
) -> None:
    """With the reason, and never a reward of 0; the right answer is given in every case."""
    own = served(kind) if fault.endswith("die") else None
    url = own.__enter__() if own else urls[kind]
    try:
        environment = environment_of(kind, url, timeout_s=1, max_calls=9) if kind == KINDS[0] else (
            environment_of(kind, url, timeout_s=1)
        )  # fmt: skip
        verdict, _ = play(environment, prompt_of(kind, fault=fault), turns_of(kind, 9, 7))
    finally:
        if own:
            own.__exit__(None, None, None)
    assert verdict.outcome is Outcome.UNKNOWN and verdict.grade is None
    assert len(verdict.reason) > 10
    assert not verdict.reason.startswith("judge:")  # found where the server was asked
    # The server still serves others.
    if not own:
        healthy = environment_of(kind, url)
        assert play(healthy, prompt_of(kind), turns_of(kind, 7))[0].grade == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_at_the_address_is_an_unknown_verdict(kind: str) -> None:
    with socket.socket() as taken:  # not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        url = f"{SCHEMES[kind]}://127.0.0.1:{taken.getsockname()[1]}"
        verdict, _ = play(environment_of(kind, url), prompt_of(kind), turns_of(kind, 7))
    assert verdict.outcome is Outcome.UNKNOWN and "refused" in verdict.reason


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (ConnectionRefusedError("refused"), 3),
        (httpx.ConnectError("refused"), 3),
        (ConnectionResetError("reset"), 1),
        (httpx.ReadError("half"), 1),
        (httpx.ConnectTimeout("late"), 1),
        (TimeoutError("late"), 1),
    ],
)
def test_only_a_refused_connection_is_tried_again(
    error: Exception, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, calls = environment_of("openenv", "ws://x"), [0]
    monkeypatch.setattr(served_module, "_PAUSES_S", (0.0, 0.0))

    def fails() -> Any:
        calls[0] += 1
        raise error

    def fails_once() -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise error
        return "a session"

    episode = Episode(prompt_of("openenv"), 0, np.array([]), np.zeros(0))
    with pytest.raises(type(error)):
        environment._session(episode, is_first=True, begin=fails)
    assert calls == [num_calls]
    calls[0] = 0
    if num_calls > 1:
        assert environment._session(episode, is_first=True, begin=fails_once) == "a session"
    else:
        with pytest.raises(type(error)):
            environment._session(episode, is_first=True, begin=fails_once)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_session_and_the_token_limit_are_unknown(kind: str, urls: dict[str, str]) -> None:
    """A later process has no session; a server has not seen the end of a truncated response."""
    tokens = np.array([5, 6, EOS], np.int32)
    episode = Episode(
        prompt_of(kind), 0, tokens, np.zeros(3, np.float32),
        response_mask=np.array([False, True, True]),
    )  # fmt: skip
    environment = environment_of(kind, urls[kind])
    with pytest.raises(RuntimeError, match="session"):
        environment.respond(episode)
    judged = verdict_of(environment.judge, episode)
    assert isinstance(judged, Verdict) and judged.outcome is Outcome.UNKNOWN
    assert "limit" in judged.reason
    scored = environment_of(kind, urls[kind], unscored=-1)
    judged = verdict_of(scored.judge, episode)
    assert isinstance(judged, Verdict) and judged.grade == -1


def test_a_model_reaches_the_tools_of_its_row_alone(urls: dict[str, str]) -> None:
    """Not the server's own addresses; what a tool refuses is an answer to the model."""
    environment = environment_of("nemo_gym", urls["nemo_gym"])
    odd = [call(7, name) for name in ("verify", "seed_session", "../guess", "GUESS", "")]
    odd += ["<tool_call>{</tool_call>", call("seven")]
    verdict, appended = play(environment, prompt_of("nemo_gym"), [*odd, "It is 7."])
    assert verdict.grade == 1.0
    assert appended.count("error: there is no tool") == 5
    assert "cannot be read" in appended and "must be an integer" in appended


@pytest.mark.parametrize("number", ["\ud83d", float("nan"), float("inf")])
def test_a_call_that_no_server_could_get_is_the_models_mistake(
    number: Any, urls: dict[str, str]
) -> None:
    """Half a character and NaN are no JSON that is sent: not a failure of the server."""
    environment = environment_of("nemo_gym", urls["nemo_gym"])
    verdict, appended = play(environment, prompt_of("nemo_gym"), [call(number), "It is 7."])
    assert verdict.grade == 1.0 and "error: the call cannot be read" in appended
    for part, other, error in (
        ('"guess"', '["guess"]', "it has no name"),
        ("arguments", "parameters", "it has no arguments"),  # not sent without them
    ):
        said = [call(7).replace(part, other), "It is 7."]
        verdict, appended = play(environment, prompt_of("nemo_gym"), said)
        assert verdict.grade == 1.0 and error in appended


@pytest.mark.parametrize("odd", [float("nan"), {"of": [float("inf"), 1.5]}, "\ud83d"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_json_cannot_hold_costs_no_episode(kind: str, odd: Any, urls: dict[str, str]) -> None:
    """pandas writes what is missing in a column of numbers as NaN; JSON has none."""
    prompt = prompt_of(kind)
    row = {**prompt.row, "odd": odd, "reset": {**prompt.row.get("reset", {}), "odd": odd}}
    environment = environment_of(kind, urls[kind])
    verdict, _ = play(environment, replace(prompt, row=row), turns_of(kind, 7))
    assert verdict.grade == 1.0, verdict


STAGES = [("nemo_gym", "tool"), ("openenv", "reset"), ("openenv", "step")]


@pytest.mark.parametrize(("kind", "stage"), STAGES)
def test_special_tokens_of_a_server_are_removed(
    kind: str, stage: str, urls: dict[str, str]
) -> None:
    """Also one that is there once the one within it is removed."""
    prompt, turns = prompt_of(kind, fault=f"{stage}:special"), turns_of(kind, 9, 7)
    verdict, appended = play(environment_of(kind, urls[kind]), prompt, turns)
    assert verdict.grade == 0.75
    assert "ab" in appended and "a<" not in appended and ">b" not in appended
    _, plain = play(environment_of(kind, urls[kind]), prompt_of(kind), turns)
    assert appended.count("<|im_end|>") == plain.count("<|im_end|>")


@pytest.mark.parametrize(("kind", "stage"), STAGES)
def test_what_a_server_says_is_cut(kind: str, stage: str, urls: dict[str, str]) -> None:
    config = EnvironmentConfig(kind=kind, settings={"url": urls[kind]}, max_call_tokens=20)
    if kind == "openenv":
        config.settings["observation"] = "text"
    environment = environments.build(config, TOKENIZER)
    expected, num_cut = cut_middle(LONG, TOKENIZER, max_tokens=20)
    cuts: list[int] = []
    prompt, turns = prompt_of(kind, fault=f"{stage}:long"), turns_of(kind, 9, 7)
    verdict, appended = play(environment, prompt, turns, cuts=cuts)
    assert verdict.grade == 0.75 and num_cut > 100
    assert expected in appended and LONG not in appended
    assert sum(cuts) == num_cut * appended.count("tokens cut") > 0
    _, appended = play(environment_of(kind, urls[kind]), prompt, turns, cuts=cuts)
    assert LONG.strip() in appended


def test_a_connection_is_not_used_again(urls: dict[str, str]) -> None:
    """Servers close one that was idle for some seconds: it may be just when the next call comes."""
    prompt = prompt_of("nemo_gym", fault="idle")
    verdict, _ = play(
        environment_of("nemo_gym", urls["nemo_gym"]), prompt, turns_of(KINDS[0], 9, 7)
    )
    assert verdict.grade == 0.75, verdict


def test_a_server_that_answers_no_ping_meanwhile_has_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Busy, or behind a tunnel that passes none."""
    soon = functools.partial(openenv.connect, ping_interval=0.1, ping_timeout=0.1)
    monkeypatch.setattr(openenv, "connect", soon)
    process, url = server_of("openenv")
    timer = threading.Timer(1.0, process.send_signal, [signal.SIGCONT])
    try:
        environment = environment_of("openenv", url)
        respond = environment.respond

        def stops(episode: Episode) -> Any:
            if len(episode.token_ids):
                process.send_signal(signal.SIGSTOP)
                timer.start()
            return respond(episode)

        environment.respond = stops
        verdict, _ = play(environment, prompt_of("openenv"), ["7"])
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
    assert verdict.grade == 1.0, verdict


@pytest.mark.parametrize("observation", ["text", ""])
@pytest.mark.parametrize("stage", ["reset", "step"])
def test_a_model_reads_characters_and_not_their_escapes(
    observation: str, stage: str, urls: dict[str, str]
) -> None:
    """Also in a whole observation; half a character costs no episode."""
    environment = environment_of("openenv", urls["openenv"], observation=observation)
    verdict, appended = play(
        environment, prompt_of("openenv", fault=f"{stage}:foreign"), ["9", "7"]
    )
    assert verdict.grade == 0.75 and FOREIGN.replace("\ud83d", "?") in appended


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Play."}]])
def test_a_conversation_of_openenv_begins_with_the_rows_messages(
    system: list[dict[str, str]], urls: dict[str, str]
) -> None:
    """Under `prompt`, too, as verl and TRL have them."""
    asked = [*system, {"role": "user", "content": "A number?"}]
    environment = environment_of("openenv", urls["openenv"])
    for key in ("prompt", "messages"):
        prompt = prompt_of("openenv")
        row = {"reset": prompt.row["reset"], key: asked}
        verdict, appended = play(environment, replace(prompt, row=row), ["7"])
        assert verdict.grade == 1.0 and "A number?\n\nGuess." in appended
        assert ("Play." in appended) == bool(system)
    verdict, _ = play(environment, replace(prompt, row={}), ["7"])
    assert verdict.outcome is Outcome.UNKNOWN and "prompt or messages" in verdict.reason


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_have_sessions_of_their_own(kind: str, urls: dict[str, str]) -> None:
    """Many at once on one environment; each ends with its own reward."""
    environment, found = environment_of(kind, urls[kind]), {}

    def run(secret: int) -> None:
        prompt = prompt_of(kind, secret=secret, id=str(secret))
        guesses = [*range(100, 100 + secret % 3), secret]
        found[secret] = play(environment, prompt, turns_of(kind, *guesses))[0].grade

    threads = [threading.Thread(target=run, args=(secret,)) for secret in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(HANG_S)
    assert found == {secret: 1 - 0.25 * (secret % 3) for secret in range(12)}
    assert environment._sessions == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_batch_has_the_servers_rewards(kind: str, urls: dict[str, str]) -> None:
    """Sampled and judged as in a run: of four responses two are right, one meets a failing step."""
    guesses: dict[int, tuple[int, ...]] = {0: (7,), 1: (9, 7), 2: (9, 8, 6, 7), 3: (7,)}
    faults = {0: "", 1: "verify:status" if kind == "nemo_gym" else "end:nan"}
    problems = [prompt_of(kind, fault=fault, id=str(i)) for i, fault in faults.items()]
    said: dict[tuple[str, int], int] = {}

    def script(request: Any) -> list[int]:
        place = place_of(request)
        turns = turns_of(kind, *guesses[place[1]])
        turn = said[place] = said.get(place, -1) + 1
        return [*TOKENIZER.encode(turns[turn], add_special_tokens=False), EOS]

    config = config_of(2, rollouts_per_prompt=4)
    with rewards.start_pool(RewardConfig(kind="environment"), num_workers=1) as pool:
        rollouter = Rollouter(
            ScriptedEngine(script),
            PromptSource(problems, seed=0),
            pool,
            acting_of(environment_of(kind, urls[kind]), eos_token_ids=[EOS], tokenizer=TOKENIZER),
            batch=config.batch,
            sampling=SamplingSettings(num_samples=4, max_response_tokens=900, seed=7),
            reward=config.reward,
        )
        sampled = rollouter.collect(0, attempt=ATTEMPT, stopwatch=Stopwatch())
    assert sampled is not None
    by_problem = dict(zip(sampled.table["problem"].tolist()[::4], range(2), strict=True))
    outcomes = np.array(sampled.table["outcome"]).reshape(2, 4)
    correct, wrong, unknown = (
        one.code for one in (Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN)
    )
    assert outcomes[by_problem[0]].tolist() == [correct, correct, wrong, correct]
    assert outcomes[by_problem[1]].tolist() == [unknown] * 4


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("nemo_gym", {}, ("url", "missing")),
        ("nemo_gym", {"url": "ws://x"}, ("url ('ws://x')", "http")),
        ("openenv", {"url": "http://x"}, ("url ('http://x')", "ws")),
        ("nemo_gym", {"url": "http://x", "max_calls": -1}, ("max_calls (-1)",)),
        ("openenv", {"url": "ws://x", "max_turns": 0}, ("max_turns (0)",)),
        ("openenv", {"url": "ws://x", "action": ""}, ("action ('')",)),
        ("openenv", {"url": "ws://x", "unscored": 2e6}, ("unscored (2000000.0)",)),
        ("nemo_gym", {"url": "http://x", "turns": 3}, ("turns",)),
    ],
)
def test_a_wrong_setting_is_named(
    kind: str, settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    config = EnvironmentConfig(kind=kind, settings=settings)
    with pytest.raises(ConfigError, match=mentions(*named)):
        environments.check(config)
        environments.build(config, TOKENIZER)


def test_the_verdict_is_the_environments() -> None:
    """In the config, both settings say so; a system prompt would not reach OpenEnv's model."""
    for kind, reward in (("nemo_gym", "exact"), ("one_turn", "environment")):
        with pytest.raises(ConfigError, match=mentions("reward.kind", "environment.kind", kind)):
            configs.config_of({"environment": {"kind": kind}, "reward": {"kind": reward}})
    made = configs.config_of(
        {
            "environment": {"kind": "openenv", "settings": {"url": "ws://x"}},
            "reward": {"kind": "environment", "correct_above": 0.9},
        }
    )
    assert made.environment.takes_rows
    with pytest.raises(ConfigError, match=mentions("system_prompt", "openenv")):
        environments.check(made.environment, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("judged", "outcome"),
    [
        (0.6, Outcome.CORRECT),
        (np.float32(0.4), Outcome.WRONG),
        (True, Outcome.CORRECT),
        (Verdict(Outcome.WRONG, "so"), Outcome.WRONG),
        (float("nan"), Outcome.UNKNOWN),
        (1e9, Outcome.UNKNOWN),
        (None, Outcome.UNKNOWN),
        ("1", Outcome.UNKNOWN),
    ],
)
def test_an_environment_may_judge_by_itself(judged: Any, outcome: Outcome) -> None:
    def judge(_: Episode) -> Any:
        return judged

    episode = Episode(prompt_of("openenv"), 0, np.array([5]), np.zeros(1))
    found = verdict_of(judge, episode)
    assert isinstance(found, Verdict) and found.outcome is outcome
    high = verdict_of(lambda _: 0.6, episode, correct_above=0.9)
    assert isinstance(high, Verdict) and high.outcome is Outcome.WRONG


def test_texts_are_no_verdict_of_an_environment() -> None:
    with rewards.start_pool(RewardConfig(kind="environment"), num_workers=1) as pool:
        [verdict] = pool.judge([("a", "a")])
    assert verdict.outcome is Outcome.UNKNOWN


OPENENV_APP = """
import sys
from typing import Any
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret = 0

    def reset(self, seed=None, episode_id=None, **kwargs: Any):
        self.secret = seed or 0
        return Hint(text="Guess.", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs: Any):
        if action.message == "boom":
            raise RuntimeError("boom")
        right = action.message == str(self.secret)
        return Hint(text="right" if right else "wrong", done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State()


app = create_app(Game, Guess, Hint, env_name="game", max_concurrent_envs=32)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_packages_own_server_answers_alike(
    free_port: int, wait_for_port: Callable[..., None]
) -> None:
    """OpenEnv's, where it is installed."""
    by_hand("openenv.core")
    process = subprocess.Popen([sys.executable, "-c", OPENENV_APP, str(free_port)])
    try:
        wait_for_port(process, free_port)
        environment = environment_of("openenv", f"ws://127.0.0.1:{free_port}")
        prompt = prompt_of("openenv")
        for guesses, grade in (((7,), 1.0), ((9, 8, 7), 0.5)):
            verdict, appended = play(environment, prompt, turns_of("openenv", *guesses))
            assert verdict.grade == grade and "Guess." in appended
        verdict, _ = play(environment, prompt, ["boom", "7"])
        assert verdict.outcome is Outcome.UNKNOWN and "boom" in verdict.reason
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def wait_for_port() -> Callable[..., None]:
    def wait(process: subprocess.Popen[Any], port: int) -> None:
        import time

        end = time.monotonic() + HANG_S
        while time.monotonic() < end and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"no server: {process.poll()}")

    return wait
