"""The table of claims (studies/miniature/claims.py) on runs with known numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from studies.archive import read_archive, read_study_run, write_archive
from studies.miniature import claims
from tests.messages import mentions
from tests.report_setup import NUM_STEPS, write_run

HERE = Path(__file__).parent
ARMS: list[tuple[str, int, float]] = [
    *((method, 8, 5e-3) for method in ("gapo", "gspo_asym", "f_gspo", "gapo_token", "dr_grpo")),
    *((method, 8, 3e-3) for method in ("gspo", "grpo", "f_grpo")),
    *((method, k, 5e-3) for method in ("gapo", "gspo_asym") for k in (4, 16)),
    *((method, 8, clip) for method in ("gapo", "gspo_asym") for clip in (7e-3, 1e-2)),
]


def gain(method: str, k: int, *, holds: bool, branch: bool = False) -> int:
    """Of 16 samples of a problem, how many more are correct at the end."""
    if branch:
        return 3 if holds else 0
    if method == "gapo_token":
        return 3 if holds else 1
    if (method == "gapo") == holds and method in ("gapo", "gspo_asym"):
        return 2 if k == 4 else 4
    if method == "gapo":
        return 2 if k == 16 else 0
    return 0 if holds else 4


def reshape(folder: Path, method: str, k: int, seed: int, *, holds: bool, **more: bool) -> None:
    """Give a run the numbers of a world in which every claim holds, or none does."""
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        growth = 1 + row["step"] / NUM_STEPS + seed / 10
        for c in range(1, k):
            deviation = 1e-3 * (k - c) * growth * (1 if holds else -1)
            if method != "gapo":  # no straight line in the advantage
                deviation += 2e-3 * (c % 3)
            clipped = 0.2 if holds else 0.04 * (8 - c)
            if method.startswith("gapo"):
                clipped = 0.04 * c if holds else 0.5 - 0.07 * c
            values = {
                "ratio_deviation": deviation,
                "ratio_abs_deviation": 3 * deviation,
                "clip_fraction_sequences": clipped * (1 + seed / 100),
                "clip_gradient_mass_lost": clipped / 2,
            }
            if f"per_c/correct/ratio_deviation/c{c}" in row:
                row |= {f"per_c/correct/{name}/c{c}": value for name, value in values.items()}
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    more_correct = gain(method, k, holds=holds, **more)
    for step in (0, 20, 40):
        counts = [0, 0, 3, 5, 8]
        for i in range(len(counts)):
            if more_correct and not (i == 1 and seed == 1):
                counts[i] += more_correct * step // NUM_STEPS
            elif not more_correct and 0 < step < NUM_STEPS:
                counts[i] += 1
        problems = [
            {"id": f"p{i}", "level": "", "num_samples": 16, "num_correct": count}
            for i, count in enumerate(counts)
        ]
        path = folder / "evaluations" / f"step_{step}.json"
        path.write_text(json.dumps({"problems": problems}))


def write_world(root: Path, *, holds: bool) -> list[Path]:
    """All arms of the study with two seeds, of gapo three; and a branch with two."""
    folders = []
    arms = [(*arm, False) for arm in ARMS] + [("gapo", 8, 5e-3, True)]
    for method, k, clip, branch in arms:
        usual = (method, k, clip, branch) == ("gapo", 8, 5e-3, False)
        for seed in range(3 if usual else 2):
            folder = root / f"{method}-{k}-{clip}{'-branch' if branch else ''}-{seed}"
            write_run(
                folder,
                f"batch.rollouts_per_prompt={k}",
                "objective.eps_low=0.003",
                f"objective.eps_high_max={clip}",
                "evaluation.samples_per_prompt=16",
                method=method,
                seed=seed,
            )
            reshape(folder, method, k, seed, holds=holds, branch=branch)
            if branch:
                left = {"run": str(root / f"gspo_asym-8-0.005-{seed}"), "step": 20}
                changes = {"objective.method": ["gspo_asym", "gapo"]}
                record = {**left, "checkpoint": "step_20", "changes": changes}
                (folder / "branch.json").write_text(json.dumps(record))
            folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Runs by whether the claims hold, as an archive gives them back."""
    found = {}
    for holds in (True, False):
        root = tmp_path_factory.mktemp("study")
        folders = write_world(root, holds=holds)
        write_archive([read_study_run(folder) for folder in folders], root / "archive")
        found[holds] = read_archive(root / "archive")
    return found


@pytest.mark.parametrize("holds", [True, False])
def test_every_claim_looks_where_it_says_and_in_the_right_direction(worlds, holds):
    found = list(claims.findings(claims.Study(worlds[holds])))
    assert len({(one.claim, one.what) for one in found}) == len(found)
    numbers = [8 + 8, 8, 6, 3, 1 + 3, 9 + 9, 1, 3 + 1, 2, 1, 1, 1, 2, 1 + 3]
    assert len(claims.table(worlds[holds]).splitlines()) == 2 + len(found) == 2 + sum(numbers)
    for one in found:
        mean = sum(one.values.values()) / len(one.values)
        wanted = mean > 0.01 if one.margin is None else abs(mean) < one.margin
        assert wanted == holds, (one.claim, one.what, one.values)
        shared = 3 if "minus gapo" not in one.what and one.what.startswith("gapo: ") else 2
        assert len(one.values) == shared, one.what


