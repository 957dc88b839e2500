"""Chat templates that print today's date: every part of a run renders the day on which it began."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from gapo_megatron import checkpoint
from gapo_megatron.config import Config
from gapo_megatron.data import template_date
from gapo_megatron.data.messages import begin_template
from gapo_megatron.data.schema import encode_prompt
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.rollout.chat import ChatTemplate
from gapo_megatron.run.inputs import Inputs, check_inputs
from gapo_megatron.run.supervised import _read_examples
from gapo_tools.evaluation.chosen import date_of_run
from tests import configs
from tests.chat_templates import FAMILIES, put_family
from tests.messages import mentions

FIRST, LATER = "2026-07-01", "2026-07-02"
DATED = [name for name, family in FAMILIES.items() if family.asks_date]
ASKED = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the day, for this package and for transformers."""

    def set_day(day: str) -> None:
        now = datetime.datetime.fromisoformat(day)

        class Date(datetime.date):
            @classmethod
            def today(cls) -> Any:
                return now.date()

        monkeypatch.setattr(template_date, "datetime", SimpleNamespace(date=Date))
        clock = SimpleNamespace(now=lambda: now)
        monkeypatch.setattr(chat_template_utils, "datetime", clock)

    set_day(FIRST)
    return set_day


def config_of(root: Path, name: str, *, out: str = "run", **data: Any) -> Config:
    """A run in `root/out` whose model is of the family `name`."""
    if not (model := root / name).exists():
        put_family(model, name)
        rows = [{"id": "a", "prompt": ASKED[0]["content"], "response": "2", "answer": "2"}]
        (root / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return configs.config_of(
        {
            "run": {"output_dir": str(root / out)},
            "model": {"hf_dir": str(model)},
            "data": {"train_path": str(root / "train.jsonl"), "chat_template": True, **data},
            "batch": {"rollout_prompts": 1, "minibatch_prompts": 1},
        }
    )


def tokens_of(inputs: Inputs) -> list[int]:
    return list(inputs.problems[0].token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_a_run_has_the_day_on_which_it_began(
    name: str, tmp_path: Path, set_clock: Callable[[str], None]
) -> None:
    """Start, requeue, an environment's turns, supervised examples, and an evaluation."""
    config = config_of(tmp_path, name)
    first = check_inputs(config)
    set_clock(LATER)
    again = check_inputs(config)
    assert tokens_of(again) == tokens_of(first)
    again.source.load_state_dict(json.loads(json.dumps(first.source.state_dict())))
    assert ChatTemplate(again.tokenizer).opening(ASKED) == tokens_of(first)
    [(prompt, _)] = _read_examples(
        config.data.train_path, again.tokenizer, end=0, data=config.data, longest=200
    )
    assert prompt.tolist() == tokens_of(first)

    tokenizer = load_tokenizer(config.model.hf_dir)
    of_run = date_of_run(Path(config.run.output_dir, "hf"), None)
    begin_template(tokenizer, config.data, tmp_path / "evaluation", inherited=of_run)
    prompt = encode_prompt(ASKED[0]["content"], tokenizer, chat_template=True, max_tokens=200)
    assert list(prompt) == tokens_of(first)

    other = check_inputs(config_of(tmp_path, name, out="other"))
    is_dated = FAMILIES[name].asks_date
    assert (tokens_of(other) != tokens_of(first)) == is_dated
    for folder, day in (("run", FIRST), ("evaluation", FIRST), ("other", LATER)):
        assert template_date.read_date(tmp_path / folder) == (day if is_dated else "")


@pytest.mark.parametrize("name", DATED)
def test_a_setting_pins_the_day(
    name: str, tmp_path: Path, set_clock: Callable[[str], None]
) -> None:
    first = check_inputs(config_of(tmp_path, name))
    set_clock(LATER)
    pinned = check_inputs(config_of(tmp_path, name, out="pinned", template_date=FIRST))
    assert tokens_of(pinned) == tokens_of(first)
    assert not template_date.read_date(tmp_path / "pinned"), "recorded once the run has begun"


def test_a_day_that_is_not_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentions("data.template_date", FIRST)):
        check_inputs(config_of(tmp_path, "qwen3", template_date=FIRST))
    with pytest.raises(ConfigError, match=mentions("data.template_date", "1 July")):
        config_of(tmp_path, "llama3", template_date="1 July")
    short = check_inputs(config_of(tmp_path, "llama3", out="short", template_date="2026-7-1"))
    assert short.source.date == "2026-07-01"


def _write_row(root: Path, **row: str) -> None:
    (root / "train.jsonl").write_text(json.dumps({"id": "a", "prompt": "?", **row}) + "\n")


def _prefix_spaces(path: Path) -> None:
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] ^= True
    path.write_text(json.dumps(content))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "rows": lambda root: _write_row(root, answer="3"),
    "chat template": lambda root: (root / "llama3/chat_template.jinja").write_text(
        FAMILIES["llama3"].template.replace("Today", "This")
    ),
    "date": lambda root: (root / "run" / template_date.DATE_NAME).write_text(LATER),
    "settings": lambda root: {"system_prompt": "Be brief."},
    "tokenizer": lambda root: _prefix_spaces(root / "llama3/tokenizer.json"),
}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Inputs], Any]:
    """Lets later starts find a checkpoint of a run, of which they read the data position."""

    def save(inputs: Inputs) -> Any:
        state = json.loads(json.dumps(inputs.source.state_dict()))
        monkeypatch.setattr(checkpoint, "newest_source", lambda run_dir: state)
        return state

    return save


@pytest.mark.parametrize("what", CHANGES)
def test_other_problems_are_refused_with_what_has_changed(
    what: str, tmp_path: Path, saved: Callable[[Inputs], Any]
) -> None:
    """Before any model is built."""
    before = saved(check_inputs(config_of(tmp_path, "llama3")))
    data = CHANGES[what](tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check_inputs(config_of(tmp_path, "llama3", **(data if isinstance(data, dict) else {})))
    _, _, listed = str(caught.value).partition("Changed: ")
    assert listed.startswith(f"the {what}")
    assert listed.count(";") == (what == "date"), "and nothing else but the way back"
    assert (before["dataset"][template_date.DATE] in listed) == (what == "date")


def test_a_copied_checkpoint_brings_its_day(
    tmp_path: Path, set_clock: Callable[[str], None], saved: Callable[[Inputs], Any]
) -> None:
    """Of a branch as well, into whose folder no record was copied."""
    first = check_inputs(config_of(tmp_path, "llama3"))
    saved(first)
    set_clock(LATER)
    copied = check_inputs(config_of(tmp_path, "llama3", out="copied"))
    assert tokens_of(copied) == tokens_of(first)
    assert template_date.read_date(tmp_path / "copied") == FIRST


def test_ranks_that_start_around_midnight_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_clock: Callable[[str], None]
) -> None:
    """One finds no record, is overtaken by another, and takes that one's."""
    real = template_date.expected_date

    def overtaken(folder: Any, **options: str) -> str:
        date = real(folder, **options)
        if not template_date.read_date(tmp_path):
            (tmp_path / template_date.DATE_NAME).write_text(f"{LATER}\n")
        return date

    monkeypatch.setattr(template_date, "expected_date", overtaken)
    assert template_date.freeze_date(tmp_path) == LATER
    assert [path.name for path in tmp_path.iterdir()] == [template_date.DATE_NAME]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / template_date.DATE_NAME
    path.write_text("yesterday")
    with pytest.raises(ConfigError, match=mentions(path, "yesterday")):
        template_date.freeze_date(tmp_path)
