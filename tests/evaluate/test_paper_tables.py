"""docs/paper_tables.toml: its printed figures agree with one another."""

from __future__ import annotations

import tomllib

import pytest
from scipy import stats

from gapo_megatron.data.benchmarks import BENCHMARKS
from gapo_megatron.evaluate.paper import PAPER_TABLES, read_settings
from gapo_megatron.evaluate.statistics import stars
from gapo_megatron.objective import METHODS

TABLES = tomllib.loads(PAPER_TABLES.read_text(encoding="utf-8"))

# What does not follow from the other printed figures, and what would.
AVERAGES_PRINTED_OTHERWISE = {("qwen2.5-math-1.5b", "gspo_asym", "37.7"): 37.49}
STARS_PRINTED_OTHERWISE = {("gapo", "f_gspo", "aime25"): ("*", "**")}


def half_unit(printed: str) -> float:
    """Largest error of a rounded number: half of its last digit."""
    return 0.5 * 10 ** -len(printed.partition(".")[2])


def test_averages_are_those_of_the_six_benchmarks() -> None:
    found = {}
    for name, table in TABLES["settings"].items():
        if "average" not in table["columns"]:
            continue
        for method, cells in table["rows"].items():
            for part in (0, 1):
                average, *values = (cell.split("/")[part] for cell in cells[:7])
                mean = sum(map(float, values)) / 6
                # Each printed value is off by up to half a unit, the average once more.
                slack = half_unit(average) + sum(map(half_unit, values)) / 6
                if abs(mean - float(average)) > slack + 1e-9:
                    found[name, method, average] = pytest.approx(mean, abs=0.01)
    assert found == AVERAGES_PRINTED_OTHERWISE


def test_every_row_has_a_cell_per_column_and_known_names() -> None:
    tables = [*TABLES["settings"].values(), TABLES["seeds"]]
    tables += [
        {"columns": TABLES["differences"]["columns"], "rows": rows}
        for rows in TABLES["differences"]["rows"].values()
    ]
    for table in tables:
        assert set(table["columns"]) <= {"average", *BENCHMARKS}
        assert set(table["rows"]) <= {"base", "deepcoder", *METHODS}
        for cells in table["rows"].values():
            assert len(cells) == len(table["columns"])
    percentages = [
        float(number)
        for table in TABLES["settings"].values()
        for cells in table["rows"].values()
        for cell in cells
        for number in cell.split("/")
    ]
    assert all(0 < number <= 100 for number in percentages)


def test_more_samples_solve_no_less() -> None:
    for setting in read_settings().values():
        for row in setting.published.values():
            assert all(not last or float(first) < float(last) for first, last in row.values())


def test_differences_and_stars_follow_from_means_and_intervals() -> None:
    """Welch's test from three seeds' mean and interval: the half width is t * s / sqrt(3)."""
    quantile = stats.t.ppf(0.975, 2)
    columns = TABLES["differences"]["columns"]
    means = {
        method: dict(zip(TABLES["seeds"]["columns"], cells, strict=True))
        for method, cells in TABLES["seeds"]["rows"].items()
    }
    otherwise = {}
    for ours, rows in TABLES["differences"]["rows"].items():
        for baseline, cells in rows.items():
            for column, cell in zip(columns, cells, strict=True):
                (a, wide_a), (b, wide_b) = (
                    map(float, means[method][column].split("±")) for method in (ours, baseline)
                )
                printed = cell.rstrip("*")
                # Two means and their difference, each rounded to two digits.
                assert abs(a - b - float(printed)) < 0.0151
                deviations = [wide / quantile * 3**0.5 for wide in (wide_a, wide_b)]
                p_value = stats.ttest_ind_from_stats(
                    a, deviations[0], 3, b, deviations[1], 3, equal_var=False
                ).pvalue
                if stars(p_value) != cell[len(printed) :]:
                    otherwise[ours, baseline, column] = (cell[len(printed) :], stars(p_value))
    assert otherwise == STARS_PRINTED_OTHERWISE


def test_improvements_of_the_sweep() -> None:
    sweep = TABLES["sweep"]
    for fixed, ours, printed in zip(
        sweep["gspo"], sweep["gapo"], sweep["improvement"], strict=True
    ):
        # Two percentages of two digits around 16 and 18: 5e-3/16 relative, times a hundred.
        assert 100 * (float(ours) / float(fixed) - 1) == pytest.approx(float(printed), abs=0.06)
