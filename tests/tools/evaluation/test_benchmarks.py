"""The paper's benchmarks, read from files as they are published."""

from __future__ import annotations

import base64
import json
import math
import pickle
import zlib
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rewards import code
from gapo_megatron.types import Outcome
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from tests.messages import mentions
from tests.sandbox_setup import needs_sandbox

DATA = Path(__file__).parents[4] / "shared" / "data"
NUM_PROBLEMS = {
    "aime24": 30,
    "aime25": 30,
    "amc23": 40,
    "math500": 500,
    "minerva": 272,
    "olympiadbench": 675,
    "ifeval": 541,
    "humaneval_plus": 164,
}


def put(folder: Path, name: str, rows: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", NUM_PROBLEMS)
def test_published_files_are_read(name: str) -> None:
    benchmark = BENCHMARKS[name]
    if not (DATA / benchmark.folder).exists():
        pytest.skip(f"no {DATA / benchmark.folder}")
    problems = benchmark.load(*benchmark.find_files(DATA))
    assert len(problems) == NUM_PROBLEMS[name]
    assert len({problem.id for problem in problems}) == len(problems)
    assert all(problem.prompt.strip() and all(problem.answers) for problem in problems)
    if benchmark.kind == "math":
        assert all("\\boxed{}" in problem.prompt for problem in problems)
        assert all(len(problem.answers) == 1 for problem in problems) or name == "minerva"


def test_answers_are_text_numbers_or_lists_of_equally_good_ones(tmp_path) -> None:
    rows = [
        {"problem": "p", "answer": answer}
        for answer in ["025", 27.0, 3, 0.5, ["1 \n", "1", "2"], 10**400, math.inf]
    ]
    problems = BENCHMARKS["aime24"].load(put(tmp_path, "a.json", rows))
    assert [problem.answers for problem in problems] == [
        ("025",),
        ("27",),
        ("3",),
        ("0.5",),
        ("1", "2"),
        (str(10**400),),
        ("inf",),
    ]
    assert [problem.id for problem in problems] == [f"aime24-{i}" for i in range(7)]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (
            [{"question": "q"}],
            ["a.json:1:", "aime24", "'problem'", "question"],
        ),
        ([{"problem": "p", "answer": None}], ["a.json:1:", "aime24", "answer"]),
        ([{"problem": 3, "answer": "1"}], ["a.json:1:", "problem", "int"]),
        ([{"problem": "p", "answer": " "}], ["a.json:1:", "empty"]),
        ([{"problem": "p", "answer": math.nan}], ["a.json:1:", "answer", "NaN"]),
        ([{"problem": "p", "answer": "\\frac{1"}], ["a.json:1:", "answer", "'math'"]),
        ([{"problem": "\ud800", "answer": "1"}], ["a.json:1:", "surrogate"]),
        ([], ["no problems", "aime24"]),
        ({"a": 1}, ["a.json:1:", "'problem'", "has a"]),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, rows, named) -> None:
    path = put(tmp_path, "a.json", rows)
    with pytest.raises(DataError, match=mentions(path, *named)):
        BENCHMARKS["aime24"].load(path)


def test_a_folder_holds_one_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match=mentions("aime24", tmp_path, ".jsonl", "none")):
        BENCHMARKS["aime24"].find_files(tmp_path)
    path = put(tmp_path / "aime24", "a.json", [])
    assert BENCHMARKS["aime24"].find_files(tmp_path) == [path]
    put(tmp_path / "aime24", "b.jsonl", [])
    with pytest.raises(ConfigError, match=mentions("aime24", tmp_path, "a.json, b.jsonl")):
        BENCHMARKS["aime24"].find_files(tmp_path)


def livecodebench_row(date: str, private: str, *, function: str = "") -> dict:
    return {
        "question_content": "Add two numbers.",
        "contest_date": date,
        "difficulty": "easy",
        "starter_code": "class Solution: ..." if function else "",
        "metadata": json.dumps({"func_name": function} if function else {}),
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "stdin"}]),
        "private_test_cases": private,
    }


