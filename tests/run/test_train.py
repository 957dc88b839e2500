"""The whole program: real Megatron-core, real vLLM, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from gapo_megatron.config import load_config
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.formats.manifest import read_manifest
from gapo_megatron.io.sample_files import read_samples
from gapo_megatron.io.token_files import read_tokens, token_files
from gapo_megatron.objective import upper_clip
from gapo_megatron.train import train
from gapo_megatron.types import Sample
from tests.distributed.conversion_setup import convert
from tests.messages import mentions
from tests.programs import Program
from tests.train_setup import (
    CONFIG,
    arguments,
    assert_same_run,
    documented_names,
    finish,
    interrupt,
    launched,
    metrics_of,
    num_problems_drawn,
    prepare,
    run,
    steps_of,
    stop_and_resume,
    trainer_state,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with task, tokenizer, configuration, and a model that solves some problems."""
    return prepare(tmp_path_factory.mktemp("train"), CONFIG)


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    """An uninterrupted run on one rank."""
    run(root, "whole")
    return root / "whole"


@pytest.fixture(scope="module")
def run_of_two(root: Path) -> Path:
    """An uninterrupted run on two ranks."""
    run(root, "two", ranks=2)
    return root / "two"


@pytest.mark.system
def test_torchrun_starts_the_same_run(root: Path, run_of_two: Path) -> None:
    """In processes without shared imports."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    finish(start_python("-m", *torchrun, "gapo_megatron.train", *arguments(root, "user")))
    assert_same_run(root / "user", run_of_two)


def start_python(*arguments: object) -> subprocess.Popen[str]:
    """Start a program as a user does; `Program` does the same without the imports."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_run_trains_evaluates_saves_and_exports(root: Path, whole_run: Path) -> None:
    steps = steps_of(whole_run)
    started = load_config(root / "config.toml", [f"run.output_dir={whole_run}"])
    assert load_config(whole_run / "config.toml") == started
    assert [line["step"] for line in steps] == list(range(6))
    evaluated = [line["step"] for line in metrics_of(whole_run) if "eval/pass@1" in line]
    assert evaluated == [0, 3, 6]
    samples = read_samples(whole_run)
    assert [one.step for one in samples] == [step for step in range(6) for _ in range(8)]
    for one in samples:
        assert one.prompt.endswith("=") and one.k == 4
        sums = one.response.removesuffix("</s>").split(">")
        assert one.truncated or (one.verdict == "correct") == (sums[-1] == one.answer)
        assert bool(one.reason) == (one.verdict == "wrong")
    assert_tokens(whole_run, samples)
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


def assert_tokens(run_dir: Path, samples: list[Sample]) -> None:
    """Each sample token by token; of what was not computed nothing is made up."""
    files = token_files(run_dir)
    rows = [row for path in files.values() for row in read_tokens(path)]
    shared = [{name: row[name] for name in asdict(samples[0])} for row in rows]
    assert [*files] == [*range(6)] and shared == [*map(asdict, samples)]
    learned = [row for row in rows if row["update"] is not None]
    assert {row["update"] for row in learned} == {0, 1}
    for row in rows:
        assert "".join(row["pieces"]) == row["response"] and all(row["response_mask"])
        assert {*row["policy_versions"]} == {row["step"]}
        assert (row["advantage"] != 0) == (row in learned)
        absent = {row[name] is None for name in ("ratio", "clipped", "log_probs", "log_ratio")}
        assert absent == {row not in learned}
    for row in learned:
        old, new = np.array(row["old_log_probs"]), np.array(row["log_probs"])
        assert np.abs(old - row["rollout_log_probs"]).max() < 1e-4
        assert row["ratio"] == pytest.approx(np.exp((new - old).mean()), rel=1e-12)
        assert np.array_equal(np.array(row["log_ratio"], np.float32), (new - old).astype("f4"))
        assert row["ratio"] == 1 or row["update"] == 1
        width = upper_clip(
            torch.tensor([row["c"]]), group_size=row["k"], eps_low=0.01, eps_high_max=0.02
        )
        high = 1 + (float(width) if row["advantage"] > 0 else 0.01)
        assert (row["clip_low"], row["clip_high"]) == pytest.approx((0.99, high), rel=1e-12)
        right, wrong = row["ratio"] > high, row["ratio"] < 0.99
        side = "high" if right and row["advantage"] > 0 else ""
        assert row["clip_side"] == ("low" if wrong and row["advantage"] < 0 else side)
        assert row["clipped"] == (row["clip_side"] != "")
    assert any(row["clipped"] for row in learned) and any(row["ratio"] != 1 for row in learned)


