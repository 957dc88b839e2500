"""Broken code of a user's own where it is loaded, and before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import EnvironmentConfig, RewardConfig
from gapo_megatron.errors import ConfigError, DataError, GapoError, RolloutError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.generate import begin
from gapo_megatron.types import Prompt
from tests.hostile.behaviours import RAISED, function, source

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


def _begin(path: Path, body: str) -> None:
    begin(SimpleNamespace(begin=function(body)), PROMPT)  # type: ignore[arg-type]


PLACES: dict[Callable[[Path, str], None], tuple[type[GapoError], str]] = {
    _import: (ConfigError, "reward.kind"),
    _construct_verifier: (ConfigError, "reward.kind"),
    _construct_environment: (ConfigError, "environment.kind"),
    _check_answer: (DataError, "reward.kind"),
    _begin: (RolloutError, "the prompt"),
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
