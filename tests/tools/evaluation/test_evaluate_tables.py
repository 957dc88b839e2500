"""Tables of one evaluation and of several, with made-up figures per seed."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gapo_megatron.errors import ConfigError, DataError
from gapo_tools import evaluate as tool
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.compare import Method, compare
from gapo_tools.evaluation.paper import Sampling, read_settings
from gapo_tools.evaluation.result_tables import results_tables
from gapo_tools.evaluation.results import (
    RESULTS_FILE,
    Results,
    SeedResult,
    read_results,
    write_results,
)
from gapo_tools.evaluation.table import with_interval
from tests.messages import mentions

SIX = [name for name, benchmark in BENCHMARKS.items() if benchmark.in_average]
GAPO, GSPO = (0.170, 0.180, 0.189), (0.155, 0.150, 0.153)


def seed_result(pass_1: float, pass_2: float = math.nan, *, unknown: int = 0) -> SeedResult:
    counts = {f"p-{i}": (2, round(2 * pass_1)) for i in range(4)}
    return SeedResult(
        pass_at_k=[pass_1, pass_2],
        problems_at_k=[4, 4 - unknown],
        unknown_verdicts=unknown / 8,
        truncated=0.125,
        response_tokens=100.4,
        counts=counts,
    )


def results(values: dict[str, list[SeedResult]], *, setting: str = "qwen2.5-math-1.5b") -> Results:
    return Results(
        model="runs/gapo/hf",
        setting=setting,
        sampling=Sampling(2, 1.0, 1.0, 3092),
        files=dict.fromkeys(values, "0123456789abcdef"),
        benchmarks={name: dict(enumerate(seeds)) for name, seeds in values.items()},
    )


def method(label: str, pass_1: tuple[float, ...], **options) -> Method:
    """One evaluation per training seed, the same on all benchmarks but AIME25, which is harder."""
    evaluations = [
        results(
            {
                name: [seed_result(value / (2 if name == "aime25" else 1), 2 * value)]
                for name in SIX
            },
            **options,
        )
        for value in pass_1
    ]
    return Method(label, evaluations)


def test_comparison_is_the_golden_one() -> None:
    tables = compare([method("gapo", GAPO), method("gspo", GSPO)], read_settings())
    assert "\n".join(table.to_text() for table in tables) == GOLDEN.lstrip("\n")


GOLDEN = """
pass@1/pass@2 in %
---------------------------------------------------------------------------------------------
method                 Avg.     AIME24     AIME25        AMC    MATH500    Minerva   Olympiad
---------------------------------------------------------------------------------------------
gapo              16.5/35.9  18.0/35.9   9.0/35.9  18.0/35.9  18.0/35.9  18.0/35.9  18.0/35.9
gapo (published)  37.9/76.3  17.9/63.3  10.6/56.7  53.4/97.5  76.5/97.5  31.2/64.1  38.0/78.5
gspo              14.0/30.5  15.3/30.5   7.6/30.5  15.3/30.5  15.3/30.5  15.3/30.5  15.3/30.5
gspo (published)  36.8/76.2  15.3/60.0  9.28/60.0   53.0/100  75.2/97.0  30.9/62.9  37.3/77.3
---------------------------------------------------------------------------------------------
Published rows are from the paper, as pass@1/pass@256 where it prints both.

