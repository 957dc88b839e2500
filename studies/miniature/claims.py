"""Verdicts on the paper's claims in the miniature study, and its correlations: in table.md.

    python -m studies.miniature.claims runs/studies/report/data

Most claims are differences that the paper says are positive. The 95 % Student-t interval, paired by
seed, decides: above zero, "reproduced"; below, "not reproduced"; else "not resolvable" at
this size. A claim that two things are alike is "reproduced" if the interval is within a margin, and
"not reproduced" if it is outside. README.md says which results were known when these rules were
chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_megatron.objective.diagnostics import advantage_correlation
from gapo_tools.evaluation.statistics import has_spread, mean_interval, stars, welch_p_value
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.correlation import correlation
from gapo_tools.reporting.figures import DEVIATION
from gapo_tools.reporting.runs import Run, Values
from gapo_tools.reporting.series import MAX_WINDOW, per_c, window_of
from studies.archive import StudyRun, read_archive

CLIPPED = "correct/clip_fraction_sequences"
DRIFT = "correct/ratio_abs_deviation"
LOST = "correct/clip_gradient_mass_lost"
SEQUENCE = ("gspo", "gspo_asym", "f_gspo")
TOKEN = ("grpo", "f_grpo", "dr_grpo")
SCARCE, ABUNDANT = (1, 2), (6, 7)
"""Values of c at k = 8."""
PASSES = (1, 4, 16)
"""k of pass@k, of 16 samples; pass@16 is near its ceiling from the first step on."""
ALIKE_SHARE = 0.2
"""Two clip fractions are alike if they differ by less than this share of their mean."""
ALIKE_POINTS = 1.0
"""Two values of pass@1 are alike if they differ by fewer percentage points."""
HIGH_CORRELATION = 0.8
"""Correlation that GAPO keeps in late training, in the paper."""
BySeed = dict[int, float]


@dataclass(frozen=True)
class Finding:
    """A difference that is positive if the claim holds; with a margin, small."""

    claim: str
    what: str
    values: BySeed
    """By seed, in percentage points (r as it is)."""
    p_value: float | None = None
    """Of Welch's test over shared seeds, if two arms are compared."""
    margin: float | None = None
    """Largest difference that counts as alike; None: the claim is a positive difference."""

    @property
    def verdict(self) -> str:
        """Verdict of the interval; "not resolvable" if all seeds have the same value."""
        values = list(self.values.values())
        if not has_spread(values):
            return "not resolvable"
        found = mean_interval(values)
        if self.margin is not None:
            if max(abs(found.low), abs(found.high)) < self.margin:
                return "reproduced"
            outside = found.low > self.margin or found.high < -self.margin
            return "not reproduced" if outside else "not resolvable"
        if not found.excludes_zero:
            return "not resolvable"
        return "reproduced" if found.mean > 0 else "not reproduced"

    def row(self) -> str:
        """The finding as a row of the table."""
        values = list(self.values.values())
        shown = f"{sum(values) / len(values):+.2f}"
        if has_spread(values):
            found = mean_interval(values)
            shown += f" ± {found.mean - found.low:.2f}"
        if self.p_value is not None:
            shown += stars(self.p_value)
        expected = "> 0" if self.margin is None else f"within ± {self.margin:.2f}"
        what = self.what.replace("|", r"\|")  # would end the cell
        return f"| {self.claim} | {what} | {expected} | {shown} | {len(values)} | {self.verdict} |"


class Study:
    """Arms of an archive; all runs must have the same number of steps."""

    def __init__(self, runs: Sequence[StudyRun]) -> None:
        self.num_steps = max(run.num_steps for run in runs)
        for run in runs:
            if run.num_steps != self.num_steps:
                raise SystemExit(
                    f"{run.folder.name} has {run.num_steps} steps, others {self.num_steps}: "
                    "finish it first"
                )
        self._arms: dict[tuple[str, int, float, bool], Arm] = {}
        for arm in Comparison.of(runs).arms:
            key = self._key(arm)
            if key in self._arms:
                raise SystemExit(
                    f"{arm.label} and {self._arms[key].label}: both have the same method, k, "
                    "eps_high_max and branch; leave out one of them"
                )
            self._arms[key] = arm

    @staticmethod
    def _key(arm: Arm) -> tuple[str, int, float, bool]:
        return (arm.method.name, arm.k, arm.method.eps_high_max, arm.runs[0].branch is not None)

    def arm(
        self, method: str, *, k: int = 8, eps_high_max: float | None = None, branch: bool = False
    ) -> Arm:
        """The arm with these settings; by default with the method's smallest `eps_high_max`."""
        found = [
            arm
            for (name, size, width, is_branch), arm in sorted(self._arms.items())
            if (name, size, is_branch) == (method, k, branch) and eps_high_max in (None, width)
        ]
        if not found:
            wide = "" if eps_high_max is None else f" and eps_high_max = {eps_high_max:g}"
            left = ", branched" if branch else ""
            raise SystemExit(f"no run of {method}{left} with k = {k}{wide}, which a claim needs")
        return found[0]


