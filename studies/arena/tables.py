"""The arena's tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gapo_megatron.objective.diagnostics import SUMS
from gapo_tools.evaluation.statistics import Interval, mean_interval
from studies.arena import steps
from studies.arena.sweep import Cell, best_factor
from studies.arena.train import PASS_AT, QUARTERS, Setting, Trained
from studies.arena.verdicts import (
    ABUNDANT,
    OUTCOMES,
    SCARCE,
    SHARES,
    Pair,
    Results,
    compare,
    confidence,
    late,
    pass_at_equal_divergence,
    shares,
    verdict,
)

Arms = Mapping[str, Setting]
GAPO = "gapo"
MISSING, NOTHING = "missing", "-"
UNCLIPPED, FIXED = "unclipped", "gspo_asym"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def outcomes(arms: Arms, found: Results, *, more_rows: int = 0) -> str:
    """Widths, late pass@1 and pass@64 of every arm, and GAPO minus the arm.

    Args:
        arms: arms by name.
        found: their results.
        more_rows: rows of another table that the intervals hold together with.
    """
    pairs = pairs_to_gapo(arms)
    compared = compare(found, pairs, more_rows=more_rows)
    head = ["arm", "widths", "pass@1, %", "pass@64, %"]
    lines = []
    for name in (GAPO, *(other for _, other in pairs)):
        level = [late_mean(found[name], k) if name in found else MISSING for k in PASS_AT]
        cells = (
            [NOTHING] * len(OUTCOMES) if name == GAPO else differences_of(compared, (GAPO, name))
        )
        lines.append([name, _widths(arms[name]), *level, *cells])
    return markdown([*head, *(f"GAPO minus arm: {name}" for name in OUTCOMES)], lines)


def added_outcomes(arms: Arms, found: Results) -> str:
    """`outcomes` of an arm added to the table of the transformer four times wider."""
    return outcomes(arms, found, more_rows=6)


def pairs_to_gapo(arms: Arms) -> list[Pair]:
    """GAPO and each other arm."""
    return [(GAPO, name) for name in arms if name != GAPO]


def _widths(setting: Setting) -> str:
    """Lower and upper width; the threshold of a mask."""
    method = setting.method
    if method.name in ("topr", UNCLIPPED):
        return NOTHING
    if method.off_policy_mask is not None:
        return f"{method.off_policy_mask:.2g}"
    low = "none" if method.eps_low == 1 else f"{method.floor:.2g}"
    return f"{low}, {method.eps_high_max:.2g}"


def sweeps(swept: Mapping[Cell, Mapping[float, Tensor]]) -> str:
    """pass@1 / pass@64 on the selection seeds by factor, and the best factor, for every cell."""
    factors = sorted({factor for row in swept.values() for factor in row})
    head = ["conditions", "rule", *(f"x {factor:g}" for factor in factors), "best"]
    lines = []
    for cell, row in swept.items():
        levels = {factor: values.mean(dim=1).tolist() for factor, values in row.items()}
        shown = [
            f"{levels[factor][0]:.1f} / {levels[factor][1]:.1f}" if factor in levels else NOTHING
            for factor in factors
        ]
        best = f"{best_factor(row):g}" if row else MISSING
        lines.append([conditions(cell), cell.rule, *shown, best])
    return markdown(head, lines)


def conditions(cell: Cell) -> str:
    """A cell's conditions in words."""
    return f"{cell.mode}, rate {cell.rate:g}, k {cell.group_size}"


def by_c(arms: Arms, found: Results) -> str:
    """Clipping and drift of scarce and of abundant correct responses, by arm."""
    head = ["arm", "ratio"]
    for quantity in SHARES:
        name = quantity.replace("|", "\\|")
        head += [f"{name}, %: c {' and '.join(map(str, counts))}" for counts in (SCARCE, ABUNDANT)]
        head.append("difference")
    lines = []
    for name, setting in arms.items():
        row = [name, setting.method.ratio]
        if name not in found:
            lines.append([*row, *[MISSING] * (len(head) - 2)])
            continue
        for quantity in SHARES:
            scarce, abundant = (shares(found[name], quantity, at) for at in (SCARCE, ABUNDANT))
            row += [_number(sum(values) / len(values)) for values in (scarce, abundant)]
            row.append(_chunks(scarce, abundant, num_rows=len(arms)))
        lines.append(row)
    return markdown(head, lines)


def _chunks(scarce: Sequence[float], abundant: Sequence[float], *, num_rows: int) -> str:
    """Scarce minus abundant, with the interval over chunks; two of them say nothing."""
    values = [one - other for one, other in zip(scarce, abundant, strict=True)]
    if len(values) < 3 or any(math.isnan(value) for value in values):
        return NOTHING
    found = mean_interval(values, confidence=confidence(num_rows))
    return f"{found.mean:+.2f} ± {found.mean - found.low:.2f}"


def single_steps(arms: Arms, found: Results) -> str:
    """What single steps do (`steps`), and pass@1 at equal KL minus GAPO's, by arm."""
    last = slice(QUARTERS - 1, QUARTERS)
    lines = []
    for name in arms:
        if name not in found:
            lines.append([name, *[MISSING] * 6])
            continue
        trained = found[name]
        correlations = [
            steps.paper_correlation(trained),
            steps.paper_correlation(trained, last),
            steps.response_correlation(trained),
        ]
        moved = steps.mean_log_ratio(trained)
        share = mean_interval(
            steps.share_of_best_gain(trained).tolist(), confidence=confidence(len(arms))
        )
        equal = NOTHING
        if name != GAPO and GAPO in found:
            values = pass_at_equal_divergence(trained, found[GAPO]).tolist()
            equal = _interval(mean_interval(values, confidence=confidence(len(arms) - 1)))
        lines.append(
            [
                name,
                *map(_number, correlations),
                _number(float(moved[1] / moved[len(moved) - 2])),
                f"{share.mean:.1f} ± {share.mean - share.low:.1f}",
                equal,
            ]
        )
    head = [
        "arm",
        "r over c",
        "r over c, last quarter",
        "r over responses",
        "log-ratio, c = 1 : k - 1",
        "share of the best gain, %",
        "pass@1 at equal KL, minus GAPO",
    ]
    return markdown(head, lines)


