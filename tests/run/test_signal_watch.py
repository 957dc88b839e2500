"""Steps with nothing to learn from are said, and how often."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron.run.metrics import MetricsWriter
from tests.io.test_sample_files import sample_of
from tests.run.test_metrics import fake_wandb, make_config

WRONG = {"groups/zero_advantage_share": 1.0, "per_c/groups/c0": 2.0, "reward/mean": 0.0}
MIXED = WRONG | {"per_c/groups/c2": 1.0, "reward/mean": 0.5}
UNKNOWN = {"groups/zero_advantage_share": 0.0, "per_c/groups/c0": 0.0, "reward/mean": 0.0}
TEACHES = {"groups/zero_advantage_share": 0.9, "per_c/groups/c0": 2.0, "reward/mean": 0.1}
EVALUATION = {"eval/pass@1": 0.0}
SAMPLES = [
    replace(sample_of(0, i), response=400 * "x" + f"end {i}", reason=f"reason {i}", answer="42")
    for i in range(4)
]


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def run(folder: Path, steps: list[dict[str, float]], *, first: int = 0) -> MetricsWriter:
    writer = MetricsWriter(folder, config=make_config(), resume_step=first)
    for step, metrics in enumerate(steps, start=first):
        writer.log_samples(step, SAMPLES)
        writer.log(step, metrics)
    return writer


@pytest.mark.parametrize("metrics", [WRONG, MIXED, UNKNOWN, WRONG | {"reward/mean": 1.0}])
def test_a_step_that_teaches_nothing_is_said_with_three_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: dict[str, float]
) -> None:
    run(tmp_path, [TEACHES, EVALUATION, metrics]).close(is_finished=True)
    (text,) = caplog.messages
    assert "step 2 " in text and "samples.jsonl" in text
    for i in range(4):
        assert (f"end {i}" in text) == (f"reason {i}" in text) == (i < 3)
    assert "'42'" in text and "x" * 201 not in text


def test_it_is_said_again_rarely_also_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [WRONG] * 8).close()
    assert len(caplog.messages) == 1
    run(tmp_path, [WRONG] * 8, first=8).close()
    assert ["step 9 " in text for text in caplog.messages] == [False, True]
    # A damaged or repeated line does not count.
    run(tmp_path, [WRONG] * 90, first=11).close()
    assert ["step 99 " in text for text in caplog.messages] == [False, False, True]


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("before", [TEACHES, WRONG])
def test_a_run_that_never_taught_anything_is_said_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: dict[str, float], is_finished: bool
) -> None:
    run(tmp_path, [before]).close()
    run(tmp_path, [UNKNOWN, WRONG], first=1).close(is_finished=is_finished)
    is_said = is_finished and before is WRONG
    assert any("none of the 3 steps" in text for text in caplog.messages) == is_said


def test_a_run_without_steps_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [EVALUATION]).close(is_finished=True)
    assert not caplog.messages


def test_samples_can_be_off_and_are_shown_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(samples_per_step=0)
    with MetricsWriter(tmp_path, config=config) as writer:
        writer.log_samples(0, SAMPLES)
        writer.log(0, WRONG)
    assert not (tmp_path / "samples.jsonl").exists()
    assert "reason 2" in caplog.text


def test_wandb_shows_samples_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = fake_wandb(monkeypatch)
    long = replace(sample_of(5), response="a" * 5000 + "b" * 5000)
    with MetricsWriter(tmp_path, config=make_config(wandb_project="gapo")) as writer:
        writer.log_samples(5, [long, replace(sample_of(5, 1), metrics={"format": 0.5})])
    ((step, table), _) = logged
    columns, data = table["samples"]
    assert step == 5
    assert [*columns] == [*json.loads((tmp_path / "samples.jsonl").read_text().split("\n")[0])]
    shown = data[0][columns.index("response")]
    assert shown.startswith("a" * 1000) and shown.endswith("b" * 1000)
    assert "8000" in shown and len(shown) < 2100
    assert [row[columns.index("problem")] for row in data] == ["p0", "p1"]
    # A table of W&B refuses mappings with different keys in one column.
    assert [row[columns.index("metrics")] for row in data] == ["{}", '{"format": 0.5}']
