"""tools/evaluate.py as a user starts it: real vLLM, several ranks, a real kill."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.config import EnvironmentConfig, RewardConfig
from gapo_megatron.data.template_date import freeze_date
from gapo_megatron.errors import ConfigError
from gapo_tools import evaluate as tool
from gapo_tools.demonstration import demo_task as arithmetic
from gapo_tools.evaluation import code_digest
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.chosen import date_of_run
from gapo_tools.evaluation.options import parse as parse_options
from gapo_tools.evaluation.paper import Sampling, read_settings
from tests.convert_setup import pack_experts, pack_linears
from tests.distributed.conversion_setup import save_model
from tests.messages import mentions
from tests.programs import Program
from tests.waiting import wait_until

ONE_TURN = EnvironmentConfig()
TOOL = Path(__file__).parents[3] / "tools/evaluate.py"
NUM_PROBLEMS, NUM_SAMPLES = 96, 32  # three pieces of 1024 samples


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that writes digits, and problems that ask for one of them."""
    root = tmp_path_factory.mktemp("evaluate")
    tokenizer = arithmetic.write_tokenizer(["0123456789"], root / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # 32 per head, the least that vLLM serves on a CPU
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(root / "model")
    rows = [
        {
            "prompt": f"0{i}",
            "instruction_id_list": ["keywords:letter_frequency"],
            "kwargs": [{"letter": str(i % 10), "let_frequency": 1, "let_relation": "at least"}],
        }
        for i in range(NUM_PROBLEMS)
    ]
    (root / "data/ifeval").mkdir(parents=True)
    (root / "data/ifeval/a.json").write_text(json.dumps(rows))
    return root


def arguments(root: Path, *options: object) -> list[str]:
    """Of the tool, for the random model and its problems."""
    fixed = (
        *("--model", root / "model", "--data", root / "data", "--output", root / "out"),
        *("--benchmarks", "ifeval", "--num-samples", NUM_SAMPLES, "--max-response-tokens", 6),
        *("--max-prompt-tokens", 16, "--precision", "fp32", "--enforce-eager"),
    )
    return [str(argument) for argument in (*fixed, *options)]


@pytest.mark.system
def test_a_killed_evaluation_continues_on_other_ranks(root: Path) -> None:
    folder = root / "out/ifeval/seed_3"
    killed = subprocess.Popen(
        [sys.executable, str(TOOL), *arguments(root, "--seeds", 3)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,
    )
    try:
        wait_until(lambda: killed.poll() is not None or any(folder.glob("*.jsonl")), "a first file")
        assert killed.poll() is None, killed.communicate()[0]
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    kept = {path.name: path.read_text() for path in folder.glob("*.jsonl")}
    num_kept = sum(text.count("\n") for text in kept.values())
    assert 0 < num_kept < NUM_PROBLEMS
    assert not (root / "out/results.json").exists()

    continued = Program("gapo_tools.evaluate", *arguments(root, "--seeds", 3), ranks=2)
    output, _ = continued.communicate()
    assert continued.returncode == 0, output[-6000:]
    assert f"{num_kept} of {NUM_PROBLEMS} problems" in output
    files = {path.name: path.read_text() for path in folder.glob("*.jsonl")}
    assert kept.items() < files.items()
    rows = [json.loads(line) for text in files.values() for line in text.splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(f"ifeval-{i}" for i in range(NUM_PROBLEMS))
    figures = json.loads((root / "out/results.json").read_text())["benchmarks"]["ifeval"]["3"]
    solved = 0.0
    for row in rows:
        digit = str(int(row["id"].removeprefix("ifeval-")) % 10)
        right = sum(digit in sample["response"] for sample in row["samples"])
        assert figures["counts"][row["id"]] == [NUM_SAMPLES, right]
        solved += right / NUM_SAMPLES / NUM_PROBLEMS
    assert 0 < solved < 1
    # Sums of the same numbers in another order.
    assert figures["pass_at_k"][0] == pytest.approx(solved, abs=1e-12)
    assert figures["pass_at_k"] == sorted(figures["pass_at_k"])
    assert len(figures["pass_at_k"]) == NUM_SAMPLES
    assert re.search(rf"^IFEval +{100 * solved:.2f} ", output, re.MULTILINE)
    names = {path.name for path in (root / "out").iterdir()}
    assert names == {"ifeval", "settings.json", "results.json", "results.md"}


def parse(*options: object) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, options)])
        return parse_options("", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--benchmarks", "aime23"], ("--benchmarks", "'aime23'", "aime24")),
        (["--benchmarks", "aime24,aime24"], ("--benchmarks", "aime24,aime24")),
        (["--seeds", "0,0"], ("--seeds", "0,0")),
        (["--seeds", "-1"], ("--seeds", "'-1'", "0,1,2")),
        (["--seeds", "a"], ("--seeds", "'a'", "0,1,2")),
        (["--compare", "x"], ("--compare", "--model")),
    ],
)
def test_the_command_line_refuses(options, named, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--model", "m", "--output", "o", *options)
    error = capsys.readouterr().err.splitlines()[-1]  # what precedes it is the usage
    assert all(part in error for part in named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ["--num-samples", "--setting"]),
        (["--num-samples", 4], ["--max-response-tokens", "--setting"]),
        (["--num-samples", 0, "--max-response-tokens", 8], ["evaluation.samples_per_prompt"]),
        (["--setting", "qwen2.5-math-1.5b", "--temperature", 0], ["rollout.temperature"]),
    ],
)
def test_sampling_is_checked_before_anything_is_built(options, named) -> None:
    arguments = parse("--model", "m", "--output", "o", *options)
    with pytest.raises(ConfigError, match=mentions(*named)):
        tool._config(arguments, tool._sampling(arguments, read_settings(), ONE_TURN), ONE_TURN)