def test_values_are_those_of_the_runs(worlds):
    found = {one.what: one for one in claims.findings(claims.Study(worlds[True]))}
    # Points of five problems: four of 16 samples more on each, on one of them not for seed 1.
    gained = found["gapo minus gspo: pass@1"]
    assert gained.values == pytest.approx({0: 100 * 4 / 16, 1: 100 * 4 / 16 * 4 / 5})
    assert found["gapo minus gspo: pass@16"].values == pytest.approx({0: 40.0, 1: 20.0})
    # Steps 20 to 39, of which even ones have three times the rollouts of odd ones.
    weights = [3, 1] * 10
    growth = sum(w * (1 + s / 40) for s, w in zip(range(20, 40), weights, strict=True)) / 40
    moved = found["gapo: s - 1, c 1-2 minus 6-7"].values
    assert moved == pytest.approx({s: 0.1 * 5 * (growth + s / 10) for s in range(3)}, rel=1e-3)
    clipped = found["gapo minus gspo_asym: clipped, c 6-7"].values
    assert clipped == pytest.approx({s: (26 - 20) * (1 + s / 100) for s in range(2)}, rel=1e-3)
    assert found["gspo: clipped, c 1-2 minus 6-7"].margin == pytest.approx(0.2 * 20.1)


@pytest.mark.parametrize(
    ("values", "margin", "verdict"),
    [
        ((1.0, 1.1, 1.2), None, "reproduced"),
        ((-1.0, -1.1, -1.2), None, "not reproduced"),
        ((1.0, -1.1, 1.2), None, "not resolvable"),
        ((0.0, 0.0, 0.0), None, "not resolvable"),
        # Three times the same says nothing of a fourth.
        ((0.4, 0.4, 0.4), None, "not resolvable"),
        ((0.1, -0.1, 0.0), 1.0, "reproduced"),
        ((1.5, 1.6, 1.4), 1.0, "not reproduced"),
        ((-1.5, -1.6, -1.4), 1.0, "not reproduced"),
        ((0.9, 1.1, 1.0), 1.0, "not resolvable"),
    ],
)
def test_the_interval_decides(values, margin, verdict):
    found = claims.Finding("claim", "what", dict(enumerate(values)), p_value=0.02, margin=margin)
    assert found.verdict == verdict
    assert found.row().endswith(f"| 3 | {verdict} |")
    assert "*" in found.row()
    assert ("±" in found.row().split("|")[4]) == (len(set(values)) > 1)


def without(runs, *words):
    return [run for run in runs if not all(word in run.folder.name for word in words)]


def test_what_cannot_be_judged_is_named(worlds):
    runs = worlds[True]
    with pytest.raises(SystemExit, match=r"\bgrpo\b.*\b8\b"):
        claims.table(without(runs, "grpo-8"))
    with pytest.raises(SystemExit, match=r"\bgapo\b.*\b8\b.*\beps_high_max\b.*\b0\.01\b"):
        claims.table(without(runs, "gapo-8-0.01"))
    with pytest.raises(SystemExit, match=r"\bgapo\b.*\bbranched\b"):
        claims.table(without(runs, "branch"))
    with pytest.raises(SystemExit, match=r"\bseeds\b.*\[0\].*\[0\]"):
        claims.table(without(runs, "gspo_asym-8-0.005", "-1"))


def test_a_run_that_is_not_finished_is_named(tmp_path):
    whole = write_run(tmp_path / "whole", seed=0)
    cut = write_run(tmp_path / "cut", seed=1, num_steps=30)
    with pytest.raises(SystemExit, match=r"\bcut\b.*\b30\b.*\b40\b"):
        claims.Study([read_study_run(whole), read_study_run(cut)])


def test_two_arms_that_no_claim_tells_apart_are_named(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "optimizer.learning_rate=1e-3")]
    with pytest.raises(SystemExit, match=mentions("gapo", "learning_rate", "eps_high_max")):
        claims.Study([read_study_run(folder) for folder in folders])


def test_the_document_says_what_the_data_say():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    runs = read_archive(HERE / "data")
    table = claims.table(runs)
    assert (HERE / "table.md").read_text(encoding="utf-8").endswith(f"\n\n{claims.page(runs)}")
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert f" all {len(rows)} differences" in text
    ranges = re.findall(r"(\d+)(?:-(\d+))?", " ".join(re.findall(r"\[(\d[\d,\s-]*)\]", text)))
    cited = {n for first, last in ranges for n in range(int(first), int(last or first) + 1)}
    assert cited == set(range(1, len(rows) + 1)), "each row is in a conclusion"
    quoted = re.findall(r"by (\d\.\d ± \d\.\d)[^[]*\[(\d+)\]", text)
    for found, number in quoted:
        numbers = rows[int(number) - 1][4].strip("*").split("±")
        assert found == " ± ".join(f"{abs(float(one)):.1f}" for one in numbers)
    assert quoted
    shown = re.findall(r"!\[.+\]\((\w+)\.png\)", text)
    assert sorted(shown) == sorted(path.stem for path in HERE.glob("*.png"))
    size = sum(path.stat().st_size for path in (HERE / "data").iterdir())
    assert size < 2_000_000
