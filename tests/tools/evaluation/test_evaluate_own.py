"""Benchmarks of the user's own: files of problems, and code."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import Config, EnvironmentConfig, RewardConfig
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.calls import Acting
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Outcome, Verdict
from gapo_tools.demonstration import demo_task as arithmetic
from gapo_tools.evaluation.benchmarks import BOXED
from gapo_tools.evaluation.chosen import (
    Chosen,
    choose,
    environment_of,
    judge_of,
    read_reward,
    with_kind,
)
from gapo_tools.evaluation.compare import Method, compare
from gapo_tools.evaluation.paper import Sampling
from gapo_tools.evaluation.result_tables import results_tables
from gapo_tools.evaluation.results import collect, read_results, write_results
from gapo_tools.evaluation.sampler import Sampler
from gapo_tools.evaluation.samples import read_samples
from tests.acting import one_turn_acting
from tests.configs import config_of
from tests.messages import mentions
from tests.programs import Program
from tests.scripted_engine import ScriptedEngine, says
from tests.tools.evaluation.test_evaluate_tool import arguments, parse, root  # noqa: F401 (a fixture)

DOCUMENT = Path(__file__).parents[3] / "docs" / "evaluation.md"
SAMPLING = Sampling(num_samples=2, temperature=1.0, top_p=1.0, max_response_tokens=16)
ROWS = [
    {"id": "a/../b", "prompt": "1+2=", "answer": "3", "level": "easy"},
    {"id": "Ω" * 200, "prompt": "2+2=", "answer": "4"},
]


def config(reward: RewardConfig, **sections: Any) -> Config:
    return config_of(
        sections
        | {
            "data": {"max_prompt_tokens": 200},
            "reward": reward.model_dump(exclude_none=True),
        }
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = "0123456789+=>abcdefghijklmnopqrstuvwxyzLT',.\\{}"
    tokenizer = arithmetic.write_tokenizer([letters], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)
    return load_tokenizer(folder)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documentation's example of a benchmark, in a folder of its own, with its data."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = re.search(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / found[1]).write_text(found[2])
    rows = [
        {"language": "en", "question": "1+2=", "grade": 3, "solutions": ["3", "three"]},
        {"language": "de", "question": "2+2=", "grade": 3, "solutions": ["4"]},
    ]
    (tmp_path / "data/school").mkdir(parents=True)
    (tmp_path / "data/school/a.json").write_text(json.dumps(rows))
    return tmp_path / found[1]


def problems(folder: Path, name: str = "held.out.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def chosen(*files: Path, names: tuple[str, ...] = (), kind: str = "exact", data: Path = Path()):
    reward = RewardConfig(kind="math")
    judge = with_kind(reward, kind, field="--kind")
    return choose(names, files, data_dir=data, reward=reward, judge=judge)


def evaluated(
    one: Chosen, tokenizer, output: Path, *, says_always: str, acting: Acting | None = None
) -> Path:
    """Sample the benchmark with an engine that always answers the same, and write its results."""
    acting = acting or one_turn_acting(tokenizer)
    environment = acting.config.model_dump()
    task = one.read(config(one.reward, environment=environment), tokenizer)
    engine = ScriptedEngine(says(tokenizer, defaultdict(lambda: [says_always] * 2)))
    with rewards.start_pool(one.reward, num_workers=1) as pool:
        sampler = Sampler(engine, acting, SAMPLING, output)
        sampler.sample(task, remaining=task.remaining(output, 0), seed=0, pool=pool)
    assert task.remaining(output, 0) == []
    results = collect(
        output,
        model="m",
        setting="",
        sampling=SAMPLING,
        files={one.name: one.sha256},
        problem_ids={one.name: [prompt.id for prompt in task.prompts]},
        seeds=[0],
    )
    write_results(results, output)
    assert repr(read_results(output)) == repr(results)  # NaN is not NaN
    return output


def test_a_file_of_problems_is_a_benchmark_with_its_name(tmp_path, tokenizer) -> None:
    (one,) = chosen(problems(tmp_path))
    assert (one.name, one.reward.kind) == ("held_out", "exact")
    output = evaluated(one, tokenizer, tmp_path / "out", says_always=">4")
    solved = read_samples(output / "held_out" / "seed_0")
    assert {name: row.num_correct for name, row in solved.items()} == {
        ROWS[0]["id"]: 0,
        ROWS[1]["id"]: 2,
    }
    assert solved["a/../b"].level == "easy"
    results = read_results(output)
    assert results.benchmarks["held_out"][0].pass_at_k == [0.5, 0.5]
    assert results_tables(results)[0].rows == [["held_out", "50.00", "50.00"]]


def test_own_benchmarks_follow_the_papers_and_are_compared(tmp_path, tokenizer) -> None:
    (held_out,) = chosen(problems(tmp_path))
    for method, answer in {"ours": ">4", "theirs": ">5"}.items():
        evaluated(held_out, tokenizer, tmp_path / method, says_always=answer)
    main, _ = compare([Method.read(str(tmp_path / name)) for name in ("ours", "theirs")], {})
    assert main.columns[-1] == "held_out"
    assert [row[0] for row in main.rows] == ["ours", "theirs"]
    (other,) = chosen(problems(tmp_path, "held_out.jsonl"))
    other.files[0].write_text(json.dumps(ROWS[1]) + "\n")
    evaluated(other, tokenizer, tmp_path / "fewer", says_always=">4")
    with pytest.raises(ConfigError, match=mentions("held_out", "SHA-256")):
        compare([Method.read(str(tmp_path / name)) for name in ("ours", "fewer")], {})


def test_the_example_of_a_benchmark(own: Path, tokenizer, tmp_path: Path) -> None:
    (one,) = chosen(names=(f"{own}:SCHOOL",), data=tmp_path / "data")
    task = one.read(config(one.reward), tokenizer)
    assert [(p.id, p.prompt, p.answers, p.level) for p in task.problems] == [
        ("school-0", f"1+2={BOXED}", ("3", "three"), "grade 3")
    ]
    output = evaluated(one, tokenizer, tmp_path / "out", says_always="\\boxed{three}")
    assert read_results(output).benchmarks["school"][0].pass_at_k == [1.0, 1.0]
    digest = one.sha256
    own.write_text(own.read_text() + "\n# changed\n")
    assert one.sha256 != digest


def test_a_verifier_of_ones_own_judges_with_its_settings(
    tmp_path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(
        "def verify(response, answer, *, most):\n    return len(response) <= most\n"
    )
    path = tmp_path / "config.toml"
    for most, correct in {1: 0, 2: 2}.items():
        path.write_text(
            f"[reward]\nkind = '{tmp_path}/mine.py:verify'\nsettings = {{ most = {most} }}\n"
        )
        judge = read_reward(path, field="--config")
        (one,) = choose(
            (),
            (problems(tmp_path),),
            data_dir=tmp_path,
            reward=RewardConfig(kind="math"),
            judge=judge,
        )
        output = evaluated(one, tokenizer, tmp_path / f"out_{most}", says_always=">4")
        solved = read_samples(output / "held_out" / "seed_0").values()
        assert {row.num_correct for row in solved} == {correct}
    path.write_text("[reward]\nkind = 'exact'\ncorrect_abov = 1\n")
    with pytest.raises(ConfigError, match=mentions("--config", path, "correct_abov")):
        read_reward(path, field="--config")


@pytest.mark.parametrize(("needed", "correct"), [(2, [0, 2]), (3, [0, 0])])
def test_components_that_compare_and_wait_judge_a_benchmark(
    tmp_path, tokenizer, monkeypatch: pytest.MonkeyPatch, needed: int, correct: list[int]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(
        "def verify_group(responses, answer, messages):\n"
        "    said = [[one['role'] for one in some] for some in messages]\n"
        "    return [said == [['user', 'assistant']] * 2] * len(responses)\n"
        "async def verify(response, answer, row):\n"
        "    return {'score': response == '>' + answer and row['prompt'][1] == '+'}\n"
    )
    path = tmp_path / "config.toml"
    path.write_text(
        f"[reward]\ncorrect_above = {needed - 0.5}\n[reward.components]\n"
        f"pair = '{tmp_path}/mine.py:verify_group'\nexact = '{tmp_path}/mine.py:verify'\n"
    )
    judge = judge_of(RewardConfig(kind="math"), None, path, sandbox="unsafe")
    (one,) = choose(
        (), (problems(tmp_path),), data_dir=tmp_path, reward=RewardConfig(kind="math"), judge=judge
    )
    output = evaluated(one, tokenizer, tmp_path / "out", says_always=">4")
    solved = read_samples(output / "held_out" / "seed_0").values()
    assert [row.num_correct for row in solved] == correct


def test_each_answer_of_a_problem_is_compared_by_itself(
    own: Path, tokenizer, tmp_path: Path
) -> None:
    verifier = (
        "def verify_group(responses, answer):\n"
        "    assert len(responses) == 2\n"
        "    return [one == answer for one in responses]\n"
    )
    kind = f'import dataclasses\nSCHOOL = dataclasses.replace(SCHOOL, kind="{own}:verify_group")\n'
    own.write_text(f"{own.read_text()}\n{verifier}\n{kind}")
    (one,) = chosen(names=(f"{own}:SCHOOL",), data=tmp_path / "data")
    output = evaluated(one, tokenizer, tmp_path / "out", says_always="three")
    assert read_results(output).benchmarks["school"][0].pass_at_k == [1.0, 1.0]


@pytest.fixture
def with_columns(own: Path) -> Path:
    """The example's benchmark, with a verifier and an environment that read the row."""
    own.write_text(
        own.read_text()
        + f"""
SCHOOL = dataclasses.replace(SCHOOL, kind="{own}:verify")


def verify(response, answer, *, grade, question):
    return response.endswith(f"{{grade}}{{question}}")


class Asks(OneTurn):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.tokenizer = tokenizer

    def respond(self, episode):
        if episode.response_mask is not None:
            return None
        if episode.sample == 1:
            raise OSError("no network")
        return self.tokenizer.encode(episode.prompt.row["question"], add_special_tokens=False)
"""
    )
    text = own.read_text().replace("from", "import dataclasses\nfrom", 1)
    line = "from gapo_megatron.rollout.environments.one_turn import OneTurn\n"
    own.write_text(text.replace("\n\ndef read", f"{line}\n\ndef read", 1))
    return own