def quantized(root: Path, model_type: str) -> Path:
    """A model of the type, in the weights that its publisher has, with the random one's tokens."""
    folder = root / model_type
    save_model(folder, model_type, hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    pack_experts(folder) if model_type == "gpt_oss" else pack_linears(folder, (128, 128))
    for path in (root / "model").glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "options", "named"),
    [
        ("gpt_oss", ["--precision", "fp32"], ["model.precision ('fp32') must be 'bf16' for"]),
        ("gpt_oss", ["--precision", "fp16"], ["model.precision ('fp16') must be 'bf16' for"]),
        ("deepseek_v3", ["--precision", "fp32"], ["('fp32') must be 'bf16' or 'fp16' for"]),
        ("deepseek_v3", ["--tensor-parallel-size", 4], ["rollout.tensor_parallel_size (4)", "(6)"]),
        (
            "deepseek_v3",
            ["--precision", "fp16", "--max-response-tokens", 241],
            ["data.max_prompt_tokens + rollout.max_response_tokens (257)", 256],
        ),
    ],
)
def test_what_vllm_cannot_do_with_a_model_is_said(
    root, tmp_path, monkeypatch, model_type, options, named
) -> None:
    """Before anything is written, so that the corrected command may use the folder."""
    if not (folder := root / model_type).exists():
        quantized(root, model_type)
    command = arguments(root, "--precision", "bf16", "--model", folder, "--output", tmp_path / "o")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *command, *map(str, options)])
    monkeypatch.setattr(tool, "fail_fast", contextlib.nullcontext)
    with pytest.raises(ConfigError, match=mentions(*named)):
        tool.main()
    assert not (tmp_path / "o").exists()


LIMITS = ("--num-samples", 1, "--max-response-tokens", 8)


def keep(folder: Path, *options: object, date: str = "", **environment: object) -> dict[str, Any]:
    """Begin or continue an evaluation with these options; the settings that its folder keeps."""
    arguments = parse("--model", folder, "--output", folder / "out", *LIMITS, *options)
    acts = EnvironmentConfig.model_validate(environment)
    sampling = tool._sampling(arguments, {}, acts)
    tool._keep_settings(arguments, sampling, {}, acts, date=date)
    kept: dict[str, Any] = json.loads((folder / "out/settings.json").read_text())
    return kept


