"""Generated problems: the same everywhere, all different, and read like those of a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.compat.reasoning_gym import REFUSED
from gapo_megatron.config import Config, DataSource, parse_config
from gapo_megatron.config.roles import changes
from gapo_megatron.data import reasoning_gym as generator
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.io.documents import parse_toml
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.run.inputs import read_problems
from gapo_tools import prepare_data
from gapo_tools.preparation.generated_tasks import HELD_OUT, write_generated
from tests.configs import config_of
from tests.dist import SOAK
from tests.messages import mentions
from tests.tokenizers import byte_level

pytest.importorskip("reasoning_gym")
EASY = {"name": "chain_sum", "settings": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}


def source(*families: Any, **settings: Any) -> DataSource:
    values = {"name": "gym", "kind": "reasoning_gym", "size": 20, "families": families, **settings}
    return DataSource(**values)


def config(*sources: dict[str, Any], **sections: Any) -> Config:
    data = {"train_path": "", "source": list(sources), "max_prompt_tokens": 500}
    batch = {"rollout_prompts": 4, "minibatch_prompts": 2}
    return config_of({"data": data, "batch": batch, "reward": {"kind": "math"}}, sections)


def of_gym(**settings: Any) -> dict[str, Any]:
    return {
        **{"name": "gym", "kind": "reasoning_gym", "families": ["gcd", EASY], "size": 20},
        **settings,
    }


def test_problems_are_the_same_in_every_process_for_all_families() -> None:
    """Some families draw from global random numbers, and from sets, whose order is a process's."""
    from reasoning_gym.factory import DATASETS

    # The last two take seconds, and draw as the others do.
    families = sorted(DATASETS.keys() - {"composite", "futoshiki", "knight_swap", *REFUSED})
    given = [source(*families, size=2 * len(families), eval_size=len(families))]
    first = generate(given)
    assert len(families) > 100
    script = (
        "import json, sys, random\n"
        "from gapo_megatron.config import DataSource\n"
        "from gapo_megatron.data.reasoning_gym import generate\n"
        "random.seed(5); made = generate([DataSource(**json.load(sys.stdin))])\n"
        "print(json.dumps([made.training, made.held_out, made.num_repeated]))"
    )
    again = subprocess.run(
        [sys.executable, "-c", script],
        input=given[0].model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert json.loads(again.stdout) == [first.training, first.held_out, first.num_repeated]
    rows = first.training["gym"] + first.held_out["gym"]
    assert Counter(row["level"] for row in rows) == dict.fromkeys(families, 3)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)


def test_no_question_is_in_two_rows_also_of_two_sources() -> None:
    """Of 100 sums of two digits, the held-out ones first; each left-out draw is counted."""
    given = [source(EASY, size=60, eval_size=20), source(EASY, name="more", size=15, seed=0)]
    made = generate(given)
    rows = [*made.held_out["gym"], *made.training["gym"], *made.training["more"]]
    assert [len(made.held_out["gym"]), len(made.training["gym"])] == [20, 60]
    assert len({row["prompt"] for row in rows}) == 95
    numbers = [int(row["id"].rpartition("-")[2]) for row in rows]
    last = [max(numbers[:20]), max(numbers[20:80]), max(numbers[80:])]
    assert sum(last) + 3 - 95 == made.num_repeated > 0
    with pytest.raises(ConfigError, match=mentions("gym", "chain_sum", "500", "max_digits")):
        generate([source(EASY, size=2000)])


def test_more_problems_leave_the_first_as_they_are() -> None:
    """And those held out, of 100 sums that both parts draw from."""
    held_out = [generate([source(EASY, size=size, eval_size=30)]).held_out for size in (5, 60)]
    assert held_out[0] == held_out[1]
    short = generate([source("gcd", EASY, size=10, eval_size=4)])
    long = generate([source("gcd", EASY, size=30, eval_size=4)])
    assert long.training["gym"][:10] == short.training["gym"]
    assert long.held_out == short.held_out
    assert (
        generate([source("gcd", EASY, size=30, eval_size=4)], most=4).training["gym"]
        == (short.training["gym"][:4])
    )


