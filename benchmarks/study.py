"""The paper's claims, one by one, in the miniature study: the table of docs/study.md.

    python benchmarks/study.py runs/studies/report/data

Each claim is a difference that the paper says is positive. Its 95 % Student-t interval over seeds
(paired by the seeds that two methods share) decides, by one rule for all (docs/study.md says what
had been seen when it was chosen): all above zero, "reproduced"; all below, "not reproduced"; else
"not resolvable" at this size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.evaluate.statistics import mean_interval, stars, welch_p_value
from gapo_megatron.report.arms import Arm, Comparison
from gapo_megatron.report.clipping import CLIPPED, CORRELATION, DRIFT
from gapo_megatron.report.intervention import correlation_since
from gapo_megatron.report.runs import Run
from gapo_megatron.report.series import final, last_half, pass_keys

SEQUENCE = ("gspo", "gspo_asym", "f_gspo")
TOKEN = ("grpo", "f_grpo", "dr_grpo")
SCARCE, ABUNDANT = (1, 2), (6, 7)
"""Values of c, of k = 8."""
BySeed = dict[int, float]


@dataclass(frozen=True)
class Finding:
    """One difference, positive if the claim holds."""

    claim: str
    what: str
    values: BySeed
    """In percentage points (r: as it is)."""
    p_value: float | None = None
    """Welch's, where two methods are compared."""

    def row(self) -> str:
        """A line of the table."""
        found = mean_interval(list(self.values.values()))
        half = found.mean - found.low
        verdict = "not resolvable"
        if found.excludes_zero:
            verdict = "reproduced" if found.mean > 0 else "not reproduced"
        star = "" if self.p_value is None else stars(self.p_value)
        shown = f"{found.mean:+.2f} ± {half:.2f}{star}"
        return f"| {self.claim} | {self.what} | {shown} | {verdict} |"


class Study:
    """The arms of an archive, by what sets them apart."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._arms = {self._key(arm): arm for arm in Comparison.of(runs).arms}

    @staticmethod
    def _key(arm: Arm) -> tuple[str, int, float, bool]:
        return (arm.method.name, arm.k, arm.method.eps_high_max, arm.runs[0].branch is not None)

    def arm(
        self, method: str, *, k: int = 8, eps_high_max: float | None = None, branch: bool = False
    ) -> Arm:
        """The one arm of that kind; the method's smallest `eps_high_max` where none is given."""
        clips = [key[2] for key in self._arms if key[0] == method and key[1] == k]
        width = min(clips) if eps_high_max is None else eps_high_max
        return self._arms[method, k, width, branch]


def findings(study: Study) -> Iterator[Finding]:
    """Every claim of the paper that the study can speak of."""
    gapo, asym = study.arm("gapo"), study.arm("gspo_asym")
    for method in (*SEQUENCE, "gapo", *TOKEN, "gapo_token"):
        arm = study.arm(method)
        drift = _minus(_by_c(arm, DRIFT, SCARCE), _by_c(arm, DRIFT, ABUNDANT))
        yield Finding("scarce rollouts drift more", f"{method}: drift, c 1-2 minus 6-7", drift)
    for method in (*SEQUENCE, *TOKEN):
        arm = study.arm(method)
        hit = _minus(_by_c(arm, CLIPPED, SCARCE), _by_c(arm, CLIPPED, ABUNDANT))
        yield Finding("a fixed clip hits them as often", f"{method}: clipped, c 1-2 minus 6-7", hit)
    more = _minus(_by_c(gapo, CLIPPED, ABUNDANT), _by_c(asym, CLIPPED, ABUNDANT))
    yield Finding("GAPO clips high c more", "gapo minus gspo_asym: clipped, c 6-7", more)
    less = _minus(_by_c(asym, CLIPPED, SCARCE), _by_c(gapo, CLIPPED, SCARCE))
    yield Finding("GAPO clips low c less", "gspo_asym minus gapo: clipped, c 1-2", less)
    for method in SEQUENCE:
        yield _final("correlation stays higher", gapo, study.arm(method), CORRELATION, scale=1)
    keys = pass_keys([gapo, asym])
    for ours, others in ((gapo, SEQUENCE), (study.arm("gapo_token"), TOKEN)):
        for key in keys:
            for method in others:
                yield _final("better at equal budget", ours, study.arm(method), key)
    gains = {}
    for k in (4, 8, 16):
        gains[k] = _final("better for every k", study.arm("gapo", k=k), study.arm("gspo_asym", k=k))
        yield gains[k]
    wider = _minus(gains[8].values, gains[4].values)
    yield Finding("k = 8 widens the gap", "pass@1, the gap at k = 8 minus that at 4", wider)
    for clip in (5e-3, 7e-3, 1e-2):
        adaptive, uniform = (study.arm(m, eps_high_max=clip) for m in ("gapo", "gspo_asym"))
        yield _final(f"better at eps_high_max = {clip:g}", adaptive, uniform)
    branch = study.arm("gapo", branch=True)
    kept = "the branch keeps what uniform clipping loses"
    since = [_correlation_after_branch(arm, branch) for arm in (branch, asym)]
    yield Finding(kept, f"{branch.label} minus gspo_asym: r since then", _minus(*since))
    for key in keys:
        yield _final(kept, branch, asym, key)


def _by_c(arm: Arm, name: str, chosen: Sequence[int]) -> BySeed:
    """Percent: mean over `chosen` c of the last half of training."""
    steps = min(run.num_steps for run in arm.runs)
    found = [last_half(run, name, num_steps=steps) for run in arm.runs]
    values = [100 * sum(one[c] for c in chosen) / len(chosen) for one in found]
    return dict(zip(arm.seeds, values, strict=True))


def _correlation_after_branch(arm: Arm, branch: Arm) -> BySeed:
    """Pearson r over the steps since the branch point alone."""
    assert branch.runs[0].branch is not None
    begin = int(branch.runs[0].branch["step"])
    found = {run.seed: correlation_since(run, begin) for run in arm.runs}
    return {seed: values[max(values)] for seed, values in found.items()}


def _minus(ours: BySeed, theirs: BySeed) -> BySeed:
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def _final(
    claim: str, ours: Arm, theirs: Arm, key: str = "eval/pass@1", *, scale: float = 100
) -> Finding:
    """Difference of the values at the last step."""
    ends = [final(arm, key) for arm in (ours, theirs)]
    if ends[0] is None or ends[1] is None or ends[0][0] != ends[1][0]:
        raise SystemExit(f"{ours.label} and {theirs.label} have no {key} at the same last step")
    values = [[scale * value for value in end[1]] for end in ends if end]
    by_seed = [
        dict(zip(arm.seeds, found, strict=True))
        for arm, found in zip((ours, theirs), values, strict=True)
    ]
    name = "r" if key == CORRELATION else key.removeprefix("eval/")
    what = f"{ours.label} minus {theirs.label}: {name}"
    return Finding(claim, what, _minus(*by_seed), welch_p_value(*values))


def table(runs: Sequence[Run]) -> str:
    """The table as Markdown."""
    head = "| claim | difference, positive if so | over seeds | verdict |\n|---|---|---|---|\n"
    return head + "\n".join(finding.row() for finding in findings(Study(runs))) + "\n"


if __name__ == "__main__":
    from gapo_megatron.report.archive import read_archive

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    print(table(read_archive(parser.parse_args().archive)), end="")
