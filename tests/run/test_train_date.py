"""The whole program with a template that prints the date: all of a run has the day it began on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapo_megatron.data.template_date import DATE_NAME
from gapo_megatron.io.sample_files import read_samples
from tests import train_setup
from tests.programs import Program
from tests.train_setup import arguments, finish, run, steps_of, write_inputs

CONFIG = train_setup.CONFIG.replace(
    "max_prompt_tokens = 20", "max_prompt_tokens = 32\nchat_template = true"
)
# Digits are tokens of the task.
TEMPLATE = "{{ strftime_now('%d%m%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
FIRST = "2020-01-31"


@pytest.mark.system
def test_requeue_branch_evaluation_and_sft_keep_the_day(tmp_path: Path) -> None:
    """The run began long ago: what takes the clock's day has other prompts, and is refused."""
    root = write_inputs(tmp_path, CONFIG)
    (root / "init/chat_template.jinja").write_text(TEMPLATE)

    def begin(folder: str, day: str) -> Path:
        (root / folder).mkdir(exist_ok=True)
        (root / folder / DATE_NAME).write_text(f"{day}\n")
        return root / folder

    def days(folder: Path) -> set[str]:
        """First tokens of the prompts."""
        return {one.prompt[:8] for one in read_samples(folder)}

    run_dir, changes = begin("run", FIRST), ("checkpoint.every_steps=2", "evaluation.every_steps=0")
    finish(Program("gapo_megatron.sft", root / "config.toml", "supervised.num_steps=2"))
    run(root, "run", "run.num_steps=2", *changes)
    run(root, "run", "run.num_steps=3", *changes)
    assert len(steps_of(run_dir)) == 3 and days(run_dir) == {"31012020"}

    point = f"checkpoint.branch_from={run_dir}/checkpoints/step_00000002"
    run(root, "branch", "run.num_steps=3", point, *changes)
    assert days(root / "branch") == {"31012020"}
    assert (root / "branch" / DATE_NAME).read_text().strip() == FIRST

    options = ("--problems", root / "task/eval.jsonl", "--kind", "exact", "--chat-template")
    limits = ("--num-samples", 1, "--max-response-tokens", 4, "--max-prompt-tokens", 32)
    engine = ("--precision", "fp32", "--enforce-eager", "--output", root / "evaluated")
    model = ("--model", run_dir / "hf")
    finish(Program("gapo_tools.evaluate", *model, *options, *limits, *engine))
    assert json.loads((root / "evaluated/results.json").read_text())["template_date"] == FIRST

    begin("run", "2020-02-01")
    again = arguments(root, "run", "run.num_steps=4", *changes)
    said = finish(Program("gapo_megatron.train", *again), exit_code=1)
    assert FIRST in said and "2020-02-01" in said and "data.template_date" in said
    run(root, "run", "run.num_steps=4", f"data.template_date={FIRST}", *changes)
    assert (run_dir / DATE_NAME).read_text().strip() == FIRST and days(run_dir) == {"31012020"}