@pytest.mark.system
@pytest.mark.parametrize("number", ["0", "all"])
def test_what_is_recorded_changes_nothing(root: Path, whole_run: Path, number: str) -> None:
    run(root, f"records_{number}", f"metrics.samples_per_step={number}")
    other = root / f"records_{number}"
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        assert (other / name).read_bytes() == (whole_run / name).read_bytes(), name
    assert {len(read_tokens(one)) for one in token_files(other).values()} == (
        {32} if number == "all" else set()
    )


def test_kill_and_resume_repeat_the_run_bitwise(root: Path, run_of_two: Path) -> None:
    """Invariant 6, with SIGKILL of one of two ranks as it enters an update."""
    interrupt(root, "killed_once", stage="step 3: update", by="SIGKILL", rank=1, ranks=2)
    assert len(steps_of(root / "killed_once")) == 3
    assert "resumed from" in run(root, "killed_once", ranks=2)
    assert_same_run(root / "killed_once", run_of_two)


@pytest.mark.system
def test_a_rank_that_only_generates_changes_nothing(root: Path, whole_run: Path) -> None:
    """Generation and training in turns on separate ranks: the same samples, the same bits."""
    two_sides = ("two_sides", "rollout.generation_ranks=1")
    interrupt(root, *two_sides, stage="step 3: update", by="SIGKILL", ranks=2)
    assert len(steps_of(root / "two_sides")) == 3
    assert "resumed from" in run(root, *two_sides, ranks=2)
    assert_same_run(root / "two_sides", whole_run)
    # The last data position is saved, too.
    assert trainer_state(root / "two_sides", step=6) == trainer_state(whole_run, step=6)


AHEAD = (
    *("rollout.generation_ranks=1", "rollout.max_staleness=1"),
    "objective.importance_weight_max=2",
)
"""Settings with which batches are sampled one step ahead."""


@pytest.fixture(scope="module")
def run_ahead(root: Path) -> Path:
    """An uninterrupted run whose generation runs ahead."""
    run(root, "ahead", *AHEAD, ranks=2)
    return root / "ahead"


@pytest.mark.system
def test_batches_sampled_ahead_survive_a_kill_bitwise(root: Path, run_ahead: Path) -> None:
    metrics = steps_of(run_ahead)
    assert [line["rollout/version_gap"] for line in metrics] == [0, 1, 1, 1, 1, 1]
    # Older weights have sampled: the engine's log-probs are no longer the trainer's.
    mismatch = [line["mismatch/mean_abs_log_prob_diff"] for line in metrics]
    assert mismatch[0] < 1e-5 and mismatch[1] > 1e-2

    interrupt(root, "ahead_killed", *AHEAD, stage="step 3: update", by="SIGKILL", ranks=2)
    assert (root / "ahead_killed/checkpoints/step_00000002/ahead.pt").is_file()
    run(root, "ahead_killed", *AHEAD, ranks=2)
    assert_same_run(root / "ahead_killed", run_ahead)


@pytest.fixture(scope="module")
def run_given_back(root: Path) -> Path:
    """A run that was stopped within a step, while the next one was being sampled."""
    stop_and_resume(root, "given_back", *AHEAD, stage="step 2: update", ranks=2)
    return root / "given_back"