def test_seeds_have_problems_of_their_own() -> None:
    """The package's seed is added to a problem's number: neighbours would be nearly the same."""
    prompts = [
        {row["prompt"] for row in generate([source("products", seed=seed)]).training["gym"]}
        for seed in (0, 1, 2)
    ]
    assert all(len(one & other) < 5 for one in prompts for other in prompts if one is not other)


def test_families_have_their_weights_and_settings() -> None:
    hard = {"name": "chain_sum", "weight": 3, "settings": {"min_digits": 4}}
    made = generate([source("gcd", EASY, hard, size=50)])
    levels = Counter(row["level"] for row in made.training["gym"])
    assert levels == {"gcd": 10, "chain_sum.1": 10, "chain_sum.2": 30}
    hard_ones = [row["prompt"] for row in made.training["gym"] if row["level"] == "chain_sum.2"]
    assert all(any(part.isdigit() and len(part) >= 4 for part in one.split()) for one in hard_ones)


def test_a_family_has_levels_of_the_packages_curriculum() -> None:
    """Equal parts of its weight, no level with problems of an easier one; `settings` on top."""
    sums = {"name": "chain_sum", "weight": 3, "levels": [0, 2, 4]}
    few = {"name": "chain_sum", "levels": [3], "settings": {"min_digits": 1, "max_digits": 1}}
    made = generate([source("gcd", sums, few, size=50, eval_size=10)])
    rows = made.training["gym"]
    by_level = {one["level"]: [] for one in rows} | {"gcd": []}
    for one in rows:
        by_level[one["level"]].append(one["prompt"].partition(": ")[2].split())
    first = "chain_sum.1.level"
    names = ["gcd", f"{first}0", f"{first}2", f"{first}4", "chain_sum.2.level3"]
    assert {name: len(some) for name, some in by_level.items()} == dict.fromkeys(names, 10)
    # Numbers at even places between signs, and "=" at the end.
    for name, terms, digits in zip(names[1:], (2, 4, 6, 5), (1, 3, 5, 1), strict=True):
        for words in by_level[name]:
            assert len(words[::2]) == terms and words[-1] == "=", words
            assert all(len(number) == digits for number in words[:-1:2]), words
    assert {one["level"] for one in made.held_out["gym"]} == {*names}


@pytest.mark.parametrize("spacing", [8, pytest.param(1, marks=SOAK)])
def test_every_familys_levels_can_be_named(spacing: int) -> None:
    """What the package's own curricula refuse or lack is named, too."""
    from reasoning_gym.factory import CURRICULA

    families = sorted(CURRICULA.keys() - {*REFUSED, "futoshiki", "knight_swap"})
    assert len(families) > 95
    some = families[::spacing]
    given = [{"name": name, "levels": [0, 1]} for name in some if name != "modulo_grid"]
    made = generate([source(*given, size=len(given))], most=0)
    assert made.training == {}
    for name, level, named in (
        ("gcd", 4, ("levels (4)", "0 to 3")),
        ("acre", 0, ("levels (0)", "no curriculum")),
        ("codeio", 0, ("executes code",)),
    ):
        with pytest.raises(ConfigError, match=mentions("'gym'", repr(name), *named)):
            generate([source({"name": name, "levels": [level]})], most=0)


def test_levels_are_the_strata_of_a_curriculum() -> None:
    levels = {"name": "chain_sum", "levels": [0, 1]}
    made = config(of_gym(families=["gcd", levels], size=40), data={"curriculum": 0.7})
    problems, _ = read_problems(made, byte_level())
    prompts = PromptSource(problems, seed=0, sources=made.data.source, curriculum=0.7)
    names = {"gym/gcd", "gym/chain_sum.level0", "gym/chain_sum.level1"}
    assert prompts.state_dict()["curriculum"].keys() == names
    with pytest.raises(DataError, match=mentions("data.curriculum (0.7)", "'gym'", "gym/gcd")):
        read_problems(config(of_gym(families=["gcd"]), data={"curriculum": 0.7}), byte_level())


