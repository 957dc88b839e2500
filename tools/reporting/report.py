"""The report of runs: every figure that they can fill, its data, and a page with all of them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gapo_megatron.errors import DataError, printable
from gapo_megatron.formats.folder import claim
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.sample_files import read_samples
from gapo_megatron.types import Sample
from gapo_tools.evaluation.table import Table
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.clip import clip_by_c
from gapo_tools.reporting.correlation import correlation
from gapo_tools.reporting.figures import (
    clip_fraction_per_c,
    deviation_per_c,
    groups_per_c,
    health,
    over_training,
    step_time,
)
from gapo_tools.reporting.gains import before_and_after
from gapo_tools.reporting.runs import Run, find_trained, read_run
from gapo_tools.reporting.series import NoData
from gapo_tools.reporting.style import KINDS, Exhibit, style
from gapo_tools.reporting.tables import rounding, summary
from gapo_tools.viewer import has_samples, make_page, read_data

PAGE_NAME = "report.html"
SAMPLES_PAGE_NAME = "samples.html"
FIGURES_NAME = "figures"
SUMMARY, ROUNDING = "Summary", "Signal against rounding"
MOST_CHARACTERS = 600
"""Of a prompt or an answer on the report's own page."""
MOST_NAMES = 5
"""Most names of runs listed in a sentence."""

