"""Problems of benchmarks among others."""

from __future__ import annotations

import pytest

from gapo_tools.evaluation.benchmarks import BENCHMARKS, BOXED, without_request
from gapo_tools.preparation import HeldOut
from tests.prepare_data_setup import put_benchmarks

TRAIN = "a train leaves the town at noon and goes on for three hours"


@pytest.fixture
def benchmarks(tmp_path):
    return put_benchmarks(tmp_path / "benchmarks")


@pytest.mark.parametrize(
    ("text", "same_as", "share"),
    [
        ("a TRAIN leaves the town at noon, and goes on for three hours without a stop", 0, 1.0),
        ("Find x + y", 1, 1.0),
        ("find y + x", None, None),
        # 4 of its 9 eight-word sequences, and 5
        ("leaves the town at noon and goes on for three hours today, and so on", None, None),
        ("leaves the town at noon and goes on for three hours without a break", 0, 0.667),
        ("nothing of the kind", None, None),
        # 6 of its 9, which are 6 of the text's 14; and all of the 9, whatever surrounds them
        (f"{TRAIN} until it stops for the night at another town", None, None),
        (f"On every day {TRAIN} without a stop, and is there long before another one", 0, 1.0),
    ],
)
def test_problems_of_a_benchmark_are_found_by_their_words(benchmarks, text, same_as, share):
    hit = HeldOut(benchmarks).find(text)
    assert (hit and hit.id) == (None if same_as is None else f"aime24-{same_as}")
    assert (hit and round(hit.share, 3)) == share


def test_what_we_ask_around_a_problem_is_not_its_words(benchmarks):
    held_out = HeldOut(benchmarks)
    assert held_out.find("Return the longest of the words, the first if many.").share == 0.5
    assert (
        held_out.find(
            without_request(BENCHMARKS["aime24"].load(benchmarks / "aime24" / "a.jsonl")[0].prompt)
        ).share
        == 1.0
    )
    asked = "Complete this Python function. Answer with one Python code block that holds the whole"
    assert held_out.find(asked) is None
    assert held_out.find(BOXED) is None