def acting(kind: str, tokenizer, **settings: Any) -> Acting:
    """As tools/evaluate.py calls an environment."""
    chosen = environment_of(kind, None).model_copy(update=settings)
    environment = environments.build(chosen, tokenizer)
    turns = Turns(tokenizer, chosen.stop, eos_token_ids=(tokenizer.eos_token_id,))
    size = len(tokenizer)
    return Acting(environment, chosen, turns, max_response_tokens=200, vocab_size=size)


def test_an_environment_answers_and_its_failures_are_unknown(
    with_columns: Path, tokenizer, tmp_path: Path
) -> None:
    """The columns of a benchmark's row reach verifier and environment."""
    (one,) = chosen(names=(f"{with_columns}:SCHOOL",), data=tmp_path / "data")
    asks = acting(f"{with_columns}:Asks", tokenizer)
    task = one.read(config(one.reward, environment=asks.config.model_dump()), tokenizer)
    assert task.prompts[0].row == {
        **{"language": "en", "question": "1+2=", "grade": 3},
        **{"solutions": ["3", "three"], "prompt": f"1+2={BOXED}"},
    }
    plain = one.read(config(one.reward), tokenizer)  # what the verifier takes, no more
    assert plain.prompts[0].row == {"question": "1+2=", "grade": 3}

    # The response is "3", the environment's "1+2=", and "3" again.
    output = evaluated(one, tokenizer, tmp_path / "out", says_always="3", acting=asks)
    ((solved,), (counts,)) = (
        read_samples(output / "school/seed_0").values(),
        read_results(output).benchmarks["school"].values(),
    )
    first, second = solved.samples
    assert (first.response, first.num_tokens) == ("31+2=3", 4)  # two of them EOS
    assert first.verdict.outcome is Outcome.WRONG
    assert (first.num_turns, first.num_calls, first.num_errors) == (2, 2, 0)
    assert second.verdict == Verdict(Outcome.UNKNOWN, "OSError: no network")
    assert (second.num_turns, second.num_calls, second.num_errors) == (1, 1, 1)
    assert counts.counts == {"school-0": (1, 0)}
    assert counts.environment == {"turns": 1.5, "calls": 1.5, "error_share": 1 / 3}

    results = read_results(output)
    sampling = replace(SAMPLING, environment=asks.config.kind)
    table = results_tables(replace(results, sampling=sampling))[-1].to_text()
    assert re.search(r"^school +1\.50 +1\.50 +33\.33", table, re.MULTILINE)
    right = evaluated(one, tokenizer, tmp_path / "right", says_always="31+2=", acting=asks)
    assert read_results(right).benchmarks["school"][0].counts == {"school-0": (1, 1)}
    one_turn = evaluated(one, tokenizer, tmp_path / "plain", says_always="3")
    assert "31+2=3" not in (one_turn / "school/seed_0/school-0.jsonl").read_text()


