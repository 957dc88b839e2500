"""The whole program: real Megatron-core, real vLLM, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.config import Config, load_config
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.hf.manifest import read_manifest
from gapo_megatron.ops.plan.observation import read_observation
from gapo_megatron.ops.prepare import demo_task as arithmetic
from gapo_megatron.train import train
from tests.distributed.conversion_setup import convert
from tests.programs import Program
from tests.waiting import HANG_S

CONFIG = """
[run]
output_dir = "{root}/run"
num_steps = 6
[model]
hf_dir = "{root}/base"
precision = "fp32"
[data]
train_path = "{root}/task/train.jsonl"
eval_path = "{root}/task/eval.jsonl"
max_prompt_tokens = 20
[batch]
rollout_prompts = 8
minibatch_prompts = 4
rollouts_per_prompt = 4
max_tokens_per_microbatch = 128
[rollout]
max_response_tokens = 24
enforce_eager = true
verify_bound = 1e-4
[reward]
kind = "exact"
[objective]
method = "gapo"
eps_low = 0.01
eps_high_max = 0.02
[optimizer]
learning_rate = 1e-3
[checkpoint]
every_steps = 2
[evaluation]
every_steps = 3
samples_per_prompt = 2
[metrics]
tensorboard = false
rounding_every_steps = 1
[supervised]
initial_hf_dir = "{root}/init"
train_path = "{root}/task/supervised.jsonl"
num_steps = 100
batch_sequences = 64
learning_rate = 5e-3
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with task, tokenizer, configuration, and a model that solves some problems."""
    return prepare(tmp_path_factory.mktemp("train"), CONFIG)


def prepare(root: Path, config: str) -> Path:
    """Fill the folder; `config` is the text of its config.toml."""
    (root / "task").mkdir()
    arithmetic.write_task(root / "task", seed=0, num_eval=32, num_train=400, num_supervised=20000)
    # The easiest level alone (the shortest lines): a hundred supervised steps get somewhere.
    for name in ("train", "eval", "supervised"):
        path = root / f"task/{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if line.count("+") == 2))
    rows = [json.loads(line) for line in (root / "task/supervised.jsonl").read_text().splitlines()]
    tokenizer = arithmetic.write_tokenizer(arithmetic.training_texts(rows), root / "init")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,  # 32 per head, the least that vLLM serves on a CPU
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(root / "init")
    (root / "config.toml").write_text(config.format(root=root))
    finish(Program("gapo_megatron.sft", root / "config.toml"))
    return root


def start(
    module: str, *arguments: object, ranks: int = 1, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the program as a user does; `Program` does the same without the imports."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.Popen(
        [*launcher, module, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )


def launched(attempt_dir: Path) -> dict[str, str]:
    """Prepare a start as slurm/launch.sh does; returns the variables for the ranks."""
    attempt_dir.mkdir(parents=True)
    (attempt_dir.parents[1] / "OWNER").write_text(attempt_dir.name)
    return {"GAPO_ATTEMPT": attempt_dir.name, "GAPO_ATTEMPT_DIR": str(attempt_dir)}


def finish(process: subprocess.Popen[str] | Program, *, exit_code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == exit_code, output[-6000:]
    return output


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def num_steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("loss/policy" in line for line in lines)


def last_write(run_dir: Path) -> int | None:
    path = run_dir / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else None


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    """An uninterrupted run on one rank."""
    finish(Program("gapo_megatron.train", root / "config.toml", f"run.output_dir={root}/whole"))
    return root / "whole"


@pytest.fixture(scope="module")
def run_of_two(root: Path) -> Path:
    """An uninterrupted run on two ranks."""
    run_dir = root / "two"
    finish(
        Program("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}", ranks=2)
    )
    return run_dir


def assert_same_run(run_dir: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.system
def test_a_user_starts_the_same_runs(root: Path, whole_run: Path, run_of_two: Path) -> None:
    """In separate processes without shared imports, by python -m and by torchrun."""
    for ranks, expected in ((1, whole_run), (2, run_of_two)):
        run_dir = root / f"user_{ranks}"
        command = ("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}")
        finish(start(*command, ranks=ranks))
        assert_same_run(run_dir, expected)


def test_run_trains_evaluates_saves_and_exports(root: Path, whole_run: Path) -> None:
    lines = metrics_of(whole_run)
    steps = [line for line in lines if "loss/policy" in line]
    started = load_config(root / "config.toml", [f"run.output_dir={whole_run}"])
    assert load_config(whole_run / "config.toml") == started
    assert [line["step"] for line in steps] == list(range(6))
    assert [line["step"] for line in lines if "eval/pass@1" in line] == [0, 3, 6]
    assert all(line["sync/max_abs_log_prob_diff"] < 1e-4 for line in steps)
    # Neither hopeless nor perfect, so that the rest of this file means something.
    assert 0.05 < steps[0]["reward/mean"] < 0.95
    assert any(line["clip/fraction_sequences"] > 0 for line in steps)
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000006",
    ]
    model = Qwen2ForCausalLM.from_pretrained(whole_run / "hf")
    before = load_file(root / "base/model.safetensors")
    moved = [name for name, tensor in before.items() if not tensor.equal(model.state_dict()[name])]
    assert moved == list(before)


@pytest.mark.system
def test_a_probe_keeps_no_weights(root: Path, whole_run: Path) -> None:
    """Same steps and timings as a run's, without checkpoints and exported model."""
    run_dir = root / "probe"
    finish(
        Program(
            "gapo_megatron.ops.plan.trial",
            root / "config.toml",
            "run.num_steps=3",
            "checkpoint.every_steps=1",
            "checkpoint.keep_steps=[2]",
            f"run.output_dir={run_dir}",
        )
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    expected = (whole_run / "metrics.jsonl").read_text().splitlines()
    assert lines == expected[: len(lines)] and json.loads(lines[-1])["step"] == 3
    one = read_observation(run_dir, mean_prompt_tokens=8.0)
    assert one.step_s > one.measured.update_s > 0
    names = {path.name for path in run_dir.iterdir()}
    assert not names & {"checkpoints", "hf", "finished.json"}
    assert sum(path.stat().st_size for path in run_dir.rglob("*")) < 2**20


def test_kill_and_resume_repeat_the_run_bitwise(root: Path, run_of_two: Path) -> None:
    """Invariant 6, with SIGKILL of one of two ranks as it enters an update."""
    run_dir = root / "killed_once"
    arguments = (root / "config.toml", f"run.output_dir={run_dir}")
    env = {"STAGE": "step 3: update", "SIGNAL": "SIGKILL", "SIGNALLED_RANK": "1"}
    killed = Program("tests.signalled", *arguments, ranks=2, env=env)
    finish(killed, exit_code=-signal.SIGKILL)
    assert num_steps_logged(run_dir) == 3
    assert "resumed from" in finish(Program("gapo_megatron.train", *arguments, ranks=2))
    assert_same_run(run_dir, run_of_two)


@pytest.mark.system
def test_kills_at_any_moment_repeat_the_run_bitwise(root: Path, run_of_two: Path) -> None:
    """The same within stages, KILLS times, at moments that depend on the machine's load."""
    draw, num_kills, num_runs = random.Random(0), 0, 0
    while num_kills < int(os.environ.get("KILLS", "3")):
        run_dir = root / f"killed_{num_runs}"
        arguments = (root / "config.toml", f"run.output_dir={run_dir}")
        before = last_write(run_dir)
        process = Program("gapo_megatron.train", *arguments, ranks=2)
        # A killed run may have logged later steps already: wait until this one writes.
        while last_write(run_dir) == before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(process.pids), signal.SIGKILL)
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode in (0, -signal.SIGKILL), output[-4000:]
        if process.returncode:
            num_kills += 1
        else:  # it was done before: another run is to be killed
            assert_same_run(run_dir, run_of_two)
            num_runs += 1
    finish(Program("gapo_megatron.train", *arguments, ranks=2))
    assert_same_run(run_dir, run_of_two)


