"""A run on an environment of the package `verifiers`: real Megatron-core, real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.io.sample_files import read_samples
from tests.train_setup import CONFIG, arguments, metrics_of, prepare, steps_of
from tests.verifiers_setup import toml_of, write_environment
from tests.waiting import HANG_S

pytestmark = pytest.mark.system

TEMPLATE = (
    "{% for one in messages %}"
    "{% if one.role == 'assistant' %}{{ one.content }}</s>"
    "{% else %}<pad>{{ one.content }}{% endif %}"
    "{% endfor %}"
)
SECTION = """
[environment]
kind = "gapo_megatron.rollout.agents.verifiers:play"
ENV
"""
SETTINGS = (
    "reward.kind=gapo_megatron.rollout.agents.verifiers:reward",
    "run.num_steps=2",
    "rollout.max_response_tokens=60",
    "batch.minibatch_prompts=8",  # one update of each step: every ratio is exactly 1
    "metrics.samples_per_step=32",
    "evaluation.every_steps=2",
)


def python(root: Path, *arguments: object) -> None:
    """Run a program that can import the environment's module."""
    here = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{here}:{root / 'modules'}", "OMP_NUM_THREADS": "1"},
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("verifiers.v1")
    root = tmp_path_factory.mktemp("verifiers")
    env = write_environment(root / "modules")
    env["taskset"] |= {"path": f"{root}/task/train.jsonl", "task": {"log": f"{root}/log"}}
    prepare(root, CONFIG + SECTION.replace("ENV", toml_of(env)))
    (root / "base/chat_template.jinja").write_text(TEMPLATE)
    config, tasks = root / "config.toml", root / "tasks"
    python(root, "tools/prepare_data.py", "verifiers", "--config", config, "--output", tasks)
    lines = (root / "tasks/problems.jsonl").read_text().splitlines(keepends=True)
    (root / "train.jsonl").write_text("".join(lines[8:]))
    (root / "eval.jsonl").write_text("".join(lines[:8]))
    return root


def test_an_environment_of_the_package_trains(root: Path) -> None:
    paths = (f"data.train_path={root}/train.jsonl", f"data.eval_path={root}/eval.jsonl")
    python(root, "-m", "gapo_megatron.train", *arguments(root, "run", *SETTINGS, *paths))
    lines: list[dict[str, Any]] = steps_of(root / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["environment/error_share"] == 0 and line["environment/turns"] > 1.5
        assert line["ratio/abs_deviation_max"] == 0 and line["clip/fraction_sequences"] == 0
        assert line["optim/grad_norm"] > 0
    (evaluated, *_) = [one for one in metrics_of(root / "run") if "eval/pass@1" in one]
    assert 0 < evaluated["eval/pass@1"] < 1
    scored: dict[int, list[Any]] = {}
    for line in (root / "log").read_text().splitlines():
        number, *counts, reply = json.loads(line)
        scored.setdefault(number, []).append((counts, reply))
    samples = [one for one in read_samples(root / "run") if not one.truncated]
    assert len(samples) > 32 and {one.verdict for one in samples} == {"correct", "wrong"}
    rows = map(json.loads, (root / "tasks/problems.jsonl").read_text().splitlines())
    by_id = {row["id"]: row for row in rows}
    for one in samples:
        row = by_id[one.problem]
        _, first, second = f"{one.prompt}{one.response}".split("<pad>")
        turns = [turn.removeprefix(row["prompt"]).removesuffix("</s>") for turn in (first, second)]
        counts = [sum(len(turn) + 1 for turn in turns), 1 + one.num_tokens, 2]
        assert (counts, turns[1]) in scored[row["task"]], one
