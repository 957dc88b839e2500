"""Compares evaluations in tables like the paper's, beside its published figures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.files import real
from gapo_tools.evaluation.paper import Setting
from gapo_tools.evaluation.result_tables import title
from gapo_tools.evaluation.results import Results, in_order, read_results
from gapo_tools.evaluation.statistics import paired_difference, stars, welch_p_value
from gapo_tools.evaluation.table import NONE, Table, mean, percent, with_interval


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the tables: one evaluation, or one per training seed."""

    label: str
    """Name of the row; the name of a method (`gapo`) adds its published figures."""
    evaluations: list[Results]

    @classmethod
    def read(cls, text: str) -> Method:
        """Read `[LABEL=]DIR[,DIR...]`; the label defaults to the first folder's name.

        An existing folder is read as one, even if its name contains `=` or `,`.

        Raises:
            DataError: a folder has no results.
            ConfigError: the evaluations were sampled differently.
        """
        label, equals, folders = text.partition("=")
        # Not Path.is_dir, which raises for a list that is too long for a name.
        if not equals or os.path.isdir(text.partition(",")[0]) or os.path.isdir(text):
            label, equals, folders = "", "", text
        is_one = os.path.isdir(folders)
        paths = [Path(one) for one in ([folders] if is_one else folders.split(","))]
        evaluations = [read_results(path) for path in paths]
        drawn = dict.fromkeys((one.setting, one.sampling) for one in evaluations)
        if len(drawn) > 1:
            shown = "; ".join(f"{name} {sampling.text}".strip() for name, sampling in drawn)
            raise ConfigError(
                f"--compare {text}: the evaluations were sampled differently: {shown}"
            )
        return cls(label if equals else real(paths[0]).name, evaluations)

    @property
    def num_samples(self) -> int:
        return self.evaluations[0].sampling.num_samples

    @property
    def seeds(self) -> str:
        """Which seeds its values are of."""
        return "training" if len(self.evaluations) > 1 else "sampling"

    def values(self, benchmark: str, k: int) -> list[float]:
        """pass@k per training seed (a mean over sampling seeds); of one, per sampling seed."""
        by_evaluation = [one.values(benchmark, k) for one in self.evaluations]
        if len(by_evaluation) == 1:
            return by_evaluation[0]
        return [mean(values) for values in by_evaluation] if all(by_evaluation) else []

    def __contains__(self, benchmark: str) -> bool:
        return all(benchmark in one.benchmarks for one in self.evaluations)

    def published(self, settings: dict[str, Setting]) -> dict[str, tuple[str, str]]:
        """The paper's figures of this method and model by benchmark; empty if it has none."""
        setting = settings.get(self.evaluations[0].setting)
        return setting.published.get(self.label, {}) if setting else {}


def compare(methods: Sequence[Method], settings: dict[str, Setting]) -> list[Table]:
    """The paper's tables: pass@1/pass@k, means with intervals, and differences with stars.

    Args:
        methods: the first is compared with every other.
        settings: the result of `read_settings`.

    Raises:
        ConfigError: two methods have the same label, one has no figures, or the problems of a
            benchmark differ between methods.
    """
    labels = [method.label for method in methods]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(
            f"--compare: {', '.join(sorted(repeated))} names several rows; name each LABEL=DIR, "
            "and list the training seeds of one method as LABEL=DIR,DIR,..."
        )
    _check_problems(methods)
    columns = [
        name
        for name in ["average", *benchmarks_of(methods)]
        if any(method.values(name, 1) for method in methods)
    ]
    for method in methods:
        if not any(method.values(name, 1) for name in columns):
            raise ConfigError(f"--compare: {method.label} has no complete benchmark")
    tables = [_main_table(methods, columns, settings)]
    if any(count > 1 for method in methods for count in _num_seeds(method, columns)):
        tables.append(_seeds_table(methods, columns))
    if len(methods) > 1:
        tables.append(_differences_table(methods, columns))
    return tables


def benchmarks_of(methods: Sequence[Method]) -> list[str]:
    """Every benchmark that one of the methods was evaluated on, in order."""
    return in_order(
        name for method in methods for one in method.evaluations for name in one.benchmarks
    )


def _check_problems(methods: Sequence[Method]) -> None:
    for name in benchmarks_of(methods):
        sets = {  # with the file: ids are row numbers, which two files may share
            (evaluation.files[name], frozenset(seed.counts)): method.label
            for method in methods
            for evaluation in method.evaluations
            for seed in evaluation.benchmarks.get(name, {}).values()
        }
        if len(sets) > 1:
            shown = " and ".join(
                f"{len(problems)} of SHA-256 {file[:12]} ({label})"
                for (file, problems), label in sets.items()
            )
            raise ConfigError(
                f"--compare: {title(name)} was evaluated on different problems: {shown}"
            )


