"""The demo's own part: folders per run, the task it writes, the table at its end."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.config.rules import input_paths
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.models.config_json import facts_of, read_facts
from gapo_megatron.models.published import shipped_fields
from tests.messages import mentions

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "demo.toml")
TOOLS = str(ROOT / "configs" / "demo_tools.toml")
LANGUAGE = str(ROOT / "configs" / "demo_language.toml")


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.console.file, module.console.width = io.StringIO(), 80
    return module


def _arguments(
    *overrides: str,
    config: str = CONFIG,
    world_size: int = 1,
    tp: int = 1,
    pp: int = 1,
    seed: int = 0,
):
    return argparse.Namespace(
        config=config, overrides=list(overrides), world_size=world_size, tp=tp, pp=pp, seed=seed
    )


def _config(demo, *overrides: str, seed: int = 0, **arguments):
    return load_config(CONFIG, demo._settings(_arguments(*overrides, seed=seed, **arguments)))


def test_every_run_keeps_to_a_folder_of_its_own(demo):
    """Those of a seed begin with the same weights, whatever their layout."""
    folders = {
        "runs/demo": _config(demo),
        "runs/demo_seed2": _config(demo, seed=2),
        "runs/demo_ranks2_tp2": _config(demo, world_size=2, tp=2),
        "runs/demo_ranks2_pp2": _config(demo, world_size=2, pp=2),
        "runs/demo_gspo": _config(demo, "objective.method=gspo"),
    }
    for folder, config in folders.items():
        assert config.run.output_dir == folder
        made = "runs/demo_seed2" if config.run.seed == 2 else "runs/demo"
        read = [path for path in input_paths(config).values() if path]
        assert len(read) == 5 and all(path.startswith(f"{made}/") for path in read)
    assert folders["runs/demo_seed2"].run.seed == 2
    assert folders["runs/demo_ranks2_tp2"].parallel.tensor_model_parallel_size == 2
    assert folders["runs/demo_ranks2_pp2"].parallel.pipeline_model_parallel_size == 2


def test_a_folder_that_is_given_is_the_runs(demo):
    given, settings = "run.output_dir=runs/x", ("run.num_steps=3", "objective.method=gspo")
    for config in (_config(demo, given, *settings), _config(demo, given, world_size=2, tp=2)):
        assert (config.run.output_dir, config.model.hf_dir) == ("runs/x", "runs/demo/warm_start")


def test_seeds_of_the_language_model_share_it_and_nothing_else(demo):
    arguments = _arguments("objective.method=gspo", config=LANGUAGE, seed=2)
    config = load_config(LANGUAGE, demo._settings(arguments))
    assert config.run.output_dir == "runs/demo_language_seed2_gspo"
    assert config.data.train_path == "runs/demo_language_seed2/task/train.jsonl"
    assert config.model.hf_dir == load_config(LANGUAGE, []).model.hf_dir


def test_a_model_that_the_demo_cannot_make_is_refused(demo):
    arguments = _arguments("model.hf_dir=models/mine", config=LANGUAGE)
    with pytest.raises(ConfigError, match=mentions("[supervised]", "models/mine", "SmolLM2")):
        demo._settings(arguments)


def test_what_is_there_is_not_made_again(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(LANGUAGE, [])
    Path(config.model.hf_dir).mkdir(parents=True)
    for _ in range(2):
        demo._prepare_language(config)
        rows = Path(config.data.train_path).read_text().splitlines()
        assert 1000 < len(rows) <= demo.LANGUAGE_TRAIN
        Path(config.data.eval_path).write_text("as it was")
    assert Path(config.data.eval_path).read_text() == "as it was"


def test_a_layout_that_does_not_fit_is_refused_before_anything_runs(demo):
    with pytest.raises(ConfigError, match=mentions("--world-size (3)", "--tp (2)")):
        _config(demo, world_size=3, tp=2)


@pytest.mark.parametrize("path", [CONFIG, TOOLS])
def test_the_task_fits_the_config(demo, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    settings = demo._settings(_arguments(config=path))
    config = load_config(path, [*settings, "supervised.num_steps=2"])
    demo._claim_task(config)
    demo._write_task(config)
    initial = config.supervised.initial_hf_dir
    # What a plan and a dry run take before there is a model (models/published).
    shipped = facts_of(shipped_fields(Path(config.model.hf_dir).name), source="shipped")
    made = read_facts(initial)
    assert set(made.layer_types) == {"full_attention"}  # transformers writes what all have
    made.layer_types = None
    assert made == shipped
    tokenizer = load_tokenizer(initial)
    for path, number in (
        (config.data.train_path, demo.NUM_TRAIN),
        (config.data.eval_path, demo.NUM_EVAL),
    ):
        prompts = read_prompts(path, tokenizer=tokenizer, data=config.data, reward=config.reward)
        assert len(prompts) == number
        longest = max(len(prompt.token_ids) for prompt in prompts)
        assert longest == config.data.max_prompt_tokens
    lines = Path(config.supervised.train_path).read_text().splitlines()
    assert len(lines) == 2 * config.supervised.batch_sequences
    examples = [json.loads(line) for line in lines]
    # EOS is one more token. The prompt of an example may have a tool's result.
    texts = [(one["prompt"] + one["response"]).partition("=")[2] for one in examples]
    longest = max(len(tokenizer.encode(text)) for text in texts)
    assert longest + 1 <= config.rollout.max_response_tokens


def _write_run(folder: Path, shares: dict[int, tuple[int, int]], *, seed: int = 0) -> Path:
    (folder / "evaluations").mkdir(parents=True)
    for step, correct in shares.items():
        problems = [
            {"id": f"{i}", "level": f"level_{i % 2}", "num_samples": 8, "num_correct": c}
            for i, c in enumerate((*correct, *correct))
        ]
        path = folder / "evaluations" / f"step_{step}.json"
        path.write_text(json.dumps({"problems": problems}))
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    config = load_config(CONFIG, [f"run.output_dir={folder}", f"run.seed={seed}"])
    (folder / "config.toml").write_text(to_toml(config))
    return folder


def test_the_table_compares_the_first_and_the_last_evaluation(demo, tmp_path):
    # Step 100 comes after step 20, though not in the order of their names.
    folder = _write_run(tmp_path / "demo", {0: (2, 0), 20: (1, 1), 100: (6, 8)})
    demo._report(load_config(CONFIG, [f"run.output_dir={folder}"]))
    text = demo.console.file.getvalue()
    assert "12.5 -> 87.5" in text
    assert "50.0 -> 100.0" in text
    assert "level_0" in text
    assert (folder / "report" / "report.html").exists()
    assert all(len(line) <= 80 for line in text.splitlines() if "│" in line)


def test_a_level_with_one_verdict_has_no_gain(demo, tmp_path):
    folder = _write_run(tmp_path / "demo", {0: (2, 0), 20: (6, 8)})
    path = folder / "evaluations" / "step_20.json"
    problems = json.loads(path.read_text())
    problems["problems"][1] |= {"num_samples": 0, "num_correct": 0}
    path.write_text(json.dumps(problems))
    demo._report(load_config(CONFIG, [f"run.output_dir={folder}"]))
    (line,) = [one for one in demo.console.file.getvalue().splitlines() if "level_1" in one]
    assert [one.strip() for one in line.split("│")][3] == "-"


def test_other_settings_have_a_folder_of_their_own(demo):
    """A second method must not continue, and so report, the first one's finished run."""
    folders = set()
    for overrides in ([], ["objective.method=gspo"], ["objective.method=grpo"]):
        settings = demo._settings(_arguments(*overrides))
        folders |= {line for line in settings if line.startswith("run.output_dir=")}
    assert len(folders) == 3
    settings = demo._settings(_arguments("objective.method='gspo'"))
    assert "run.output_dir=runs/demo_gspo" in settings