def findings(study: Study) -> Iterator[Finding]:
    """The paper's claims that these runs can test, in its order."""
    gapo, asym = study.arm("gapo"), study.arm("gspo_asym")
    steps = study.num_steps
    everyone = (*SEQUENCE, "gapo", *TOKEN, "gapo_token")

    def scarce_minus_abundant(method: str, name: str, num_steps: int = steps) -> BySeed:
        arm = study.arm(method)
        return _minus(_by_c(arm, name, SCARCE, num_steps), _by_c(arm, name, ABUNDANT, num_steps))

    for name, shown in ((DEVIATION, "s - 1"), (DRIFT, "|s - 1|")):
        for method in everyone:
            values = scarce_minus_abundant(method, name)
            yield Finding(
                "scarce rollouts move more", f"{method}: {shown}, c 1-2 minus 6-7", values
            )
    for method in everyone:
        early = scarce_minus_abundant(method, DEVIATION, steps // 2)
        grown = _minus(scarce_minus_abundant(method, DEVIATION), early)
        what = f"{method}: s - 1, c 1-2 minus 6-7, last half minus 2nd quarter"
        yield Finding("and go on growing at least as fast", what, grown)
    for method in (*SEQUENCE, *TOKEN):
        rates = [_by_c(study.arm(method), CLIPPED, c, steps) for c in (SCARCE, ABUNDANT)]
        usual = sum(sum(one.values()) / len(one) for one in rates) / 2
        yield Finding(
            "a fixed clip hits both alike",
            f"{method}: clipped, c 1-2 minus 6-7",
            _minus(*rates),
            margin=ALIKE_SHARE * usual,
        )
    for claim, name, chosen, ours, theirs in (
        ("GAPO clips high c more", CLIPPED, ABUNDANT, gapo, asym),
        ("GAPO clips low c less", CLIPPED, SCARCE, asym, gapo),
        ("GAPO keeps more gradient of low c", LOST, SCARCE, asym, gapo),
    ):
        sides = [_by_c(arm, name, chosen, steps) for arm in (ours, theirs)]
        word = "clipped" if name == CLIPPED else "gradient lost"
        what = f"{ours.label} minus {theirs.label}: {word}, c {chosen[0]}-{chosen[1]}"
        yield _compared(claim, what, *sides)
    late = {m: _correlation(study.arm(m), steps // 2) for m in (*SEQUENCE, "gapo")}
    above = {seed: r - HIGH_CORRELATION for seed, r in late["gapo"].items()}
    yield Finding("r stays above 0.8", "gapo: r of the last half minus 0.8", above)
    for method in SEQUENCE:
        what = f"gapo minus {method}: r of the last half"
        yield _compared("r stays higher than others'", what, late["gapo"], late[method])
    for ours, others in ((gapo, SEQUENCE), (study.arm("gapo_token"), TOKEN)):
        for k in PASSES:
            for method in others:
                yield _passes("better at equal budget", ours, study.arm(method), steps, k)
    yield _passes("sequence ratios beat token ratios", gapo, study.arm("gapo_token"), steps)
    for method in (*SEQUENCE, "gapo"):
        ends = [_pass_at(study.arm(method), step, 4) for step in (steps // 2, steps)]
        if method == "gapo":
            yield Finding(
                "GAPO's pass@k lasts", "gapo: pass@4, end minus half", _minus(*ends[::-1])
            )
        else:
            what = f"{method}: pass@4, half minus end"
            yield Finding("pass@k of fixed clips falls late", what, _minus(*ends))
    gains = {
        k: _passes("better for every k", study.arm("gapo", k=k), study.arm("gspo_asym", k=k), steps)
        for k in (4, 8, 16)
    }
    yield from (gains[4], gains[16])  # k = 8 is above
    yield _passes("k = 8 improves on k = 4", gapo, study.arm("gapo", k=4), steps)
    wider = _minus(gains[8].values, gains[4].values)
    yield Finding("k = 8 widens the gap", "pass@1, the gap at k = 8 minus that at 4", wider)
    ends = [_pass_at(arm, steps, 1) for arm in (study.arm("gapo", k=16), gapo)]
    yield Finding(
        "beyond k = 8 nothing is gained",
        "gapo k=16 minus k=8: pass@1",
        _minus(*ends),
        margin=ALIKE_POINTS,
    )
    for clip in (7e-3, 1e-2):  # 5e-3 is above
        arms = [study.arm(method, eps_high_max=clip) for method in ("gapo", "gspo_asym")]
        yield _passes("better at every eps_high_max", *arms, steps)
    branch = study.arm("gapo", branch=True)
    kept = "the branch keeps what uniform clipping loses"
    assert branch.runs[0].branch is not None
    since = int(branch.runs[0].branch["step"])
    sides = [_correlation(arm, since) for arm in (branch, asym)]
    yield _compared(kept, f"{branch.label} minus gspo_asym: r since then", *sides)
    for k in PASSES:
        yield _passes(kept, branch, asym, steps, k)


def _by_c(arm: Arm, name: str, chosen: Sequence[int], num_steps: int) -> BySeed:
    """Mean over `chosen` values of c in the last half of `num_steps`, in percent."""
    found = {run.seed: last_half(run, name, num_steps=num_steps) for run in arm.runs}
    return {seed: 100 * sum(one[c] for c in chosen) / len(chosen) for seed, one in found.items()}


def last_half(run: Run, name: str, *, num_steps: int) -> dict[int, float]:
    """Mean by c over the last half of `num_steps` steps; every correct rollout counts the same."""
    found = {}
    for c, (values, weights) in per_c(run, name).items():
        late = [step for step in values if num_steps - num_steps // 2 <= step < num_steps]
        total = sum(weights[step] for step in late)
        if total > 0:
            found[c] = sum(weights[step] * values[step] for step in late) / total
    return found


def _correlation(arm: Arm, begin: int) -> BySeed:
    """Pearson r over the steps from `begin` on."""
    found = {run.seed: correlation_since(run, begin) for run in arm.runs}
    return {seed: values[max(values)] for seed, values in found.items()}


def correlation_since(run: StudyRun, begin: int) -> Values:
    """Pearson r over c of correct rollouts' mean deviation and mean advantage since `begin`.

    As in training, there is no r below three values of c, or where either is the same for all c.
    """
    steps, deviations = _sums(run, DEVIATION, begin)
    _, advantages = _sums(run, "correct/advantage", begin)
    both = [c for c in deviations if c in advantages]
    found = {}
    for i, step in enumerate(steps):
        sums = [(*deviations[c][:, i], advantages[c][1, i]) for c in both]
        r = advantage_correlation(*np.array(sums).reshape(-1, 3).T)
        if r is not None:
            found[step] = r
    return found


def _sums(run: StudyRun, name: str, begin: int) -> tuple[list[int], dict[int, np.ndarray]]:
    """Sums over the last `MAX_WINDOW` steps from `begin` on; every rollout counts the same.

    Returns:
        Steps, without the first ones (`window_of`), which rest on few rollouts; by c, [2, steps]
        float64: number of correct rollouts, sum of `per_c/{name}` over them.
    """
    steps = np.array(_trained(run, begin), dtype=np.int64)
    first = np.searchsorted(steps, steps - MAX_WINDOW, side="right")
    shown = steps >= begin + window_of([run]) - 1
    found = {}
    for c, (values, weights) in per_c(run, name).items():
        weight = np.array([weights[step] if step in values else 0.0 for step in steps])
        value = np.array([values.get(step, 0.0) for step in steps])
        sums = np.cumsum(np.pad([weight, weight * value], ((0, 0), (1, 0))), axis=1)
        found[c] = (sums[:, 1:] - sums[:, first])[:, shown]
    return steps[shown].tolist(), found


def _trained(run: StudyRun, begin: int) -> list[int]:
    """Steps from `begin` on; an archived run's bin must lie after it as a whole."""
    return [step for step in run.series("reward/mean") if step - run.bin_steps + 1 >= begin]


def _pass_at(arm: Arm, step: int, k: int) -> BySeed:
    """pass@k of the evaluation at `step`, in percent."""
    found = {}
    for run in arm.runs:
        if step not in run.solve_rates:
            raise SystemExit(f"{run.folder.name} has no evaluation at step {step}")
        n = run.config.evaluation.samples_per_prompt
        counts = [(n, round(rate * n)) for rate in run.solve_rates[step].values()]
        found[run.seed] = 100 * mean_pass_at_k(counts, k)
    return found


def _minus(ours: BySeed, theirs: BySeed) -> BySeed:
    shared = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
    if len(shared) < 2:
        raise SystemExit(f"seeds {sorted(ours)} and {sorted(theirs)}: at least two must be shared")
    return shared


def _compared(claim: str, what: str, ours: BySeed, theirs: BySeed) -> Finding:
    """Ours minus theirs, with Welch's test over shared seeds."""
    difference = _minus(ours, theirs)
    p_value = welch_p_value(*([side[seed] for seed in difference] for side in (ours, theirs)))
    return Finding(claim, what, difference, p_value)


def _passes(claim: str, ours: Arm, theirs: Arm, step: int, k: int = 1) -> Finding:
    what = f"{ours.label} minus {theirs.label}: pass@{k}"
    return _compared(claim, what, _pass_at(ours, step, k), _pass_at(theirs, step, k))


def table(runs: Sequence[StudyRun]) -> str:
    """The table as Markdown; README.md cites rows by their number."""
    rows = enumerate(findings(Study(runs)), start=1)
    lines = [
        "| row | claim | what is measured | expected | found | seeds | verdict |",
        "|---|---|---|---|---|---|---|",
        *(f"| {number} {finding.row()}" for number, finding in rows),
    ]
    return "\n".join(lines) + "\n"


def page(runs: Sequence[StudyRun]) -> str:
    """The table of claims, then the correlation of every arm by half of training."""
    shown = correlation(Comparison.of(runs)).table
    assert shown is not None
    return f"{table(runs)}\n{shown.to_markdown().rstrip()}\n"


if __name__ == "__main__":
    from gapo_megatron.errors import DataError

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    try:
        print(page(read_archive(parser.parse_args().archive)), end="")
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
