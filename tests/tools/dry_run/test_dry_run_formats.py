"""The real dry run, on a file of each format: recognised, read, and its first row shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gapo_megatron.config import parse_config
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools.demonstration import demo_task
from tests.messages import mentions
from tests.prepare_data_setup import put_tokenizer, runner, written
from tests.row_files import ASKED, FORMS, put_form, put_rows

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def dry_run(folder: Path, model: Path, data: dict[str, object]) -> subprocess.CompletedProcess[str]:
    tree = {
        "run": {"output_dir": str(folder / "run"), "num_steps": 3},
        "model": {"hf_dir": str(model), "precision": "fp32"},
        "data": {"chat_template": True, **data},
        "rollout": {"max_response_tokens": 8},
        "batch": {"rollout_prompts": 3, "minibatch_prompts": 3},
        "reward": {"kind": "math"},
    }
    (folder / "config.toml").write_text(to_toml(parse_config(tree, source="test")))
    command = [sys.executable, "-m", "gapo_megatron.train", "config.toml", "--dry-run"]
    env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin", "COLUMNS": "120"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    texts = [text for text, _ in ASKED] + ["Solve it.\n\n<user><assistant>"]
    demo_task.write_initial_model(demo_task.write_tokenizer(texts, folder), folder, seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> str:
    """What one dry run prints whose sources are files of all formats."""
    folder = tmp_path_factory.mktemp("all")
    sources = [{"name": name, "path": str(put_form(folder / name))} for name in FORMS]
    done = dry_run(folder, model, {"source": sources})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FORMS)
def test_the_dry_run_names_each_format_and_shows_its_first_row(printed: str, name: str) -> None:
    _, said, keys = FORMS[name]
    lines = printed.splitlines()
    [about] = [one for one in lines if re.search(rf"Data: \S*{re.escape(name)}: ", one)]
    assert re.search(mentions(said, keys, "read 3 of 3 rows"), about), about
    shown = lines[lines.index(about) + 1]
    text, answer = ASKED[0]
    answer = f"${answer}$" if "trl" in name else answer
    assert re.search(mentions("First row", name, f'{text}"', f'answer "{answer}"'), shown), shown
    assert "reference answers: 27 correct" in printed


def test_the_dry_run_ends_with_what_the_run_would_say(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 9 * 8?", "solution": "72", "ground_truth": "71"}] * 3
    path = put_rows(tmp_path / "both.jsonl", rows)
    done = dry_run(tmp_path, model, {"train_path": str(path)})
    named = mentions(f"{path}:1", "prompt, solution", "prompt, ground_truth", "data.answer_key")
    assert done.returncode == 2 and re.search(named, done.stdout), done.stdout


@pytest.mark.parametrize("name", FORMS)
def test_prepare_data_own_reads_the_same(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf_dir = put_tokenizer(tmp_path / "policy")
    settings = json.loads((hf_dir / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (hf_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    run = runner(tmp_path, hf_dir, monkeypatch)
    assert run("own", [put_form(tmp_path / name)], "--chat-template", "--suffix", " Box it.") == 0
    _, said, keys = FORMS[name]
    text, answer = ASKED[0]
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(mentions(said, keys, f'{text} Box it."', 'answer "'), shown), shown
    rows = written(tmp_path / "out")
    assert len(rows) == len(ASKED)
    prompt = rows[0]["prompt"] if "prompt" in rows[0] else rows[0]["messages"][-1]["content"]
    assert prompt.endswith(f"{text} Box it.") and rows[0]["answer"].strip("$") == answer
