"""The user's own files: a verifier of theirs, columns to keep, messages, keys within values."""

from __future__ import annotations

import json
import re

import pytest

from tests.messages import mentions
from tests.prepare_data_setup import prompts_of, put, put_tokenizer, runner, written
from tests.row_files import ASKED, put_rows, user, verl

OWN = """\
def verify(response, answer, extra_info, unit=None):
    return response == answer

def check_answer(answer):
    if answer == "never":
        raise ValueError("nobody says never")
"""


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """The command with a chat template."""
    folder = put_tokenizer(tmp_path / "chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return runner(tmp_path, folder, monkeypatch)


def test_a_verifier_of_the_users_reads_the_answers_and_gets_its_columns(chat, tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rows = [verl(i, *one) for i, one in enumerate(ASKED)]
    rows[1]["reward_model"]["ground_truth"] = "never"
    rows[2]["reward_model"]["ground_truth"] = {"target": [1, 2]}
    path = put_rows(tmp_path / "rows.jsonl", rows)
    options = ("--kind", f"{own}:verify", "--chat-template", "--id-key", "extra_info.index")
    options += ("--keep-columns", "data_source", "ability")
    assert chat("own", [path], *options) == 0
    first, second = written(tmp_path / "out")
    assert first == {
        "id": "9a9b6eb4-0",
        "messages": [{"role": "user", "content": f"Solve it.\n\n{ASKED[0][0]}"}],
        "answer": "42",
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": rows[0]["extra_info"],
    }
    assert json.loads(second["answer"]) == {"target": [1, 2]}
    (dropped,) = written(tmp_path / "out", "dropped")
    assert re.search(mentions("nobody says never", "ground_truth"), dropped["reason"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    own.write_text(OWN + "# another\n")
    assert chat("own", [path], *options, output="again") == 0
    again = json.loads((tmp_path / "again" / "manifest.json").read_text())
    assert manifest["verifier"] != again["verifier"]
    for row in rows:
        del row["extra_info"]
    put_rows(path, rows)
    assert chat("own", [path], *options[:3], output="without") == 1
    assert re.search(mentions("rows.jsonl:1", "'extra_info'", own), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--kind", "gone.py:verify"), ["gone.py"]),
        (("--kind", "maths"), ["--kind", "math, code", "FILE.py:NAME"]),
        (("--format", "verll"), ["--format", "verl"]),
        (("--keep-columns", "level"), ["--keep-columns", "level"]),
    ],
)
def test_options_that_cannot_be_are_named(run, capsys, options, named):
    rows = [{"prompt": "How far?", "answer": "1"}]
    try:
        code = run("own", rows, *options)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert re.search(mentions(*named), capsys.readouterr().err)


def test_messages_need_the_template_and_are_one_text_for_duplicates(chat, tmp_path, capsys):
    system = {"role": "system", "content": "Be brief."}
    turns = [*user("How far?"), {"role": "assistant", "content": "To where?"}, *user("Rome.")]
    rows = [
        {"messages": user("How far?"), "answer": 5},
        {"prompt": [system, *user("How  far?")], "answer": "5"},  # the system's words are not its
        {"messages": turns, "answer": "7"},
        {"prompt": "How wide?", "answer": ["1/2", "0.5"]},
        {"prompt": "How wide?", "answer": "0.50"},
        {"prompt": "How wide?", "answer": ["0.5", "1/2"]},
    ]
    assert chat("own", rows) == 1
    assert re.search(mentions("own.jsonl:1", "--chat-template"), capsys.readouterr().err)
    assert chat("own", rows, "--chat-template") == 0
    assert [(row["id"], row["answer"]) for row in written(tmp_path / "out")] == [
        ("own-0", "5"),
        ("own-2", "7"),
        ("own-3", '["1/2", "0.5"]'),
    ]
    assert written(tmp_path / "out")[1]["messages"] == turns
    rules = [(row["rule"], row["same_as"]) for row in written(tmp_path / "out", "dropped")]
    assert rules == [("duplicate", "own-0"), ("duplicate", "own-3"), ("duplicate", "own-3")]
    prompts = prompts_of(put_folder(tmp_path), tmp_path / "chat", "math")
    assert [one.answer for one in prompts] == ['["1/2", "0.5"]']


def put_folder(tmp_path):
    """The problem with several answers alone: the others need the template."""
    put(tmp_path / "one" / "problems.jsonl", written(tmp_path / "out")[2:])
    return tmp_path / "one"


def test_each_input_has_its_own_format_and_one_without_rows_has_none(run, tmp_path, capsys):
    files = [
        put(tmp_path / "a.jsonl", [{"prompt": "How far?", "label": 1}]),
        put(tmp_path / "b.json", []),
        put_rows(tmp_path / "c.tsv.gz", [{"prompt": "How wide?", "answer": "2"}]),
    ]
    assert run("own", files) == 0
    assert [row["answer"] for row in written(tmp_path / "out")] == ["1", "2"]
    assert re.search(mentions("slime format", "gapo format"), capsys.readouterr().out)


def test_a_later_row_without_a_value_is_dropped_and_one_without_the_key_is_an_error(
    run, tmp_path, capsys
):
    rows = [{"prompt": text, "label": answer} for text, answer in ASKED]
    rows[1]["label"] = None
    rows[2]["prompt"] = " "
    assert run("own", rows) == 0
    assert [row["answer"] for row in written(tmp_path / "out")] == ["42"]
    reasons = [row["reason"] for row in written(tmp_path / "out", "dropped")]
    assert re.search(mentions("label", "null"), reasons[0]) and "empty" in reasons[1]
    rows[2] = {"prompt": "How far?", "answer": "1"}
    assert run("own", rows, output="two") == 1
    named = mentions("own.jsonl:3", "'label'", "own.jsonl:1 was recognised as slime format")
    assert re.search(named, capsys.readouterr().err)