def test_samples_of_two_models_do_not_mix(tmp_path) -> None:
    with pytest.raises(ConfigError, match=mentions("--model", tmp_path, ".safetensors")):
        keep(tmp_path)
    for name in (
        *("model.safetensors", "tokenizer_config.json", "chat_template.jinja"),
        *("merges.txt", "tokenizer.model"),
    ):
        (tmp_path / name).write_text("one")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert keep(tmp_path) == keep(tmp_path)
        (tmp_path / name).write_text("another")
        with pytest.raises(ConfigError, match=mentions("model_sha256", "--output")):
            keep(tmp_path)


def test_prompts_of_other_settings_or_days_do_not_mix(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    keep(tmp_path, "--chat-template", date="2026-07-01")
    assert freeze_date(tmp_path / "out") == "2026-07-01", "also without the option"
    silent = {"enable_thinking": False}
    for options, key, value in (
        (("--system-prompt", "be\nbrief"), "system_prompt", "be\nbrief"),
        (("--chat-template-kwargs", json.dumps(silent)), "chat_template_kwargs", silent),
        (("--template-date", "2026-07-01"), "template_date", "2026-07-01"),
    ):
        arguments = parse("--model", "m", "--output", "o", *LIMITS, "--chat-template", *options)
        config = tool._config(arguments, tool._sampling(arguments, {}, ONE_TURN), ONE_TURN)
        assert getattr(config.data, key) == value
        if key != "template_date":
            with pytest.raises(ConfigError, match=mentions(key, "--output")):
                keep(tmp_path, "--chat-template", *options, date="2026-07-01")
    with pytest.raises(ConfigError, match=mentions("2026-07-01", "2026-07-02", "--output")):
        keep(tmp_path, "--chat-template", date="2026-07-02")
    with pytest.raises(SystemExit):
        parse("--chat-template-kwargs", "enable_thinking")


def test_an_evaluation_has_the_date_of_the_run(tmp_path) -> None:
    for name in ("by_export", "by_config"):
        (tmp_path / name).mkdir()
    freeze_date(tmp_path / "by_export", inherited="2026-07-01")
    freeze_date(tmp_path / "by_config", inherited="2026-07-02")
    assert date_of_run(tmp_path / "by_export/hf", None) == "2026-07-01"
    for config in ("by_config", "by_config/config.toml"):
        assert date_of_run(tmp_path / "hf", tmp_path / config) == "2026-07-02"
    assert not date_of_run(tmp_path / "hf", tmp_path / "config.toml")


def test_samples_of_two_environments_do_not_mix(tmp_path) -> None:
    """Of another kind, with other settings, code, ends of turns or limits; or of none."""
    (tmp_path / "model.safetensors").write_text("")
    keep(tmp_path)
    with pytest.raises(ConfigError, match=mentions("environment.kind", "tools", "--output")):
        keep(tmp_path, kind="tools")
    shutil.rmtree(tmp_path / "out")
    whole = {"kind": "a.py:A", "settings": {"n": 1}, "code": "x", "stop": ["</a>"]}
    assert keep(tmp_path, **whole) == keep(tmp_path, **whole, max_concurrent=2)
    for other in (
        *({"settings": {"n": 2}}, {"code": "y"}, {"stop": []}),
        *({"call_timeout_s": 61}, {"episode_timeout_s": 601}),
    ):
        with pytest.raises(
            ConfigError, match=mentions("environment", *other, "--output")
        ) as caught:
            keep(tmp_path, **whole | other)
        assert "a.py:A" not in str(caught.value)  # the difference alone


def test_verdicts_of_two_verifiers_do_not_mix(tmp_path, monkeypatch) -> None:
    arguments = parse("--model", "m", "--output", tmp_path)
    left = {"aime24": ["aime24-0"], "livecodebench": ["livecodebench-0"]}
    tasks = [
        SimpleNamespace(
            name=name,
            reward=RewardConfig(kind=BENCHMARKS[name].kind),
            remaining=lambda output, seed, name=name: left[name],
        )
        for name in left
    ]
    expected = {("aime24", 0): ["aime24-0"], ("livecodebench", 0): ["livecodebench-0"]}
    assert (
        tool._remaining(arguments, tasks, ONE_TURN)
        == tool._remaining(arguments, tasks, ONE_TURN)
        == expected
    )
    tasks[1].reward = RewardConfig(kind="code", sandbox="unsafe")
    with pytest.raises(
        ConfigError, match=mentions("livecodebench", "sandbox", "'bubblewrap'", "'unsafe'")
    ):
        tool._remaining(arguments, tasks, ONE_TURN)
    tool._remaining(arguments, tasks[:1], ONE_TURN)  # no program runs
    monkeypatch.setattr(tool, "code_sha256", lambda *parts: "changed")
    with pytest.raises(ConfigError, match=mentions("aime24", "code", "'changed'")):
        tool._remaining(arguments, tasks[:1], ONE_TURN)
    left["aime24"].clear()
    # Only tables are written.
    assert tool._remaining(arguments, tasks[:1], ONE_TURN) == {("aime24", 0): []}


def test_verdicts_in_another_version_of_environments_do_not_mix(tmp_path, monkeypatch) -> None:
    code = tmp_path / "code"
    for name in ("gapo_megatron/rollout", "gapo_megatron/rewards", "gapo_tools/evaluation"):
        shutil.copytree(code_digest._CODE / name, code / name)
    monkeypatch.setattr(code_digest, "_CODE", code)
    arguments = parse("--model", "m", "--output", tmp_path)
    task = SimpleNamespace(name="a", reward=RewardConfig(kind="math"), remaining=lambda *_: ["a"])

    def judge(kind: str) -> None:
        tool._remaining(arguments, [task], EnvironmentConfig(kind=kind))

    def change(part: str) -> None:
        with (code / "gapo_megatron/rollout" / part).open("a") as file:
            file.write("# changed")

    for part in ("environments/tools.py", "agents/environment.py", "chat.py", "turns.py"):
        judge("tools")
        change(part)
        with pytest.raises(ConfigError, match=mentions("environment_code", "--output")):
            judge("tools")
        shutil.rmtree(tmp_path / "a")
        judge("one_turn")
        change(part)
        judge("one_turn")
        shutil.rmtree(tmp_path / "a")


def test_verdicts_of_other_named_verifiers_or_limits_do_not_mix(tmp_path) -> None:
    arguments = parse("--model", "m", "--output", tmp_path)

    def judge(**reward: object) -> None:
        given = RewardConfig.model_validate({"kind": "math"} | reward)
        task = SimpleNamespace(name="mine", reward=given, remaining=lambda *_: ["a"])
        tool._remaining(arguments, [task], ONE_TURN)

    path = tmp_path / "mine" / "judge.json"
    judge()
    for key, other in {"timeout_s": 5, "verifiers": {"short": "exact"}}.items():
        with pytest.raises(ConfigError, match=mentions("mine", f"reward.{key}")):
            judge(**{key: other})
    path.unlink()
    judge(verifiers={"short": {"kind": "exact", "timeout_s": 5}}, timeout_s=20)
    judge(verifiers={"short": {"kind": "exact", "timeout_s": 5}}, timeout_s=20)
    with pytest.raises(ConfigError, match=mentions("short", "timeout_s")):
        judge(verifiers={"short": {"kind": "exact", "timeout_s": 6}}, timeout_s=20)


def test_a_setting_gives_what_the_command_line_does_not() -> None:
    arguments = parse("--model", "m", "--output", "o", "--setting", "llama-3.2-3b-instruct")
    assert tool._sampling(arguments, read_settings(), ONE_TURN) == Sampling(256, 1.0, 1.0, 8192)
    arguments.num_samples = 4
    assert tool._sampling(arguments, read_settings(), ONE_TURN) == Sampling(4, 1.0, 1.0, 8192)
    assert arguments.benchmarks == [*BENCHMARKS][:6]
    assert parse("--compare", "a", "b").compare == ["a", "b"]
