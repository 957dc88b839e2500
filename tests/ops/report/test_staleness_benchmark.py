"""benchmarks/staleness.py on run folders with known numbers, and on a training that is stood in."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import staleness
from gapo_megatron.config import load_config
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.ops.report.arms import Arm
from tests.report_setup import CONFIG, NUM_STEPS, write_run

SEEDS = (0, 1, 2)
LAST = [0.5, 0.51, 0.54]
"""pass@1 of the seeds after the last step: `report_setup.pass_at`."""
CLIPPED = {"on-policy": 0.25, "decoupled": 0.26, "around older weights": 0.75}


def write_arm(root: Path, arm: str) -> list[Path]:
    folders = []
    for seed in SEEDS:
        folder = root / f"{arm.replace(' ', '_')}_{seed}"
        ranks = "rollout.generation_ranks=1"
        write_run(folder, ranks, *staleness.ARMS[arm], seed=seed)
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if "reward/mean" not in row:
                continue
            # Even and odd steps differ; of seeds only the on-policy arm's.
            swing = 0.1 if row["step"] % 2 else -0.1
            shift = 0.01 * seed if arm == "on-policy" else 0.0
            row["clip/fraction_sequences"] = CLIPPED[arm] + swing + shift
            if arm != "on-policy":
                row["mismatch/outside_clip"] = 0.5 + swing
            if arm == "decoupled":
                row["mismatch/importance_weight"] = 1.01 + swing
                row["mismatch/importance_weight_cut"] = 0.0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> list[Arm]:
    root = tmp_path_factory.mktemp("runs")
    return staleness.read_arms({arm: write_arm(root, arm) for arm in staleness.ARMS})


def test_the_table_has_the_known_numbers(arms: list[Arm]) -> None:
    _, _, *lines = staleness.table(arms).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    # Student's t of three seeds: 4.303 standard errors.
    mean = 100 * sum(LAST) / 3
    half = 4.3027 * (sum((100 * v - mean) ** 2 for v in LAST) / 2 / 3) ** 0.5
    shown = f"{mean:.2f} ± {half:.2f}"
    assert cells[0] == [
        *("on-policy", shown, "50.0, 51.0, 54.0", "-", "26.00 ± 2.48", "-"),
        *("-", "-", "-"),
    ]
    assert cells[1] == [
        *("decoupled", shown, "50.0, 51.0, 54.0", "+0.00 ± 0.00", "26.00 ± 0.00", "+0.00 ± 2.48"),
        *("50.00 ± 0.00", "1.0100 ± 0.0000", "0.00 ± 0.00"),
    ]
    assert cells[2][4:] == ["75.00 ± 0.00", "+49.00 ± 2.48", "50.00 ± 0.00", "-", "-"]


def test_one_seed_has_no_interval(arms: list[Arm]) -> None:
    alone = [Arm(arm.label, arm.runs[:1], {}) for arm in arms]
    *_, line = staleness.table(alone).splitlines()
    assert line == "| around older weights | 50.00 | 50.0 | - | 75.00 | - | 50.00 | - | - |"


def test_the_curves_are_drawn_and_written(arms: list[Arm], tmp_path: Path) -> None:
    paths = staleness.draw(arms, tmp_path / "staleness")
    assert [path.name for path in paths] == [f"staleness.{kind}" for kind in ("csv", "png", "pdf")]
    assert all(path.stat().st_size > 1000 for path in paths)
    rows = list(csv.DictReader(paths[0].open()))
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["metric"], set()).add(row["arm"])
    stale = {"decoupled", "around older weights"}
    assert found == {
        "eval/pass@1": stale | {"on-policy"},
        "clip/fraction_sequences": stale | {"on-policy"},
        "mismatch/outside_clip": stale,
        "mismatch/importance_weight": {"decoupled"},
    }
    # A window of four steps: the swing is gone.
    clipped = [row for row in rows if row["metric"] == "clip/fraction_sequences"]
    means = [float(row["mean"]) for row in clipped if row["arm"] == "around older weights"]
    assert means == [pytest.approx(0.75)] * (NUM_STEPS - 3)


def command(tmp_path: Path, *more: str) -> list[str]:
    warm = tmp_path / "warm_start"
    warm.mkdir(exist_ok=True)
    given = ["--config", str(CONFIG), "--folder", str(tmp_path / "runs"), "--seeds", "0", "1"]
    return ["staleness.py", *given, "--steps", "20", f"model.hf_dir={warm}", *more]


def finish(started: list[list[str]], words: list[str]) -> subprocess.CompletedProcess[str]:
    """What a training leaves behind; the third one is killed half-way, the first time."""
    started.append(words)
    settings = words[words.index(str(CONFIG)) + 1 :]
    config = load_config(CONFIG, settings)
    if len(started) == 3:
        return subprocess.CompletedProcess(words, 137)
    folder = Path(config.run.output_dir)
    write_run(folder, seed=config.run.seed, num_steps=20, wanted=20)
    (folder / "config.toml").write_text(to_toml(config))
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [row | {"clip/fraction_sequences": 0.25} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    mark_finished(folder, num_steps=20)
    return subprocess.CompletedProcess(words, 0)


def test_runs_that_are_finished_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", command(tmp_path))
    with patch.object(subprocess, "run", lambda words, **_: finish(started, words)):
        with pytest.raises(SystemExit, match=r"around_older_weights_0 .*137.*weights_0\.log"):
            staleness.main()
        assert len(started) == 3  # every arm of the first seed first
        staleness.main()
        assert len(started) == 3 + 1 + 3
        out = capsys.readouterr().out
        assert out.count("is finished") == 2 and (tmp_path / "runs/staleness.png").exists()
        staleness.main()
        assert len(started) == 7
        # Other settings are other runs.
        monkeypatch.setattr(sys, "argv", command(tmp_path, "objective.eps_low=0.005"))
        with pytest.raises(SystemExit, match=r"on-policy_0 has other objective\.eps_low: "):
            staleness.main()
    for words in started:
        assert words[words.index("-m") + 1] == "torch.distributed.run"
        assert "rollout.generation_ranks=1" in words and "run.num_steps=20" in words
