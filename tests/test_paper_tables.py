"""docs/paper_tables.toml: consistent in itself, and number by number what the paper prints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from scipy import stats

from gapo_megatron.data.benchmarks import BENCHMARKS
from gapo_megatron.evaluate.paper import PAPER_TABLES, read_settings
from gapo_megatron.evaluate.statistics import stars
from gapo_megatron.objective import METHODS

SOURCE = Path(__file__).parents[2] / "shared" / "paper" / "gapo.tex"
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


def rows_of(label: str) -> list[list[str]]:
    """Cells of every line of one table of the paper's source, without its markup."""
    text = SOURCE.read_text(encoding="utf-8")
    (table,) = (
        part
        for part in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", text, re.DOTALL)
        if f"\\label{{{label}}}" in part
    )
    # Caption and headings speak of numbers too; only lines with cells count.
    body = table.partition("\\caption")[0]
    body = re.sub(r"\\(textcolor)\{[^}]*\}", "", body)
    body = re.sub(r"\\(rowcolor|columncolor)\{[^}]*\}", "", body)
    body = re.sub(r"\\(textbf|multirow\{-?\d\}\{\*\})", "", body)
    body = body.replace("$\\pm$", "±").replace("\\ee{-3}", "e-3").replace("\\%", "")
    body = re.sub(r"\\(hline|hdashline)", "", body)
    lines = [re.sub(r"[{}$^\\]|\n", "", line) for line in body.split("\\\\")]
    return [[cell.strip() for cell in line.split("&")] for line in lines if "&" in line]


needs_source = pytest.mark.skipif(not SOURCE.exists(), reason=f"no {SOURCE}")
PRINTED_NAMES = {
    "grpo": "GRPO",
    "f_grpo": "F-GRPO",
    "dr_grpo": "DrGRPO",
    "gapo_token": "GAPO-token-IS",
    "gspo": "GSPO",
    "gspo_asym": "GSPO",
    "f_gspo": "F-GSPO",
    "gapo": "GAPO",
}


@needs_source
def test_main_table_and_seeds_are_the_papers() -> None:
    main = rows_of("tab:all_models")
    main = [row for row in main if re.fullmatch(r"[\d./]+", row[-1])]
    ours = [
        [PRINTED_NAMES[method], *cells]
        for name in ("qwen2.5-math-1.5b", "llama-3.2-3b-instruct")
        for method, cells in TABLES["settings"][name]["rows"].items()
    ]
    assert [[row[0], *row[3:]] for row in main] == ours
    # The two clip bounds tell apart what has the same printed name.
    bounds = {"gspo": ["3e-3", "3e-3"], "gspo_asym": ["3e-3", "5e-3"]}
    methods = [*TABLES["settings"]["qwen2.5-math-1.5b"]["rows"]]
    for row, method in zip(main, methods, strict=False):
        assert row[1:3] == bounds.get(method, row[1:3])
    seeds = [row for row in rows_of("tab:ci_qwen") if "±" in row[-1]]
    ours = [[PRINTED_NAMES[method], *cells] for method, cells in TABLES["seeds"]["rows"].items()]
    assert [[row[0], *row[3:]] for row in seeds] == ours


@needs_source
@pytest.mark.parametrize(
    "name", ["deepseek-r1-distill-qwen-1.5b", "deepseek-r1-distill-qwen-1.5b-code"]
)
def test_tables_by_column_are_the_papers(name: str) -> None:
    """In these the paper has benchmarks in rows and methods in columns."""
    table = TABLES["settings"][name]
    rows = [row for row in rows_of(table["table"]) if re.fullmatch(r"[\d./]+", row[-1])]
    assert [list(column) for column in zip(*(row[1:] for row in rows), strict=True)] == [
        *table["rows"].values()
    ]


@needs_source
def test_differences_and_sweep_are_the_papers() -> None:
    rows = [row[1:] for row in rows_of("tab:pairwise_sig") if "vs." in row[0]]
    assert rows == [
        cells for rows in TABLES["differences"]["rows"].values() for cells in rows.values()
    ]
    sweep = TABLES["sweep"]
    rows = [row[2:6] for row in rows_of("tab:sweepcompare")]
    assert rows[0] == [f"[{bound}e-3]" for bound in sweep["eps_high_gspo"]]
    assert rows[1] == sweep["gspo"]
    assert rows[2] == [f"[3e-3,{bound}e-3]" for bound in sweep["eps_high_max_gapo"]]
    assert rows[3:] == [sweep["gapo"], sweep["improvement"]]


@needs_source
def test_sampling_is_the_papers() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    pattern = r"Temperature=([\d.]+), Top-p=(\d+), n=(\d+), T\{max\}=(\d+)"
    printed = [tuple(map(float, match)) for match in re.findall(pattern, text)]
    ours = [
        (
            s.sampling.temperature,
            s.sampling.top_p,
            s.sampling.num_samples,
            s.sampling.max_response_tokens,
        )
        for s in read_settings().values()
    ]
    assert set(printed) == set(ours)
