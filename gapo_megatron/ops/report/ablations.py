"""Figures and tables over a setting: rollouts per group k, and the largest upper clip."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import astuple, fields, replace

import numpy as np
from matplotlib.axes import Axes

from gapo_megatron.config.methods import Method
from gapo_megatron.evaluate.table import NONE, Table, with_interval
from gapo_megatron.ops.report.arms import CLIP, SIZES, Arm, Comparison, K
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.series import NoData, Row, final, interval, pass_keys
from gapo_megatron.ops.report.style import arm_style, column, legend_below, panels
from gapo_megatron.ops.report.summary import INTERVALS, gain, gain_text

NOT_EVALUATED = "no method has an evaluation that all of its seeds have"


def over_k(comparison: Comparison) -> Exhibit:
    """The paper's ablation: final pass@1 and pass@k of each method against k."""
    families = [arms for arms in comparison.over(K, *SIZES) if len({arm.k for arm in arms}) > 1]
    if not families:
        raise NoData("no method was run with two values of batch.rollouts_per_prompt")
    keys = pass_keys([arm for arms in families for arm in arms])
    rows: list[Row] = []
    for key in keys:
        for arms in families:
            for arm in sorted(arms, key=lambda arm: arm.k):
                if found := final(arm, key):
                    row: Row = {"method": arms[0].label, "metric": key.removeprefix("eval/")}
                    rows.append({**row, "k": arm.k, "step": found[0], **interval(found[1])})
    if not rows:
        raise NoData(NOT_EVALUATED)
    figure, axes = panels(len(keys), row_inches=1.5, share_y=False)
    for axis, key in zip(axes, keys, strict=True):
        _draw_over_k(axis, rows, families, key.removeprefix("eval/"))
    legend_below(figure, axes[0])
    seeds = sorted({int(row["seeds"] or 0) for row in rows})
    return Exhibit(
        aid="Final accuracy on held-out problems against k, the number of rollouts per group; one "
        "line per method.",
        rows=rows,
        figure=figure,
        notes=[
            f"Bars: 95 % Student-t intervals of the mean over seeds ({' or '.join(map(str, seeds))}"
            " of them); methods stand beside each other so that bars do not hide one another."
        ],
    )


def _draw_over_k(
    axis: Axes, rows: Sequence[Row], families: Sequence[Sequence[Arm]], metric: str
) -> None:
    axis.set(xlabel="k (rollouts per group)", ylabel=f"final {metric} (%)")
    axis.set_xscale("log", base=2)
    for place, arms in enumerate(families):
        name = arms[0].label
        line = [row for row in rows if row["method"] == name and row["metric"] == metric]
        if not line:
            continue
        means = 100 * column(line, "mean")
        shift = 2 ** (0.12 * (place - (len(families) - 1) / 2))
        look = {"capsize": 2, "elinewidth": 0.8, **arm_style(place)}
        low, high = (100 * np.clip(column(line, bound), 0, 1) for bound in ("low", "high"))
        error = [means - low, high - means]
        axis.errorbar(shift * column(line, "k"), means, yerr=error, label=name, **look)
    ks = sorted({int(row["k"] or 0) for row in rows})
    axis.set_xticks(ks)
    axis.set_xlim(ks[0] / 2**0.4, ks[-1] * 2**0.4)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def clip_sweep(comparison: Comparison) -> Exhibit:
    """The paper's table of `eps_high_max`: adaptive against uniform clip, level by level."""
    families: dict[Hashable, list[Arm]] = {}
    for arm in (arm for arms in comparison.over(CLIP) for arm in arms):
        families.setdefault(_family(arm), []).append(arm)
    swept = [arms for arms in families.values() if len({_clip(arm) for arm in arms}) > 1]
    if not swept:
        raise NoData("no method was run with two values of objective.eps_high_max")
    key = pass_keys([arm for arms in swept for arm in arms])[0]
    levels = sorted({_clip(arm) for arms in swept for arm in arms})
    rows: list[Row] = []
    at_level: list[dict[float, Arm]] = []
    for arms in swept:
        at_level.append({})
        for arm in sorted(arms, key=_clip):
            if found := final(arm, key):
                at_level[-1].setdefault(_clip(arm), arm)
                row: Row = {"methods": _name(arms), "arm": arm.label, "eps_high_max": _clip(arm)}
                rows.append({**row, "step": found[0], **interval(found[1])})
    if not rows:
        raise NoData(NOT_EVALUATED)
    lines = [
        [_name(arms), *(_cell(found.get(level), key) for level in levels)]
        for arms, found in zip(swept, at_level, strict=True)
    ]
    ours = at_level[0]
    for arms, theirs in zip(swept[1:], at_level[1:], strict=True):
        cells = [
            gain_text(gain(ours[level], theirs[level], key))
            if level in ours and level in theirs
            else NONE
            for level in levels
        ]
        lines.append([f"{_name(swept[0])} over {_name(arms)} (points)", *cells])
    return Exhibit(
        aid="Final pass@1 of each method at each eps_high_max; the last rows are differences "
        "between methods at the same eps_high_max.",
        rows=rows,
        table=Table(
            f"final held-out {key.removeprefix('eval/')} in % by eps_high_max",
            ["eps_high_max", *(f"{level:g}" for level in levels)],
            lines,
            notes=[INTERVALS],
        ),
    )


def _clip(arm: Arm) -> float:
    return arm.method.eps_high_max


def _cell(arm: Arm | None, key: str) -> str:
    found = arm and final(arm, key)
    return with_interval(found[1]) if found else NONE


def _name(family: Sequence[Arm]) -> str:
    """Name of a family: the usual arms of its methods, as in "gspo, gspo_asym"."""
    usual = {arm.method.name: arm.label for arm in reversed(family)}
    return ", ".join(dict.fromkeys(usual[arm.method.name] for arm in family))


def _family(arm: Arm) -> Hashable:
    """Methods that differ in the upper clip alone: gspo and gspo_asym are one at two widths."""
    method = astuple(replace(arm.method, name="", eps_high_max=0.0))
    # Not all of the objective is the method's: kl_coef, say, is not.
    compared = {"objective.method", *(f"objective.{field.name}" for field in fields(Method))}
    rest = [pair for pair in arm.settings.items() if pair[0] not in compared]
    return (method, tuple(rest))