@pytest.mark.system
def test_a_kill_while_a_checkpoint_is_written_repeats_the_run_bitwise(
    root: Path, run_of_two: Path
) -> None:
    """Step 3's is not whole before the end of the step; a stop then finishes what is under way."""
    behind = ("behind", "checkpoint.background=true", "checkpoint.every_steps=1")
    checkpoints = root / "behind/checkpoints"
    interrupt(root, *behind, stage="step 3: update", by="SIGKILL", ranks=2)
    (hidden, *whole) = sorted(path.name for path in checkpoints.iterdir())
    assert hidden.startswith(".tmp_step_00000003.")
    assert whole == ["step_00000001", "step_00000002"]
    first, second = (root / "behind/attempts" / name for name in ("7.0", "7.1"))
    stop = {"stage": "step 4: update", "by": "SIGUSR1"}
    interrupt(root, *behind, **stop, ranks=2, env=launched(first))
    named = {path.name for path in checkpoints.iterdir()}
    assert named == {"step_00000003", "step_00000004", "step_00000004_1"}
    run(root, *behind, ranks=2, env=launched(second))
    assert_same_run(root / "behind", run_of_two)


@pytest.mark.system
def test_what_a_stop_gives_back_is_counted_and_sampled_again(run_given_back: Path) -> None:
    metrics = steps_of(run_given_back)
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
    for num_steps in (4, 6):
        offload = ("optimizer.offload=all", f"run.num_steps={num_steps}")
        run(root, f"offload_{ranks}", *offload, ranks=ranks)
    assert_same_run(root / f"offload_{ranks}", run_of_two if ranks == 2 else whole_run)


def test_a_run_started_by_hand_saves_when_it_is_told_to_end(root: Path, whole_run: Path) -> None:
    """After any last checkpoint; then it is resumed, bitwise."""
    ended = root / "ended"
    output = interrupt(root, ended.name, stage="step 3: update", by="SIGTERM")
    assert "stopped (signal SIGTERM)" in output
    assert (ended / "checkpoints/step_00000003_1").is_dir()
    run(root, ended.name)
    assert_same_run(ended, whole_run)


def test_stop_within_a_step_and_resume_repeat_the_run_bitwise(root: Path, whole_run: Path) -> None:
    """Invariant 6 for a stop on request: finished updates and rollouts are kept."""
    stopped = root / "stopped"
    stop_and_resume(root, "stopped", stage="step 3: update")
    assert_same_run(stopped, whole_run)

    # Once more: nothing is left to do, and nothing is done, nor is the run called another one.
    written, config = (stopped / "hf/model.safetensors").stat().st_mtime_ns, stopped / "config.toml"
    recorded = config.read_text()
    assert "all 6 steps are done" in run(root, "stopped", "objective.method=gspo")
    assert config.read_text() == recorded
    assert (stopped / "hf/model.safetensors").stat().st_mtime_ns == written


@pytest.mark.system
def test_two_runs_with_one_port_stay_two(root: Path, run_of_two: Path) -> None:
    """The first trains undisturbed; the second names both, and has written nothing."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folders = [root / "one", root / "other"]
    programs = [
        Program("gapo_megatron.train", *arguments(root, folder.name), ranks=2, port=port)
        for folder in folders
    ]
    outputs = [program.communicate()[0] for program in programs]
    lost = 0 if programs[0].returncode else 1
    assert programs[lost].returncode in (1, 2) and programs[1 - lost].returncode == 0, outputs
    assert "MASTER_PORT" in outputs[lost] and "Traceback" not in outputs[lost]
    assert_same_run(folders[1 - lost], run_of_two)
    assert not (folders[lost] / "metrics.jsonl").exists()


def branch_point(whole_run: Path) -> str:
    """Setting of a run that branches from the whole run's checkpoint after four of six steps."""
    return f"checkpoint.branch_from={whole_run}/checkpoints/step_4"


