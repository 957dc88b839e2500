"""The report of runs: every figure that they can fill, its data, and a page with all of them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gapo_megatron.errors import DataError
from gapo_megatron.evaluate.table import Table
from gapo_megatron.hf.folder import claim
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.sample_files import read_samples, read_timelines
from gapo_megatron.ops.report.archive import check_archive, is_archive, read_archive, write_archive
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.clipping import (
    by_c,
    clip_fraction_per_c,
    correlation,
    deviation_per_c,
)
from gapo_megatron.ops.report.costs import rounding, step_time
from gapo_megatron.ops.report.intervention import intervention
from gapo_megatron.ops.report.learning import pass_at_k, solve_rates, spectrum
from gapo_megatron.ops.report.outcomes import clip_sweep, others, over_k, summary
from gapo_megatron.ops.report.runs import Run, find_trained, read_run
from gapo_megatron.ops.report.samples import page_values
from gapo_megatron.ops.report.series import NoData
from gapo_megatron.ops.report.style import KINDS, Exhibit, mark_changes, style

PAGE_NAME = "report.html"
SAMPLES_PAGE_NAME = "samples.html"
FIGURES_NAME = "figures"
MOST_NAMES = 5
"""Most names of runs listed in a sentence."""
_TITLE = "Training report: "

MAKERS: dict[str, Callable[[Comparison], Exhibit]] = {
    "Summary": summary,
    "Held-out pass@1 and pass@k over training": pass_at_k,
    "Ratio deviation of correct rollouts, per c": deviation_per_c,
    "Clip fraction of correct rollouts, per c": clip_fraction_per_c,
    "Clip fraction, drift and deviation against c": by_c,
    "Correlation of ratio deviation and advantage": correlation,
    "Branches and the runs they left": intervention,
    "Spectrum of solve rates": spectrum,
    "Solve rates problem by problem": solve_rates,
    "Other settings": others,
    "Ablation over rollouts per group": over_k,
    "Sweep of the largest upper clip": clip_sweep,
    "Time of a step, by stage": step_time,
    "Signal against rounding": rounding,
}
"""Title -> function that makes the exhibit or raises NoData, in the order of the page.

