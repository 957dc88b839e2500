"""Evaluations in an environment: what is kept of its calls, and what it gets of a row."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapo_megatron.config import EnvironmentConfig, RewardConfig
from gapo_megatron.errors import ConfigError
from gapo_tools import evaluate as tool
from gapo_tools.evaluation.chosen import judge_of, with_prompts_of_config
from gapo_tools.evaluation.compare import Method
from gapo_tools.evaluation.paper import Sampling
from gapo_tools.evaluation.result_tables import results_tables
from gapo_tools.evaluation.results import read_results, write_results
from tests.configs import config_of
from tests.messages import mentions
from tests.tokenizers import byte_level
from tests.tools.evaluation.test_evaluate_own import (  # noqa: F401 (a fixture)
    SAMPLING,
    acting,
    chosen,
    evaluated,
    tokenizer,
)
from tests.tools.evaluation.test_evaluate_tool import arguments, parse, root  # noqa: F401 (a fixture)

FAILS = """
from gapo_megatron.rollout.environments.one_turn import OneTurn


class Fails(OneTurn):
    moves_first = True

    def __init__(self, tokenizer, *, samples):
        super().__init__(tokenizer)
        self.tokenizer, self.samples = tokenizer, samples

    def respond(self, episode):
        if len(episode.token_ids):
            return None
        if episode.sample in self.samples:
            raise OSError("down")
        return self.tokenizer.encode("1", add_special_tokens=False)