def test_a_branch_with_the_same_settings_continues_the_run_bitwise(
    root: Path, whole_run: Path
) -> None:
    """After a kill it resumes from its own checkpoint; the other run keeps every byte."""
    source = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")}
    same, run_dir = ("same", branch_point(whole_run), "checkpoint.every_steps=1"), root / "same"
    own = run_dir / "checkpoints/step_00000005"
    output = interrupt(root, *same, stage="step 5: update", by="SIGKILL")
    assert f"branched from {whole_run}/checkpoints/step_00000004" in output
    output = run(root, *same)
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
    """One step under another method."""
    method = (
        "objective.method=dr_grpo",
        "objective.kl_coef=0.01",
        "objective.entropy_coef=0.001",
        "objective.importance_weight_max=2",
    )
    length = ("run.num_steps=5", "evaluation.every_steps=0")
    run(root, "branch", branch_point(whole_run), *method, *length)
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
        "objective.importance_weights": ["none", "sequence"],  # the bound alone means these
        "objective.importance_weight_max": [None, 2.0],
    }
    # The correlation of its own steps alone: those before were under the other method.
    assert len(trainer_state(branched_run, step=5)["window"]) == 1


PARTIAL = (
    *("run.num_steps=4", "evaluation.every_steps=0"),
    *("batch.oversampling=1.5", "batch.partial_rollouts=true"),
)
"""Settings of four steps with partial rollouts."""


@pytest.fixture(scope="module")
def partial_run(root: Path) -> Path:
    run(root, "partial", *PARTIAL)
    return root / "partial"


@pytest.mark.system
def test_what_is_broken_off_is_finished_by_the_next_steps(partial_run: Path) -> None:
    lines = steps_of(partial_run)
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
    path = partial_run / "checkpoints/step_00000004/open_groups.pt"
    opened = torch.load(path, weights_only=True)["groups"]
    assert len(opened) == 4
    assert num_problems_drawn(partial_run, step=4) == 4 * 8 + len(opened)


@pytest.mark.system
def test_partial_rollouts_are_resumed_bitwise(root: Path, partial_run: Path) -> None:
    """Invariant 6: stopped within a step, which keeps its rollouts and open groups, and after a
    step whose open groups the next step continues."""
    stopped = root / "partial_stopped"
    attempts = [stopped / "attempts" / f"7.{restart}" for restart in range(3)]
    command = (root, stopped.name, *PARTIAL)
    for attempt, stage, written in (
        (attempts[0], "step 2: update", "step_00000002_1"),
        (attempts[1], "step 2: sync", "step_00000003"),
    ):
        interrupt(*command, stage=stage, by="SIGUSR1", env=launched(attempt))
        assert (stopped / "checkpoints" / written / "open_groups.pt").is_file()
    assert "step_00000003" in run(*command, env=launched(attempts[2]))
    last = "checkpoints/step_00000004"
    assert_same_run(stopped, partial_run, f"{last}/open_groups.pt", f"{last}/trainer_state.json")


@pytest.mark.system
@pytest.mark.parametrize(("max_staleness", "more"), [(0, ()), (1, ("data.curriculum=0.9",))])
def test_weights_arrive_within_responses_on_ranks_that_only_generate(
    root: Path, max_staleness: int, more: tuple[str, ...]
) -> None:
    """Each token is compared with the step's own weights; a killed run is resumed bitwise."""
    sides = ("rollout.generation_ranks=1", f"rollout.max_staleness={max_staleness}", *more)
    command, name = (*PARTIAL, *sides, "objective.importance_weights=token"), f"parted_{sides[1]}"
    run(root, name, *command, ranks=2)
    lines = steps_of(root / name)
    gaps = [line["rollout/oldest_version_gap"] for line in lines]
    assert gaps[0] == 0 and gaps[1] == 1 and max(gaps) > max_staleness
    for line in lines[1:]:
        assert 0 < line["rollout/carried_token_share"] < 1
        # Older weights sampled some tokens, and the engine's log-probs are kept from then.
        assert line["mismatch/max_abs_log_prob_diff"] > 1e-3
        assert "mismatch/outside_clip" in line and line["mismatch/importance_weight"] != 1
    killed = f"{name}_killed"
    interrupt(root, killed, *command, stage="step 3: update", by="SIGKILL", ranks=2)
    folder = root / killed / "checkpoints/step_00000002"
    assert (folder / "open_groups.pt").is_file()
    assert (folder / "ahead.pt").is_file() == bool(max_staleness)
    assert "step_00000002" in run(root, killed, *command, ranks=2)
    last = "checkpoints/step_00000004"
    assert_same_run(root / killed, root / name, f"{last}/open_groups.pt")