def test_a_verifiers_columns_are_required_of_a_benchmark(
    with_columns: Path, tokenizer, tmp_path: Path
) -> None:
    rows = [{"language": "en", "question": "1+2=", "grade": 3, "solutions": ["3"]}]
    with_columns.write_text(with_columns.read_text().replace("grade, question", "points"))
    (tmp_path / "data/school/a.json").write_text(json.dumps(rows))
    (one,) = chosen(names=(f"{with_columns}:SCHOOL",), data=tmp_path / "data")
    with pytest.raises(DataError, match=mentions("a.json:1", "'points'")):
        one.read(config(one.reward), tokenizer)


def test_an_environment_may_have_its_own_answer(own: Path, tokenizer, tmp_path: Path) -> None:
    """It is then the only one, in place of the problem's alternatives."""
    (one,) = chosen(names=(f"{own}:SCHOOL",), data=tmp_path / "data")
    plain = one_turn_acting(tokenizer)
    for answer, num_correct in {"12": 0, "3": 2}.items():
        told = SimpleNamespace(
            begin=plain.environment.begin,
            respond=plain.environment.respond,
            judge=lambda episode, answer=answer: (plain.environment.judge(episode)[0], answer),
        )
        output = evaluated(
            one,
            tokenizer,
            tmp_path / answer,
            says_always="\\boxed{3}",
            acting=replace(plain, environment=told),
        )
        (solved,) = read_samples(output / "school/seed_0").values()
        assert solved.num_correct == num_correct


