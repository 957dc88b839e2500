"""A small task and model, and programs that train on it; for tests of whole runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.io.token_files import token_files
from gapo_tools.demonstration import demo_task as arithmetic
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


def prepare(root: Path, config: str) -> Path:
    """Fill the folder with task, tokenizer, model and `config`, the text of its config.toml."""
    write_inputs(root, config)
    finish(Program("gapo_megatron.sft", root / "config.toml"))
    return root


def write_inputs(root: Path, config: str) -> Path:
    """What `prepare` leaves before the supervised steps: the model, in `init`, is random."""
    (root / "task").mkdir()
    arithmetic.write_task(root / "task", seed=0, num_eval=32, num_train=400, num_supervised=20000)
    # Two levels of training problems, for runs with a curriculum.
    rows = [json.loads(line) for line in (root / "task/train.jsonl").read_text().splitlines()]
    for row in rows:
        row["level"] = "odd" if int(row["answer"]) % 2 else "even"
    (root / "task/train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
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
    return root


def launched(attempt_dir: Path) -> dict[str, str]:
    """Prepare a start as slurm/launch.sh does; returns the variables for the ranks."""
    attempt_dir.mkdir(parents=True)
    (attempt_dir.parents[1] / "OWNER").write_text(attempt_dir.name)
    return {"GAPO_ATTEMPT": attempt_dir.name, "GAPO_ATTEMPT_DIR": str(attempt_dir)}


def finish(process: subprocess.Popen[str] | Program, *, exit_code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == exit_code, output[-6000:]
    return output


def arguments(root: Path, name: str, *settings: str) -> tuple[object, ...]:
    """Command line of the run `name`."""
    return (root / "config.toml", f"run.output_dir={root}/{name}", *settings)


def run(root: Path, name: str, *settings: str, **options: Any) -> str:
    """Train to the end; returns the output."""
    command = arguments(root, name, *settings)
    return finish(Program("gapo_megatron.train", *command, **options))


def interrupt(
    root: Path, name: str, *settings: str, stage: str, by: str, rank: int = 0, **options: Any
) -> str:
    """Train until `rank` gets the signal `by` as it enters `stage`; returns the output."""
    env = {"STAGE": stage, "SIGNAL": by, "SIGNALLED_RANK": str(rank)} | options.pop("env", {})
    command = arguments(root, name, *settings)
    exit_code = -signal.SIGKILL if by == "SIGKILL" else 0
    return finish(Program("tests.signalled", *command, env=env, **options), exit_code=exit_code)


def stop_and_resume(
    root: Path, name: str, *settings: str, stage: str, by: str = "SIGUSR1", **options: Any
) -> None:
    """Train under a launcher, with a signal as rank 0 enters `stage`, and again to the end."""
    first, second = (root / name / "attempts" / attempt for attempt in ("7.0", "7.1"))
    stopped = interrupt(root, name, *settings, stage=stage, by=by, env=launched(first), **options)
    output = run(root, name, *settings, env=launched(second), **options)
    assert "resumed from" in output
    if by != "SIGKILL":
        assert (first / "outcome").read_text() == "stopped\n", stopped[-4000:]
        step = int(stage.split()[1].rstrip(":"))
        assert f"step_{step:08d}_1" in output, "within the step"
    assert (second / "outcome").read_text() == "finished\n"


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of its training steps, without those of evaluations alone."""
    return [line for line in metrics_of(run_dir) if "loss/policy" in line]


def trainer_state(run_dir: Path, *, step: int) -> dict[str, Any]:
    path = run_dir / f"checkpoints/step_{step:08d}/trainer_state.json"
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def num_problems_drawn(run_dir: Path, *, step: int) -> int:
    """Since the run began, by its checkpoint after `step`."""
    source = trainer_state(run_dir, step=step)["source"]
    num_problems = len((run_dir.parent / "task/train.jsonl").read_text().splitlines())
    return num_problems * (1 + int(source["epoch"])) - len(source["remaining"])


def assert_same_run(run_dir: Path, other: Path, *more: str) -> None:
    """They have the same metrics, samples and exported weights, and the same bytes in `more`."""
    ours, theirs = token_files(run_dir), token_files(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[step].read_bytes() == theirs[step].read_bytes() for step in ours)
    for name in ("metrics.jsonl", "samples.jsonl", "hf/model.safetensors", *more):
        assert (run_dir / name).read_bytes() == (other / name).read_bytes(), name


def documented_names() -> list[str]:
    """First column of every table of docs/metrics.md on what runs write."""
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    text, reports = page.split("\n## Reports\n")
    assert "step_time" in reports and "step_time" not in text
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall("`(.+?)`", cell)]
