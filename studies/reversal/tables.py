"""Tables and figures from an archive: data/MODEL has the numbers, MODEL.md the tables.

    python -m studies.reversal.tables

probabilities.csv begins with the registration's hash. Then a row per arm, seed and evaluated step:
the probability of each held-out problem's answer, in 1e-4.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapo_megatron.io.files import write_atomically
from gapo_tools.evaluation.statistics import mean_interval
from gapo_tools.reporting import figures
from gapo_tools.reporting.arms import Comparison
from studies.archive import StudyRun, read_archive, read_study_run, write_archive
from studies.arena.tables import markdown
from studies.reversal import plan

DATA = Path(__file__).parent / "data"
PROBABILITIES, WIDTHS, RUNS = "probabilities.csv", "widths.json", "runs"
SCALE = 10_000
PAIRED = (("gapo", "reversed"), ("gapo", "fixed"), ("gapo", "symmetric"))
"""Differences in the order in which they are judged: the first two are primary."""
BINS = ((0, 0.5), (0.5, 2.5), (2.5, 5.5), (5.5, 7.5), (7.5, 8.1))
"""Problems by the c that the start has on average, 8 p."""
FIGURES = {
    "deviation_per_c": figures.deviation_per_c,
    "clip_fraction_per_c": figures.clip_fraction_per_c,
    "over_training": figures.over_training,
}
Evaluations = Mapping[str, np.ndarray]
"""Step -> probability of each problem's answer."""


@dataclass(frozen=True)
class Archive:
    """What was found with one model."""

    registration: str
    widths: plan.Widths
    problems: list[str]
    start: np.ndarray
    """[problems], before training."""
    found: dict[str, np.ndarray]
    """Arm -> [pairs, evaluations, problems]."""

    @property
    def families(self) -> np.ndarray:
        """[problems]: `gym/held_out-products-12` is of products."""
        return np.array([one.split("-")[-2] for one in self.problems])