def test_shots_are_solved_problems_that_are_in_no_row() -> None:
    """The same for all questions of a family, in training and held out."""
    made = generate([source("gcd", EASY, size=60, eval_size=20, shots=4)])
    plain = generate([source("gcd", EASY, size=60, eval_size=20)])
    rows = made.training["gym"] + made.held_out["gym"]
    assert all(row["prompt"].endswith("\nAnswer:") for row in rows)
    parts = [row["prompt"].removesuffix("\nAnswer:").rpartition("\n\n") for row in rows]
    shots = {(row["level"], before) for row, (before, _, _) in zip(rows, parts, strict=True)}
    assert len(shots) == 2
    for level, text in shots:
        solved = [one.rpartition("\nAnswer: ") for one in text.split("\n\n")]
        assert len({question for question, _, _ in solved}) == 4
        assert {question for question, _, _ in solved}.isdisjoint(last for *_, last in parts)
        assert all(answer.lstrip("-").isdigit() for *_, answer in solved), level
        for question, _, answer in solved if level == "chain_sum" else ():
            assert eval(question.rpartition(":")[2].rstrip("= ")) == int(answer)
    questions = {last.removeprefix("Question: ") for *_, last in parts}
    assert len(questions & {row["prompt"] for row in plain.training["gym"]}) > 40
    with pytest.raises(ConfigError, match=mentions("shots", "boxnet")):
        generate([source("boxnet", shots=1)], most=0)


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("chainsum", ("'chainsum'", "chain_sum")),
        ({"name": "gcd", "settings": {"min_number": 3}}, ("'gcd'", "min_number")),
        ({"name": "gcd", "settings": {"min_value": 9, "max_value": 3}}, ("'gcd'", "max_value")),
        ("composite", ("'composite'",)),
        (
            {"name": "composite", "settings": {"datasets": [{"name": "codeio", "weight": 1.0}]}},
            ("'composite'",),
        ),
        ("codeio", ("'codeio'", "executes code")),
    ],
)
def test_a_family_that_the_package_refuses_is_named(family: Any, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=mentions("data.source", "'gym'", *named)):
        generate([source("lcm", family)], most=0)


@pytest.mark.parametrize(
    ("does", "named"),
    [
        ("time.sleep(60)", ("gym: gcd", "no problem in 8 s", "leave the family out")),
        ("os.close(1); time.sleep(60)", ("gym: gcd", "no problem in 8 s")),
        ("os.write(1, b'{\"row\": '); os.kill(os.getpid(), 9)", ("gym: gcd", "with -9")),
        ("os.write(1, b'{\"num_repeated\": 0}\\n'); sys.exit('no memory')", ("1: no memory",)),
        ("sys.exit()", ("gym: gcd", "ended with 0")),
    ],
)
def test_a_generator_that_hangs_or_dies_is_named(
    monkeypatch: pytest.MonkeyPatch, does: str, named: tuple[str, ...]
) -> None:
    begins = 'import os, sys, time; os.write(1, b\'{"at": "gym: gcd"}\\n\'); '
    monkeypatch.setattr(generator, "_COMMAND", begins + does)
    monkeypatch.setattr(generator, "MOST_WAIT_S", 8.0 if "sleep" in does else 60.0)
    with pytest.raises(ConfigError, match=mentions("data.source", *named)):
        generate([source("gcd")])