DRAFTED = (*PARTIAL, "rollout.draft=ngram", "rollout.draft_ngram=1", "data.curriculum=0.9")


@pytest.fixture(scope="module")
def drafted_run(root: Path) -> Path:
    run(root, "drafted", *DRAFTED)
    return root / "drafted"


@pytest.mark.system
def test_runs_with_draft_tokens_are_resumed_bitwise(root: Path, drafted_run: Path) -> None:
    """Invariant 6 with proposed tokens, some of them in responses that the next step continues.

    And with a curriculum.
    """
    lines = steps_of(drafted_run)
    assert len(lines) == 4
    shares = [
        [v for k, v in one.items() if k.startswith("curr") and "/share" in k] for one in lines
    ]
    assert all(sum(one) == pytest.approx(1) for one in shares) and shares[3] != shares[0]
    # Of some hundred tokens that are about as likely, few follow a proposal.
    for key in ("rollout/draft_acceptance", "rollout/draft_share"):
        assert 0 < max(line[key] for line in lines) < 1
    for line in lines:
        # Log-probs of accepted tokens are those of the trainer's weights, like all others.
        assert line["mismatch/max_abs_log_prob_diff"] < 2e-4
    stopped = root / "drafted_stopped"
    interrupt(root, stopped.name, *DRAFTED, stage="step 2: update", by="SIGTERM")
    run(root, stopped.name, *DRAFTED)
    assert_same_run(stopped, drafted_run, "checkpoints/step_00000004/open_groups.pt")


@pytest.mark.system
def test_open_groups_at_another_temperature_are_refused_before_any_model_is_built(
    root: Path, partial_run: Path
) -> None:
    # With more steps than it has: else it is finished.
    path, *given = map(str, arguments(root, partial_run.name, *PARTIAL))
    config = load_config(path, [*given, "run.num_steps=9", "rollout.temperature=0.5"])
    with pytest.raises(ConfigError, match=mentions("temperature", 0.5, 1.0, "step_00000004")):
        train(config)


@pytest.mark.system
def test_partial_rollouts_go_on_in_a_branch_on_more_ranks(root: Path, partial_run: Path) -> None:
    point = f"checkpoint.branch_from={partial_run}/checkpoints/step_2"
    changes = ("objective.method=gapo_token", "objective.importance_weight_max=2")
    run(root, "partial_branch", *PARTIAL, point, *changes, "run.num_steps=3", ranks=2)
    (line,) = metrics_of(root / "partial_branch")
    assert line["step"] == 2
    assert 0 < line["rollout/carried_token_share"] < 1
    assert line["rollout/oldest_version_gap"] >= 1
    assert line["mismatch/max_abs_log_prob_diff"] < 2e-4
    assert line["mismatch/importance_weight"] == pytest.approx(1, abs=1e-4)


@pytest.mark.system
def test_every_name_that_runs_log_is_documented_once(
    whole_run: Path,
    branched_run: Path,
    partial_run: Path,
    run_given_back: Path,
    drafted_run: Path,
) -> None:
    logged = {
        key
        for run_dir in (whole_run, branched_run, partial_run, run_given_back, drafted_run)
        for name in ("metrics.jsonl", "timings.jsonl")
        for line in (run_dir / name).read_text().splitlines()
        for key in json.loads(line)
    } - {"step"}
    parts = dict.fromkeys(("c", "k", "n"), r"\d+") | {"side": "(correct|wrong)"}
    forms = [
        re.sub(r"\\{(\w+)\\}", lambda part: parts.get(part[1], "[^/]+"), re.escape(name))
        for name in documented_names()
    ]
    assert len(logged) > 100
    found = {key: [form for form in forms if re.fullmatch(form, key)] for key in logged}
    assert {key: names for key, names in found.items() if len(names) != 1} == {}


