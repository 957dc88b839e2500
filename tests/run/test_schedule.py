"""A learning rate that falls, in whole runs: killed, resumed, and made longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import Program
from tests.train_setup import (
    CONFIG,
    arguments,
    assert_same_run,
    finish,
    interrupt,
    prepare,
    run,
    steps_of,
)

FALLS = (
    *("optimizer.schedule=cosine", "optimizer.min_learning_rate=1e-4"),
    *("optimizer.warmup_steps=2", "evaluation.every_steps=0"),
)


@pytest.mark.system
def test_a_resume_repeats_the_schedule_and_a_longer_run_must_say_which(tmp_path: Path) -> None:
    root = prepare(tmp_path, CONFIG)
    given = (*FALLS, "run.num_steps=4")
    run(root, "whole", *given)
    rates = [row["optim/learning_rate"] for row in steps_of(root / "whole")]
    # A mini-batch whose rewards are all alike makes no update, and the rate stays.
    assert 1e-3 >= rates[0] >= rates[1] >= rates[2] >= rates[3] > 1e-4
    assert rates[0] > rates[3]
    interrupt(root, "killed", *given, stage="step 3: update", by="SIGKILL")
    assert "resumed from" in run(root, "killed", *given)
    assert_same_run(root / "killed", root / "whole")

    longer = (*FALLS, "run.num_steps=6")
    said = finish(Program("gapo_megatron.train", *arguments(root, "whole", *longer)), exit_code=2)
    assert "optimizer.decay_steps (12) was 8" in said
    run(root, "whole", *longer, "optimizer.decay_steps=8")
    rates = [row["optim/learning_rate"] for row in steps_of(root / "whole")]
    assert rates[-1] == 1e-4