MAKERS: dict[str, Callable[[Comparison], Exhibit]] = {
    "Before and after": before_and_after,
    SUMMARY: summary,
    "Correlation and dose": correlation,
    "Accuracy and correlation over training": over_training,
    "Clip widths and what they clipped, per c": clip_by_c,
    "Length, gradient, mismatch and unknown verdicts": health,
    "Ratio deviation of correct rollouts, per c": deviation_per_c,
    "Clip fraction of correct rollouts, per c": clip_fraction_per_c,
    "Groups, per c": groups_per_c,
    "Time of a step, by stage": step_time,
    ROUNDING: rounding,
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


def write_report(folders: Sequence[Path], output_dir: Path, *, first: str | None = None) -> Report:
    """Write `report.html`, `figures/` (PNG, PDF, CSV), and `samples.html` if runs have any.

    Args:
        folders: run folders, or folders of run folders.
        output_dir: made when missing; files of an earlier report are replaced.
        first: the method that is compared with all others; None: the first run's.

    Raises:
        DataError: names the folder or file and the rule (`find_trained`, `read_run`,
            `viewer.read_data`, `Comparison.of`); `output_dir` cannot be made.
        ConfigError: a run's config is not valid, or `output_dir` holds other files with the names
            of ours.
    """
    found, waiting = find_trained(folders)
    figures_dir = output_dir / FIGURES_NAME
    try:
        _claim(output_dir)
        figures_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot make this folder: {error.strerror}") from None
    comparison = Comparison.of([read_run(folder) for folder in found], first=first)

    answers_of, answers = _last_answers(comparison)
    written, left_out = [], {}
    for title, make in MAKERS.items():
        try:
            written.append(_write(title, make, comparison, figures_dir))
        except NoData as reason:
            left_out[title] = str(reason)
    tables = [one for one in written if one.exhibit.table is not None]
    page = output_dir / PAGE_NAME
    text = _fill(
        "page.html.j2",
        title=f"Training report: {some([arm.label for arm in comparison.arms])}",
        lead=_lead(comparison, waiting),
        samples_page=_write_samples(comparison, output_dir / SAMPLES_PAGE_NAME),
        answers_of=answers_of,
        answers=answers,
        first_tables=[one for one in tables if one.title != ROUNDING],
        last_tables=[one for one in tables if one.title == ROUNDING],
        figures=[one for one in written if one.exhibit.figure is not None],
        left_out=left_out,
        arms=comparison.arms,
    )
    write_atomically(page, text)
    (table,) = (one.exhibit.table for one in written if one.title == SUMMARY)
    assert table is not None
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
        exhibit = note_missing(make(comparison), comparison)
        paths = exhibit.write(stem)
    image = ""
    if exhibit.figure is not None:
        image = base64.b64encode(stem.with_suffix(".png").read_bytes()).decode()
    return _Written(title, exhibit, [f"{FIGURES_NAME}/{path.name}" for path in paths], image)


def note_missing(exhibit: Exhibit, comparison: Comparison) -> Exhibit:
    """Add a note that names the methods for which a figure has no data."""
    present = {row["arm"] for row in exhibit.rows if "arm" in row}
    missing = [arm.label for arm in comparison.arms if arm.label not in present]
    if exhibit.figure is None or not present or not missing:
        return exhibit
    return replace(exhibit, notes=[*exhibit.notes, f"No data: {', '.join(missing)}."])


def _write_samples(comparison: Comparison, page: Path) -> str:
    """Write the page of samples and return its name; "" without any, an earlier one removed."""
    named = {
        f"{arm.label}: {run.folder.name}": run.folder
        for arm in comparison.arms
        for run in arm.runs
        if has_samples(run.folder)
    }
    if not named:
        page.unlink(missing_ok=True)
        return ""
    runs = [read_data(folder, name, share=len(named)) for name, folder in named.items()]
    title = f"Samples: {some([arm.label for arm in comparison.arms])}"
    write_atomically(page, make_page(runs, title=title, report=PAGE_NAME))
    return page.name


def _last_answers(comparison: Comparison) -> tuple[str, list[Sample]]:
    """The first run with samples, and one answer of each verdict of its last step with some."""
    for run in comparison.runs:
        if samples := read_samples(run.folder):
            last = [one for one in samples if one.step == samples[-1].step]
            return run.folder.name, [*{one.verdict: one for one in reversed(last)}.values()]
    return "", []


def _excerpt(text: str) -> str:
    """Text of a model for the page: its lines as they are, without the middle of a long one."""
    half = MOST_CHARACTERS // 2
    cut = len(text) - MOST_CHARACTERS
    if cut > 0:
        text = f"{text[:half]} [... {cut:,} characters ...] {text[-half:]}"
    return printable(text, most=len(text), kept="\n\t\u200c\u200d")


def _fill(template: str, **values: object) -> str:
    """A page from a template; all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = lambda text: printable(text, most=MOST_CHARACTERS)
    environment.filters["excerpt"] = _excerpt
    return environment.get_template(template).render(**values)


def _lead(comparison: Comparison, waiting: Sequence[Path]) -> list[str]:
    """Paragraphs below the title: which runs the page shows, and what is unusual about them."""
    runs = comparison.runs
    lead = [
        f"{len(runs)} {'runs' if len(runs) > 1 else 'run'}, read at "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Runs that differ only in the seed are one "
        "method; a line is the mean over its runs."
    ]
    if going := [run for run in runs if run.num_steps < run.config.run.num_steps]:
        shown = some(
            [f"{r.folder.name} ({r.num_steps} of {r.config.run.num_steps})" for r in going]
        )
        lead.append(
            f"Not finished: {shown}. A curve ends where the shortest run of its method does."
        )
    if changed := [text for run in runs for text in _changes(run)]:
        lead.append(f"Resumed with other settings: {some(changed)}.")
    for metric, what in _WATCHED.items():
        if found := [text for run in runs if (text := _shares(run, metric))]:
            lead.append(f"{what}: {some(found)}.")
    if waiting:
        lead.append(f"Not started: {some([folder.name for folder in waiting])}.")
    return lead


def _changes(run: Run) -> list[str]:
    """Settings that a run was resumed with: `name from step 3: learning_rate 1e-06, now 1e-05`."""
    return [
        f"{run.folder.name} from step {one['step']}: "
        + ", ".join(f"{key} {was}, now {now}" for key, (was, now) in one["changes"].items())
        for one in run.changes
    ]


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
