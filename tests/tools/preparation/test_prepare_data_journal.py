"""Preparation goes on where it was killed, and writes what one that was not killed writes."""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats import folder as folder_module
from gapo_tools.preparation import HeldOut, Lengths, Source, deepcoder, own, prepare
from gapo_tools.preparation import journal as journal_module
from gapo_tools.preparation.journal import Journal
from tests.messages import mentions
from tests.prepare_data_setup import put, put_benchmarks, put_tokenizer
from tests.row_files import put_rows

module = importlib.import_module("gapo_tools.preparation.problem_folder")  # not the function

TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.fixture(autouse=True)
def flush_every_row(monkeypatch):
    monkeypatch.setattr(journal_module, "FLUSH_S", 0.0)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Preparation of two files, as a function of the output's name and what differs."""
    tokenizer = load_tokenizer(put_tokenizer(tmp_path / "policy"))
    held_out = HeldOut(put_benchmarks(tmp_path / "benchmarks"))

    def make(source: Source, inputs: list[Path], output: str, **different) -> None:
        arguments = {
            "lengths": Lengths(tokenizer, 40, chat_template=False),
            "held_out": held_out,
            "options": {},
            "progress": lambda activity, share: None,
        }
        prepare(source, inputs, tmp_path / output, **(arguments | different))

    return make


def programs(folder: Path) -> list[Path]:
    rows = [{"problem": f"Add {n}.", "tests": TESTS} for n in range(5)]
    rows[1]["problem"] = "Find x + y."  # a benchmark's
    rows[2]["tests"] = {}
    rows[3]["problem"] += " far" * 40
    others = [{"problem": f"Take {n}. é", "tests": json.dumps(TESTS)} for n in range(4)]
    return [
        put(folder / "one" / "a.json", rows),
        put(folder / "two" / "b.parquet", others, row_group_size=2),
    ]


def answers(folder: Path) -> list[Path]:
    rows = [
        {"prompt": f"How far to {n}?", "answer": str(n), "id": f"own {n}"}
        for n in (0, 1, 2, 1, 3, 0)
    ]
    rows[3] |= {"answer": "9", "id": ""}  # contradicts the second
    rows[5]["id"] = ""  # repeats the first
    return [
        put(folder / "c.jsonl", rows),
        put(folder / "d.jsonl", [{"prompt": "e", "answer": "f"}]),
    ]


