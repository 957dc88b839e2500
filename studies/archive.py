"""Archives: runs as a few small CSV files, from which a study's figures can be drawn again.

    python -m studies.archive RUN... --output DIR

RUN is a run folder or a folder of runs. DIR then holds:

runs.csv          a row per run: name, code, config and branch (JSON)
metrics.csv       a row per run and bin of steps, named by its last step: what figures show
timings.csv       a row per start, and per run one with the mean over its steps
solve_rates.csv   a row per run and evaluation, a column per problem: solve rate times `per`
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gapo_megatron.config import Config, check_recorded
from gapo_megatron.errors import DataError, GapoError, shown
from gapo_megatron.evaluate.counts import read_counts
from gapo_megatron.formats.folder import claim
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.run_folder import parse_changes
from gapo_tools.reporting.runs import Run, Values, find_trained, parse_branch, read_run
from gapo_tools.reporting.series import Row, rollout_weights

RUNS_NAME = "runs.csv"
METRICS_NAME = "metrics.csv"
TIMINGS_NAME = "timings.csv"
SOLVE_RATES_NAME = "solve_rates.csv"
BIN_STEPS = 5
DIGITS = 5
"""Significant digits: the interval of two seeds is 13 times their difference's rounding."""

_WEIGHT = r"per_c/correct/sequences/c\d+"
_WEIGHED = r"per_c/correct/(?P<name>\w+)/c(?P<c>\d+)"
_AT_ONE_STEP = (
    r"eval/pass@\d+|numerics/\w+|experts/ratio_by_routes|ratio/advantage_correlation_window"
)
_KEPT = "|".join(
    (
        *(_AT_ONE_STEP, r"reward/mean", r"experts/same_routes_share", r"per_c/group_share/c\d+"),
        r"clip/(fraction_sequences|(positive_)?gradient_mass_lost|dose_\w+)",
        r"per_c/correct/(sequences|response_length|advantage)/c\d+",
        r"per_c/correct/(ratio_deviation|ratio_abs_deviation|clip_gradient_mass_lost)/c\d+",
        r"per_c/correct/(clip_fraction_sequences|clip_fraction_tokens)/c\d+",
    )
)


Rates = dict[str, float]
"""Problem -> share of its samples that are correct; NaN where no verdict is known."""


@dataclass(frozen=True)
class StudyRun(Run):
    """A run with what studies alone look at."""

    solve_rates: dict[int, Rates] = field(default_factory=dict)
    """Step of an evaluation -> solve rates, in step order."""
    code: tuple[str, ...] = ()
    """Versions of the code it was started with (`frozen_code`), each once; empty if unknown."""
    bin_steps: int = 1
    """Steps per value: a value stands for its step and those before it. Archives have bins."""


def read_study_run(folder: Path) -> StudyRun:
    """Read a run's folder; errors as `read_run`."""
    rates: dict[int, Rates] = {}
    for path in sorted((folder / "evaluations").glob("step_*.json")):
        rates[int(path.stem.removeprefix("step_"))] = {
            str(one["id"]): one["num_correct"] / (one["num_samples"] or math.nan)
            for one in read_counts(path)
        }
    code = dict.fromkeys(
        frozen_code(path.parent) for path in sorted((folder / "code").glob("*/code.json"))
    )
    rates = dict(sorted(rates.items()))
    return StudyRun(**vars(read_run(folder)), solve_rates=rates, code=tuple(code))


def frozen_code(folder: Path) -> str:
    """Identifier of frozen code: its commit, plus a digest if files differ from the commit.

    Args:
        folder: a folder that `launch.freeze.freeze` wrote.

    Returns:
        `1a2b3c4d5e6f`; with a digest of the package if files differ from the commit or the commit
        is unknown: `1a2b3c4d5e6f+01234567`, `+01234567`.

    Raises:
        FileNotFoundError: there is no code.json.
        DataError: code.json is damaged.
    """
    path = folder / "code.json"
    origin = read_json(path, error=DataError)
    commit = origin.get("commit") if isinstance(origin, dict) else 0
    if not isinstance(commit, str | None):
        raise DataError(f"{path}: commit ({shown(commit)}) must be a string or null")
    commit = (commit or "")[:12]
    if commit and not origin.get("has_local_changes"):
        return commit
    digest = hashlib.sha256()
    package = folder / "gapo_megatron"
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{commit}+{digest.hexdigest()[:8]}"


