"""Naming code of one's own: what loads, and the message for what does not."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from gapo_megatron import user_code
from gapo_megatron.config import RewardConfig, with_digest
from gapo_megatron.errors import ConfigError, said

SOURCE = """
from pydantic import BaseModel
import user_code_neighbour

def scaled(text, *, factor, **row):
    return len(text) * factor + user_code_neighbour.ONE

class Limit(BaseModel):
    most: int
    def verify(self, response, answer):
        return len(response) <= self.most

number = 3
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_code_neighbour.py").write_text("ONE = 1\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return path


def test_a_file_is_executed_once_and_imports_its_user_code_neighbours(source: Path) -> None:
    loaded = user_code.load("mine.py:scaled", setting="reward.kind")
    assert loaded("ab", factor=2) == 5
    assert user_code.load(f"{source}:scaled", setting="reward.kind") is loaded
    assert (
        user_code.digest("mine.py:scaled", setting="")
        == hashlib.sha256(source.read_bytes()).hexdigest()
    )


def test_code_of_this_package_has_no_digest(source: Path) -> None:
    """It changes with the version, as all of it does."""
    ours = "gapo_megatron.rollout.agents.verifiers:reward"
    assert user_code.digest(ours, setting="") == ""
    codes = [
        with_digest(RewardConfig(kind=kind), name="reward", source="run.toml").code
        for kind in (ours, "mine.py:scaled")
    ]
    assert codes == ["", user_code.digest("mine.py:scaled", setting="")]


def test_a_module(source: Path) -> None:
    found = user_code.load("gapo_megatron.errors:ConfigError", setting="x.y")
    assert found is ConfigError
    assert user_code.find_file("gapo_megatron.errors:ConfigError", setting="").name == "errors.py"


@pytest.mark.parametrize("name", ["time:sleep", "builtins:len", "__main__:x"])
def test_a_module_without_a_file_has_no_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in an interactive Python
    with pytest.raises(ConfigError, match=f"x.y.*{name}"):
        user_code.digest(name, setting="x.y")


def test_settings_are_keyword_arguments(source: Path) -> None:
    made = user_code.load_with_settings("mine.py:scaled", {"factor": 3}, setting="reward.kind")
    assert made("ab") == 7
    limit = user_code.load_with_settings("mine.py:Limit", {"most": 3}, setting="reward.kind")
    built = user_code.build(limit, setting="reward.kind")
    assert isinstance(built, BaseModel) and built.verify("abc", "")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("mine.py", {}, ["path/to/file.py:NAME"]),
        ("mine.py:", {}, ["path/to/file.py:NAME"]),
        ("../m y.txt:f", {}, ["path/to/file.py:NAME"]),
        ("absent.py:f", {}, ["absent.py", "no file"]),
        ("no_such_package.x:f", {}, ["no_such_package"]),
        ("mine.py:scaledd", {}, ["scaledd", "did you mean 'scaled'"]),
        ("mine.py:zzz", {}, ["zzz", "Limit"]),
        ("mine.py:number", {}, ["function or a class", "int"]),
        ("mine.py:scaled", {"facto": 1}, ["facto", "factor"]),
        ("mine.py:scaled", {"row": 1}, ["'row'", "factor"]),
        ("broken.py:f", {}, ["line 2", "ZeroDivisionError"]),
        ("leaves.py:f", {}, ["line 1", "SystemExit"]),
    ],
)
def test_refused_with_setting_value_and_rule(
    source: Path, name: str, settings: dict[str, int], said: list[str]
) -> None:
    (source.parent / "broken.py").write_text("one = 1\n1 / 0\n")
    (source.parent / "leaves.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"reward\.kind") as caught:
        user_code.load_with_settings(name, settings, setting="reward.kind")
    assert all(part in str(caught.value) for part in [name, *said]), caught.value


def test_an_object_that_cannot_be_built(source: Path) -> None:
    limit = user_code.load_with_settings("mine.py:Limit", {"most": "x"}, setting="reward.kind")
    with pytest.raises(ConfigError, match=r"reward\.kind: Limit .*most"):
        user_code.build(limit, setting="reward.kind")


def test_what_an_exception_says_can_be_logged() -> None:
    """Half a character has no UTF-8: a log, and the tests' own report, would fail."""
    assert said(ValueError("half \ud800, whole ü")) == "ValueError: half \\ud800, whole ü"
