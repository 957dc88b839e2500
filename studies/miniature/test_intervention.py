"""Branches beside the runs they left: what differs from the branch point on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gapo_megatron.config import load_config
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.series import NoData
from gapo_tools.reporting.style import style
from studies.archive import StudyRun
from studies.miniature.intervention import CLIPPED, intervention

CONFIG = Path(__file__).parents[2] / "configs" / "demo.toml"
K, BEGIN, END = 8, 10, 40
CHANGES = {"objective.method": ["gspo_asym", "gapo"]}


def make_run(name, *, method, seed, begin=0, left=None):
    """With values per c that are different at every step."""
    random = np.random.default_rng([seed, begin])
    given = [f"run.seed={seed}", f"objective.method={method}", f"run.num_steps={END}"]
    steps = range(begin, END)
    metrics = {"reward/mean": {step: float(random.random()) for step in steps}}
    for c in range(1, K):
        seen = [step for step in steps if (step + c) % 3]
        columns = {
            "sequences": [float(random.integers(1, 9)) for _ in seen],
            "ratio_deviation": random.normal(1e-3 * (K - c), 2e-3, len(seen)).tolist(),
            "clip_fraction_tokens": random.random(len(seen)).tolist(),
            "clip_fraction_sequences": random.random(len(seen)).tolist(),
            "advantage": [1 - c / K] * len(seen),
        }
        for key, values in columns.items():
            metrics[f"per_c/correct/{key}/c{c}"] = dict(zip(seen, values, strict=True))
    for k in (1, 8):
        metrics[f"eval/pass@{k}"] = {s: float(random.random()) for s in range(begin, END + 1, 10)}
    branch = left and {"run": f"/elsewhere/{left}", "step": begin, "changes": CHANGES}
    return StudyRun(Path("/runs") / name, load_config(CONFIG, given), branch, metrics, [])


@pytest.fixture(scope="module")
def runs():
    """Three seeds, each with its branch."""
    seeds = (0, 1, 2)
    whole = [make_run(f"whole_{s}", method="gspo_asym", seed=s) for s in seeds]
    branches = [
        make_run(f"branch_{s}", method="gapo", seed=s, begin=BEGIN, left=f"whole_{s}")
        for s in seeds
    ]
    return whole, branches


@pytest.fixture(scope="module")
def exhibit(runs):
    whole, branches = runs
    with style():
        return intervention(Comparison.of([*whole, *branches[::-1]]))


def rows_of(exhibit, quantity):
    return [row for row in exhibit.rows if row["quantity"] == quantity]


def since(run, name, step):
    """By c, values and weights from the branch point to `step`."""
    found = {}
    for c in range(1, K):
        weights = run.series(f"per_c/correct/sequences/c{c}")
        steps = [one for one in weights if BEGIN <= one <= step]
        values = run.series(f"per_c/{name}/c{c}")
        found[c] = ([values[one] for one in steps], [weights[one] for one in steps])
    return found


def correlation(run, step):
    means = [
        np.average(v, weights=w) for v, w in since(run, "correct/ratio_deviation", step).values()
    ]
    return np.corrcoef(means, [1 - c / K for c in range(1, K)])[0, 1]


def check(row, ours, theirs):
    """Both means, and the paired interval of their difference."""
    assert (row["branch mean"], row["parent mean"]) == pytest.approx(
        (np.mean(ours), np.mean(theirs))
    )
    bounds = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert row["difference"] == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert (row["low"], row["high"]) == pytest.approx((bounds.low, bounds.high))


def test_accuracy_is_paired_by_seed_from_the_branch_point_on(exhibit, runs):
    for k in (1, 8):
        rows = rows_of(exhibit, f"pass@{k} (%)")
        assert [row["step"] for row in rows] == [10, 20, 30, 40]
        for row in rows:
            theirs, ours = (
                [run.series(f"eval/pass@{k}")[row["step"]] for run in side] for side in runs
            )
            check(row, ours, theirs)


def test_training_goes_by_a_window_that_begins_at_the_branch_point(exhibit, runs):
    row = next(row for row in rows_of(exhibit, "correct in training (%)") if row["step"] == 13)
    theirs, ours = (
        [np.mean([run.series("reward/mean")[s] for s in range(10, 14)]) for run in side]
        for side in runs
    )
    check(row, ours, theirs)


def test_correlation_forgets_what_was_before_the_branch_point(exhibit, runs):
    rows = rows_of(exhibit, "Pearson r")
    assert [row["step"] for row in rows] == list(range(BEGIN + 3, END))  # a tenth of 40 is 4 steps
    for row in (rows[0], rows[-1]):
        theirs, ours = ([correlation(run, row["step"]) for run in side] for side in runs)
        check(row, ours, theirs)


@pytest.mark.parametrize(("quantity", "half"), [("c ≤ 4", range(1, 5)), ("c > 4", range(5, K))])
def test_clip_fractions_of_both_halves_count_every_rollout_the_same(exhibit, runs, quantity, half):
    row = rows_of(exhibit, f"clipped, {quantity} (%)")[-1]
    sides = []
    for side in runs:
        by_c = [since(run, CLIPPED, END) for run in side]
        values = [[v for c in half for v in one[c][0]] for one in by_c]
        weights = [[w for c in half for w in one[c][1]] for one in by_c]
        sides.append([np.average(v, weights=w) for v, w in zip(values, weights, strict=True)])
    check(row, sides[1], sides[0])


def test_one_seed_has_no_interval(runs):
    whole, branches = runs
    exhibit = intervention(Comparison.of([whole[0], branches[0]]))
    assert {row["low"] for row in exhibit.rows} == {None}
    assert {row["seeds"] for row in exhibit.rows} == {1}


def test_a_branch_without_the_run_it_left_is_no_intervention(runs):
    whole, branches = runs
    with pytest.raises(NoData, match=r"checkpoint\.branch_from"):
        intervention(Comparison.of([whole[0], branches[1]]))