def test_prepare_makes_what_the_config_names_unless_it_is_there(demo, tmp_path, monkeypatch):
    def warm_start(config, start):
        assert Path(config.supervised.initial_hf_dir).is_dir()
        with open("started", "a") as file:
            file.write(f"{config.parallel.tensor_model_parallel_size}\n")

    monkeypatch.setattr(demo, "_warm_start", warm_start)
    command_line = ["demo.py", "--config", CONFIG, "--prepare", "supervised.num_steps=2"]
    monkeypatch.setattr(sys, "argv", [*command_line, "--world-size=2", "--tp=2"])
    monkeypatch.chdir(tmp_path)
    assert demo.main() == 0
    assert Path("started").read_text() == "1\n", "on one rank, for every layout"
    Path("runs/demo/warm_start").mkdir()
    Path("runs/demo/warm_start/config.json").touch()
    assert demo.main() == 0
    assert Path("started").read_text() == "1\n"
    monkeypatch.setattr(demo, "_warm_start", lambda *_: os._exit(3))
    Path("runs/demo/warm_start/config.json").unlink()
    assert demo.main() == 1 and "exit code 3" in demo.console.file.getvalue()


def _printed_commands(demo) -> list[list[str]]:
    words = map(shlex.split, demo.console.file.getvalue().splitlines())
    return [one for one in words if any(word.endswith(".py") for word in one)]


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ([], "gspo_asym"),
        (["--seed", "1", "run.num_steps=3"], "gspo_asym"),
        (["--world-size", "2", "--tp", "2", "objective.method=grpo"], "gapo"),
        (["objective.method=gspo_asym", "run.num_steps=3"], "gapo"),
    ],
)
def test_the_demo_ends_with_commands_that_compare_it(demo, tmp_path, monkeypatch, given, other):
    monkeypatch.chdir(tmp_path)
    given = ["--config", CONFIG, *given]
    arguments = demo._parse(given)
    folder = load_config(CONFIG, demo._settings(arguments)).run.output_dir
    demo._show_next(arguments, folder)
    train, compare = _printed_commands(demo)
    # The printed command trains the other method, and all else as it was.
    theirs = demo._parse(train[2:])
    config = load_config(CONFIG, demo._settings(theirs))
    assert config.objective.method == other
    kept = ("config", "seed", "world_size", "tp", "pp")
    assert [vars(theirs)[key] for key in kept] == [vars(arguments)[key] for key in kept]
    assert config.run.num_steps == load_config(CONFIG, arguments.overrides).run.num_steps
    assert compare[2:] == [folder, config.run.output_dir] and folder != config.run.output_dir
    for command, tool in ((train, "demo"), (compare, "report")):
        assert command[:2] == [sys.executable, str(ROOT / "tools" / f"{tool}.py")]