def packed(folder: Path) -> list[Path]:
    """The same rows as `answers`, gzipped; the first file's in another framework's format."""
    first, second = answers(folder)
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    cells = [
        {"prompt": row["prompt"], "id": row["id"], "reward_model": {"ground_truth": row["answer"]}}
        for row in rows
    ]
    others = [json.loads(line) for line in second.read_text().splitlines()]
    return [
        put_rows(folder / "c.jsonl.gz", cells),
        put_rows(folder / "d.csv.gz", [row | {"id": ""} for row in others]),
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(number: int, call: Callable[[], None]) -> bool:
    """Whether a process that would do `call` was killed before its `number`-th step on the disk."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs must not hang the test
        steps = iter(range(1, number))

        def step(real, *arguments, **options):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        for name in ("fsync", "link", "rename", "unlink"):
            setattr(os, name, functools.partial(step, getattr(os, name)))
        try:
            call()
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"the process ended with {status}"
    return status == signal.SIGKILL


@pytest.mark.parametrize(
    ("source", "inputs", "stride"),
    [
        (deepcoder(), programs, 5),
        pytest.param(deepcoder(), programs, 1, marks=pytest.mark.system),
        pytest.param(own("exact"), answers, 5, marks=pytest.mark.system),
        (own("exact"), packed, 5),
    ],
    ids=["code", "code at every step", "exact", "gzipped"],
)
def test_a_run_killed_at_any_step_is_continued_to_the_same_bytes(
    tmp_path, make, source, inputs, stride
):
    files = inputs(tmp_path)
    make(source, files, "whole")
    expected = content(tmp_path / "whole")
    for number in range(1, 99, stride):
        output = tmp_path / f"out{number}"
        call = functools.partial(make, source, files, output.name)
        if not killed_at(number, call):
            break
        if output.exists():  # killed behind the last rename
            with pytest.raises(ConfigError, match=mentions(output, "exists")):
                call()
        else:
            call()
        assert content(output) == expected
    assert number > 20  # two steps a row, and those of the folder
    # Again and again, each time from where the one before was killed.
    call = functools.partial(make, source, files, "out")
    for _ in range(3):
        assert killed_at(9, call)
    call()
    assert content(tmp_path / "out") == expected
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def interrupted(make, source: Source, files: list[Path], **different) -> Path:
    """The journal's folder of a run that was killed in the middle."""
    assert killed_at(9, lambda: make(source, files, "out", **different))
    (hidden,) = files[0].parents[1].glob(".out.unfinished")
    return hidden


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rows.jsonl", lambda data: data + b'{"id": "deepcoder-4", "answ'),
        ("rows.jsonl", lambda data: data + b"\0" * 100 + b"\n"),
        ("rows.jsonl", lambda data: data[:-1]),
        ("tests.jsonl", lambda data: data + b"half of a te"),
        ("tests.jsonl", lambda data: b""),
    ],
)
def test_what_was_cut_off_by_a_crash_of_the_machine_is_done_again(tmp_path, make, name, damage):
    files = programs(tmp_path)
    make(deepcoder(), files, "whole")
    path = interrupted(make, deepcoder(), files) / name
    path.write_bytes(damage(path.read_bytes()))
    make(deepcoder(), files, "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_only_the_same_command_goes_on(tmp_path, make, caplog, monkeypatch):
    files = programs(tmp_path)

    def said(**different) -> str:
        interrupted(make, deepcoder(), files)
        caplog.clear()
        make(deepcoder(), files, "out", **different)
        shutil.rmtree(tmp_path / "out")
        return caplog.text

    assert re.search(r"\b3 rows\b", said())
    assert "first row" in said(options={"a": 1})
    assert "first row" in said(held_out=None)
    interrupted(make, deepcoder(), files)
    put(files[0], json.loads(files[0].read_text())[:4])
    make(deepcoder(), files, "out")
    assert "first row" in caplog.messages[-1]
    assert len((tmp_path / "out" / "problems.jsonl").read_text().splitlines()) == 5
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(module, "code_sha256", lambda *parts: "changed")
    assert "3 rows" in said()
    interrupted(make, deepcoder(), files)
    monkeypatch.setattr(module, "code_sha256", lambda *parts: "changed again")
    make(deepcoder(), files, "out")
    assert "first row" in caplog.messages[-1]


def test_an_id_that_was_used_before_the_interruption_is_an_error(tmp_path, make):
    rows = [{"id": str(n), "prompt": f"How far to {n}?", "answer": "1"} for n in range(6)]
    rows.append({"id": "0", "prompt": "How wide?", "answer": "1"})
    files = [put(tmp_path / "x" / "a.jsonl", rows)]
    assert killed_at(9, functools.partial(make, own("exact"), files, "out"))
    with pytest.raises(DataError, match=r"a\.jsonl:7\b.*'0'.*a\.jsonl:1\b"):
        make(own("exact"), files, "out")


def test_one_process_at_a_time_makes_an_output(tmp_path, make):
    with (
        Journal.open(tmp_path / "out", belongs_to={}),
        pytest.raises(ConfigError, match=mentions(tmp_path / "out", "process")),
    ):
        make(deepcoder(), programs(tmp_path), "out")
    make(deepcoder(), programs(tmp_path), "out")


def test_a_file_system_without_locks_makes_an_output(tmp_path, make, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    make(deepcoder(), programs(tmp_path), "out")
    assert content(tmp_path / "out")


def test_a_folder_that_is_no_journal_is_left_alone(tmp_path, make):
    files, folder = programs(tmp_path), tmp_path / ".out.unfinished"
    (tmp_path / "mine").mkdir()
    notes = tmp_path / "mine" / "rows.jsonl"
    notes.write_text("mine")
    folder.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=mentions(folder, "move it")):
        make(deepcoder(), files, "out")
    folder.unlink()
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=mentions(folder, "move it")):
        make(deepcoder(), files, "out")
    assert notes.read_text() == (folder / "notes").read_text() == "mine"


def test_an_input_at_fault_leaves_nothing_and_a_full_disk_all_findings(tmp_path, make, monkeypatch):
    files = programs(tmp_path)
    make(deepcoder(), files, "whole")
    wrong = put(files[1].with_suffix(".jsonl"), [{"other": 1}])
    with pytest.raises(DataError, match=mentions(f"{wrong}:1", "deepcoder")):
        make(deepcoder(), [files[0], wrong], "out")
    assert not list(tmp_path.glob(".out*"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(folder_module, "_publish", full)
        with pytest.raises(OSError, match="No space"):
            make(deepcoder(), files, "out")
    assert [path.name for path in tmp_path.glob("*out*")] == [".out.unfinished"]
    monkeypatch.setattr(module.Rules, "look", full)  # no row is looked at again
    make(deepcoder(), files, "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list(tmp_path.glob(".out*"))