def test_the_environment_is_that_of_the_run(with_columns: Path, tmp_path: Path) -> None:
    """A run's folder has the digest of its code: other code is refused, as on a resume."""
    kind = f"{with_columns}:Asks"
    assert environment_of(None, None) == EnvironmentConfig()
    digest = environment_of(kind, None).code
    assert digest == hashlib.sha256(with_columns.read_bytes()).hexdigest()
    text = f"[environment]\nkind = '{kind}'\nstop = ['=']\ncall_timeout_s = 5\n"
    (tmp_path / "base.toml").write_text(text)
    (tmp_path / "config.toml").write_text(f"base = 'base.toml'\n[environment]\ncode = '{digest}'")
    for path in (tmp_path, tmp_path / "config.toml", tmp_path / "base.toml"):
        found = environment_of(None, path)
        assert (found.kind, found.code, found.stop) == (kind, digest, ("=",))
        assert found.call_timeout_s == 5
    assert environment_of("one_turn", tmp_path) == EnvironmentConfig()
    with_columns.write_text(with_columns.read_text() + "# changed")
    assert environment_of(None, tmp_path / "base.toml").code != digest
    with pytest.raises(ConfigError, match=mentions("--config", "environment.code", digest)):
        environment_of(None, tmp_path)
    with pytest.raises(ConfigError, match=mentions("--environment", "'tool'", "'tools'")):
        environment_of("tool", None)
    (tmp_path / "base.toml").write_text("[environment]\nkind = 'tools'\nstops = []\n")
    with pytest.raises(ConfigError, match=mentions("--config", "environment.stops")):
        environment_of(None, tmp_path / "base.toml")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name='a/b', title='', kind='math'", ("name", "'a/b'")),
        ("name='aime24', title='', kind='math'", ("name", "'aime24'")),
        ("name='mine', title='', kind='maht'", ("mine", "'maht'")),
    ],
)
def test_a_benchmark_that_cannot_be_is_refused(tmp_path, text, named, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "bad.py"
    path.write_text(
        "from gapo_tools.evaluation.benchmarks import Benchmark\nNUMBER = 3\n"
        f"MINE = Benchmark({text}, folder='x', read=len, answers=len)\n"
    )
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.json").write_text("[]")
    with pytest.raises(ConfigError, match=mentions(*named)):
        chosen(names=(f"{path}:MINE",), data=tmp_path)
    with pytest.raises(ConfigError, match=mentions("--benchmarks", "Benchmark", "int")):
        chosen(names=(f"{path}:NUMBER",))
    with pytest.raises(ConfigError, match=mentions("--benchmarks", "aime23")):
        chosen(names=("aime23",))


def test_problems_that_cannot_be_read_are_refused(tmp_path, tokenizer) -> None:
    path = problems(tmp_path)
    with pytest.raises(ConfigError, match=mentions("--kind", "'maht'")):
        chosen(path, kind="maht")
    with pytest.raises(ConfigError, match=mentions("--problems", "'held_out'")):
        chosen(path, problems(tmp_path, "held_out.jsonl"))
    for name in ("aime24", "\u9898" * 80):  # 80 characters are 240 bytes
        with pytest.raises(ConfigError, match=mentions("--problems", f"'{name}'")):
            chosen(problems(tmp_path, f"{name}.jsonl"))
    path.write_text('{"id": "a", "prompt": "1+2="}\n')
    with pytest.raises(DataError, match=mentions(f"{path}:1", "answer")):
        (one,) = chosen(path)
        one.read(config(one.reward), tokenizer)


def test_a_benchmark_of_the_paper_goes_by_its_files_alone(tmp_path) -> None:
    (tmp_path / "aime24").mkdir()
    path = tmp_path / "aime24/a.json"
    path.write_text("[]")
    (one,) = chosen(names=("aime24",), data=tmp_path)
    assert (one.name, one.reward.kind, one.files, one.code) == ("aime24", "math", (path,), ())
    assert one.sha256 == hashlib.sha256(b"[]").hexdigest()


def test_the_command_line_asks_for_the_verifier(capsys) -> None:
    given = ("--model", "m", "--output", "o", "--problems", "a.jsonl", "b.jsonl")
    with pytest.raises(SystemExit, match="2"):
        parse(*given)
    assert "--kind" in capsys.readouterr().err.splitlines()[-1]
    parsed = parse(*given, "--kind", "exact")
    assert parsed.benchmarks == [] and parsed.problems == [Path("a.jsonl"), Path("b.jsonl")]
    with pytest.raises(SystemExit, match="2"):
        parse(*given, "--kind", "exact", "--config", "c.toml")
    with pytest.raises(SystemExit, match="2"):
        parse("--model", "m", "--output", "o", "--kind", "exact")
    parsed = parse("--model", "m", "--output", "o", "--config", "run", "--environment", "tools")
    assert (parsed.config, parsed.environment, parsed.problems) == (Path("run"), "tools", [])
    parsed = parse(*given, "--kind", "exact", "--benchmarks", "mine.py:ONE,aime24")
    assert parsed.benchmarks == ["mine.py:ONE", "aime24"]


@pytest.mark.system
def test_the_tool_evaluates_in_an_environment(root: Path, with_columns: Path) -> None:  # noqa: F811
    """Real vLLM on two ranks, and calls that take a moment or fail; a second start makes none."""
    folder, log = with_columns.parent, with_columns.parent / "log"
    path = folder / "digits.jsonl"
    rows = [{"id": str(i), "prompt": f"0{i}", "answer": str(i), "say": str(i)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "says.py").write_text(
        "import os, time\n"
        "from gapo_megatron.rollout.environments.one_turn import OneTurn\n"
        "class Says(OneTurn):\n"
        "    def __init__(self, tokenizer, log):\n"
        "        super().__init__(tokenizer)\n"
        "        self.tokenizer, self.log = tokenizer, log\n"
        "    def respond(self, episode):\n"
        "        if episode.response_mask is not None:\n"
        "            return None\n"
        "        with open(self.log, 'a') as file:\n"
        "            file.write(f'{episode.prompt.id}/{episode.sample}\\n')\n"
        "        time.sleep(0.1)\n"
        "        if episode.sample == 1:\n"
        "            raise OSError('no network')\n"
        "        said = episode.prompt.row['say']\n"
        "        return self.tokenizer.encode(said, add_special_tokens=False)\n"
        "    def judge(self, episode):\n"
        "        return episode.prompt.row['say'], episode.prompt.answer\n"
    )
    (folder / "config.toml").write_text(
        f"[environment]\nkind = '{folder}/says.py:Says'\nsettings = {{ log = '{log}' }}\n"
        "[reward]\nkind = 'exact'\n"
    )
    output = folder / "out"
    command = [
        *("--model", root / "model", "--output", output, "--max-prompt-tokens", 16),
        *("--num-samples", 4, "--max-response-tokens", 30, "--precision", "fp32"),
        *("--enforce-eager", "--problems", path, "--config", folder),
    ]
    for _ in range(2):
        program = Program("gapo_tools.evaluate", *map(str, command), ranks=2)
        text, _ = program.communicate()
        assert program.returncode == 0, text[-6000:]
        assert len({*log.read_text().splitlines()}) == len(log.read_text().splitlines())
    found = read_results(output).benchmarks["digits"][0]
    samples = [
        one for row in read_samples(output / "digits/seed_0").values() for one in row.samples
    ]
    assert len(samples) == 24 and found.environment["calls"] > 0
    for one in samples:
        assert one.num_errors == ("no network" in one.verdict.reason)
        assert one.verdict.outcome is (Outcome.UNKNOWN if one.num_errors else Outcome.CORRECT)
    assert 0 < sum(one.num_errors for one in samples) <= 6
    (table,) = re.findall(r"^digits +(\d\.\d+) +(\d\.\d+) +(\d+\.\d+)$", text, re.MULTILINE)
    assert float(table[1]) == pytest.approx(found.environment["calls"], abs=0.006)
