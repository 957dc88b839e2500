"""Runs of older versions resume with this version (tests/old_files)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program

ROUNDING = ("mismatch/", "sync/", "numerics/noise_floor")
"""Metrics of differences by rounding between two computations of a number."""
NEWER = ("sync/ratio_deviation", "rollout/token_share/")
"""Metrics that newer versions log beside those of the expected file: shares."""
OLD = Path(__file__).parents[1] / "old_files"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("checkpoint", ["step_00000003_1", "step_00000002"])
def test_a_run_of_an_older_version_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    """Within a step and between steps; both with open groups and the settings of their version."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    for other in {path.name for path in checkpoints.iterdir()} - {checkpoint}:
        if other > checkpoint:
            shutil.rmtree(checkpoints / other)
    monkeypatch.chdir(tmp_path)

    program = Program("gapo_megatron.train", "config.toml")
    output, _ = program.communicate()
    assert program.returncode == 0, output
    assert f"resumed from run/checkpoints/{checkpoint}" in output

    expected = lines_of(OLD / "expected" / "metrics.jsonl")
    found = lines_of(tmp_path / "run" / "metrics.jsonl")
    for line, wanted in zip(found, expected, strict=True):
        newer = [line.pop(name) for name in [*line] if name.startswith(NEWER)]
        assert line.keys() == wanted.keys() and all(0 <= value <= 1 for value in newer)
        # Differences that are rounding alone are other ones on every kind of CPU, and below a bound
        # on all of them (the invariant of float32 on a CPU).
        rounding = [name for name in line if name.startswith(ROUNDING)]
        assert all(line.pop(name) < 1e-5 for name in rounding), line
        # Everything else was computed from the same samples, by sums in another order. A random
        # number falls between two CPUs' bounds of a token with a probability of about 1e-6; there
        # are 2,000 tokens.
        wanted = {name: value for name, value in wanted.items() if name not in rounding}
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-6, nan_ok=True)