def pack(
    folder: Path,
    registration: str,
    widths: plan.Widths,
    problems: Sequence[str],
    found: Mapping[tuple[str, int], Evaluations],
    runs: Sequence[Path],
) -> None:
    """Write an archive; `found` has the start's evaluation as ("start", 0)."""
    write_archive([read_study_run(one) for one in runs], folder / RUNS)
    write_atomically(folder / WIDTHS, json.dumps(widths, indent=1))
    with (folder / PROBABILITIES).open("w", encoding="utf-8", newline="") as file:
        file.write(f"# SHA-256 of REGISTRATION.md: {registration}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "step", *problems])
        for (arm, seed), evaluations in found.items():
            for step, values in evaluations.items():
                writer.writerow([arm, seed, step, *(SCALE * values).round().astype(int)])


def read(folder: Path) -> Archive:
    """Read what `pack` wrote."""
    with (folder / PROBABILITIES).open(encoding="utf-8", newline="") as file:
        registration = next(file).partition(": ")[2].strip()
        (_, _, _, *problems), *rows = csv.reader(file)
    values = {
        (arm, int(seed), step): np.array(one, dtype=float) / SCALE for arm, seed, step, *one in rows
    }
    runs = sorted((seed, arm) for arm, seed, step in values if step != "0")
    found = {
        arm: np.stack(
            [
                [values[arm, seed, str(step)] for step in plan.LATE]
                for seed, other in dict.fromkeys(runs)
                if other == arm
            ]
        )
        for arm in plan.ARMS
        if any(other == arm for _, other in runs)
    }
    widths = json.loads((folder / WIDTHS).read_text())
    return Archive(registration, widths, problems, values["start", 0, "0"], found)


def blind_deviation(archive: Archive) -> float:
    """`plan.blind_deviation` of the first pairs, in points."""
    rates = np.stack([archive.found[arm].mean(axis=(1, 2)) for arm in plan.JUDGED], axis=1)
    return plan.blind_deviation(100 * rates[: plan.LEAST_PAIRS])


# -- tables ----------------------------------------------------------------------------------------


def page(archive: Archive, runs: Sequence[StudyRun]) -> str:
    """All tables; rows that README.md quotes have numbers.

    Raises:
        ValueError: there are fewer pairs than the deviation asks for, so nothing may be compared.
    """
    rates = {arm: 100 * one.mean(axis=1) for arm, one in archive.found.items()}  # [pairs, problems]
    pairs = min(len(rates.get(arm, ())) for arm in plan.ARMS)
    deviation = blind_deviation(archive)
    if pairs < (needed := plan.pairs_needed(deviation)):
        raise ValueError(f"{pairs} of {needed} pairs: no arms are compared before the last")
    seen = plan.detectable(deviation, pairs)
    parts = [
        f"Registration {archive.registration}. {pairs} pairs; the deviation of a difference, "
        f"estimated blind after {plan.LEAST_PAIRS}, is {deviation:.2f} points: they see {seen:.2f}."
    ]
    number = iter(range(1, 1000))

    def table(title: str, head: Sequence[str], lines: Iterator[list[str]]) -> None:
        rows = [[f"[{next(number)}]", *line] for line in lines]
        parts.append(f"## {title}\n\n{markdown(['', *head], rows)}".rstrip())

    table("Primary", ["pass@1, points", "difference", "verdict"], _primary(rates))
    table("Arms", ["arm", "eps_low", "eps_high_max", "pass@1, %", "gain"], _levels(archive, rates))
    head = ["arm", "sequences", "gradient", "of correct responses", "dose: decisions", "gradient"]
    table("What the clips removed, %", head, _removed(runs))
    head = ["problems", "start", *plan.ARMS, *map(_name, PAIRED)]
    table("pass@1 by family", ["family", *head], _by_family(archive, rates))
    table("pass@8 by c of the start", ["c at the start", *head], _by_c(archive))
    return "\n\n".join(parts) + "\n"


def _name(pair: tuple[str, str]) -> str:
    return " minus ".join(pair)


def _shown(values: np.ndarray) -> str:
    found = mean_interval(values.tolist())
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _primary(rates: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    is_open = True
    for pair in PAIRED:
        values = (rates[pair[0]] - rates[pair[1]]).mean(axis=1)
        found = mean_interval(values.tolist())
        if found.excludes_zero:
            word = f"{pair[0] if found.mean > 0 else pair[1]} is ahead"
        elif max(-found.low, found.high) < plan.EFFECT:
            word = f"less than {plan.EFFECT} points apart"
        else:
            word = "undecided"
        yield [_name(pair), _shown(values), word if is_open else f"{word} (exploratory)"]
        # In a fixed order: a later one is a test only while all before it have found a difference.
        is_open = is_open and found.excludes_zero


def _levels(archive: Archive, rates: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    before = 100 * archive.start.mean()
    for arm, values in rates.items():
        of_pairs = values.mean(axis=1)
        widths = [f"{one:g}" for one in archive.widths[arm]]
        yield [arm, *widths, f"{of_pairs.mean():.2f}", _shown(of_pairs - before)]


def _split(
    name: str, start: np.ndarray, of_arm: Mapping[str, np.ndarray], chosen: np.ndarray
) -> list[str]:
    """A row of the chosen problems: start, arms, and differences over pairs."""
    means = {arm: values[:, chosen].mean(axis=1) for arm, values in of_arm.items()}
    row = [name, f"{chosen.sum()}", f"{start[chosen].mean():.1f}"]
    row += [f"{one.mean():.1f}" for one in means.values()]
    return row + [_shown(means[one] - means[other]) for one, other in PAIRED]


def _by_c(archive: Archive) -> Iterator[list[str]]:
    def pass_at_k(values: np.ndarray) -> np.ndarray:
        return 100 * (1 - (1 - values) ** plan.K)

    of_arm = {arm: pass_at_k(values).mean(axis=1) for arm, values in archive.found.items()}
    start, expected = pass_at_k(archive.start), plan.K * archive.start
    yield _split("all", start, of_arm, expected >= 0)
    for low, high in BINS:
        chosen = (expected >= low) & (expected < high)
        if chosen.any():
            yield _split(f"{low:g} to {min(high, plan.K):g}", start, of_arm, chosen)


def _by_family(archive: Archive, rates: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    start, families = 100 * archive.start, archive.families
    for family in dict.fromkeys(families.tolist()):
        yield _split(family, start, rates, families == family)


def _removed(runs: Sequence[StudyRun]) -> Iterator[list[str]]:
    keys = (plan.CLIPPED, plan.LOST, plan.LOST_CORRECT, "clip/dose_decisions", "clip/dose_gradient")
    for arm, method in plan.ARMS.items():
        own = [run for run in runs if run.config.objective.method == method]
        means = [
            [np.mean(list(run.series(key).values())) for run in own if run.series(key)]
            for key in keys
        ]
        yield [arm, *(f"{100 * np.mean(one):.1f}" if one else "-" for one in means)]


def write(folder: Path) -> None:
    """Write tables and figures of an archive beside its folder's parent: MODEL.md, MODEL_*.png."""
    runs, name = read_archive(folder / RUNS), folder.parents[1] / folder.name
    write_atomically(
        name.with_name(f"{name.name}.md"), f"# {name.name}\n\n{page(read(folder), runs)}"
    )
    comparison = Comparison.of(runs)
    for title, draw in FIGURES.items():
        draw(comparison).figure.savefig(f"{name}_{title}.png", dpi=100)


def write_all() -> None:
    """Write the tables of every archive that there is."""
    for path in sorted(DATA.glob(f"*/{PROBABILITIES}")):
        write(path.parent)


if __name__ == "__main__":
    write_all()