"""

COMMON = {"answer": "3", "solution": "it is 3"}
ROWS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "aime24": ({"id": 60, "problem": "1+2="}, COMMON),
    "humaneval_plus": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "atol": 0},
        {"canonical_solution": " return 3", "base_input": [], "plus_input": [], "test": "f() == 3"},
    ),
}
"""Benchmark -> columns of its row that an environment gets, and that it must not get."""


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_its_prompt_as_asked_and_no_solution(name: str, tmp_path: Path) -> None:
    shown, hidden = ROWS[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([shown | hidden]))
    (one,) = chosen(names=(name,), data=tmp_path)
    (tmp_path / "agent.py").write_text("def solve(session):\n    return ''\n")
    agent = {"kind": f"{tmp_path}/agent.py:solve"}
    config = config_of({"environment": agent, "data": {"max_prompt_tokens": 2000}})
    task = one.read(config, byte_level())
    (problem,) = task.problems
    assert task.prompts[0].row == shown | {"prompt": problem.prompt}
    assert "1+2=" in problem.prompt or "def f():" in problem.prompt
    assert problem.answers


@pytest.mark.parametrize(
    ("fail", "figures"),
    [
        ([0], {"turns": 0.5, "calls": 1.5, "error_share": 1 / 3}),
        ([0, 1], {"turns": 0, "calls": 1, "error_share": 1}),
    ],
)
def test_first_calls_that_fail_are_counted(tmp_path: Path, tokenizer, fail, figures) -> None:  # noqa: F811
    """Their episodes have no turn of the model."""
    (tmp_path / "fails.py").write_text(FAILS)
    row = {"id": "a", "prompt": "1+2=", "answer": "3"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = chosen(tmp_path / "mine.jsonl")
    kind = f"{tmp_path}/fails.py:Fails"
    act = acting(kind, tokenizer, settings={"samples": fail})
    output = evaluated(one, tokenizer, tmp_path / "out", says_always="3", acting=act)
    results = read_results(output)
    assert results.benchmarks["mine"][0].environment == figures
    without = {0: replace(results.benchmarks["mine"][0], environment={})}
    results.benchmarks["none"] = without  # every `begin` failed: neither turns nor calls
    table = results_tables(replace(results, sampling=replace(SAMPLING, environment=kind)))[-1]
    assert [row[0] for row in table.rows] == ["mine"]


def test_the_sandbox_is_the_configs_unless_the_command_has_another(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[reward]\nkind = 'code'\nsandbox = 'https://there:7420'\n")
    usual = RewardConfig(kind="math")
    assert judge_of(usual, None, path).sandbox == "https://there:7420"
    assert judge_of(usual, None, path, sandbox="unsafe").sandbox == "unsafe"
    with pytest.raises(ConfigError, match=mentions("--sandbox", "'jail'", "--config")):
        judge_of(usual, None, path, sandbox="jail")
    assert judge_of(usual, "code", None, sandbox=None).sandbox == "bubblewrap"


def test_samples_belong_to_the_verifiers_file_that_judged_them(tmp_path: Path) -> None:
    file, config = tmp_path / "mine.py", tmp_path / "config.toml"
    config.write_text(f"[reward]\nkind = '{file}:verify'\n")
    file.write_text("def verify(response, answer): return True\n")
    given = parse("--model", "m", "--output", tmp_path, "--problems", "a.jsonl", "--config", config)

    def judged() -> None:
        judge = judge_of(RewardConfig(kind="math"), None, config)
        task = SimpleNamespace(name="mine", reward=judge, remaining=lambda *_: ["a"])
        tool._remaining(given, [task], EnvironmentConfig())

    judged()
    kept = json.loads((tmp_path / "mine/judge.json").read_text())
    assert kept["reward_sha256"] == [hashlib.sha256(file.read_bytes()).hexdigest()]
    judged()
    file.write_text("def verify(response, answer): return False\n")
    with pytest.raises(ConfigError, match="reward_sha256"):
        judged()


def sampling_of(**environment: object) -> Sampling:
    limits = ("--num-samples", 2, "--max-response-tokens", 16)
    given = parse("--model", "m", "--output", "o", *limits)
    return tool._sampling(given, {}, EnvironmentConfig.model_validate(environment))


def test_seeds_of_a_method_have_the_same_environment(tmp_path: Path, tokenizer) -> None:  # noqa: F811
    row = {"id": "a", "prompt": "1+2=", "answer": "3"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = chosen(tmp_path / "mine.jsonl")
    base = read_results(evaluated(one, tokenizer, tmp_path / "base", says_always="3"))
    usual: dict[str, object] = {"kind": "a.py:A", "settings": {"n": 1}, "code": "x"}

    def compared(**environment: object) -> Method:
        for name, drawn in (("one", usual), ("two", environment)):
            (tmp_path / name).mkdir(exist_ok=True)
            results = replace(base, sampling=sampling_of(**drawn))
            write_results(results, tmp_path / name)
        return Method.read(f"{tmp_path / 'one'},{tmp_path / 'two'}")

    assert len(compared(**usual, max_concurrent=2).evaluations) == 2
    for other in {"settings": {"n": 2}}, {"code": "y"}, {"stop": ["</a>"]}, {"kind": "b.py:A"}:
        with pytest.raises(ConfigError, match=mentions("sampled differently", "a.py:A")):
            compared(**usual | other)
    assert sampling_of() == SAMPLING
    assert sampling_of(stop=["</a>"]) != SAMPLING


def test_prompts_are_made_as_in_training_where_no_option_says_how(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        "[data]\nchat_template = true\nsystem_prompt = 'be brief'\nend_tokens = ['</s>']\n"
        "template_date = '2026-07-01'\n"
    )
    base = ("--model", "m", "--output", "o")

    def made(*options: object) -> tuple[object, ...]:
        given = with_prompts_of_config(parse(*base, *options))
        return (
            given.chat_template,
            given.system_prompt,
            given.chat_template_kwargs,
            given.end_tokens,
            given.template_date,
        )

    assert made() == (False, "", {}, [], "")
    assert made("--config", path) == (True, "be brief", {}, ["</s>"], "2026-07-01")
    options = ("--system-prompt", "be long", "--chat-template-kwargs", '{"a": 1}')
    options = (*options, "--template-date", "2026-08-01")
    expected = (True, "be long", {"a": 1}, ["</s>"], "2026-08-01")
    assert made("--config", path, *options) == expected
    path.write_text("[environment]\nkind = 'tools'\n")
    assert made("--config", path, "--chat-template") == (True, "", {}, [], "")
