"""Evaluations in an environment: what is kept of its calls, and what it gets of a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron.evaluate.results import read_results
from gapo_megatron.evaluate.tables import results_tables
from tests.evaluate.test_evaluate_own import (  # noqa: F401 (a fixture)
    SAMPLING,
    acting,
    chosen,
    evaluated,
    tokenizer,
)

FAILS = """
from gapo_megatron.rollout.environments.one_turn import OneTurn


class Fails(OneTurn):
    moves_first = True

    def __init__(self, tokenizer, *, samples):
        super().__init__(tokenizer)
        self.tokenizer, self.samples = tokenizer, samples

    def respond(self, episode):
        if len(episode.token_ids):
            return None
        if episode.sample in self.samples:
            raise OSError("down")
        return self.tokenizer.encode("1", add_special_tokens=False)
"""


@pytest.mark.parametrize(
    ("fail", "figures"),
    [
        ([0], {"turns": 0.5, "calls": 1.5, "error_share": 1 / 3}),
        ([0, 1], {"turns": 0, "calls": 1, "error_share": 1}),
    ],
)
def test_first_calls_that_fail_are_counted(tmp_path: Path, tokenizer, fail, figures) -> None:  # noqa: F811
    """Their episodes have no turn of the model."""
    (tmp_path / "fails.py").write_text(FAILS)
    row = {"id": "a", "prompt": "1+2=", "answer": "3"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = chosen(tmp_path / "mine.jsonl")
    kind = f"{tmp_path}/fails.py:Fails"
    act = acting(kind, tokenizer, settings={"samples": fail})
    output = evaluated(one, tokenizer, tmp_path / "out", says_always="3", acting=act)
    results = read_results(output)
    assert results.benchmarks["mine"][0].environment == figures
    without = {0: replace(results.benchmarks["mine"][0], environment={})}
    results.benchmarks["none"] = without  # every `begin` failed: neither turns nor calls
    table = results_tables(replace(results, sampling=replace(SAMPLING, environment=kind)))[-1]
    assert [row[0] for row in table.rows] == ["mine"]
