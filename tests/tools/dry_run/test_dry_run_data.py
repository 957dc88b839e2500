"""The dry run reads what the run reads: nothing starts after a queue only to end at its data."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.config import Config, parse_config
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats import manifest
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.run.inputs import read_problems
from gapo_tools.demonstration import demo_task
from gapo_tools.dry_run import command as dry_run
from gapo_tools.dry_run.command import look_at_inputs, print_dry_run
from gapo_tools.dry_run.data import SAMPLE, Seen
from tests.messages import mentions

ROWS = [{"id": f"{i}", "prompt": "1+2=", "answer": "3"} for i in range(8)]
OWN = """\
def needs_unit(response, answer, unit):
    return response == answer

def lax(response, answer):
    return True

def dead(response, answer):
    raise KeyError("missing")

def later(response, answer):
    yield True

async def soon(response, answer):
    return {"score": response == answer, "length": len(response)}

def together(responses, answer, messages, state=None):
    return [one == answer and len(said) == 2 for one, said in zip(responses, messages)]

def of_trl(completions, prompts, answer, **kwargs):
    return [float(one == right) for one, right in zip(completions, answer)]

def agent(session):
    return ""
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    demo_task.write_initial_model(demo_task.write_tokenizer(["1+2=3"], folder), folder, seed=0)
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Config of a run on these rows, or on the file that is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)

    def of(rows: Sequence[Any] | None = None, path: str = "train.jsonl", **sections: Any) -> Config:
        if rows is not None:
            (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree: dict[str, Any] = {
            "run": {"output_dir": str(tmp_path / "run"), "num_steps": 3},
            "model": {"hf_dir": str(model), "precision": "fp32"},
            "data": {"train_path": str(tmp_path / path)},
            "rollout": {"max_response_tokens": 8},
            "batch": {"rollout_prompts": 4, "minibatch_prompts": 2},
            "reward": {"kind": "exact"},
        }
        return parse_config({**tree, **sections}, source="test")

    return of


def look(config: Config, *, most: int | None = SAMPLE) -> Seen:
    return look_at_inputs(config, most=most)


def test_a_run_that_can_start_shows_prompts_and_verdicts(make: Any) -> None:
    seen = look(make(ROWS))
    assert not seen.errors and not seen.warnings
    text = "\n".join(seen.notes)
    assert re.search(mentions("train.jsonl", "8 of 8", "4 to 4 tokens"), text)
    assert re.search(mentions("First row '0'", 'ends in "1+2="', 'answer "3"'), text)
    assert text.count("1+2=") == 3 + 1
    assert re.search(mentions("exact", "reference answers", "8 correct"), text)
    assert re.search(mentions("exact", "empty responses", "8 wrong"), text)


TEXT = "".join(json.dumps(row) + "\n" for row in [*ROWS, {**ROWS[0], "id": "\u00e9"}])
LATIN = TEXT.replace("\\u00e9", "\u00e9").encode("latin-1")


UNREADABLE: list[tuple[str, bytes | None, tuple[str, ...]]] = [
    ("t.jsonl", TEXT.encode("utf-16"), ("t.jsonl:1", "UTF-8")),
    ("t.jsonl", LATIN, ("t.jsonl:9", "UTF-8")),
    ("t.txt", b"id,prompt,answer\na,1+2=,3\n", ("t.txt:1",)),
    ("t.csv", b"id,prompt,answer\na,1+2=,3\nb,1+2=\n", ("t.csv:2", "2 cells", "id, prompt")),
    ("t.jsonl", (TEXT + TEXT).encode(), ("t.jsonl:10", "id '0'", "line 1")),
    ("t.jsonl", TEXT.replace(', "answer": "3"}\n', "}\n", 1).encode(), ("t.jsonl:1", "answer")),
    ("t.jsonl", "".join(TEXT.splitlines(True)[:3]).encode(), ("rollout_prompts (4)", "3")),
    ("t.jsonl", None, ("data.train_path", "t.jsonl", "folder")),
]


@pytest.mark.parametrize(
    ("name", "content", "said", "has_model"),
    [*((*row, True) for row in UNREADABLE), *((*row, False) for row in UNREADABLE[5:])],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_file_that_the_run_could_not_read_is_an_error(
    make: Any,
    tmp_path: Path,
    model: Path,
    name: str,
    content: bytes | None,
    said: Any,
    has_model: bool,
) -> None:
    """Its message is the run's; also where there is no tokenizer yet."""
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    config = make(path=name, **({} if has_model else {"model": {"hf_dir": str(tmp_path / "no")}}))
    errors = [one for one in look(config).errors if not one.startswith("model.hf_dir")]
    (error,) = errors
    assert re.search(mentions(*said), error) and "does not exist" not in error
    if content is not None:
        with pytest.raises(GapoError) as caught:
            read_problems(config, load_tokenizer(model))
        assert str(caught.value) == error


def test_only_a_look_at_all_rows_finds_what_is_behind_the_sample(make: Any) -> None:
    rows = [{**ROWS[0], "id": f"{i}"} for i in range(SAMPLE)] + [{"id": "z", "prompt": "1+2="}]
    seen = look(make(rows))
    assert not seen.errors
    assert any(
        re.search(mentions(f"{SAMPLE} of {SAMPLE + 1}", "--dry-run=data"), one)
        for one in seen.notes
    )
    (error,) = look(make(rows), most=None).errors
    assert re.search(mentions(f"train.jsonl:{SAMPLE + 1}", "answer"), error)


def test_the_strata_of_a_curriculum_are_shown(make: Any, tmp_path: Path) -> None:
    """A single one is an error once all rows have been read."""
    given = {"data": {"train_path": str(tmp_path / "train.jsonl"), "curriculum": 0.5}}
    rows = [{**one, "level": f"level {i % 3}"} for i, one in enumerate(ROWS)]
    seen = look(make(rows, **given))
    assert not seen.errors
    said = "Curriculum: 3 strata, in 8 of 8 problems: level 0 3, level 1 3, level 2 2"
    assert said in seen.notes
    (error,) = look(make(ROWS, **given)).errors
    assert re.search(mentions("data.curriculum (0.5)", "(no level)", "level"), error)
    rows = [{**ROWS[0], "id": f"{i}"} for i in range(SAMPLE)] + [{**rows[0], "id": "z"}]
    seen = look(make(rows, **given))
    said = f"Curriculum: 1 strata, in {SAMPLE} of {SAMPLE + 1} problems: (no level) {SAMPLE}"
    assert not seen.errors and said in seen.notes


@pytest.mark.parametrize(
    ("kind", "errors", "warnings"),
    [
        ("own.py:needs_unit", [("train.jsonl:1", "'unit'")], []),
        ("own.py:later", [("reward.kind", "generator")], []),
        ("own.py:soon", [], []),
        ("own.py:lax", [], [("empty responses", "8 correct", "'0'")]),
        # Each unknown verdict may have taken its whole time: three are enough.
        (
            "own.py:dead",
            [],
            [("empty responses", "3 unknown", "KeyError"), ("reference answers", "3 unknown")],
        ),
    ],
)
def test_verifiers_are_called_on_answers_and_on_nothing(
    make: Any, kind: str, errors: list[Any], warnings: list[Any]
) -> None:
    seen = look(make(ROWS, reward={"kind": kind}))
    for found, expected in ((seen.errors, errors), (seen.warnings, warnings)):
        assert len(found) == len(expected), found
        for one, parts in zip(found, expected, strict=True):
            assert re.search(mentions(*parts), one), one


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "own.py:together"},
        {"kind": "own.py:of_trl"},
        {"components": {"exact": "exact", "soon": "own.py:soon", "pair": "own.py:together"}},
    ],
    ids=str,
)
def test_every_form_of_a_verifier_is_called(make: Any, reward: dict[str, Any]) -> None:
    seen = look(make(ROWS, reward=reward))
    assert not seen.errors and not seen.warnings
    name = reward.get("kind") or "exact + soon + pair"
    for said in ("reference answers: 8 correct", "empty responses: 8 wrong"):
        assert any(f"Verifier {name}, {said}" in note for note in seen.notes), seen.notes