def correlations_by_c(arms: Arms, found: Results) -> str:
    """Correlation of log-ratio and A within groups of equal c, first and last quarter, by arm."""
    k = next(iter(arms.values())).group_size
    lines = []
    for quarter, word in ((0, "first"), (QUARTERS - 1, "last")):
        for name, trained in found.items():
            values = [
                steps.response_correlation(trained, slice(quarter, quarter + 1), counts=[c])
                for c in range(1, k)
            ]
            lines.append([word, name, *map(_number, values)])
    return markdown(["quarter", "arm", *(f"c = {c}" for c in range(1, k))], lines)


def correlations_by_quarter(found_by: Mapping[str, Results]) -> str:
    """Correlations of all arms in each quarter of training and over all, by conditions."""
    measures = {
        "r over c": steps.paper_correlation,
        "r of \\|s - 1\\| over c": steps.drift_correlation,
        "r over responses": steps.response_correlation,
    }
    spans = {f"q{quarter + 1}": slice(quarter, quarter + 1) for quarter in range(QUARTERS)}
    head = ["conditions", "arm"]
    head += [f"{name}: {span}" for name in measures for span in (*spans, "all")]
    lines = []
    for words, found in found_by.items():
        for name, trained in found.items():
            cells = [
                _number(measure(trained, span))
                for measure in measures.values()
                for span in (*spans.values(), steps.ALL)
            ]
            lines.append([words, name, *cells])
    return markdown(head, lines)


def removed(arms: Arms, found: Results) -> str:
    """Gradient that the clip removes, over all of training: of all, of correct responses, by c."""
    counts = range(1, next(iter(arms.values())).group_size)
    head = [
        "arm",
        "of all gradient, %",
        "of all: correct responses', %",
        "of correct responses', %",
    ]
    lines = []
    for name, trained in found.items():
        sums = torch.stack([one.per_c.sum(dim=0) for one in trained]).sum(dim=0)
        lost, mass = (sums[SUMS.index(f"gradient_mass{end}")] for end in ("_lost", ""))
        shares = [
            lost.sum() / mass.sum(),
            lost[1].sum() / mass.sum(),
            lost[1].sum() / mass[1].sum(),
        ]
        shares += [lost[1, c] / mass[1, c] for c in counts]
        lines.append([name, *(f"{100 * float(share):.1f}" for share in shares)])
    return markdown([*head, *(f"c = {c}" for c in counts)], lines)


def probes(arms: Arms, found: Results) -> str:
    """Clips with widths by c minus the fixed clip, by learning rate."""
    return _pairwise(probe_pairs(arms), found)


def probe_pairs(arms: Arms) -> list[Pair]:
    """Arms with a width by c and the fixed clip, at each learning rate."""
    rests = list(dict.fromkeys(name.partition(", ")[2] for name in arms))
    names = (GAPO, "gapo_matched", "reversed")
    return [(f"{name}, {rest}", f"{FIXED}, {rest}") for rest in rests for name in names]


def weights(arms: Arms, found: Results) -> str:
    """Stale batches with importance weights minus those without, by rule and learning rate."""
    pairs = [(name, f"{_rule(name)}, none") for name in arms if not name.endswith(", none")]
    compared = compare(found, pairs)
    lines = [
        [
            _rule(pair[0]),
            f"{pair[0].rpartition(', ')[2]} minus none",
            *differences_of(compared, pair),
        ]
        for pair in pairs
    ]
    return markdown(["rule", "difference", *OUTCOMES], lines)


def _rule(name: str) -> str:
    """Rule and learning rate of "gapo, rate 0.05, token": "gapo, rate 0.05"."""
    return name.rpartition(", ")[0]


def proportional(arms: Arms, found: Results) -> str:
    """Other widths by c minus those with GAPO's floor, by learning rate and advantage."""
    names = [name.partition(", ") for name in arms]
    pairs = [(f"{width}, {rest}", f"floor, {rest}") for width, _, rest in names if width != "floor"]
    return _pairwise(pairs, found)


def _pairwise(pairs: Sequence[Pair], found: Results) -> str:
    compared = compare(found, pairs)
    lines = []
    for pair in pairs:
        (first, _, rest), (second, _, _) = (name.partition(", ") for name in pair)
        lines.append([rest, f"{first} minus {second}", *differences_of(compared, pair)])
    return markdown(["at", "difference", *OUTCOMES], lines)


def late_mean(trained: Sequence[Trained], k: int) -> str:
    """Mean of the seeds' late pass@k, in %."""
    return f"{late(trained)[PASS_AT.index(k)].mean():.2f}"


def differences_of(compared: Mapping[Pair, Mapping[str, Interval]], pair: Pair) -> list[str]:
    """A pair's cells, one per outcome."""
    if pair not in compared:
        return [MISSING] * len(OUTCOMES)
    return [
        f"{_interval(found)}, {verdict(found, outcome)}"
        for outcome, found in compared[pair].items()
    ]


def _interval(found: Interval) -> str:
    return f"{found.mean:+.2f} ± {found.mean - found.low:.2f}"


def _number(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2f}"