@pytest.mark.system
def test_a_rank_that_only_generates_changes_nothing(root: Path, whole_run: Path) -> None:
    """Generation and training in turns on separate ranks: the same samples, the same bits."""
    run_dir = root / "two_sides"
    arguments = (root / "config.toml", f"run.output_dir={run_dir}", "rollout.generation_ranks=1")
    env = {"STAGE": "step 3: update", "SIGNAL": "SIGKILL", "SIGNALLED_RANK": "0"}
    killed = Program("tests.signalled", *arguments, ranks=2, env=env)
    finish(killed, exit_code=-signal.SIGKILL)
    assert num_steps_logged(run_dir) == 3
    assert "resumed from" in finish(Program("gapo_megatron.train", *arguments, ranks=2))
    assert_same_run(run_dir, whole_run)
    # The last data position is saved, too.
    states = [json.loads(trainer_state(one).read_text()) for one in (run_dir, whole_run)]
    assert states[0] == states[1]


def trainer_state(run_dir: Path) -> Path:
    return run_dir / "checkpoints/step_00000006/trainer_state.json"


def ahead(root: Path, name: str) -> tuple[object, ...]:
    """Arguments of a run whose batches are sampled one step ahead."""
    return (
        root / "config.toml",
        f"run.output_dir={root}/{name}",
        *("rollout.generation_ranks=1", "rollout.max_staleness=1"),
        "objective.importance_weight_max=2",
    )


@pytest.fixture(scope="module")
def run_ahead(root: Path) -> Path:
    """An uninterrupted run whose generation runs ahead."""
    finish(Program("gapo_megatron.train", *ahead(root, "ahead"), ranks=2))
    return root / "ahead"