def _num_seeds(method: Method, columns: Sequence[str]) -> list[int]:
    """The different numbers of seeds in a method's columns."""
    return sorted({len(method.values(name, 1)) for name in columns} - {0})


def _main_table(
    methods: Sequence[Method], columns: Sequence[str], settings: dict[str, Setting]
) -> Table:
    k = min(method.num_samples for method in methods)
    rows: list[list[str]] = []
    ours: list[int] = []
    published_ks = set()
    for method in methods:
        ours.append(len(rows))
        rows.append([method.label, *(_cell(method, name, k) for name in columns)])
        if published := method.published(settings):
            setting = settings[method.evaluations[0].setting]
            published_ks.add(setting.sampling.num_samples)
            cells = ["/".join(filter(None, published.get(name, (NONE, "")))) for name in columns]
            rows.append([f"{method.label} (published)", *cells])
    best = set()
    for place, name in enumerate(columns, start=1):
        means = [mean(method.values(name, 1)) for method in methods]
        top = max((value for value in means if not math.isnan(value)), default=math.nan)
        if len(methods) > 1:
            best |= {(row, place) for row, value in zip(ours, means, strict=True) if value == top}
    notes = []
    if published_ks:
        shown = " or ".join(f"pass@1/pass@{one}" for one in sorted(published_ks))
        notes.append(f"Published rows are from the paper, as {shown} where it prints both.")
    samplings = {method.label: method.evaluations[0].sampling for method in methods}
    for method in methods:
        if method.published(settings):
            drawn = settings[method.evaluations[0].setting].sampling
            own = samplings[method.label]
            if replace(drawn, num_samples=own.num_samples) != own:  # n is in the note above
                samplings[f"{method.label} (published)"] = drawn
    if len(set(samplings.values())) > 1:
        shown = "; ".join(f"{label}: {one.text}" for label, one in samplings.items())
        notes.append(f"Sampling settings differ: {shown}.")
    dates = {method.label: [one.template_date for one in method.evaluations] for method in methods}
    if len({date for found in dates.values() for date in found}) > 1:
        shown = "; ".join(f"{label}: {', '.join(found)}" for label, found in dates.items())
        notes.append(f"Dates in the prompts differ (--template-date sets one): {shown}.")
    figures = "pass@1" if k == 1 else f"pass@1/pass@{k}"
    return Table(f"{figures} in %", ["method", *map(title, columns)], rows, frozenset(best), notes)


def _cell(method: Method, benchmark: str, k: int) -> str:
    figures = [percent(mean(method.values(benchmark, one))) for one in sorted({1, k})]
    return NONE if set(figures) == {NONE} else "/".join(figures)


def _seeds_table(methods: Sequence[Method], columns: Sequence[str]) -> Table:
    rows = [
        [method.label, *(with_interval(method.values(name, 1)) for name in columns)]
        for method in methods
    ]
    numbers = "; ".join(
        f"{method.label}: {' or '.join(map(str, _num_seeds(method, columns)))} {method.seeds}"
        for method in methods
    )
    return Table(
        "pass@1 in %, mean ± 95 % interval over seeds (Student's t)",
        ["method", *map(title, columns)],
        rows,
        notes=[f"Seeds by method: {numbers}."],
    )


def _differences_table(methods: Sequence[Method], columns: Sequence[str]) -> Table:
    ours = methods[0]
    rows = []
    notes = ["Welch's t-test over seeds: * p < 0.05, ** p < 0.01, *** p < 0.001."]
    if any(1 in _num_seeds(method, columns) for method in methods):
        notes.append("Not tested where a method has only one seed.")
    for method in methods[1:]:
        rows.append([f"vs. {method.label}", *(_difference(ours, method, n) for n in columns)])
        if len(ours.evaluations) == len(method.evaluations) > 1:
            rows.append(["paired", *(_paired(ours, method, name) for name in columns)])
    if any(label == "paired" for label, *_ in rows):
        notes.append(
            "paired: half width of the 95 % interval (Student's t), training seeds paired in given "
            "order."
        )
    return Table(
        f"Δ pass@1 in points, {ours.label} - baseline",
        ["", *map(title, columns)],
        rows,
        notes=notes,
    )


def _difference(ours: Method, baseline: Method, benchmark: str) -> str:
    first, second = ours.values(benchmark, 1), baseline.values(benchmark, 1)
    difference = 100 * (mean(first) - mean(second))
    if math.isnan(difference):
        return NONE
    marks = stars(welch_p_value(first, second))
    return f"{difference:+.2f}{marks}"


def _paired(ours: Method, baseline: Method, benchmark: str) -> str:
    first, second = ours.values(benchmark, 1), baseline.values(benchmark, 1)
    if math.isnan(mean(first) - mean(second)):
        return NONE
    interval = paired_difference(second, first)
    return f"±{percent((interval.high - interval.low) / 2, digits=2)}"