# -- writing ---------------------------------------------------------------------------------------


def write_archive(runs: Sequence[StudyRun], folder: Path) -> None:
    """Write runs to `folder`.

    A bin holds what a longer window would make of its steps: the sum of numbers of sequences, the
    mean per sequence (of shares of tokens, per token) of metrics per c, the mean over steps of all
    others.

    Args:
        runs: runs with different folder names.
        folder: made when missing.

    Raises:
        DataError: two runs whose folders have the same name.
        ConfigError: the folder holds files of these names that no earlier call wrote.
    """
    names = [run.folder.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two runs are called {name}; runs in an archive need different names")
    tables: dict[str, list[Row]] = {
        RUNS_NAME: [{"run": run.folder.name, **_settings(run)} for run in runs],
        METRICS_NAME: [row for run in runs for row in _metrics(run)],
        TIMINGS_NAME: [row for run in runs for row in _timings(run)],
        SOLVE_RATES_NAME: [row for run in runs for row in _solve_rates(run)],
    }
    claim(folder, tables, field="--output", made_by="archive")
    for table, rows in tables.items():
        with (folder / table).open("w", encoding="utf-8", newline="") as file:
            columns = dict.fromkeys(key for row in rows for key in row)
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {
                        key: f"{value:.{DIGITS}g}" if isinstance(value, float) else value
                        for key, value in row.items()
                    }
                )


def _settings(run: StudyRun) -> Row:
    """A run's settings, with defaults and the method's preset filled in."""
    objective, method = run.config.objective, asdict(run.method)
    # Only keys that a config may have: an infinite largest ratio means that the method has none.
    own = {
        key: method[key]
        for key in type(objective).model_fields
        if key in method and method[key] != float("inf")
    }
    whole = run.config.model_copy(update={"objective": objective.model_copy(update=own)})
    return {
        "commit": " ".join(run.code),
        "config": whole.model_dump_json(),
        "branch": None if run.branch is None else json.dumps(run.branch),
        "changes": json.dumps(run.changes) if run.changes else None,
    }


def _metrics(run: Run) -> list[Row]:
    last = run.num_steps - 1
    ends = {step: min(step - step % BIN_STEPS + BIN_STEPS - 1, last) for step in range(last + 1)}
    rows: dict[int, Row] = {}
    for key, values in run.metrics.items():
        if re.fullmatch(_KEPT, key):
            for step, value in _binned(key, values, run, ends).items():
                rows.setdefault(step, {"run": run.folder.name, "step": step})[key] = value
    return [rows[step] for step in sorted(rows)]


def _binned(key: str, values: Values, run: Run, ends: Mapping[int, int]) -> Values:
    """Values of a metric at the ends of bins; `ends`: step -> the last step of its bin."""
    if re.fullmatch(_AT_ONE_STEP, key):
        is_end = set(ends.values()) if key.startswith("ratio/") else values.keys()
        return {step: value for step, value in values.items() if step in is_end}
    weighed = re.fullmatch(_WEIGHED, key)
    weights = dict.fromkeys(values, 1.0)
    if weighed and not re.fullmatch(_WEIGHT, key):
        weights = rollout_weights(run, weighed["name"], int(weighed["c"]))
    sums: dict[int, float] = {}
    totals: dict[int, float] = {}
    for step, value in values.items():
        weight = weights.get(step, 0.0)  # responses also have a length where A = 0
        sums[ends[step]] = sums.get(ends[step], 0.0) + weight * value
        totals[ends[step]] = totals.get(ends[step], 0.0) + weight
    if re.fullmatch(_WEIGHT, key):
        return sums
    return {end: sums[end] / totals[end] for end in sums if totals[end]}


