"""Problem files from published data: each rule on made-up rows, the whole on real ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys

import pytest

from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.rewards import code
from gapo_megatron.rewards.code.forms import AssertTests, CallTests, TextTests, read_tests
from gapo_tools.evaluation.benchmarks import BENCHMARKS, BOXED
from tests.messages import mentions
from tests.prepare_data_setup import (
    counts_of,
    problem,
    prompts_of,
    put,
    put_benchmarks,
    written,
)

# DeepScaleR.


def test_deepscaler_keeps_each_text_once_and_none_that_contradicts_itself(run, tmp_path, capsys):
    rows = [
        problem("What is  $1+1$?", "2"),
        problem("How far?", "5"),
        problem("What is $1+1$? ", 2.0),  # white space apart, and a number: the same
        problem("How far?", "6"),
        problem("How much of it?", "\\frac{1}{2}"),
        problem("How much of it?", "0.5"),  # written otherwise, and equal
        problem("How far?", "5"),
        problem("How wide?", "\\frac{1"),
        problem("", "3"),
        problem("How high?", " "),
    ]
    assert run("deepscaler", rows) == 0
    assert written(tmp_path / "out") == [
        {"id": "deepscaler-0", "prompt": "What is  $1+1$?" + BOXED, "answer": "2"},
        {"id": "deepscaler-4", "prompt": "How much of it?" + BOXED, "answer": "\\frac{1}{2}"},
    ]
    dropped = {row["row"]: row for row in written(tmp_path / "out", "dropped")}
    assert {number: row["rule"] for number, row in dropped.items()} == {
        2: "contradictory",
        3: "duplicate",
        4: "contradictory",
        6: "duplicate",
        7: "contradictory",
        8: "unreadable",
        9: "unreadable",
        10: "unreadable",
    }
    assert dropped[4] == {
        "id": "deepscaler-3",
        "file": str(tmp_path / "deepscaler.jsonl"),
        "row": 4,
        "rule": "contradictory",
        "same_as": "deepscaler-1",
        "answers": ["5", "6"],
        "problem": "How far?",
    }
    assert dropped[3]["same_as"] == "deepscaler-0"
    for row, field in ((8, "answer"), (9, "problem"), (10, "answer")):
        assert field in dropped[row]["reason"]
    counts = counts_of(tmp_path / "out")
    assert (counts["dropped"]["contradictory"], counts["contradictory_texts"]) == (3, 1)
    shown = capsys.readouterr().out
    assert re.search(r"\banswers\W+1$", shown, re.MULTILINE)
    assert "--benchmarks" in shown


def test_own_rows_with_text_that_cannot_be_written_or_numbers_that_are_none(run, tmp_path):
    half = "half a pair \ud83d"
    rows = [
        {"prompt": half, "answer": "1"},
        {"prompt": "b", "answer": half},
        {"prompt": "c", "answer": "1", "level": half},
        {"prompt": "d", "answer": "1", "id": half},
        {"prompt": "e", "answer": float("nan")},
        {"prompt": "f", "answer": "1>2"},
        {"prompt": "g", "answer": "1", "level": float("nan"), "id": float("nan")},
    ]
    assert run("own", rows, "--kind", "exact") == 0
    assert written(tmp_path / "out") == [{"id": "own-6", "prompt": "g", "answer": "1"}]
    dropped = written(tmp_path / "out", "dropped")
    assert {row["rule"] for row in dropped} == {"unreadable"}
    named = ("problem", "answer", "level", "id", "answer", "'>'")
    for row, name in zip(dropped, named, strict=True):
        assert name in row["reason"]


@pytest.mark.parametrize(
    "answer",
    [
        "3 \\mid n",
        "n = 4k \\text{ for integers } k",
        "9^{9^{9^9}}",
        "2^3^4",
    ],
)
def test_references_read_by_their_letters_alone_or_in_two_ways_are_dropped(run, tmp_path, answer):
    readable = [problem("a", "\\text{Friday}"), problem("b", "7 minutes and 5 seconds")]
    readable += [problem("c", "2^\\frac13"), problem("d", "1, 2, \\ldots, n")]
    assert run("deepscaler", [*readable, problem("e", answer)]) == 0
    assert len(written(tmp_path / "out")) == len(readable)
    [dropped] = written(tmp_path / "out", "dropped")
    assert dropped["rule"] == "unreadable"
    assert repr(answer) in dropped["reason"]


def test_worked_solutions_are_refused_with_the_row_the_key_and_what_to_do(run, tmp_path, capsys):
    """As GSM8K publishes its rows."""
    row = {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as "
        "many clips in May. How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = "
        "<<48+24=72>>72 clips altogether in April and May.\n#### 72",
    }
    other = row | {"question": "And in June?", "answer": "None.\n#### 0"}
    assert run("own", [row, other]) == 1
    assert re.search(mentions("own.jsonl:1", "'prompt'", "--prompt-key"), capsys.readouterr().err)
    assert run("own", [row, other], "--prompt-key", "question") == 1
    says = mentions("2 rows", "2 unreadable", "own.jsonl:1", "'answer'", "#### 72", "final")
    assert re.search(says, capsys.readouterr().err)
    options = ("--prompt-key", "question", "--answer-after", "####")
    without = row | {"question": "And in July?", "answer": "7"}
    assert run("own", [row, other, without], *options) == 0
    assert [one["answer"] for one in written(tmp_path / "out")] == ["72", "0"]
    [dropped] = written(tmp_path / "out", "dropped")
    assert re.search(mentions("'answer'", "'####'"), dropped["reason"])


def test_prompts_that_are_too_long_are_dropped_and_what_stays_can_be_read(run, tmp_path, hf_dir):
    rows = [problem("one two three"), problem("one two three four")]
    limit = 3 + len(BOXED.split())
    assert run("deepscaler", rows, "--max-prompt-tokens", limit) == 0
    (dropped,) = written(tmp_path / "out", "dropped")
    assert (dropped["rule"], dropped["tokens"]) == ("too_long", limit + 1)
    (prompt,) = prompts_of(tmp_path / "out", hf_dir, "math", max_tokens=limit)
    assert (prompt.id, prompt.answer, len(prompt.token_ids)) == ("deepscaler-0", "1", limit)


def test_the_template_counts_and_the_suffix_is_the_users(run, tmp_path, hf_dir):
    folder = shutil.copytree(hf_dir, tmp_path / "instruct")
    tokenizer = load_tokenizer(hf_dir)
    tokenizer.chat_template = "two words {{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    rows = [problem("a b"), problem("a b c")]
    options = ("--suffix", " end", "--max-prompt-tokens", 5)
    assert run("deepscaler", rows, *options) == 0
    assert [row["prompt"] for row in written(tmp_path / "out")] == ["a b end", "a b c end"]
    options = (*options, "--model", folder, "--chat-template")
    assert run("deepscaler", rows, *options, output="chat") == 0
    assert [row["prompt"] for row in written(tmp_path / "chat")] == ["a b end"]


def test_a_prompt_that_the_template_refuses_is_named(run, tmp_path, hf_dir, capsys):
    folder = shutil.copytree(hf_dir, tmp_path / "instruct")
    tokenizer = load_tokenizer(hf_dir)
    tokenizer.chat_template = "{{ raise_exception('no x') if 'xx' in messages[0].content }}"
    tokenizer.save_pretrained(folder)
    options = ("--model", folder, "--chat-template")
    assert run("deepscaler", [problem("a b"), problem("a xx")], *options) == 2
    assert re.search(
        mentions(f"{tmp_path / 'deepscaler.jsonl'}:2", "no x"), capsys.readouterr().err
    )


def test_problems_of_benchmarks_are_dropped_and_listed_with_both(run, tmp_path, capsys):
    benchmarks = put_benchmarks(tmp_path / "benchmarks")
    rows = [problem("How far?"), problem("find X + Y")]
    assert run("deepscaler", rows, "--benchmarks", benchmarks) == 0
    (dropped,) = written(tmp_path / "out", "dropped")
    assert dropped["id"] == "deepscaler-1"
    assert (dropped["rule"], dropped["same_as"], dropped["share"]) == ("held_out", "aime24-1", 1.0)
    assert (dropped["problem"], dropped["benchmark_problem"]) == ("find X + Y", "Find $x+y$.")
    shown = capsys.readouterr().out
    assert re.search(r"\b1\b.*\baime24\b", shown)
    assert re.search(r"\baime25\b.*\bamc23\b", shown)  # whose folders are not there
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    file = benchmarks / "aime24" / "a.jsonl"
    assert manifest["benchmarks"]["files"]["aime24"] == [
        {"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    ]
    assert set(manifest["benchmarks"]["absent"]) == set(BENCHMARKS) - {"aime24", "humaneval_plus"}
    assert manifest["counts"]["benchmarks"] == {"aime24": 1}


# DeepCoder.

CASES = [{"input": "1\n", "output": "2\n"}]
PRIME = {
    "problem": "Add one.",
    "solutions": ["left alone"],
    "tests": json.dumps([{"type": "stdin_stdout", **CASES[0]}]),
}
TACO = {
    "problem": "Add one to it.",
    "tests": json.dumps({"fn_name": "add", "inputs": [[1]], "outputs": [2]}),
}
LCB = {
    "problem": "Add one, and return it.",
    "starter_code": "class Solution:\n    def add(self, n: int) -> int:",
    "tests": json.dumps([{"input": "1", "output": "2", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
LEETCODE = {
    "problem": "Complete this.\n```python\nclass Solution:\n    def add(self, n):\n```",
    "solutions": "left alone",
    "tests": {
        "functional": "def check(candidate):\n    assert candidate(1) == 2\ncheck(Solution().add)"
    },
}
READS = "```python\nprint(int(input()) + 1)\n```"
CALLED = "```python\nclass Solution:\n    def add(self, n):\n        return n + 1\n```"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_deepcoder_reads_every_sets_rows_and_puts_tests_apart(run, tmp_path, hf_dir, suffix):
    files = [
        put(tmp_path / name / f"train-0{suffix}", [row])
        for name, row in {"primeintellect": PRIME, "taco": TACO, "lcbv5": LCB}.items()
    ]
    files.append(put(tmp_path / "leetcode" / "train.json", [LEETCODE]))
    assert run("deepcoder", files) == 0
    folder = tmp_path / "out"
    prompts = prompts_of(folder, hf_dir, "code")
    assert [prompt.level for prompt in prompts] == ["primeintellect", "taco", "lcbv5", "leetcode"]
    assert [json.loads(prompt.answer)["file"] for prompt in prompts] == [
        str(folder / "tests.jsonl")
    ] * 4
    tests = [read_tests(prompt.answer) for prompt in prompts]
    assert [type(one) for one in tests] == [TextTests, CallTests, CallTests, AssertTests]
    assert tests[0] == TextTests(("1\n",), ("2\n",))
    assert [tests[1].function, tests[2].function] == ["add", "add"]
    texts = [row["prompt"] for row in written(folder)]
    assert "standard input" in texts[0]
    assert "function `add`" in texts[1]
    assert LCB["starter_code"] in texts[2]
    assert texts[3] == LEETCODE["problem"]
    assert counts_of(folder)["levels"] == {prompt.level: {"written": 1} for prompt in prompts}


def test_what_deepcoder_wrote_is_judged_by_the_reward(run, tmp_path, hf_dir):
    files = [put(tmp_path / "a.json", [PRIME, LCB])]
    assert run("deepcoder", files) == 0
    prompts = prompts_of(tmp_path / "out", hf_dir, "code")
    # The sandbox has tests of its own.
    options = {"sandbox": "unsafe", "python": sys.executable}
    outcomes = [
        code.verify(response, prompt.answer, **options).outcome
        for prompt in prompts
        for response in (READS, CALLED)
    ]
    assert outcomes == ["correct", "wrong", "wrong", "correct"]


def test_deepcoder_drops_unreadable_tests_and_long_prompts_but_no_duplicates(run, tmp_path):
    rows = [PRIME, PRIME, TACO | {"problem": "word " * 50}, LCB | {"tests": "[]"}]
    rows.append(LCB | {"tests": "[{"})
    assert run("deepcoder", rows, "--max-prompt-tokens", 45) == 0
    assert [row["id"] for row in written(tmp_path / "out")] == ["deepcoder-0", "deepcoder-1"]
    rules = [row["rule"] for row in written(tmp_path / "out", "dropped")]
    assert rules == ["too_long", "unreadable", "unreadable"]
    levels = {tmp_path.name: {"written": 2, "too_long": 1, "unreadable": 2}}
    assert counts_of(tmp_path / "out")["levels"] == levels


# One's own files.


def test_own_files_have_keys_of_ones_own_and_ids_where_they_have_none(run, tmp_path):
    rows = [
        {"q": "How far?", "a": 5, "level": "roads", "id": 17},
        {"q": "How wide?", "a": "6", "level": None},
    ]
    assert run("own", rows, "--prompt-key=q", "--answer-key=a", suffix=".json") == 0
    assert written(tmp_path / "out") == [
        {"id": "17", "prompt": "How far?", "answer": "5", "level": "roads"},
        {"id": "own-1", "prompt": "How wide?", "answer": "6"},
    ]


def test_a_row_that_repeats_another_with_its_id_is_a_duplicate_or_contradictory(run, tmp_path):
    asked = {"id": "x", "prompt": "How far?", "answer": "1"}
    assert run("own", [asked, asked, asked | {"id": "y", "prompt": "How wide?"}]) == 0
    assert [row["id"] for row in written(tmp_path / "out")] == ["x", "y"]
    (dropped,) = written(tmp_path / "out", "dropped")
    assert (dropped["rule"], dropped["row"], dropped["same_as"]) == ("duplicate", 2, "x")
    rows = [asked, asked | {"answer": "2"}, asked | {"id": "y", "prompt": "How wide?"}]
    assert run("own", rows, output="two") == 0
    rules = [row["rule"] for row in written(tmp_path / "two", "dropped")]
    assert rules == ["contradictory", "contradictory"]
    assert counts_of(tmp_path / "two")["contradictory_texts"] == 1


def test_own_instructions_and_programs_are_objects_or_json_text(run, tmp_path):
    asked = {"instructions": [{"id": "punctuation:no_comma"}]}
    rows = [{"prompt": "a", "answer": asked}, {"prompt": "b", "answer": json.dumps(asked)}]
    rows.append({"prompt": "c", "answer": {"instructions": [{"id": "no_such:check"}]}})
    assert run("own", rows, "--kind", "instructions") == 0
    assert [json.loads(row["answer"]) for row in written(tmp_path / "out")] == [asked, asked]
    (dropped,) = written(tmp_path / "out", "dropped")
    assert "no_such:check" in dropped["reason"]
    rows = [{"prompt": "a", "answer": CASES}]
    assert run("own", rows, "--kind", "code", output="code") == 0
    (row,) = written(tmp_path / "code")
    assert row["answer"]["file"] == "tests.jsonl"
    assert written(tmp_path / "code", "tests") == [CASES]


# The command.


def test_equal_inputs_give_equal_bytes_and_the_manifest_their_digests(run, tmp_path, hf_dir):
    rows = [problem("How far?"), problem("How far?"), problem("How wide?", "2")]
    assert run("deepscaler", rows) == run("deepscaler", rows, output="again") == 0
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("out", "again")
    )
    assert first == second
    manifest = json.loads(first["manifest.json"])
    data = (tmp_path / "deepscaler.jsonl").read_bytes()
    assert manifest["inputs"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["outputs"] == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in first.items()
        if name != "manifest.json"
    }
    counts = manifest["counts"]
    assert (counts["read"], counts["written"], counts["dropped"]) == (3, 2, {"duplicate": 1})
    assert manifest["options"]["suffix"] == BOXED
    tokenizer = (hf_dir / "tokenizer.json").read_bytes()
    assert manifest["tokenizer"]["tokenizer.json"] == hashlib.sha256(tokenizer).hexdigest()


@pytest.mark.parametrize(
    ("rows", "options", "status", "says"),
    [
        ([{"problem": "a"}], (), 1, r"deepscaler\.jsonl:1\b.*'answer'"),
        ([problem("a", True)], (), 1, r"deepscaler\.jsonl:1\b.*'True'"),
        ([problem("a", "{")], (), 1, r"deepscaler\.jsonl\b.*\b1 rows.*\b1 unreadable\b"),
        ([], (), 1, r"deepscaler\.jsonl\b.*\b0 rows"),
        ([problem("a")], ("--chat-template",), 2, "chat template"),
        ([problem("a")], ("--model", "/nowhere"), 2, r"--model\W+nowhere\b"),
        ([problem("a")], ("--benchmarks", "/nowhere"), 2, r"/nowhere\b.*\bbenchmark\b"),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_leave_nothing(run, tmp_path, capsys, rows, options, status, says):
    assert run("deepscaler", rows, *options) == status
    assert re.search(says, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["deepscaler.jsonl"]


def test_ids_used_twice_other_files_and_an_output_that_exists_are_errors(run, tmp_path, capsys):
    rows = [{"id": "a", "prompt": text, "answer": "1"} for text in ("b", "c")]
    assert run("own", rows) == 1
    assert re.search(r"own\.jsonl:2\b.*'a'.*own\.jsonl:1\b", capsys.readouterr().err)
    assert run("own", [tmp_path / "own.jsonl", tmp_path / "own.jsonl"]) == 2
    assert re.search(mentions("own.jsonl", "twice"), capsys.readouterr().err)
    (tmp_path / "a.txt").write_text("a,b")
    assert run("own", [tmp_path / "a.txt"]) == 2
    named = mentions("a.txt", "*.jsonl", "*.json", "*.parquet", "*.csv", "*.tsv", "*.gz")
    assert re.search(named, capsys.readouterr().err)
    (tmp_path / "out").mkdir()
    assert run("own", rows) == 2
    assert re.search(mentions(tmp_path / "out", "exists", "--output"), capsys.readouterr().err)