@pytest.mark.system
def test_batches_sampled_ahead_survive_a_kill_bitwise(root: Path, run_ahead: Path) -> None:
    metrics = [line for line in metrics_of(run_ahead) if "loss/policy" in line]
    assert [line["rollout/version_gap"] for line in metrics] == [0, 1, 1, 1, 1, 1]
    # Older weights have sampled: the engine's log-probs are no longer the trainer's.
    mismatch = [line["mismatch/mean_abs_log_prob_diff"] for line in metrics]
    assert mismatch[0] < 1e-5 and mismatch[1] > 1e-2

    arguments = ahead(root, "ahead_killed")
    env = {"STAGE": "step 3: update", "SIGNAL": "SIGKILL", "SIGNALLED_RANK": "0"}
    killed = Program("tests.signalled", *arguments, ranks=2, env=env)
    finish(killed, exit_code=-signal.SIGKILL)
    assert (root / "ahead_killed/checkpoints/step_00000002/ahead.pt").is_file()
    finish(Program("gapo_megatron.train", *arguments, ranks=2))
    assert_same_run(root / "ahead_killed", run_ahead)


@pytest.fixture(scope="module")
def run_given_back(root: Path) -> Path:
    """A run that was stopped within a step, while the next one was being sampled."""
    run_dir = root / "given_back"
    attempt = run_dir / "attempts/7.0"
    arguments = ahead(root, "given_back")
    asked = launched(attempt) | {"STAGE": "step 2: update", "SIGNAL": "SIGUSR1"}
    output = finish(Program("tests.signalled", *arguments, ranks=2, env=asked))
    assert (attempt / "outcome").read_text() == "stopped\n", output[-4000:]
    assert (run_dir / "checkpoints/step_00000002_1").is_dir()
    (run_dir / "OWNER").write_text("7.1")
    again = launched(run_dir / "attempts/7.1")
    finish(Program("gapo_megatron.train", *arguments, ranks=2, env=again))
    return run_dir


@pytest.mark.system
def test_what_a_stop_gives_back_is_counted_and_sampled_again(run_given_back: Path) -> None:
    metrics = [line for line in metrics_of(run_given_back) if "loss/policy" in line]
    assert [line["step"] for line in metrics] == [*range(6)]
    given_back = {line["step"]: line.get("rollout/given_back_tokens", 0) for line in metrics}
    assert given_back.pop(2) > 0 and not any(given_back.values())
    # Step 3 is sampled anew, by the weights that it is learned from; then ahead again.
    assert [line["rollout/version_gap"] for line in metrics] == [0, 1, 1, 0, 1, 1]


@pytest.mark.system
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_leave_for_the_engine_change_nothing(
    root: Path, whole_run: Path, run_of_two: Path, ranks: int
) -> None:
    """Saved, evaluated and exported while offloaded; resumed from that checkpoint."""
    run_dir = root / f"offload_{ranks}"
    command = ("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}")
    for num_steps in (4, 6):
        offload = ("optimizer.offload=all", f"run.num_steps={num_steps}")
        finish(Program(*command, *offload, ranks=ranks))
    assert_same_run(run_dir, run_of_two if ranks == 2 else whole_run)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_started_by_hand_saves_when_it_is_told_to_end(
    root: Path, whole_run: Path, name: str
) -> None:
    """After any last checkpoint; then it is resumed, bitwise."""
    ended = root / f"ended_{name}"
    arguments = (root / "config.toml", f"run.output_dir={ended}")
    env = {"STAGE": "step 3: update", "SIGNAL": name}
    output = finish(Program("tests.signalled", *arguments, env=env))
    assert f"stopped (signal {name})" in output
    assert (ended / "checkpoints/step_00000003_1").is_dir()
    finish(Program("gapo_megatron.train", *arguments))
    assert_same_run(ended, whole_run)


def test_stop_within_a_step_and_resume_repeat_the_run_bitwise(root: Path, whole_run: Path) -> None:
    """Invariant 6 for a stop on request: finished updates and rollouts are kept."""
    stopped = root / "stopped"
    attempts = [stopped / "attempts" / f"7.{restart}" for restart in range(2)]
    arguments = (root / "config.toml", f"run.output_dir={stopped}")
    command = ("gapo_megatron.train", *arguments)
    asked = launched(attempts[0]) | {"STAGE": "step 3: update", "SIGNAL": "SIGUSR1"}
    output = finish(Program("tests.signalled", *arguments, env=asked))
    assert (attempts[0] / "outcome").read_text() == "stopped\n"
    assert "stopped (signal SIGUSR1)" in output
    assert (stopped / "checkpoints/step_00000003_1").is_dir()

    output = finish(Program(*command, env=launched(attempts[1])))
    assert "resumed from" in output and "step_00000003_1" in output
    assert (attempts[1] / "outcome").read_text() == "finished\n"
    assert_same_run(stopped, whole_run)

    # Once more: nothing is left to do, and nothing is done, nor is the run called another one.
    written, config = (stopped / "hf/model.safetensors").stat().st_mtime_ns, stopped / "config.toml"
    recorded = config.read_text()
    assert "all 6 steps are done" in finish(Program(*command, "objective.method=gspo"))
    assert config.read_text() == recorded
    assert (stopped / "hf/model.safetensors").stat().st_mtime_ns == written


