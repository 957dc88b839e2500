"""What the sweep says of widths: how much they matter beside the rule, and how sure a best one is.

All of it is computed from the selection seeds, and for the fixed clip also from those that judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gapo_tools.evaluation.statistics import Interval, mean_interval
from studies.arena.arms import PAPER
from studies.arena.sweep import FACTORS, LARGEST, SMALLEST, Cell, best_factor
from studies.arena.tables import FIXED, GAPO, Arms, conditions, markdown, pairs_to_gapo
from studies.arena.verdicts import Results, confidence, late

Swept = Mapping[Cell, Mapping[float, Tensor]]
"""Outcomes on the selection seeds by cell and factor, [2, seeds] (`sweep.sweep`)."""
WIDE = 4.0
"""The factor that README.md calls wide."""
RESAMPLES = 1000


class Choice(NamedTuple):
    """What another draw of the selection seeds would have chosen."""

    shares: dict[float, float]
    """Factor -> share of the draws in which it is the best."""
    deviations: tuple[float, float]
    """Standard deviation over the draws of pass@1 and pass@64 at the chosen factor, in points."""


def choose_again(outcomes: Mapping[float, Tensor]) -> Choice:
    """Bootstrap the choice of the best factor over seeds; always with the same random numbers."""
    factors = sorted(outcomes)
    values = np.stack([outcomes[factor].double().numpy() for factor in factors])
    size = values.shape[-1]
    draws = np.random.default_rng(0).integers(0, size, (RESAMPLES, size))
    chosen = values.sum(axis=1)[:, draws].mean(axis=2).argmax(axis=0)
    first, second = values.mean(axis=2)[chosen].std(axis=0)
    shares = np.bincount(chosen, minlength=len(factors)) / RESAMPLES
    known = {factor: float(one) for factor, one in zip(factors, shares, strict=True) if one}
    return Choice(known, (float(first), float(second)))


def is_resolved(outcomes: Mapping[float, Tensor], *, least: float = WIDE) -> bool:
    """Whether the best factor beats every one below `least` in the sum of both outcomes.

    Each paired 95 % interval over the selection seeds is above 0.
    """
    sums = {factor: values.sum(dim=0) for factor, values in outcomes.items()}
    best = sums[best_factor(outcomes)]
    return all(
        mean_interval((best - sums[factor]).tolist()).low > 0 for factor in sums if factor < least
    )


def width_or_rule(swept: Swept) -> str:
    """Range over widths beside the range over rules, and shares of the variance, by conditions."""
    head = ["conditions", "rules", "pass@1 over widths", "pass@1 over rules"]
    head += ["pass@64 over widths", "pass@64 over rules"]
    head += [
        f"variance of {name}, %: {of}" for name in ("pass@1", "pass@64") for of in ("rule", "width")
    ]
    lines = []
    for words, rows in _by_conditions(swept).items():
        # Rules, factors, outcomes.
        tried = np.array([[one[f].mean(dim=1).tolist() for f in FACTORS] for one in rows.values()])
        best = np.array([one[best_factor(one)].mean(dim=1).tolist() for one in rows.values()])
        widths, rules = np.median(np.ptp(tried, axis=1), axis=0), np.ptp(best, axis=0)
        total = tried.reshape(-1, 2).var(axis=0)
        of_rule, of_width = (100 * tried.mean(axis=axis).var(axis=0) / total for axis in (1, 0))
        line = [words, f"{len(rows)}"]
        line += [f"{one[place]:.2f}" for place in (0, 1) for one in (widths, rules)]
        line += [f"{one[place]:.0f}" for place in (0, 1) for one in (of_rule, of_width)]
        lines.append(line)
    return markdown(head, lines)


def best_widths(swept: Swept, scales: Mapping[str, float]) -> str:
    """Every cell's best factor, its width over the rule's own, and how sure the choice is."""
    head = ["conditions", "rule", "best", "over the rule's own", "x 4 or more"]
    head += ["best in % of the draws", "sd of the choice: pass@1", "pass@64"]
    lines = []
    numbers = dict.fromkeys(("wide", "resolved", "above", "ended"), 0)
    for cell, outcomes in swept.items():
        if not outcomes:
            continue
        best, choice = best_factor(outcomes), choose_again(outcomes)
        over = best if cell.rule in PAPER else best * scales[cell.rule]
        word = "-" if best < WIDE else "resolved" if is_resolved(outcomes) else "not resolved"
        numbers["wide"] += best >= WIDE
        numbers["resolved"] += word == "resolved"
        numbers["above"] += over > 1
        numbers["ended"] += best in (SMALLEST, LARGEST)
        shares = ", ".join(
            f"x {factor:g}: {100 * one:.0f}" for factor, one in choice.shares.items()
        )
        deviations = [f"{one:.2f}" for one in choice.deviations]
        lines.append(
            [conditions(cell), cell.rule, f"{best:g}", f"{over:.2g}", word, shares, *deviations]
        )
    summary = (
        f"Of {len(lines)} sweeps {numbers['wide']} are best at 4 times the first width or more, "
        f"{numbers['resolved']} of them resolved; {numbers['above']} above the rule's own width; "
        f"{numbers['ended']} at the end of what is tried.\n\n"
    )
    return summary + markdown(head, lines)


def fixed_clip(at_best: Mapping[str, tuple[Arms, Results]], swept: Swept) -> str:
    """GAPO minus the fixed clip at their best widths: without, and with the choice of the widths.

    Args:
        at_best: by conditions, arms at their best widths and their results.
        swept: where the choice comes from.
    """
    head = ["conditions", "factors", "pass@1", "with the choice", "pass@64", "with the choice"]
    lines = []
    rows = _by_conditions(swept)
    for words, (arms, found) in at_best.items():
        if GAPO not in found or FIXED not in found:
            continue
        pair = [rows[words][rule] for rule in (GAPO, FIXED)]
        choices = [choose_again(outcomes).deviations for outcomes in pair]
        differences = late(found[GAPO]) - late(found[FIXED])
        cells = []
        for place, values in enumerate(differences):
            level = confidence(len(pairs_to_gapo(arms)))
            interval = mean_interval(values.tolist(), confidence=level)
            own = np.hypot(choices[0][place], choices[1][place])
            cells += [_shown(interval), _shown(_wider(interval, values, float(own)))]
        factors = " and ".join(f"x {best_factor(one):g}" for one in pair)
        lines.append([words, factors, *cells])
    return markdown(head, lines)


def _wider(interval: Interval, values: Tensor, deviation: float) -> Interval:
    """The interval with another standard deviation of its mean added."""
    error = float(values.std()) / len(values) ** 0.5
    half = (interval.high - interval.mean) * float(np.hypot(error, deviation)) / error
    return Interval(interval.mean, interval.mean - half, interval.mean + half)


def equal_factors(swept: Swept) -> str:
    """GAPO minus the fixed clip at equal factors, on the selection seeds; t of each difference."""
    head = ["conditions", "factor", "pass@1", "t", "pass@64", "t"]
    lines, registered = [], []
    for words, rows in _by_conditions(swept).items():
        if GAPO not in rows or FIXED not in rows:
            continue
        ours, theirs = rows[GAPO], rows[FIXED]
        for factor in sorted(ours.keys() & theirs.keys()):
            values = (ours[factor] - theirs[factor]).double()
            means = values.mean(dim=1)
            ts = (means / values.std(dim=1) * values.shape[1] ** 0.5).tolist()
            cells = zip(means.tolist(), ts, strict=True)
            line = [f"{one:+.2f}" for pair in cells for one in pair]
            lines.append([words, f"x {factor:g}", *line])
            if factor in FACTORS and words.endswith("k 8") and "sampler" not in words:
                registered.append((*means.tolist(), *ts))
    sums = np.array(registered)
    first, second = sums[:, :2].mean(axis=0) if len(sums) else (0.0, 0.0)
    beyond = (np.abs(sums[:, 2:]) > 2).sum(axis=0) if len(sums) else (0, 0)
    summary = (
        f"Fresh and stale, three rates, the five factors that every sweep has: {len(sums)} cells, "
        f"mean {first:+.3f} of pass@1 and {second:+.3f} of pass@64; |t| > 2 in {beyond[0]} and "
        f"{beyond[1]}.\n\n"
    )
    return summary + markdown(head, lines)


def _by_conditions(swept: Swept) -> dict[str, dict[str, Mapping[float, Tensor]]]:
    """Outcomes by conditions in words and rule; cells that are not trained are left out."""
    found: dict[str, dict[str, Mapping[float, Tensor]]] = {}
    for cell, outcomes in swept.items():
        if outcomes:
            found.setdefault(conditions(cell), {})[cell.rule] = outcomes
    return found


def _shown(interval: Interval) -> str:
    return f"{interval.mean:+.2f} ± {interval.mean - interval.low:.2f}"