The function's name is the stem of the exhibit's files.
"""


@dataclass(frozen=True)
class Report:
    """Result of writing a report."""

    page: Path
    summary: Table
    left_out: dict[str, str]
    """Title of a figure these runs cannot fill -> reason."""
    waiting: list[Path]
    """Folders of runs that have not trained a step yet."""


@dataclass(frozen=True)
class _Written:
    """An exhibit and its files, for the page."""

    title: str
    exhibit: Exhibit
    files: list[str]
    """Paths relative to the page."""
    image: str
    """The PNG in base64; empty for a table."""


def write_report(
    folders: Sequence[Path],
    output_dir: Path,
    *,
    first: str | None = None,
    archive_dir: Path | None = None,
    on_part: Callable[[str, int, int], None] = lambda part, done, total: None,
) -> Report:
    """Write `report.html` and `figures/` (PNG, PDF, LaTeX, CSV) into `output_dir`.

    Also `samples.html`, if runs have samples; archives have none.

    Args:
        folders: run folders, folders of run folders, or archives (read first).
        output_dir: made when missing; files of an earlier report are replaced.
        first: the method that is compared with all others; None: the first run's.
        archive_dir: where to write the runs as an archive, too.
        on_part: called with the next part, the number of parts done and their total.

    Raises:
        DataError: names the folder or file and the rule (`find_trained`, `read_run`,
            `read_archive`, `read_samples`, `Comparison.of`, `write_archive`); a folder to write to
            cannot be made.
        ConfigError: a run's config is not valid, or a folder to write to holds other files with
            the names of ours.
    """
    archives = [folder for folder in folders if is_archive(folder)]
    runs = [run for folder in archives for run in read_archive(folder)]
    others = [folder for folder in folders if folder not in archives]
    found, waiting = find_trained(others) if others else ([], [])
    figures_dir = output_dir / FIGURES_NAME
    if archive_dir is not None:
        check_archive(archive_dir, archives)
    try:
        _claim(output_dir)
        for folder in filter(None, (figures_dir, archive_dir)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot make this folder: {error.strerror}") from None
    total = len(found) + len(MAKERS)
    for number, folder in enumerate(found):
        on_part(f"reading {folder.name}", number, total)
        runs.append(read_run(folder))
    comparison = Comparison.of(runs, first=first)
    if archive_dir is not None:
        write_archive(runs, archive_dir)

    written, left_out = [], {}
    for number, (title, make) in enumerate(MAKERS.items()):
        on_part(f"drawing {title}", len(found) + number, total)
        try:
            written.append(_write(title, make, comparison, figures_dir))
        except NoData as reason:
            left_out[title] = str(reason)
    page = output_dir / PAGE_NAME
    has_samples = _write_samples(comparison, found, output_dir / SAMPLES_PAGE_NAME)
    text = _render(comparison, written, left_out=left_out, waiting=waiting, has_samples=has_samples)
    write_atomically(page, text)
    on_part("done", total, total)
    table = written[0].exhibit.table
    assert table is not None, written[0].title
    return Report(page, table, left_out, waiting)


def _claim(folder: Path) -> None:
    """Refuse to overwrite files that no report wrote."""
    stems = [f"{FIGURES_NAME}/{make.__name__}" for make in MAKERS.values()]
    figures = [f"{stem}{kind}" for stem in stems for kind in KINDS]
    names = [PAGE_NAME, SAMPLES_PAGE_NAME, *figures]
    claim(folder, names, field="--output", made_by="report")


def _write(
    title: str, make: Callable[[Comparison], Exhibit], comparison: Comparison, figures_dir: Path
) -> _Written:
    """Make an exhibit and its files; an earlier report's are removed first."""
    stem = figures_dir / make.__name__
    for kind in KINDS:
        stem.with_suffix(kind).unlink(missing_ok=True)
    with style():
        exhibit = note_changes(note_missing(make(comparison), comparison), comparison)
        paths = exhibit.write(stem)
    image = ""
    if exhibit.figure is not None:
        image = base64.b64encode(stem.with_suffix(".png").read_bytes()).decode()
    return _Written(title, exhibit, [f"{FIGURES_NAME}/{path.name}" for path in paths], image)


def note_missing(exhibit: Exhibit, comparison: Comparison) -> Exhibit:
    """Add a note that names the methods for which a figure has no data."""
    present = {row["arm"] for row in exhibit.rows if "arm" in row}
    missing = [arm.label for arm in comparison.curves if arm.label not in present]
    if exhibit.figure is None or not present or not missing:
        return exhibit
    return replace(exhibit, notes=[*exhibit.notes, f"No data: {', '.join(missing)}."])


def note_changes(exhibit: Exhibit, comparison: Comparison) -> Exhibit:
    """Mark where runs were resumed with other settings, and add a note that names them."""
    if not (changed := comparison.changes):
        return exhibit
    drawn = set() if exhibit.figure is None else mark_changes(exhibit.figure, changed)
    if drawn:
        note = f"Dashed line: {_changes({arm: changed[arm] for arm in changed if arm in drawn})}."
    else:
        note = (
            f"Not marked here: {_changes(changed)}. Means over steps include those before and "
            "after a change."
        )
    return replace(exhibit, notes=[*exhibit.notes, note])


def _changes(changed: Mapping[str, Mapping[int, str]]) -> str:
    """Name each change: `gapo to 3, gspo was resumed with ... from step 3`."""
    return "; ".join(
        f"{arm} was resumed with {names} from step {step}"
        for arm, steps in changed.items()
        for step, names in steps.items()
    )


def _render(
    comparison: Comparison,
    written: Sequence[_Written],
    *,
    left_out: Mapping[str, str],
    waiting: Sequence[Path],
    has_samples: bool,
) -> str:
    """The page; tables stand across it, figures side by side."""
    return _fill(
        "page.html.j2",
        title=_TITLE + _labels(comparison),
        lead=_lead(comparison, waiting),
        samples_page=SAMPLES_PAGE_NAME if has_samples else "",
        tables=[one for one in written if one.exhibit.table is not None],
        figures=[one for one in written if one.exhibit.figure is not None],
        left_out=left_out,
        arms=comparison.arms,
    )