def _timings(run: Run) -> Iterator[Row]:
    """A row per start, and the mean over `num_steps` steps; without time of day and memory."""
    steps = [row for row in run.timings if "time/step_s" in row]
    starts = [[row] for row in run.timings if "time/step_s" not in row]
    for rows in filter(None, [*starts, steps]):
        keys = dict.fromkeys(
            key
            for row in rows
            for key in row
            if key not in ("step", "time/unix_s") and not key.startswith("memory/")
        )
        means = {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in keys}
        yield {"run": run.folder.name, "num_steps": len(rows), **means}


def _solve_rates(run: StudyRun) -> Iterator[Row]:
    """Solve rates as numbers of correct samples, which are shorter; not whole without verdicts."""
    per = run.config.evaluation.samples_per_prompt
    for step, rates in run.solve_rates.items():
        counts = {problem: per * rate for problem, rate in rates.items()}
        yield {"run": run.folder.name, "step": step, "per": per, **counts}


# -- reading ---------------------------------------------------------------------------------------


def read_archive(folder: Path) -> list[StudyRun]:
    """Read what `write_archive` wrote; the runs have values at the last step of each bin.

    Raises:
        DataError: names the file and line.
    """
    runs: dict[str, StudyRun] = {}
    for number, row in enumerate(_read(folder / RUNS_NAME), start=2):
        try:
            check_recorded(json.loads(row["config"]), source=f"run {row['run']}")
            runs[row["run"]] = StudyRun(
                folder=folder / row["run"],
                config=Config.model_validate_json(row["config"]),
                branch=parse_branch(row["branch"], where="branch") if row["branch"] else None,
                metrics={},
                timings=[],
                code=tuple(row["commit"].split()),
                bin_steps=BIN_STEPS,
                changes=parse_changes(json.loads(row.get("changes") or "[]"), where="changes"),
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{folder / RUNS_NAME}:{number}: not a run's row: {error}") from None
    for number, run, values in _numbers(folder / METRICS_NAME, runs):
        step = _step(folder / METRICS_NAME, number, values)
        for key, value in values.items():
            run.metrics.setdefault(key, {})[step] = value
    for _, run, values in _numbers(folder / TIMINGS_NAME, runs):
        num_steps = int(values.pop("num_steps"))
        run.timings.extend([values] * num_steps)
    for number, run, values in _numbers(folder / SOLVE_RATES_NAME, runs):
        step = _step(folder / SOLVE_RATES_NAME, number, values)
        per = values.pop("per")
        run.solve_rates[step] = {key: value / per for key, value in values.items()}
    return list(runs.values())


def _read(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    except OSError as error:
        raise DataError(f"{path}: cannot read the file: {error.strerror}") from None


def _numbers(
    path: Path, runs: Mapping[str, StudyRun]
) -> Iterator[tuple[int, StudyRun, dict[str, float]]]:
    """Line number, run and numbers of each row; empty fields are left out."""
    for number, row in enumerate(_read(path), start=2):
        name = row.pop("run", "")
        if name not in runs:
            raise DataError(f"{path}:{number}: run {name!r} is not in {RUNS_NAME}")
        try:
            yield number, runs[name], {key: float(value) for key, value in row.items() if value}
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: not a number: {error}") from None


def _step(path: Path, number: int, values: dict[str, float]) -> int:
    if "step" not in values:
        raise DataError(f"{path}:{number}: no step")
    return int(values.pop("step"))


def main() -> None:
    """Write an archive of runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    folders, _ = find_trained(arguments.runs)
    write_archive([read_study_run(folder) for folder in folders], arguments.output)


if __name__ == "__main__":
    try:
        main()
    except GapoError as error:
        raise SystemExit(f"error: {error}") from None
