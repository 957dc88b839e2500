"""The arena's tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.arena.train import PASS_AT, Setting, Trained
from benchmarks.arena.verdicts import (
    ABUNDANT,
    OUTCOMES,
    SCARCE,
    SHARES,
    Pair,
    Results,
    best_width,
    compare,
    confidence,
    late,
    shares,
    verdict,
)
from gapo_megatron.evaluate.statistics import Interval, mean_interval

Arms = Mapping[str, Setting]
GAPO = "gapo"
MISSING, NOTHING = "missing", "-"
UNCLIPPED, FIXED = "unclipped", "gspo_asym"
WIDTH_OUTCOMES = ("pass@1", "pass@64")


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def outcomes(arms: Arms, found: Results) -> str:
    """Late pass@1 and pass@64 of every rule, and GAPO minus the rule."""
    pairs = pairs_to_gapo(arms)
    compared = compare(found, pairs)
    head = ["rule", "pass@1, %", "pass@64, %", *(f"GAPO minus rule: {name}" for name in OUTCOMES)]
    lines = []
    for name in (GAPO, *(rule for _, rule in pairs)):
        level = [_late(found[name], k) if name in found else MISSING for k in (1, 64)]
        cells = [NOTHING] * len(OUTCOMES) if name == GAPO else _differences(compared, (GAPO, name))
        lines.append([name, *level, *cells])
    return markdown(head, lines)


def pairs_to_gapo(arms: Arms) -> list[Pair]:
    """GAPO and each other rule."""
    return [(GAPO, name) for name in arms if name != GAPO]


def by_c(arms: Arms, found: Results) -> str:
    """Clipping and drift of scarce and of abundant correct responses, by rule."""
    head = ["rule", "ratio"]
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
    """Scarce minus abundant, with the interval over chunks."""
    values = [one - other for one, other in zip(scarce, abundant, strict=True)]
    if len(values) < 2 or any(math.isnan(value) for value in values):
        return NOTHING
    found = mean_interval(values, confidence=confidence(num_rows))
    return f"{found.mean:+.2f} ± {found.mean - found.low:.2f}"


def probes(arms: Arms, found: Results) -> str:
    """Clips with widths by c minus the fixed clip, by learning rate."""
    return _pairwise(probe_pairs(arms), found)


def probe_pairs(arms: Arms) -> list[Pair]:
    """Arms with a width by c and the fixed clip, at each learning rate."""
    names = (GAPO, "gapo_matched", "reversed")
    return [(f"{name}, {rest}", f"{FIXED}, {rest}") for rest in _rests(arms) for name in names]


def rates(arms: Arms, found: Results) -> str:
    """GAPO minus the fixed clip, and both minus no clip, by mode and learning rate."""
    return _pairwise(rate_pairs(arms), found)


def rate_pairs(arms: Arms) -> list[Pair]:
    """Three pairs for each mode and learning rate."""
    rests = sorted(_rests(arms), key=lambda rest: mode_of(rest))
    names = ((GAPO, FIXED), (GAPO, UNCLIPPED), (FIXED, UNCLIPPED))
    return [(f"{one}, {rest}", f"{other}, {rest}") for rest in rests for one, other in names]


def weights(arms: Arms, found: Results) -> str:
    """Stale batches with importance weights minus those without, by rule and learning rate."""
    pairs = [(name, f"{_rule(name)}, none") for name in arms if not name.endswith(", none")]
    compared = compare(found, pairs)
    lines = [
        [_rule(pair[0]), f"{pair[0].rpartition(', ')[2]} minus none", *_differences(compared, pair)]
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


def mode_of(rest: str) -> str:
    """The mode of "rate 0.05, stale": "stale"."""
    return rest.partition(", ")[2]


def _rests(arms: Arms) -> list[str]:
    """Settings in the names of arms, such as "rate 0.05"."""
    return list(dict.fromkeys(name.partition(", ")[2] for name in arms))


def _pairwise(pairs: Sequence[Pair], found: Results) -> str:
    compared = compare(found, pairs)
    lines = []
    for pair in pairs:
        (first, _, rest), (second, _, _) = (name.partition(", ") for name in pair)
        lines.append([rest, f"{first} minus {second}", *_differences(compared, pair)])
    return markdown(["at", "difference", *OUTCOMES], lines)


def widths(arms: Arms, found: Results) -> str:
    """Late pass@1 and pass@64 by eps_high_max, and the best width, for each rule and k."""
    rows = width_rows(arms)
    columns = list(dict.fromkeys(width for names in rows.values() for width in names))
    lines = []
    for outcome in WIDTH_OUTCOMES:
        place = PASS_AT.index(int(outcome.partition("@")[2]))
        for (rule, k), names in rows.items():
            values = {
                width: late(found[name])[place] for width, name in names.items() if name in found
            }
            cells = [f"{values[at].mean():.2f}" if at in values else MISSING for at in columns]
            best = MISSING
            if len(values) == len(names):
                chosen = best_width(values, num_rows=len(rows))
                best = f"{chosen.width:g}"
                if chosen.width in (min(values), max(values)):
                    best += ", at the end of those tried"
                if chosen.not_resolved:
                    others = ", ".join(f"{width:g}" for width in chosen.not_resolved)
                    best += f" (not resolved from {others})"
            lines.append([outcome, rule, str(k), *cells, best])
    return markdown(["outcome", "rule", "k", *(f"{at:g}" for at in columns), "best"], lines)


def width_rows(arms: Arms) -> dict[tuple[str, int], dict[float, str]]:
    """(rule, k) -> width -> name of the arm."""
    rows: dict[tuple[str, int], dict[float, str]] = {}
    for name, setting in arms.items():
        row = rows.setdefault((setting.method.name, setting.group_size), {})
        row[setting.method.eps_high_max] = name
    return rows


def _late(trained: Sequence[Trained], k: int) -> str:
    return f"{late(trained)[PASS_AT.index(k)].mean():.2f}"


def _differences(compared: Mapping[Pair, Mapping[str, Interval]], pair: Pair) -> list[str]:
    """A pair's cells, one per outcome."""
    if pair not in compared:
        return [MISSING] * len(OUTCOMES)
    return [
        f"{found.mean:+.2f} ± {found.mean - found.low:.2f}, {verdict(found, outcome)}"
        for outcome, found in compared[pair].items()
    ]


def _number(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2f}"