def _write_samples(comparison: Comparison, folders: Sequence[Path], page: Path) -> bool:
    """Write the page of samples; without any, remove an earlier report's. Returns whether it is.

    Args:
        comparison: the runs, in order.
        folders: run folders, without archives.
        page: the file.
    """
    runs = [
        (f"{arm.label}: {run.folder.name}", samples, read_timelines(run.folder))
        for arm in comparison.arms
        for run in arm.runs
        if run.folder in folders and (samples := read_samples(run.folder))
    ]
    if not runs:
        page.unlink(missing_ok=True)
        return False
    title = f"Samples: {_labels(comparison)}"
    values = page_values(runs)
    write_atomically(page, _fill("samples.html.j2", title=title, report_page=PAGE_NAME, **values))
    return True


def _fill(template: str, **values: object) -> str:
    """A page from a template; all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _labels(comparison: Comparison) -> str:
    """The methods' names, the first few of many."""
    labels = [arm.label for arm in comparison.curves]
    if len(labels) > 4:
        labels = [*labels[:3], f"{len(labels) - 3} more"]
    return " · ".join(labels)


def _lead(comparison: Comparison, waiting: Sequence[Path]) -> list[str]:
    """Paragraphs below the title: which runs the page shows, and what is unusual about them."""
    runs = [run for arm in comparison.arms for run in arm.runs]
    going = [run for run in runs if run.num_steps < run.config.run.num_steps]
    first = comparison.first
    lead = [
        f"{len(runs)} {'runs' if len(runs) > 1 else 'run'}, read at "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Runs that differ only in the seed are one "
        "method; a line is the mean over its runs."
    ]
    if going:
        shown = some(
            [f"{r.folder.name} ({r.num_steps} of {r.config.run.num_steps})" for r in going]
        )
        lead.append(
            f"Not finished: {shown}. A curve ends where the shortest run of its method does."
        )
    if changed := comparison.changes:
        lead.append(f"{_changes(changed)}.")
    mixed = [text for arm in comparison.arms if (text := _codes(arm))]
    if mixed:
        lead.append(f"Trained by more than one version of the code: {some(mixed)}.")
    for metric, what in _WATCHED.items():
        if found := [text for run in runs if (text := _shares(run, metric))]:
            lead.append(f"{what}: {some(found)}.")
    if waiting:
        lead.append(f"Not started: {some([folder.name for folder in waiting])}.")
    if len(comparison.curves) < len(comparison.arms):
        lead.append(
            f"Curves show each method with its most common settings ({first.label}: k = {first.k}, "
            f"eps_high_max = {first.method.eps_high_max:g}). Other settings and branches are in "
            "tables and figures of their own."
        )
    return lead


def some(names: Sequence[str]) -> str:
    """List the first few names, and the number of the others."""
    more = len(names) - MOST_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MOST_NAMES])} and {more} more"


_WATCHED = {
    "reward/unknown_share": "Verdicts that are unknown",
    "reward/new_form_share": "Correct answers of a form that was not correct before",
    "reward/several_references_share": "Answers that are correct for several references of a batch",
}


def _shares(run: Run, metric: str) -> str:
    """A share's mean over the steps after the first tenth, and the worst step; empty if all are 0.

    In the first steps of a run every form is new.
    """
    shares = run.series(metric)
    if metric == "reward/new_form_share":
        shares = dict(list(shares.items())[(len(shares) + 9) // 10 :])
    if not any(shares.values()):
        return ""
    worst = max(shares, key=lambda step: shares[step])
    mean = sum(shares.values()) / len(shares)
    return f"{run.folder.name} {mean:.1%} of all, {shares[worst]:.0%} in step {worst}"


def _codes(arm: Arm) -> str:
    """Versions of the code by run; empty if all runs of the arm have the same."""
    if len({one for run in arm.runs for one in run.code}) < 2:
        return ""
    shown = (f"{run.folder.name}: {' and '.join(run.code) or 'unknown'}" for run in arm.runs)
    return f"{arm.label} ({'; '.join(shown)})"
