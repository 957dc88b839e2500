"""Sampling that resumes, and figures from samples."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import DataConfig, RewardConfig
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import DataError
from gapo_megatron.types import Outcome, Verdict
from gapo_tools.demonstration import demo_task as arithmetic
from gapo_tools.evaluation import sampler as sampling_module
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.paper import Sampling
from gapo_tools.evaluation.results import collect, measure, read_results, write_results
from gapo_tools.evaluation.sampler import Sampler, Task, all_of, any_of
from gapo_tools.evaluation.samples import (
    Sample,
    Solved,
    read_samples,
    write_samples,
)
from tests.acting import one_turn_acting
from tests.messages import mentions
from tests.scripted_engine import LoneReplicas, ScriptedEngine, place_of, says
from tests.tokenizers import byte_level
from tests.tools.evaluation.test_benchmarks import put

CORRECT, WRONG, UNKNOWN = map(Verdict, (Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN))


def answers(tokenizer, answer: str, **settings) -> ScriptedEngine:
    """An engine that says the same to everything."""
    return ScriptedEngine(says(tokenizer, defaultdict(lambda: [answer] * 2)), **settings)


def asked(engine: ScriptedEngine) -> list[str]:
    """Ids of the problems, each once."""
    return list(dict.fromkeys(place_of(request)[0] for request in engine.asked))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = arithmetic.write_tokenizer(["0123456789+=>abcdefghijklmnopx,\\{}"], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)
    return load_tokenizer(folder)


SAMPLING = Sampling(num_samples=2, temperature=1.0, top_p=1.0, max_response_tokens=16)


def read_task(name: str, path: Path, tokenizer, *, max_prompt_tokens: int = 500) -> Task:
    return Task.read(
        BENCHMARKS[name],
        path,
        reward=RewardConfig(kind=BENCHMARKS[name].kind),
        tokenizer=tokenizer,
        data=DataConfig(train_path="unused", max_prompt_tokens=max_prompt_tokens),
    )


def sample(engine, task, output_dir, pool, *, seed: int = 0) -> None:
    sampler = Sampler(engine, one_turn_acting(task.tokenizer), SAMPLING, output_dir)
    sampler.sample(task, remaining=task.remaining(output_dir, seed), seed=seed, pool=pool)


def test_a_killed_evaluation_continues_where_it_was(tmp_path, tokenizer, monkeypatch) -> None:
    rows = [{"problem": "p", "answer": str(number)} for number in range(5)]
    task = read_task("aime24", put(tmp_path / "data", "a.json", rows), tokenizer)
    monkeypatch.setattr(sampling_module, "SAMPLES_PER_PIECE", 4)  # two problems at most: 1, 2, 2

    def killed_after_two_pieces() -> None:
        if len(asked(engine)) > 3:
            raise KeyboardInterrupt

    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        engine = answers(tokenizer, "\\boxed{3}", before_step=killed_after_two_pieces)
        with pytest.raises(KeyboardInterrupt):
            sample(engine, task, tmp_path, pool)
        folder = tmp_path / "aime24" / "seed_0"
        (folder / "aime24-3.jsonl.partial").write_text('{"id": "aime24-3"')  # killed while writing
        kept = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
        assert list(kept) and set(read_samples(folder)) == {f"aime24-{i}" for i in range(3)}
        assert not collect_all(tmp_path, task).benchmarks, "half a benchmark has no figures"

        engine = answers(tokenizer, "\\boxed{3}")
        sample(engine, task, tmp_path, pool)
        assert asked(engine) == ["aime24-3", "aime24-4"]
        assert kept.items() <= {p.name: p.read_bytes() for p in folder.glob("*.jsonl")}.items()
        seeds = {request.seed for request in engine.asked}
        sample(engine, task, tmp_path, pool, seed=1)
    assert len(seeds) == 4 and len({one.seed for one in engine.asked}) == 4 + 10
    solved = read_samples(folder)
    assert [solved[f"aime24-{i}"].num_correct for i in range(5)] == [0, 0, 0, 2, 0]
    right = replace(CORRECT, answer="3")
    assert solved["aime24-3"].samples[0] == Sample("\\boxed{3}", right, 10, False)

    results = collect_all(tmp_path, task, setting="qwen2.5-math-1.5b")
    write_results(results, tmp_path)
    assert read_results(tmp_path) == results
    assert results.benchmarks["aime24"][0].pass_at_k == [0.2, 0.2]
    assert results.benchmarks["aime24"][0].counts["aime24-3"] == (2, 2)
    # What is evaluated later joins what was.
    amc = read_task("amc23", put(tmp_path / "amc", "a.json", rows[:1]), tokenizer)
    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        sample(engine, amc, tmp_path, pool)
    both = collect_all(tmp_path, amc)
    assert list(both.benchmarks) == ["aime24", "amc23"]
    assert both.benchmarks["aime24"] == results.benchmarks["aime24"]
    assert both.files == {name: f"digest of {name}" for name in ("aime24", "amc23")}
    assert both.setting == "qwen2.5-math-1.5b"  # of the folder, named again or not


def test_ranks_are_told_what_remains(tmp_path, tokenizer) -> None:
    """And gather neither prompts nor tests to agree on it."""
    rows = [{"problem": "p", "answer": "1"}] * 3
    task = read_task("aime24", put(tmp_path / "data", "a.json", rows), tokenizer)
    gathered = []
    engine = answers(tokenizer, "\\boxed{1}")
    engine.replicas.gather = lambda groups: gathered.extend(groups) or list(groups)
    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        sampler = Sampler(engine, one_turn_acting(tokenizer), SAMPLING, tmp_path)
        sampler.sample(task, remaining={"aime24-1"}, seed=0, pool=pool)
    assert asked(engine) == ["aime24-1"]
    assert set(map(type, gathered)) <= {bool, type(None)}
    assert task.remaining(tmp_path, 0) == ["aime24-0", "aime24-2"]


def test_a_rank_judges_and_keeps_its_part_of_what_its_engine_made(tmp_path, tokenizer) -> None:
    rows = [{"problem": "p", "answer": "1"}] * 3
    task = read_task("aime24", put(tmp_path / "data", "a.json", rows), tokenizer)
    replicas = LoneReplicas(rank=1, world_size=2, size=2)
    engine = answers(tokenizer, "\\boxed{1}", replicas=replicas)
    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        sample(engine, task, tmp_path, pool)
    assert list(read_samples(tmp_path / "aime24/seed_0")) == ["aime24-1", "aime24-2"]


def test_samples_show_the_thinking_of_which_the_marks_are_tokens(tmp_path) -> None:
    tokenizer = byte_level("<think>", "</think>")
    rows = [{"problem": "p", "answer": "1"}]
    task = read_task("aime24", put(tmp_path / "data", "a.json", rows), tokenizer)
    said = "<think>\\boxed{1}</think>\\boxed{2}"
    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        sample(answers(tokenizer, said), task, tmp_path, pool)
    kept = read_samples(tmp_path / "aime24/seed_0")["aime24-0"]
    assert kept.samples[0].response.startswith("<think>") and kept.num_correct == 0


def collect_all(output_dir, task, *, setting=""):
    return collect(
        output_dir,
        model="m",
        setting=setting,
        sampling=SAMPLING,
        files={task.name: f"digest of {task.name}"},
        problem_ids={task.name: [prompt.id for prompt in task.prompts]},
        seeds=[0],
    )


def test_a_problem_with_several_answers_takes_any(tmp_path, tokenizer) -> None:
    row = {"problem": "p", "solution": "s", "type": "t", "answer": ["1", "2"]}
    task = read_task("minerva", put(tmp_path / "data", "a.json", [row]), tokenizer)
    with rewards.start_pool(RewardConfig(kind="math"), num_workers=1) as pool:
        for answer, num_correct in {"2": 2, "3": 0}.items():
            output = tmp_path / answer
            sample(answers(tokenizer, f"\\boxed{{{answer}}}"), task, output, pool)
            assert read_samples(output / "minerva/seed_0")["minerva-0"].num_correct == num_correct


def test_instructions_are_judged_one_by_one(tmp_path, tokenizer) -> None:
    row = {
        "prompt": "p",
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{"keywords": None}, {"keywords": ["abc"]}],
    }
    task = read_task("ifeval", put(tmp_path / "data", "a.jsonl", [row]), tokenizer)
    with rewards.start_pool(RewardConfig(kind="instructions"), num_workers=1) as pool:
        sample(answers(tokenizer, "abc,d"), task, tmp_path, pool)
    (solved,) = read_samples(tmp_path / "ifeval/seed_0").values()
    verdict = solved.samples[0].verdict
    assert verdict.outcome is Outcome.WRONG and "punctuation:no_comma" in verdict.reason
    figures = measure([solved], num_samples=2).instructions
    assert figures == {
        "prompt_strict": 0.0,
        "instruction_strict": 0.5,
        "prompt_loose": 0.0,
        "instruction_loose": 0.5,
    }
    row["kwargs"][1] = {"keyword": "abc"}
    with pytest.raises(
        DataError, match=mentions("keywords:existence", "{'keyword': 'abc'}", "'keywords'")
    ):
        read_task("ifeval", put(tmp_path / "data", "b.jsonl", [row]), tokenizer)


def test_prompts_that_are_too_long_are_named(tmp_path, tokenizer) -> None:
    path = put(tmp_path, "a.json", [{"problem": "p", "answer": "1"}])
    with pytest.raises(DataError, match=mentions(tmp_path, "aime24-0", "--max-prompt-tokens", 10)):
        read_task("aime24", path, tokenizer, max_prompt_tokens=10)


def test_verdicts_on_several_answers_and_on_several_instructions() -> None:
    assert any_of([WRONG, UNKNOWN, CORRECT]) is CORRECT
    assert any_of([WRONG, UNKNOWN]) is UNKNOWN
    assert all_of([CORRECT, UNKNOWN, WRONG]) is WRONG
    assert all_of([CORRECT, UNKNOWN]) is UNKNOWN
    assert all_of([CORRECT, CORRECT]) is CORRECT


def solved(name: str, *verdicts: Verdict) -> Solved:
    samples = (
        Sample("text \u2028 more\n", verdict, 3, index == 0)
        for index, verdict in enumerate(verdicts)
    )
    return Solved(name, "", tuple(samples))


def test_text_that_has_no_form_in_utf_8_is_kept_but_for_that(tmp_path) -> None:
    complaint = Verdict(Outcome.WRONG, "test 1: ValueError: \ud800")
    write_samples(tmp_path, [Solved("a", "", (Sample("\udfff!", complaint, 1, False),))])
    assert read_samples(tmp_path)["a"].samples == (
        Sample("?!", Verdict(Outcome.WRONG, "test 1: ValueError: ?"), 1, False),
    )


@pytest.mark.parametrize(
    "name",
    ["\u9898" * 90, "\u00e9" * 100, "a" * 101, "a/../b", "..", "-rf", "x\u2028y", ""],
    ids=lambda name: ascii(name)[:12],
)
def test_any_id_has_a_file_for_its_samples(tmp_path, name: str) -> None:
    write_samples(tmp_path / "samples", [solved(name, CORRECT)])
    assert [*read_samples(tmp_path / "samples")] == [name]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text[:-20], ["a.jsonl:2", "JSON"]),
        (lambda text: text.replace('"id": "b"', '"id": 3'), ["a.jsonl:2", "id"]),
        (lambda text: text.replace('tokens": 3', 'tokens": "3"'), ["a.jsonl:1", "num_tokens"]),
        (lambda text: text.replace('"wrong"', '"bad"'), ["a.jsonl:1", "outcome"]),
        (lambda text: text.replace('"id": "b"', '"id": "a"'), ["a.jsonl:2", "problem a "]),
        (lambda text: text.encode() + b"\xff\n", ["a.jsonl:3", "JSON"]),
    ],
)  # fmt: skip
def test_samples_that_are_damaged_are_named_with_the_way_out(tmp_path, change, named) -> None:
    write_samples(tmp_path, [solved("a", CORRECT, WRONG), solved("b", WRONG)])
    assert list(read_samples(tmp_path)) == ["a", "b"]
    damaged = change((tmp_path / "a.jsonl").read_text())
    (tmp_path / "a.jsonl").write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(DataError, match=mentions(*named, "remove")):
        read_samples(tmp_path)


def test_a_problem_with_too_few_samples_is_named(tmp_path) -> None:
    write_samples(tmp_path / "aime24" / "seed_0", [solved("aime24-0", CORRECT)])
    with pytest.raises(DataError, match=mentions(tmp_path, "aime24-0", 1, 2, "remove")):
        collect(
            tmp_path,
            model="m",
            setting="",
            sampling=SAMPLING,
            files={"aime24": "x"},
            problem_ids={"aime24": ["aime24-0"]},
            seeds=[0],
        )


def test_figures_leave_unknown_verdicts_out() -> None:
    result = measure(
        [
            solved("a", CORRECT, CORRECT, WRONG, WRONG),
            solved("b", CORRECT, UNKNOWN, UNKNOWN, WRONG),
            solved("c", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN),
        ],
        num_samples=4,
    )
    assert result.counts == {"a": (4, 2), "b": (2, 1), "c": (0, 0)}
    assert result.problems_at_k == [2, 2, 1, 1]
    # a: 1 - C(2,k)/C(4,k); b: 1/2, then 1.
    assert result.pass_at_k == pytest.approx([0.5, (5 / 6 + 1) / 2, 1.0, 1.0])
    assert result.unknown_verdicts == pytest.approx(6 / 12)
    assert result.truncated == pytest.approx(3 / 12)
    assert result.response_tokens == 3.0
    nothing = measure([solved("c", UNKNOWN)], num_samples=1)
    assert math.isnan(nothing.pass_at_k[0])
