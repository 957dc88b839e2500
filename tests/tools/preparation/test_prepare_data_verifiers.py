"""A problem file of the tasks of an environment of the package `verifiers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.data.schema import read_prompts
from gapo_tools import prepare_data as tool
from tests.needs import by_hand
from tests.tokenizers import byte_level
from tests.verifiers_setup import env, toml_of

__all__ = ["env"]
REWARD = "gapo_megatron.rollout.agents.verifiers:reward"


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any]) -> Any:
    """The command on a config with the environment, or with this text; returns its exit code."""

    def run(*options: str, text: str | None = None, output: str = "out") -> int:
        config = tmp_path / "run.toml"
        config.write_text(f"[environment]\n{toml_of(env)}\n" if text is None else text)
        command = ["verifiers", "--config", str(config), "--output", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *command, *options])
        return tool.main()

    return run


def test_a_row_is_a_task_that_training_reads(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand("verifiers.v1")
    assert prepare() == 0
    file = tmp_path / "out/problems.jsonl"
    assert f'data.train_path = "{file}"' in capsys.readouterr().out
    data = DataConfig(train_path=str(file), max_prompt_tokens=100)
    reward = RewardConfig(kind=REWARD)
    options: Any = {"tokenizer": byte_level(), "data": data, "reward": reward, "columns": None}
    prompts = read_prompts(file, **options)
    assert [one.row["task"] for one in prompts] == [0, 1, 2, 3]
    assert [one.row["prompt"] for one in prompts] == [f"{i} * 7" for i in range(4)]
    assert len({one.id for one in prompts} | {one.row["key"] for one in prompts}) == 8
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["counts"] == {"written": 4} and "taskset" in manifest["env"]


def test_an_infinite_taskset_needs_a_number(
    prepare: Any, tmp_path: Path, env: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand("verifiers.v1")
    module = tmp_path / f"{env['taskset']['id']}.py"
    text = module.read_text().replace(
        "    def load(self)", "    INFINITE = True\n\n    def load(self)"
    )
    module.write_text(text)
    assert prepare() == 2
    assert "--num-tasks" in capsys.readouterr().err
    assert prepare("--num-tasks", "3") == 0
    assert len((tmp_path / "out/problems.jsonl").read_text().splitlines()) == 3


def test_nothing_is_written_where_nothing_can_be(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand("verifiers.v1")
    wrong = "[environment]\nsettings.env.taskset.id = 'no_such_taskset'\n"
    for text, said in [
        ("[environment]\nkind = 'tools'\n", "environment.settings.env"),
        ("[environment]\nsettings.env = 3\n", "environment.settings.env"),
        (wrong, "no_such_taskset"),
        ("[environment", "run.toml"),
    ]:
        assert prepare(text=text) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert prepare() == 0
    assert prepare() == 2  # the folder exists
    assert "exists" in capsys.readouterr().err


def test_without_the_package_it_says_so(
    prepare: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    assert prepare() == 2
    assert "pip install" in capsys.readouterr().err