def test_a_branch_into_other_problems_is_refused_before_any_model_is_built(
    root: Path, whole_run: Path
) -> None:
    def begin(*overrides: str) -> None:
        path, *given = map(str, arguments(root, "bad", branch_point(whole_run), *overrides))
        train(load_config(path, given))

    with pytest.raises(ConfigError, match=mentions("batch.rollouts_per_prompt", 4, 8)):
        begin("batch.rollouts_per_prompt=8")
    problems = root / "task/train.jsonl"
    text = problems.read_text()
    try:
        problems.write_text(text.replace('"answer": "', '"answer": "1', 1))
        with pytest.raises(CheckpointError, match=mentions("data.train_path")):
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
def test_layouts_agree(root: Path, whole_run: Path, layout: tuple[str, ...]) -> None:
    """Invariant 2 for the whole program, in its first steps.

    Rounding differs in the last float32 bits of every GEMM and reduction; AdamW divides by the root
    of tiny second moments in its first steps and amplifies it, hence 2e-3 on derived quantities.
    """
    name = layout[0].replace("=", "_")
    run(root, name, "run.num_steps=2", "evaluation.every_steps=0", *layout, ranks=2)
    for line, expected in zip(metrics_of(root / name), steps_of(whole_run)[:2], strict=True):
        for key in ("reward/mean", "rollout/response_length/mean", "clip/fraction_sequences"):
            assert line[key] == expected[key], (key, line["step"])
        for key in ("loss/policy", "optim/grad_norm", "ratio/abs_deviation"):
            assert line[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-7), key


@pytest.mark.system
def test_a_run_starts_from_a_megatron_folder_and_resumes_from_its_own_checkpoint(
    root: Path, whole_run: Path
) -> None:
    convert(root / "base", root / "megatron")
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(root / "base", root / "bare", ignore=ignored)
    # Supervised training would make the weights anew.
    text, _, _ = CONFIG.format(root=root).partition("[supervised]")
    (root / "from_megatron.toml").write_text(text)
    command = (
        "gapo_megatron.train",
        root / "from_megatron.toml",
        f"run.output_dir={root}/from_megatron",
        f"model.hf_dir={root}/bare",
        f"model.megatron_dir={root}/megatron",
        "evaluation.every_steps=0",
    )
    finish(Program(*command, "run.num_steps=1"))
    assert "resumed from" in finish(Program(*command, "run.num_steps=3"))
    assert metrics_of(root / "from_megatron") == steps_of(whole_run)[:3]
    # vLLM began with random weights; the first sync, before any metric, would have failed.
    exported = load_file(root / "from_megatron/hf/model.safetensors")
    assert exported.keys() == load_file(root / "base/model.safetensors").keys()


ROOM = """
import sys
from gapo_megatron import train
from gapo_megatron.config import load_config
from gapo_megatron.policy import Policy
from gapo_megatron.run import engines

built, build = [], Policy.build
Policy.build = lambda *arguments: built.append(build(*arguments)) or built[0]

def look(*_, **__):
    (buffer,) = built[0].model[0].buffers
    sizes = [data.untyped_storage().nbytes() for data in (buffer.grad_data, buffer.param_data)]
    sys.exit("{} bytes of gradients, {} of weights".format(*sizes))

engines.RolloutEngine = look
train.train(load_config(sys.argv[1], sys.argv[2:]))
"""


@pytest.mark.system
def test_there_is_room_when_vllm_starts(root: Path) -> None:
    """On a GPU it checks free memory, and refuses to start with less than its share."""
    process = start_python("-c", ROOM, *arguments(root, "room", "optimizer.offload=all"))
    assert "0 bytes of gradients, 0 of weights" in finish(process, exit_code=1).splitlines()
