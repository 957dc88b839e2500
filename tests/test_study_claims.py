"""The table of claims (benchmarks/study.py) on runs with known numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from gapo_megatron.report.archive import read_archive, write_archive
from gapo_megatron.report.runs import read_run
from tests.report_setup import NUM_STEPS, deviation, pass_at, write_run

_PATH = Path(__file__).parents[1] / "benchmarks" / "study.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("benchmarks_study", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All arms of the study with two seeds, of gapo three, as an archive gives them back."""
    root = tmp_path_factory.mktemp("study")
    arms = [(method, {}) for method in ("gapo", "gspo_asym", "f_gspo", "gapo_token", "dr_grpo")]
    arms += [(method, {"eps_high_max": 0.003}) for method in ("gspo", "grpo", "f_grpo")]
    for method in ("gapo", "gspo_asym"):
        arms += [(method, {"eps_high_max": clip}) for clip in (0.007, 0.01)]
        arms += [(method, {"k": k}) for k in (4, 16)]
    folders = []
    for method, more in arms:
        for seed in range(3 if (method, more) == ("gapo", {}) else 2):
            settings = {
                "batch.rollouts_per_prompt": more.get("k", 8),
                "objective.eps_low": 0.003,
                "objective.eps_high_max": more.get("eps_high_max", 0.005),
            }
            folder = root / f"{method}-{'-'.join(map(str, more.values()))}-{seed}"
            overrides = [f"{key}={value}" for key, value in settings.items()]
            folders.append(write_run(folder, *overrides, method=method, seed=seed))
    for seed in range(2):
        folder = root / f"branch-{seed}"
        clips = ("objective.eps_low=0.003", "objective.eps_high_max=0.005")
        folders.append(write_run(folder, *clips, method="gapo", seed=seed))
        left = {"run": str(root / f"gspo_asym--{seed}"), "checkpoint": "step_20", "step": 20}
        changes = {"objective.method": ["gspo_asym", "gapo"]}
        (folder / "branch.json").write_text(json.dumps({**left, "changes": changes}))
    write_archive([read_run(folder) for folder in folders], root / "archive")
    return read_archive(root / "archive")


def test_every_claim_has_its_number(study, runs):
    found = {(one.claim, one.what): one for one in study.findings(study.Study(runs))}
    lines = study.table(runs).splitlines()
    assert len(lines) == 2 + len(found) == 2 + 8 + 6 + 2 + 3 + 12 + 4 + 3 + 3
    gain = found["better at equal budget", "gapo minus gspo: pass@1"]
    expected = [pass_at("gapo", s, NUM_STEPS)[0] - pass_at("gspo", s, NUM_STEPS)[0] for s in (0, 1)]
    assert gain.values == pytest.approx({s: 100 * one for s, one in enumerate(expected)})
    # Three times the deviation; even steps have three times the rollouts of odd ones.
    drift = found["scarce rollouts drift more", "gapo: drift, c 1-2 minus 6-7"]
    means = {c: (3 * deviation(c, 8, 0, 0) + deviation(c, 8, 0, 1)) / 4 for c in (1, 2, 6, 7)}
    expected = 100 * 3 * (means[1] + means[2] - means[6] - means[7]) / 2
    assert drift.values == pytest.approx({s: (1 + s / 10) * expected for s in range(3)}, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.0, 1.1, 1.2), "reproduced"),
        ((-1.0, -1.1, -1.2), "not reproduced"),
        ((1.0, -1.1, 1.2), "not resolvable"),
        ((0.0, 0.0, 0.0), "not resolvable"),
    ],
)
def test_the_interval_decides(study, values, verdict):
    row = study.Finding("claim", "what", dict(enumerate(values)), p_value=0.02).row()
    assert row.endswith(f"| {verdict} |")
    assert "*" in row


def test_the_repository_has_these_arms(study):
    """What the configs run is what the table asks for."""
    from gapo_megatron.launch.study import read_study

    configs = _PATH.parents[1] / "configs"
    runs = read_study(configs / "study_miniature.toml").runs
    arms = {}
    for run in runs:
        method = run.config.objective.resolve()
        key = (method.name, run.config.batch.rollouts_per_prompt, method.eps_high_max)
        arms.setdefault(key, []).append(run.config.run.seed)
    assert all(len(seeds) >= 3 for seeds in arms.values())
    sequence = {("gspo", 8, 3e-3), *((m, 8, 5e-3) for m in ("gapo", "gspo_asym", "f_gspo"))}
    token = {(m, 8, 0.028) for m in ("gapo_token", "dr_grpo")}
    token |= {(m, 8, 0.02) for m in ("grpo", "f_grpo")}
    more = {(m, k, 5e-3) for m in ("gapo", "gspo_asym") for k in (4, 16)}
    more |= {(m, 8, clip) for m in ("gapo", "gspo_asym") for clip in (7e-3, 1e-2)}
    assert arms.keys() == sequence | token | more
    branches = read_study(configs / "study_miniature_branch.toml").runs
    assert {run.config.run.seed for run in branches} == {0, 1, 2}
    folders = {run.run_dir: run for run in runs}
    for run in branches:
        left = Path(run.config.checkpoint.branch_from).absolute().parents[1]
        assert folders[left].config.objective.method == "gspo_asym"
        assert 100 in folders[left].config.checkpoint.keep_steps