def test_a_family_without_its_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rubiks_cube` alone needs magiccube, which its module imports."""
    (tmp_path / "magiccube.py").write_text("raise ImportError('no magiccube here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=mentions("rubiks_cube", "no magiccube here")):
        generate([source("rubiks_cube")])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 0}, ("size (0)",)),
        ({"families": []}, ("families",)),
        ({"path": "x.jsonl"}, ("path", "x.jsonl")),
        ({"kind": "file"}, ("path",)),
        ({"kind": "file", "path": "x", "families": [], "size": 0, "seed": 3}, ("seed (3)",)),
        ({"kind": "gym"}, ("kind", "'gym'")),
        ({"families": [{"name": "gcd", "settings": {"seed": 1}}]}, ("settings.seed (1)",)),
        ({"families": [{"name": "gcd", "weight": 0}]}, ("weight",)),
        ({"families": [{"name": "gcd", "levels": [1, 0, 1]}]}, ("levels", "1 is there 2 times")),
        ({"families": [{"name": "gcd", "levels": [-1]}]}, ("levels", -1)),
    ],
)
def test_a_source_needs_the_keys_of_its_kind(
    settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=mentions("data.source", *named)):
        config(of_gym(**settings))


def test_rows_become_problems_beside_those_of_a_file(tmp_path: Path) -> None:
    """With their own verifier; held-out ones only where the run evaluates."""
    file = tmp_path / "math.jsonl"
    lines = [json.dumps({"prompt": f"{i}?", "answer": "1"}) for i in range(9)]
    file.write_text("\n".join(lines))
    of_file = {"name": "math", "path": str(file), "weight": 3}
    made = config(of_file, of_gym(eval_size=5), evaluation={"every_steps": 1})
    assert made.reward.verifiers["reasoning_gym"].kind == "reasoning_gym"
    problems, held_out = read_problems(made, byte_level())
    assert Counter(one.source for one in problems) == {"math": 9, "gym": 20}
    assert {one.verifier for one in problems if one.source == "gym"} == {"reasoning_gym"}
    assert {one.level for one in held_out} == {"gcd", "chain_sum"} and len(held_out) == 5
    assert all(one.token_ids and one.id.startswith("gym/held_out-") for one in held_out)
    tokens = [one.token_ids for one in problems + held_out]
    assert len({*tokens}) == len(tokens)
    batch = PromptSource(problems, seed=0, sources=made.data.source).next_batch(8)
    assert Counter(one.source for one in batch) == {"math": 6, "gym": 2}
    alone = config(of_gym(), reward={"kind": "reasoning_gym", "correct_above": 0.9})
    problems, held_out = read_problems(alone, byte_level())
    assert {one.verifier for one in problems} == {""} and held_out == []
    assert alone.reward.verifiers == {}


@pytest.mark.parametrize("name", ["reasoning_gym", "gym"])
def test_components_judge_generated_problems(name: str) -> None:
    components = {name: "reasoning_gym", "short": {"kind": "exact", "weight": 0.5}}
    made = config(of_gym(), reward={"kind": "", "components": components})
    assert made.reward.verifiers == {}
    problems, _ = read_problems(made, byte_level())
    assert {one.verifier for one in problems} == {""}
    with rewards.start_pool(made.reward, num_workers=1) as pool:
        first = problems[0]
        verdict, _ = pool.judge([("0", first.answer, first.verifier), ("0", first.answer, name)])
    assert verdict.metrics.keys() == components.keys()
    again = parse_config(parse_toml(to_toml(made), where="written"), source="written")
    assert again == made


def test_components_that_cannot_judge_generated_problems_are_refused() -> None:
    reward = {"kind": "", "components": {"a": "exact"}}
    named = ("reward.components (a)", "'reasoning_gym'", "data.source 'gym'")
    with pytest.raises(ConfigError, match=mentions(*named)):
        config(of_gym(), reward=reward)
    made = config(of_gym(), reward={**reward, "verifiers": {"reasoning_gym": "reasoning_gym"}})
    problems, _ = read_problems(made, byte_level())
    assert {one.verifier for one in problems} == {"reasoning_gym"}


def test_held_out_problems_are_a_file_or_generated() -> None:
    config(of_gym(eval_size=1), evaluation={"every_steps": 1})
    with pytest.raises(ConfigError, match=mentions("evaluation.every_steps (1)", "eval_size")):
        config(of_gym(), evaluation={"every_steps": 1})


def test_a_prompt_that_is_too_long_is_named() -> None:
    made = config(of_gym(), data={"max_prompt_tokens": 3})
    with pytest.raises(DataError, match=mentions("gym", "gcd-0", "data.max_prompt_tokens")):
        read_problems(made, byte_level())


@pytest.mark.parametrize("settings", [{"seed": 1}, {"size": 21}, {"families": ["gcd", "lcm"]}])
def test_a_resume_needs_the_same_problems(settings: dict[str, Any]) -> None:
    def state_of(*sources: dict[str, Any]) -> PromptSource:
        made = config(*sources)
        problems, _ = read_problems(made, byte_level())
        return PromptSource(problems, seed=0, sources=made.data.source)

    state = state_of(of_gym()).state_dict()
    state_of(of_gym()).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the rows"):
        state_of(of_gym(**settings)).require_same(state)


def test_so_does_another_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapo_megatron.rewards import reasoning_gym as scores

    made = config(of_gym())
    problems, _ = read_problems(made, byte_level())
    state = PromptSource(problems, seed=0, sources=made.data.source).state_dict()
    for one in problems:
        changed = {**json.loads(one.answer), "version": "0.0.1"}
        object.__setattr__(one, "answer", json.dumps(changed))
    with pytest.raises(CheckpointError, match="the rows"):
        PromptSource(problems, seed=0, sources=made.data.source).require_same(state)
    with pytest.raises(ValueError, match=mentions("0.0.1")):
        scores.check_answer(problems[0].answer)


def test_sources_are_compared_by_what_they_are() -> None:
    now = config({"name": "math", "path": "a.jsonl", "weight": 3})
    before = now.model_dump(mode="json")
    before["data"]["source"][0]["path"] = "moved/a.jsonl"
    assert changes(before, now) == {}
    before["data"]["source"][0]["weight"] = 2.0
    assert list(changes(before, now)) == ["data.source"]
    generated = config(of_gym()).model_dump(mode="json")
    assert changes(generated, config(of_gym())) == {}
    levels = [{"name": "gcd", "levels": [0]}, EASY]
    assert list(changes(generated, config(of_gym(families=levels)))) == ["data.source"]
    assert list(changes(generated, config(of_gym(seed=4)))) == ["data.source"]


def test_the_tool_writes_what_a_run_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As files they are read the same, and held-out ones can be evaluated by themselves."""
    made = config(of_gym(eval_size=5), reward={"kind": "reasoning_gym"})
    path = tmp_path / "run.toml"
    path.write_text(to_toml(made))
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "reasoning_gym", "--config", str(path)])
    sys.argv += ["--output", str(tmp_path / "out")]
    assert prepare_data.main() == 0
    assert (said := capsys.readouterr().out).count("problems in") == 2
    assert "20 problems" in said and "5 problems" in said
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    assert counts == {"written": 20, "repeated": generate(made.data.generated).num_repeated}
    files = {"train_path": str(tmp_path / "out/problems.jsonl"), "source": []}
    files["eval_path"] = str(tmp_path / "out" / HELD_OUT)
    every = {"evaluation": {"every_steps": 1}}
    of_files = config(data=files, reward={"kind": "reasoning_gym"}, **every)
    of_run = config(of_gym(eval_size=5), reward={"kind": "reasoning_gym"}, **every)
    texts = [
        [[(one.id, one.token_ids, one.answer, one.level) for one in part] for part in parts]
        for parts in (read_problems(each, byte_level()) for each in (of_files, of_run))
    ]
    assert texts[0] == texts[1]
    assert prepare_data.main() == 2
    assert "exist" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=mentions("run.toml", "reasoning_gym")):
        path.write_text(to_toml(of_files))
        write_generated(path, tmp_path / "other")
