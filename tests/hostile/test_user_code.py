"""Broken code of a user's own where it is loaded, and before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import EnvironmentConfig, RewardConfig
from gapo_megatron.errors import ConfigError, DataError, GapoError, said
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.generate import begin, generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Prompt
from tests.acting import EOS, acting_of
from tests.hostile.behaviours import RAISED, function, source
from tests.scripted_engine import ScriptedEngine

PROMPT = Prompt("the prompt", (5,), answer="1", row={"levels": [1]})
IN_PROCESS = [one for one in RAISED if one != "KeyboardInterrupt"]  # which is Ctrl-C there


def _import(path: Path, body: str) -> None:
    path.write_text(f"{source(body)}\nbehaves()\ndef verify(response, answer): return True\n")
    rewards.check(RewardConfig(kind=f"{path}:verify"))


def _construct_verifier(path: Path, body: str) -> None:
    path.write_text(
        f"{source(body)}\nclass Mine:\n"
        "    def __init__(self): behaves()\n"
        "    def verify(self, response, answer): return True\n"
    )
    rewards.check(RewardConfig(kind=f"{path}:Mine"))


def _construct_environment(path: Path, body: str) -> None:
    path.write_text(
        f"{source(body)}\nclass Mine:\n"
        "    def __init__(self, tokenizer): behaves()\n"
        "    begin = respond = judge = lambda *_: None\n"
    )
    environments.build(EnvironmentConfig(kind=f"{path}:Mine"), None)  # type: ignore[arg-type]


def _check_answer(path: Path, body: str) -> None:
    path.write_text(
        f"{source(body)}\ncheck_answer = behaves\ndef verify(response, answer): return True\n"
    )
    rewards.check_answer(f"{path}:verify", "1")


BEGINS = [
    *("return None", "return 5", "return ['5']", "return [1.5]", "return []", "return [-1]"),
    *("return [10**9]", "return [5] * 10**5", "return '5'", "return {'a': 5}"),
]
"""What `begin` must not return."""

PLACES: dict[Callable[[Path, str], None], tuple[type[GapoError], str]] = {
    _import: (ConfigError, "reward.kind"),
    _construct_verifier: (ConfigError, "reward.kind"),
    _construct_environment: (ConfigError, "environment.kind"),
    _check_answer: (DataError, "reward.kind"),
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[1:])
def test_whatever_it_raises_is_an_error_that_names_the_setting(
    tmp_path: Path, place: Callable[[Path, str], None]
) -> None:
    """SystemExit included, after which the run would be over without a word."""
    kind, named = PLACES[place]
    for number, one in enumerate(IN_PROCESS):
        with pytest.raises(kind) as caught:
            place(tmp_path / f"v{number}.py", f"raise {one}")
        assert named in str(caught.value) and len(str(caught.value)) > len(named), one


@pytest.mark.parametrize("body", [*(f"raise {one}" for one in IN_PROCESS), *BEGINS])
def test_a_begin_that_fails_makes_its_verdicts_unknown(body: str) -> None:
    """And nobody else's: the engine gets the requests of the other problem."""
    other = replace(PROMPT, id="other")

    def begins(prompt: Prompt) -> Any:
        return function(body)(prompt) if prompt.id == PROMPT.id else prompt.token_ids

    def judges(episode: Episode) -> tuple[str, str]:
        return str(episode.token_ids[0]), "4"

    environment: Any = SimpleNamespace(begin=begins, respond=lambda _: None, judge=judges)
    acting = acting_of(environment)
    engine = ScriptedEngine(lambda request: [4, EOS])
    calls = acting.calls("step_0", engine.replicas)
    prompts = calls.agree([begin(environment, one) for one in (PROMPT, other)])
    settings = SamplingSettings(num_samples=2, max_response_tokens=8, seed=0)
    groups = generate(engine, prompts, settings, calls=calls)
    assert groups is not None
    assert all(one.failure.startswith("begin: ") for one in groups[0])
    assert len(groups[0]) == 2 and not any(one.is_sampled.any() for one in groups[0])
    assert [one.token_ids.tolist() for one in groups[1]] == [[4, EOS]] * 2
    assert not any(one.failure for one in groups[1])


def test_what_an_exception_says_can_be_logged() -> None:
    """Half a character has no UTF-8: a log, and the tests' own report, would fail."""
    assert said(ValueError("half \ud800, whole ü")) == "ValueError: half \\ud800, whole ü"