def test_what_an_environment_makes_the_response_is_no_warning(make: Any) -> None:
    """Its verifier may know nothing else."""
    own = {"reward": {"kind": "own.py:dead"}, "environment": {"kind": "own.py:agent"}}
    seen = look(make(ROWS, **own))
    assert not seen.errors and not seen.warnings
    assert any("KeyError" in note for note in seen.notes)


def test_findings_come_first_and_the_settings_last_and_load_again(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for rows, code in ((ROWS, []), (ROWS[:3], [2])):
        config = make(rows)
        (tmp_path / "config.toml").write_text(to_toml(config))
        printed = {}
        for mode in ("data", "settings"):
            monkeypatch.setattr("sys.argv", ["train", "config.toml", f"--dry-run={mode}"])
            ended.clear()
            dry_run.main()
            printed[mode] = capsys.readouterr().out
            assert ended == code
            assert ("\n# error: " in printed[mode].partition("\n# Data: ")[0]) == bool(code)
        findings, _, tables = printed["data"].partition("World-size arithmetic")
        assert findings.startswith("# ") and "\n[run]" not in findings
        short = "[run]" + tables.partition("\n[run]")[2]
        # What `settings` prints is a config file, all of it.
        for text in (short, printed["settings"]):
            assert parse_config(tomllib.loads(text), source="test") == config
        assert "seed" not in short and "\nseed = 0" in printed["settings"]


def test_a_resume_that_a_changed_verifier_forbids_is_an_error(
    make: Any, model: Path, tmp_path: Path
) -> None:
    config = make(ROWS, reward={"kind": "own.py:lax"})
    step = manifest.step_dir(tmp_path / "run" / "checkpoints", 2)
    step.mkdir(parents=True)
    ours = model_identity(read_hf_config(model))

    def record(code: str) -> None:
        recorded = config.model_dump(mode="json")
        recorded["reward"]["code"] = code
        manifest.write_manifest(step, manifest.Manifest(2, ours, recorded, {}, "0.19.2", files={}))

    record(config.reward.code)
    print_dry_run(config, world_size=1)
    record("0" * 64)
    with pytest.raises(ConfigError, match=mentions("reward.code", "run.allow_changes")):
        print_dry_run(config, world_size=1)
