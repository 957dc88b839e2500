"""Problem files from the data sets as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapo_megatron.rewards.code.forms import read_tests
from tests.prepare_data_setup import counts_of, prompts_of, written

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")


@pytest.mark.system
@pytest.mark.soak
@needs_data
def test_deepscaler_as_published_is_accounted_for_row_by_row(run, tmp_path, hf_dir):
    """The counts that docs/data.md reports."""
    path = DATA / "deepscaler" / "deepscaler_40k_by_difficulty.jsonl"
    assert run("deepscaler", [path], "--benchmarks", DATA, "--max-prompt-tokens", 10_000) == 0
    counts = counts_of(tmp_path / "out")
    assert counts["read"] == 40_308
    assert counts["dropped"] == {
        "contradictory": 524,
        "duplicate": 849,
        "held_out": 61,
        "unreadable": 31,
    }
    assert counts["written"] == 40_308 - sum(counts["dropped"].values())
    contradictory = [
        row for row in written(tmp_path / "out", "dropped") if row["rule"] == "contradictory"
    ]
    assert len({row["same_as"] for row in contradictory}) == 155
    prompts = prompts_of(tmp_path / "out", hf_dir, "math", max_tokens=10_000)
    assert len(prompts) == counts["written"]


@needs_data
def test_the_programs_of_the_published_samples_are_all_read(run, tmp_path, hf_dir):
    folder = DATA / "deepcoder_rllm"
    assert run("deepcoder", sorted(folder.glob("*.json")), "--benchmarks", DATA) == 0
    counts = counts_of(tmp_path / "out")
    assert (counts["read"], counts["written"], counts["dropped"]) == (2497, 2497, {})
    prompts = prompts_of(tmp_path / "out", hf_dir, "code")
    rows = json.loads((folder / "codeforces_test.json").read_text())
    for prompt, row in zip(prompts, rows, strict=False):
        assert read_tests(prompt.answer) == read_tests(json.dumps(row["tests"]))