pass@1 in %, mean ± 95 % interval over seeds (Student's t)
-----------------------------------------------------------------------------------------
method        Avg.      AIME24     AIME25         AMC     MATH500     Minerva    Olympiad
-----------------------------------------------------------------------------------------
gapo    16.47±2.16  17.97±2.36  8.98±1.18  17.97±2.36  17.97±2.36  17.97±2.36  17.97±2.36
gspo    13.99±0.57  15.27±0.63  7.63±0.31  15.27±0.63  15.27±0.63  15.27±0.63  15.27±0.63
-----------------------------------------------------------------------------------------
Seeds by method: gapo: 3 training; gspo: 3 training.

Δ pass@1 in points, gapo - baseline
--------------------------------------------------------------------
            Avg.  AIME24  AIME25     AMC  MATH500  Minerva  Olympiad
--------------------------------------------------------------------
vs. gspo  +2.47*  +2.70*  +1.35*  +2.70*   +2.70*   +2.70*    +2.70*
paired     ±2.46   ±2.69   ±1.34   ±2.69    ±2.69    ±2.69     ±2.69
--------------------------------------------------------------------
Welch's t-test over seeds: * p < 0.05, ** p < 0.01, *** p < 0.001.
paired: half width of the 95 % interval (Student's t), training seeds paired in given order.
"""


@pytest.mark.parametrize(
    ("ours", "baseline"),
    [
        ((0.170, 0.180, 0.189), (0.155, 0.150, 0.153)),
        ((0.179, 0.180, 0.181), (0.155, 0.150, 0.153)),
        ((0.1799, 0.180, 0.1801), (0.151, 0.1511, 0.1512)),
        ((0.17, 0.18, 0.19), (0.19, 0.18, 0.165)),
        ((0.150, 0.155, 0.152), (0.170, 0.180, 0.189)),
    ],
)
def test_stars_are_welchs(ours, baseline) -> None:
    (*_, table) = compare([method("a", ours), method("b", baseline)], {})
    p_value = stats.ttest_ind(ours, baseline, equal_var=False).pvalue
    marks = "***" if p_value < 1e-3 else "**" if p_value < 1e-2 else "*" if p_value < 0.05 else ""
    difference = f"{100 * (np.mean(ours) - np.mean(baseline)):+.2f}"
    assert table.rows[0][table.columns.index("AIME24")] == difference + marks


def test_what_does_not_spread_is_not_tested() -> None:
    """Seeds that all solve everything: their variance is unknown, not zero."""
    (*_, table) = compare([method("a", (1.0, 1.0, 1.0)), method("b", (255 / 256,) * 3)], {})
    assert table.rows[0][table.columns.index("AIME24")] == "+0.39"
    (*_, table) = compare([method("a", (1.0, 1.0, 1.0)), method("b", (0.5, 0.6, 0.7))], {})
    assert table.rows[0][table.columns.index("AIME24")] == "+40.00"
    assert with_interval([1.0, 1.0, 1.0]) == "100.00"


def test_training_seeds_count_once_however_often_they_are_sampled() -> None:
    twice = [
        results({"aime24": [seed_result(a), seed_result(b)]}) for a, b in ((0.1, 0.3), (0.4, 0.4))
    ]
    assert Method("m", twice).values("aime24", 1) == pytest.approx([0.2, 0.4])
    assert Method("m", twice[:1]).values("aime24", 1) == [0.1, 0.3]
    assert Method("m", twice).values("average", 1) == []


def test_an_evaluation_without_figures_is_refused() -> None:
    empty = Method("a", [results({})])
    for methods in ([empty], [method("b", GAPO), empty]):
        with pytest.raises(ConfigError, match=mentions("--compare", " a ", "complete")):
            compare(methods, {})


def test_seeds_of_unequal_number_are_not_paired() -> None:
    (*_, table) = compare([method("a", GAPO), method("b", GSPO[:2])], {})
    assert [row[0] for row in table.rows] == ["vs. b"]


def test_benchmarks_that_one_lacks_have_no_figure() -> None:
    ours = Method("a", [results({"aime24": [seed_result(0.5, 0.6)]})])
    other = Method("b", [results({"amc23": [seed_result(0.4, 0.5)]})])
    main, difference = compare([ours, other], {})
    assert main.columns == ["method", "AIME24", "AMC"]
    assert main.rows == [["a", "50.0/60.0", "-"], ["b", "-", "40.0/50.0"]]
    assert difference.rows == [["vs. b", "-", "-"]]


def test_different_problems_are_not_compared() -> None:
    one = seed_result(0.5, 0.6)
    other = dataclasses.replace(one, counts=dict(list(one.counts.items())[1:]))
    methods = [Method(name, [results({"aime24": [r]})]) for name, r in (("a", one), ("b", other))]
    digest = "0123456789ab"
    named = mentions("AIME24", f"4 of SHA-256 {digest} (a)", f"3 of SHA-256 {digest} (b)")
    with pytest.raises(ConfigError, match=named):
        compare(methods, {})
    # Ids are numbers of rows: equal ones may name other problems.
    ours, other = (results({"aime24": [one]}) for _ in range(2))
    other = dataclasses.replace(other, files={"aime24": "fedcba9876543210"})
    with pytest.raises(ConfigError, match=mentions("AIME24", "4 of SHA-256 fedcba987654 (b)")):
        compare([Method("a", [ours]), Method("b", [other])], {})


def test_other_sampling_is_said() -> None:
    ours, other = (results({"aime24": [seed_result(0.5, 0.6)]}) for _ in range(2))
    other = dataclasses.replace(other, sampling=Sampling(2, 0.6, 1.0, 3092))
    table, *_ = compare([Method("a", [ours]), Method("b", [other])], {})
    assert table.notes == [
        "Sampling settings differ: a: n=2, temperature=1, top-p=1, T_max=3092; "
        "b: n=2, temperature=0.6, top-p=1, T_max=3092."
    ]


def test_other_dates_in_the_prompts_are_said() -> None:
    """Also within a method: its training seeds may have begun on different days."""
    days = [
        dataclasses.replace(results({"aime24": [seed_result(0.5, 0.6)]}), template_date=day)
        for day in ("2026-07-01", "2026-07-02")
    ]
    table, *_ = compare([Method("a", days)], {})
    assert any("2026-07-01, 2026-07-02" in note for note in table.notes)
    table, *_ = compare([Method("a", days[:1]), Method("b", days[:1])], {})
    assert not table.notes


def test_published_figures_that_were_sampled_otherwise_say_so() -> None:
    ours = dataclasses.replace(
        results({"aime24": [seed_result(0.5, 0.6)]}), sampling=Sampling(256, 0.3, 0.5, 100)
    )
    seed = dataclasses.replace(seed_result(0.5), pass_at_k=[0.5] * 256)
    ours = dataclasses.replace(ours, benchmarks={"aime24": {0: seed}})
    table, *_ = compare([Method("gapo", [ours])], read_settings())
    assert table.notes[-1] == (
        "Sampling settings differ: gapo: n=256, temperature=0.3, top-p=0.5, T_max=100; "
        "gapo (published): n=256, temperature=1, top-p=1, T_max=3092."
    )
    alike = dataclasses.replace(ours, sampling=Sampling(256, 1.0, 1.0, 3092))
    table, *_ = compare([Method("gapo", [alike])], read_settings())
    assert "Sampling settings differ" not in " ".join(table.notes)


def test_tables_of_one_evaluation() -> None:
    evaluation = results(
        {
            "aime24": [seed_result(0.5, 0.75), seed_result(0.25, 0.5)],
            "ifeval": [
                dataclasses.replace(
                    seed_result(0.5, math.nan, unknown=4),
                    instructions={
                        "prompt_strict": 0.5,
                        "instruction_strict": 0.6,
                        "prompt_loose": 0.7,
                        "instruction_loose": 0.8,
                    },
                )
            ],
        }
    )
    passes, samples, followed = results_tables(evaluation)
    half = stats.t.ppf(0.975, 1) * 12.5
    assert passes.columns == ["benchmark", "pass@1", "pass@2"]
    assert passes.rows == [
        ["AIME24", f"37.50±{half:.2f}", f"62.50±{half:.2f}"],
        ["IFEval", "50.00", "-"],
    ]
    assert re.search(mentions("pass@2", "IFEval 0 of 4"), passes.notes[1])
    assert samples.rows[1] == ["IFEval", "4", "4.0", "1", "100", "12.5", "50.00"]
    assert followed.rows == [["prompts", "50.00", "70.00"], ["instructions", "60.00", "80.00"]]
    assert passes.title.startswith("runs/gapo/hf: pass@k in %, n=2, temperature=1, top-p=1")


def test_problems_solved_in_more_than_a_twentieth_of_samples_are_counted() -> None:
    """Mean over seeds; exactly 5 % is not more, and a problem without a verdict is not solved."""
    found = []
    for correct in ((1, 2, 20), (0, 1, 2)):
        counts = {f"p-{i}": (20, n) for i, n in enumerate(correct)} | {"unknown": (0, 0)}
        found.append(dataclasses.replace(seed_result(0.5, 0.75), counts=counts))
    _, samples = results_tables(results({"aime24": found}))
    (row,) = samples.rows
    assert dict(zip(samples.columns, row, strict=True))["solved > 5 %"] == "1.5"


def test_average_needs_all_six_under_the_same_seed() -> None:
    values = {name: [seed_result(0.1 * i, 1.0)] for i, name in enumerate(SIX)}
    assert results(values).values("average", 1) == [pytest.approx(0.25)]
    del values["amc23"]
    assert results(values).values("average", 1) == []


def test_methods_are_read_by_label_and_folders(tmp_path, monkeypatch) -> None:
    for name in ("gapo", "gapo_1"):
        write_results(results({"aime24": [seed_result(0.5, 0.6)]}), _folder(tmp_path / name))
    assert Method.read(f"{tmp_path}/gapo").label == "gapo"
    for name in ("lr=1e-6", "lr=1e-6,seed=1"):  # as sweeps name folders
        (tmp_path / name).mkdir()
        write_results(results({"aime24": [seed_result(0.5)]}), tmp_path / name)
        assert Method.read(f"{tmp_path}/{name}").label == name
        assert Method.read(f"x={tmp_path}/{name}").label == "x"
    assert len(Method.read(f"{tmp_path}/lr=1e-6,{tmp_path}/gapo").evaluations) == 2
    monkeypatch.chdir(tmp_path)  # forty names, together longer than a name may be
    assert len(Method.read(f"x={','.join(['lr=1e-6'] * 40)}").evaluations) == 40
    labelled = Method.read(f"x={tmp_path}/gapo,{tmp_path}/gapo_1")
    assert (labelled.label, len(labelled.evaluations)) == ("x", 2)
    with pytest.raises(DataError, match=mentions(tmp_path, "results.json")):
        Method.read(str(tmp_path))
    (tmp_path / "gapo" / RESULTS_FILE).write_text('{"model": "m"}')
    with pytest.raises(DataError, match=mentions(tmp_path / "gapo" / RESULTS_FILE, "setting")):
        Method.read(f"{tmp_path}/gapo")
    other = results({"aime24": [seed_result(0.5, 0.6)]}, setting="llama-3.2-3b-instruct")
    write_results(other, tmp_path / "gapo")
    with pytest.raises(ConfigError, match=mentions("--compare", "sampled")):
        Method.read(f"x={tmp_path}/gapo,{tmp_path}/gapo_1")
    with pytest.raises(ConfigError, match=mentions("--compare", "gapo", "LABEL=DIR")):
        compare([method("gapo", GAPO), method("gapo", GSPO)], {})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("{", "", ["JSON"]),
        ("0.125", "NaN", ["NaN"]),
        ('"num_samples": 2', '"num_samples": "2"', ["sampling.num_samples"]),
        ('"0": {', '"x": {', ["benchmarks.aime24.x"]),
    ],
)
def test_results_that_are_damaged_are_refused_by_field(tmp_path, old, new, named) -> None:
    path = write_results(results({"aime24": [seed_result(0.5)]}), _folder(tmp_path / "gapo"))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=mentions(path, *named)):
        read_results(path.parent)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_tool_compares(tmp_path, monkeypatch, capsys) -> None:
    for name in ("gapo", "gspo"):
        write_results(results({"aime24": [seed_result(0.5, 0.6)]}), _folder(tmp_path / name))
    folders = (tmp_path / "gapo", tmp_path / "gspo", "--output", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--compare", *map(str, folders)])
    assert tool.main() == 0
    assert "gapo (published)  17.9/63.3" in capsys.readouterr().out
    written = (tmp_path / "out/comparison.md").read_text()
    assert re.search(r"\| gapo \(published\) \| +17\.9/63\.3 \|", written)
    assert re.search(r"\| gapo +\| +\*\*50\.0/60\.0\*\* \|", written)