@pytest.mark.system
def test_a_finished_run_of_two_ranks_ends_well_every_time(root: Path, run_of_two: Path) -> None:
    """One rank of two was lost in 4 of 16 starts; tests/run/test_attempt.py has it for certain."""
    written = (run_of_two / "hf/model.safetensors").stat().st_mtime_ns
    arguments = (root / "config.toml", f"run.output_dir={run_of_two}")
    for _ in range(3):
        output = finish(Program("gapo_megatron.train", *arguments, ranks=2))
        assert "all 6 steps are done" in output
    assert (run_of_two / "hf/model.safetensors").stat().st_mtime_ns == written


@pytest.mark.system
def test_two_runs_with_one_port_stay_two(root: Path, run_of_two: Path) -> None:
    """The first trains undisturbed; the second names both, and has written nothing."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folders = [root / "one", root / "other"]
    programs = [
        Program(
            "gapo_megatron.train",
            root / "config.toml",
            f"run.output_dir={folder}",
            ranks=2,
            port=port,
        )
        for folder in folders
    ]
    outputs = [program.communicate()[0] for program in programs]
    lost = 0 if programs[0].returncode else 1
    assert programs[lost].returncode in (1, 2) and programs[1 - lost].returncode == 0, outputs
    assert "MASTER_PORT" in outputs[lost] and "Traceback" not in outputs[lost]
    assert_same_run(folders[1 - lost], run_of_two)
    assert not (folders[lost] / "metrics.jsonl").exists()


def branch(root: Path, name: str, *overrides: str) -> tuple[object, ...]:
    """Command of a run that branches from the whole run's checkpoint after four of six steps."""
    point = f"checkpoint.branch_from={root}/whole/checkpoints/step_4"
    folder = f"run.output_dir={root}/{name}"
    return ("gapo_megatron.train", root / "config.toml", folder, point, *overrides)