def test_livecodebench_lies_in_parts_and_its_tests_are_not_decoded_for_its_words(tmp_path) -> None:
    benchmark, row = BENCHMARKS["livecodebench"], livecodebench_row("2024-09-01", "[]")
    files = [
        put(tmp_path / "livecodebench", f"test{part}.jsonl", [row | {"difficulty": part}] * 2)
        for part in ("", "2")
    ]
    assert benchmark.find_files(tmp_path) == files
    problems = benchmark.load(*files)
    assert [(one.id, one.level) for one in problems] == [
        *(("livecodebench-0", ""), ("livecodebench-1", "")),
        *(("livecodebench-2", "2"), ("livecodebench-3", "2")),
    ]
    put(tmp_path / "livecodebench", "test2.jsonl", [row | {"private_test_cases": "not base64"}])
    assert [id for id, _ in benchmark.prompts(*files)] == [f"livecodebench-{i}" for i in range(3)]
    with pytest.raises(DataError, match=mentions("test2.jsonl:1:", "livecodebench")):
        benchmark.load(*files)


def test_livecodebench_takes_its_window_and_all_tests(tmp_path) -> None:
    tests = json.dumps([{"input": "2\n2", "output": "4", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(tests))).decode()
    rows = [
        livecodebench_row("2024-07-31T00:00:00", tests),
        livecodebench_row("2024-08-01T00:00:00", tests),
        livecodebench_row("2025-01-31T23:00:00", packed, function="add"),
        livecodebench_row("2025-02-01T00:00:00", tests),
    ]
    text, call = BENCHMARKS["livecodebench"].load(put(tmp_path, "lcb.jsonl", rows))
    assert "standard input" in text.prompt
    assert "class Solution" in call.prompt
    assert json.loads(text.answers[0]) == [
        {"input": "1\n2", "output": "3", "fn_name": None},
        {"input": "2\n2", "output": "4", "fn_name": None},
    ]
    assert [test["fn_name"] for test in json.loads(call.answers[0])] == ["add", "add"]


def test_livecodebench_unpickles_text_alone(tmp_path) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(print))).decode()
    path = put(tmp_path, "lcb.jsonl", [livecodebench_row("2024-08-01", packed)])
    with pytest.raises(DataError, match=mentions("private_test_cases", "STACK_GLOBAL")):
        BENCHMARKS["livecodebench"].load(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"metadata": "[1]"}, ["AttributeError"]),
        ({"metadata": "[" * 100_000}, ["RecursionError"]),
        ({"private_test_cases": "[" * 100_000}, ["RecursionError"]),
        ({"private_test_cases": '[{"input": 1, "output": "2"}]'}, ["answer", "'code'"]),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"\x80\x04N.")).decode()}, ["NONE"]),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"\x80\x04")).decode()}, ["STOP"]),
    ],
)
def test_livecodebench_rows_that_cannot_be_decoded_are_named(tmp_path, change, named) -> None:
    path = put(tmp_path, "lcb.jsonl", [livecodebench_row("2024-09-01", "[]") | change])
    with pytest.raises(DataError, match=mentions("lcb.jsonl:1:", *named)):
        BENCHMARKS["livecodebench"].load(path)


@needs_sandbox
@pytest.mark.skipif(not (DATA / "humaneval_plus").exists(), reason=f"no {DATA}/humaneval_plus")
@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        (0, "< threshold", "<= threshold"),
        (12, "if len(s) == maxlen", "if len(s) == maxlen and s.isascii()"),  # the extra inputs tell
        (32, "    return x\n", "    return x + 1\n"),  # any zero is right
    ],
)
def test_humaneval_plus_tells_right_from_wrong(number: int, right: str, wrong: str) -> None:
    benchmark = BENCHMARKS["humaneval_plus"]
    (path,) = benchmark.find_files(DATA)
    row = json.loads(path.read_text().splitlines()[number])
    (answer,) = benchmark.load(path)[number].answers
    program = row["prompt"] + row["canonical_solution"]
    for text, outcome in ((program, Outcome.CORRECT), (None, Outcome.WRONG)):
        text = text or program.replace(right, wrong)
        assert text != program or outcome is Outcome.CORRECT, "nothing was replaced"
        verdict = code.verify(f"```python\n{text}\n```", answer)
        assert verdict.outcome is outcome, verdict.reason