def test_a_branch_with_the_same_settings_continues_the_run_bitwise(
    root: Path, whole_run: Path
) -> None:
    """After a kill it resumes from its own checkpoint; the other run keeps every byte."""
    source = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")}
    command, run_dir = branch(root, "same", "checkpoint.every_steps=1"), root / "same"
    own = run_dir / "checkpoints/step_00000005"
    env = {"STAGE": "step 5: update", "SIGNAL": "SIGKILL"}
    killed = Program("tests.signalled", *command[1:], env=env)
    output = finish(killed, exit_code=-signal.SIGKILL)
    assert f"branched from {whole_run}/checkpoints/step_00000004" in output
    output = finish(Program(*command))
    assert f"resumed from {own}" in output and "branched from" not in output

    # The folder has no earlier lines: the windowed correlation came with the checkpoint.
    lines = (whole_run / "metrics.jsonl").read_text().splitlines()
    expected = [line for line in lines if json.loads(line)["step"] >= 4]
    assert (run_dir / "metrics.jsonl").read_text().splitlines() == expected
    assert any("ratio/advantage_correlation_window" in line for line in expected)
    ours = (run_dir / "hf/model.safetensors").read_bytes()
    assert ours == (whole_run / "hf/model.safetensors").read_bytes()
    assert {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")} == source
    record = json.loads((run_dir / "branch.json").read_text())
    assert (record["run"], record["step"], record["changes"]) == (str(whole_run), 4, {})
    for step in (5, 6):
        found = read_manifest(run_dir / f"checkpoints/step_{step:08d}").branch
        assert found is not None and asdict(found) == record


@pytest.fixture(scope="module")
def branched_run(root: Path, whole_run: Path) -> Path:
    """One step under another method, with every term that has its own metric."""
    assert whole_run == root / "whole"
    method = (
        "objective.method=dr_grpo",
        "objective.kl_coef=0.01",
        "objective.entropy_coef=0.001",
        "objective.importance_weight_max=2",
    )
    finish(Program(*branch(root, "branch", *method, "run.num_steps=5", "evaluation.every_steps=0")))
    return root / "branch"


def test_a_branch_goes_on_under_another_method(whole_run: Path, branched_run: Path) -> None:
    """The same weights, prompts and samples; then another update."""
    (ours,) = metrics_of(branched_run)
    theirs = next(line for line in metrics_of(whole_run) if line["step"] == 4)
    for key in ("reward/mean", "rollout/entropy", "per_c/groups/c1"):
        assert ours[key] == theirs[key], key
    # Not the loss, which is 0 on both sides where no group of the batch has c between 0 and k.
    assert ours["optim/grad_norm"] != theirs["optim/grad_norm"]
    changes = json.loads((branched_run / "branch.json").read_text())["changes"]
    assert changes == {
        "objective.method": ["gapo", "dr_grpo"],
        "objective.kl_coef": [0.0, 0.01],
        "objective.entropy_coef": [0.0, 0.001],
        "objective.importance_weight_max": [None, 2.0],
    }
    # The correlation of its own steps alone: those before were under the other method.
    state = json.loads((branched_run / "checkpoints/step_00000005/trainer_state.json").read_text())
    assert len(state["window"]) == 1


@pytest.fixture(scope="module")
def balanced_run(root: Path, whole_run: Path) -> Path:
    """Two steps under a method whose mini-batches compute their own clip bounds."""
    assert whole_run == root / "whole"
    method = ("objective.method=bapo", "objective.eps_low=0.4", "objective.eps_high_max=0.2")
    finish(Program(*branch(root, "balanced", *method, "evaluation.every_steps=0")))
    return root / "balanced"


@pytest.mark.system
def test_bounds_that_minibatches_find_are_logged(balanced_run: Path) -> None:
    lines = [line for line in metrics_of(balanced_run) if "loss/policy" in line]
    assert [line["step"] for line in lines] == [4, 5]
    found = [line for line in lines if "clip/bound_low" in line]
    assert found
    for line in found:
        # The search starts from the method's own bounds and only raises them.
        assert 0.6 <= line["clip/bound_low"] <= 0.9 and 1.2 <= line["clip/bound_high"] <= 3


@pytest.fixture(scope="module")
def dynamic_run(root: Path) -> Path:
    settings = ("run.num_steps=2", "evaluation.every_steps=0", "batch.dynamic_sampling_rounds=2")
    run_dir = root / "dynamic"
    command = ("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}")
    finish(Program(*command, *settings))
    return run_dir


@pytest.mark.system
def test_groups_that_teach_nothing_are_replaced(whole_run: Path, dynamic_run: Path) -> None:
    plain, dynamic = (
        [line for line in metrics_of(run_dir) if "loss/policy" in line][:2]
        for run_dir in (whole_run, dynamic_run)
    )
    for line in dynamic:
        num_replaced = line["rollout/replaced_group_share"]
        assert 1 <= line["rollout/sampling_rounds"] <= 3
        assert (line["rollout/sampling_rounds"] > 1) == (num_replaced > 0)
        assert sum(line[f"per_c/groups/c{c}"] for c in range(5)) == 8
    # The first draw is that of the run without it.
    first, without = dynamic[0], plain[0]
    missing = without["per_c/groups/c0"] + without["per_c/groups/c4"]
    assert missing > 0
    assert first["rollout/replaced_group_share"] > 0
    assert first["per_c/groups/c0"] + first["per_c/groups/c4"] < missing
    for c in (1, 2, 3):
        assert first[f"per_c/groups/c{c}"] >= without[f"per_c/groups/c{c}"]
    # How many problems were drawn, and no others are next.
    state = json.loads((dynamic_run / "checkpoints/step_00000002/trainer_state.json").read_text())
    num_drawn = sum(round(8 / (1 - line["rollout/replaced_group_share"])) for line in dynamic)
    source = state["source"]
    num_problems = len((dynamic_run.parent / "task/train.jsonl").read_text().splitlines())
    assert len(source["remaining"]) + num_drawn == num_problems * (1 + source["epoch"])


@pytest.fixture(scope="module")
def oversampled_run(root: Path) -> Path:
    settings = ("run.num_steps=2", "evaluation.every_steps=0", "batch.oversampling=1.5")
    run_dir = root / "oversampled"
    command = ("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}")
    finish(Program(*command, *settings))
    return run_dir


@pytest.mark.system
def test_of_more_groups_than_are_wanted_the_whole_ones_are_learned_from(
    oversampled_run: Path,
) -> None:
    lines = [line for line in metrics_of(oversampled_run) if "loss/policy" in line]
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["rollout/lost_token_share"] < 1
        assert sum(line[f"per_c/groups/c{c}"] for c in range(5)) == 8
    path = oversampled_run / "checkpoints/step_00000002/trainer_state.json"
    source = json.loads(path.read_text())["source"]
    num_problems = len((oversampled_run.parent / "task/train.jsonl").read_text().splitlines())
    assert len(source["remaining"]) + 2 * 8 == num_problems * (1 + source["epoch"])


@pytest.fixture(scope="module")
def partial_run(root: Path) -> Path:
    run_dir = root / "partial"
    finish(Program(*partial(root, "partial")))
    return run_dir


def partial(root: Path, name: str) -> tuple[object, ...]:
    """Command of four steps with partial rollouts."""
    settings = (
        *("run.num_steps=4", "evaluation.every_steps=0"),
        *("batch.oversampling=1.5", "batch.partial_rollouts=true"),
    )
    return ("gapo_megatron.train", root / "config.toml", f"run.output_dir={root}/{name}", *settings)


@pytest.mark.system
def test_what_is_broken_off_is_finished_by_the_next_steps(partial_run: Path) -> None:
    lines = [line for line in metrics_of(partial_run) if "loss/policy" in line]
    assert len(lines) == 4
    for line in lines:
        assert sum(line[f"per_c/groups/c{c}"] for c in range(5)) == 8
        # Trainer and engine agree where each token is compared at the weights that sampled it:
        # float32. Other weights are a hundred times as far apart, as the ratios below show.
        assert line["mismatch/max_abs_log_prob_diff"] < 2e-4
    assert lines[0]["rollout/carried_token_share"] == lines[0]["rollout/oldest_version_gap"] == 0
    assert lines[1]["rollout/oldest_version_gap"] == 1
    for line in lines[1:]:
        assert 0 < line["rollout/carried_token_share"] < 1
        assert 1 <= line["rollout/oldest_version_gap"] <= line["step"]
    assert max(line["ratio/abs_deviation_max"] for line in lines[1:]) > 0.02
    path = partial_run / "checkpoints/step_00000004"
    source = json.loads((path / "trainer_state.json").read_text())["source"]
    opened = torch.load(path / "open_groups.pt", weights_only=True)["groups"]
    assert len(opened) == 4
    num_problems = len((partial_run.parent / "task/train.jsonl").read_text().splitlines())
    learned_and_open = 4 * 8 + len(opened)
    assert len(source["remaining"]) + learned_and_open == num_problems * (1 + source["epoch"])


@pytest.mark.system
def test_partial_rollouts_are_resumed_bitwise(root: Path, partial_run: Path) -> None:
    """Invariant 6: stopped within a step, which keeps its rollouts and open groups, and after a
    step whose open groups the next step continues."""
    stopped = root / "partial_stopped"
    attempts = [stopped / "attempts" / f"7.{restart}" for restart in range(3)]
    command = partial(root, "partial_stopped")
    for attempt, stage, written in (
        (attempts[0], "step 2: update", "step_00000002_1"),
        (attempts[1], "step 2: sync", "step_00000003"),
    ):
        asked = launched(attempt) | {"STAGE": stage, "SIGNAL": "SIGUSR1"}
        finish(Program("tests.signalled", *command[1:], env=asked))
        assert (stopped / "checkpoints" / written / "open_groups.pt").is_file()
    assert "step_00000003" in finish(Program(*command, env=launched(attempts[2])))
    for name in (
        "metrics.jsonl",
        "hf/model.safetensors",
        "checkpoints/step_00000004/open_groups.pt",
        "checkpoints/step_00000004/trainer_state.json",
    ):
        assert (stopped / name).read_bytes() == (partial_run / name).read_bytes(), name


ROOM = """
import sys
from gapo_megatron import train
from gapo_megatron.config import load_config
from gapo_megatron.policy import Policy
from gapo_megatron.run import start

built, build = [], Policy.build
Policy.build = lambda *arguments: built.append(build(*arguments)) or built[0]

def look(*_, **__):
    (buffer,) = built[0].model[0].buffers
    sizes = [data.untyped_storage().nbytes() for data in (buffer.grad_data, buffer.param_data)]
    sys.exit("{} bytes of gradients, {} of weights".format(*sizes))

start.RolloutEngine = look
train.train(load_config(sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.system
def test_there_is_room_when_vllm_starts(root: Path) -> None:
    """On a GPU it checks free memory, and refuses to start with less than its share."""
    arguments = [root / "config.toml", f"run.output_dir={root}/room", "optimizer.offload=all"]
    process = subprocess.Popen(
        [sys.executable, "-c", ROOM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said = finish(process, exit_code=1).splitlines()
    assert "0 bytes of gradients, 0 of weights" in said


@pytest.mark.system
def test_open_groups_at_another_temperature_are_refused_before_any_model_is_built(
    root: Path, partial_run: Path
) -> None:
    given = map(str, partial(root, partial_run.name)[2:])
    # With more steps than it has: else it is finished.
    overrides = [*given, "run.num_steps=9", "rollout.temperature=0.5"]
    with pytest.raises(ConfigError, match=r"temperature \(0\.5\) must be 1\.0, as in .*00000004,"):
        train(load_config(root / "config.toml", overrides))


@pytest.mark.system
def test_partial_rollouts_go_on_in_a_branch_on_more_ranks(root: Path, partial_run: Path) -> None:
    command = partial(root, "partial_branch")
    point = f"checkpoint.branch_from={partial_run}/checkpoints/step_2"
    changes = ("objective.method=gapo_token", "objective.importance_weight_max=2")
    finish(Program(*command, point, *changes, "run.num_steps=3", ranks=2))
    (line,) = metrics_of(root / "partial_branch")
    assert line["step"] == 2
    assert 0 < line["rollout/carried_token_share"] < 1
    assert line["rollout/oldest_version_gap"] >= 1
    assert line["mismatch/max_abs_log_prob_diff"] < 2e-4
    assert line["mismatch/importance_weight"] == pytest.approx(1, abs=1e-4)


def documented_names() -> list[str]:
    """First column of every table of docs/metrics.md."""
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall("`(.+?)`", cell)]


@pytest.fixture(scope="module")
def fp16_run(root: Path) -> Path:
    run_dir = root / "fp16"
    settings = ("model.precision=fp16", "rollout.verify_bound=0.02", "run.num_steps=1")
    command = (root / "config.toml", f"run.output_dir={run_dir}", *settings)
    finish(Program("gapo_megatron.train", *command))
    return run_dir


@pytest.mark.system
def test_the_document_has_the_names_that_runs_log_and_no_others(
    whole_run: Path,
    branched_run: Path,
    balanced_run: Path,
    dynamic_run: Path,
    oversampled_run: Path,
    partial_run: Path,
    run_given_back: Path,
    fp16_run: Path,
) -> None:
    runs = (
        *(whole_run, branched_run, balanced_run, dynamic_run),
        *(oversampled_run, partial_run, run_given_back, fp16_run),
    )
    logged = {
        key
        for run_dir in runs
        for name in ("metrics.jsonl", "timings.jsonl")
        for line in (run_dir / name).read_text().splitlines()
        for key in json.loads(line)
    } - {"step"}
    parts = {"c": r"\d+", "k": r"\d+", "side": "(correct|wrong)", "level": "[^/]+"}
    # Of a device, which there is none of here: `tests/run/test_memory.py` compares them.
    documented = [name for name in documented_names() if "{moment}" not in name]
    forms = {
        name: re.sub(r"\\{(\w+)\\}", lambda part: parts[part[1]], re.escape(name))
        for name in documented
    }
    assert len(forms) == len(documented) > 50
    found = {key: [name for name in forms if re.fullmatch(forms[name], key)] for key in logged}
    assert {key for key, names in found.items() if len(names) != 1} == set()
    assert forms.keys() - {name for names in found.values() for name in names} == set()


def test_a_branch_into_other_problems_is_refused_before_any_model_is_built(
    root: Path, whole_run: Path
) -> None:
    assert whole_run == root / "whole"

    def begin(*overrides: str) -> None:
        train(load_config(root / "config.toml", [*branch(root, "bad", *overrides)[2:]]))

    with pytest.raises(ConfigError, match=r"batch\.rollouts_per_prompt is 4 there and 8 here: "):
        begin("batch.rollouts_per_prompt=8")
    problems = root / "task/train.jsonl"
    text = problems.read_text()
    try:
        problems.write_text(text.replace('"answer": "', '"answer": "1', 1))
        with pytest.raises(CheckpointError, match=r"other training problems than data\.train_path"):
            begin()
    finally:
        problems.write_text(text)
    assert not (root / "bad/branch.json").exists()


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
        ("parallel.pipeline_model_parallel_size=2",),
        pytest.param(("parallel.context_parallel_size=2",), marks=pytest.mark.system),
        pytest.param(("rollout.tensor_parallel_size=2",), marks=pytest.mark.system),
    ],
    ids=["tensor, sequence", "pipeline", "context", "data"],
)
def test_layouts_agree(
    root: Path, whole_run: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Invariant 2 for the whole program, in its first steps.

    Rounding differs in the last float32 bits of every GEMM and reduction; AdamW divides by the root
    of tiny second moments in its first steps and amplifies it, hence 2e-3 on derived quantities.
    """
    reference = [line for line in metrics_of(whole_run) if "loss/policy" in line][:2]
    run_dir = tmp_path / "run"
    settings = ("run.num_steps=2", "evaluation.every_steps=0", *layout)
    command = ("gapo_megatron.train", root / "config.toml", f"run.output_dir={run_dir}", *settings)
    finish(Program(*command, ranks=2))
    for line, expected in zip(metrics_of(run_dir), reference, strict=True):
        for key in ("reward/mean", "rollout/response_length/mean", "clip/fraction_sequences"):
            assert line[key] == expected[key], (key, line["step"])
        for key in ("loss/policy", "optim/grad_norm", "ratio/abs_deviation"):
            assert line[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-7), key


@pytest.fixture(scope="module")
def megatron_dir(root: Path) -> Path:
    """The model as a Megatron folder, beside a Hugging Face folder of it without weights."""
    convert(root / "base", root / "megatron")
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(root / "base", root / "bare", ignore=ignored)
    # Supervised training would make the weights anew.
    text, _, _ = CONFIG.format(root=root).partition("[supervised]")
    (root / "from_megatron.toml").write_text(text)
    return root / "megatron"


@pytest.mark.system
def test_a_run_starts_from_a_megatron_folder_and_resumes_from_its_own_checkpoint(
    root: Path, whole_run: Path, megatron_dir: Path
) -> None:
    command = (
        "gapo_megatron.train",
        root / "from_megatron.toml",
        f"run.output_dir={root}/from_megatron",
        f"model.hf_dir={root}/bare",
        f"model.megatron_dir={megatron_dir}",
        "evaluation.every_steps=0",
    )
    finish(Program(*command, "run.num_steps=1"))
    assert "resumed from" in finish(Program(*command, "run.num_steps=3"))
    steps = [line for line in metrics_of(whole_run) if "loss/policy" in line][:3]
    assert metrics_of(root / "from_megatron") == steps
    # vLLM began with random weights; the first sync, before any metric, would have failed.
    exported = load_file(root / "from_megatron/hf/model.safetensors")
    assert exported.keys() == load_file(root / "base/model.safetensors").keys()


def broken(root: Path, *overrides: str) -> Config:
    return load_config(root / "config.toml", [f"run.output_dir={root}/broken", *overrides])


def test_user_mistakes_are_named_before_any_model_is_built(root: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=r"model\.hf_dir.*nowhere"):
        train(broken(root, f"model.hf_dir={missing}"))
    with pytest.raises(DataError, match="nowhere"):
        train(broken(root, f"data.train_path={missing}"))
    with pytest.raises(DataError, match=r"train\.jsonl:\d+.*tokens"):
        train(broken(root, "data.max_prompt_tokens=4"))
    (tmp_path / "torn.jsonl").write_text('{"id": "a", "prompt": "1+1=", "answer": "2"}\n{"id":')
    with pytest.raises(DataError, match=r"torn\.jsonl:2"):
        train(broken(root, f"data.train_path={tmp_path}/torn.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="empty"):
        train(broken(root, f"data.train_path={tmp_path}/empty.jsonl"))
    with pytest.raises(ConfigError, match=r"reward\.kind"):
        train(broken(root, "reward.kind=code", "reward.python=/nowhere"))
    for inside in ("broken/hf", "broken/hf/x"):
        with pytest.raises(ConfigError, match=r"run\.output_dir/hf.*model\.hf_dir"):
            train(broken(root, f"model.hf_dir={root}/{inside}"))
    (tmp_path / "own/hf").mkdir(parents=True)
    (tmp_path / "own/hf/precious").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir/hf.*own/hf"):
        train(broken(root, f"run.output_dir={tmp_path}/own"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir"):
        train(broken(root, f"run.output_dir={tmp_path}/file/run"))


def test_a_wrong_megatron_folder_is_named_before_any_model_is_built(
    root: Path, megatron_dir: Path, tmp_path: Path
) -> None:
    def error_of(folder: Path, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            settings = [f"run.output_dir={root}/broken", f"model.megatron_dir={folder}"]
            train(load_config(root / "from_megatron.toml", [*settings, *overrides]))
        return str(caught.value)

    assert re.search(
        r"model\.megatron_dir .*nowhere does not exist", error_of(tmp_path / "nowhere")
    )
    assert re.search(r"model\.megatron_dir .*holds no checkpoint", error_of(tmp_path))
    shutil.copytree(megatron_dir, tmp_path / "cut")
    (tmp_path / "cut/metadata.json").unlink()
    assert re.search(r"model\.megatron_dir .*metadata\.json", error_of(tmp_path / "cut"))
    inside = shutil.copytree(megatron_dir, tmp_path / "around" / "megatron")
    around = f"run.output_dir={tmp_path}/around"
    assert "must lie outside run.output_dir" in error_of(inside, around)

    config = Qwen2Config.from_pretrained(root / "base")
    for name, value in {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-3,
    }.items():
        other = tmp_path / name
        shutil.copytree(root / "base", other)
        changed = Qwen2Config.from_dict(config.to_dict() | {name: value, "layer_types": None})
        changed.save_pretrained(other)
        message = error_of(megatron_dir, f"model.hf_dir={other}")
        assert str(megatron_dir) in message
        if name == "rms_norm_eps":
            assert "rms_norm_eps is 1e-06 there and 0.001 here" in message


def test_resume_with_another_model_is_refused(root: Path, whole_run: Path, tmp_path: Path) -> None:
    config = Qwen2Config.from_pretrained(root / "base")
    config.intermediate_size = 96
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="intermediate_size"):
        train(broken(root, f"model.hf_dir={tmp_path}", f"run.output_dir={whole_run}"))
