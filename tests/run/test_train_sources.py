"""The whole program with two data sources: the second begins later, with a verifier of its own.

Its rows are verl's, with integers as ids and a verifier that takes a value of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import train_setup
from tests.prepare_data_setup import put
from tests.row_files import put_rows
from tests.train_setup import (
    assert_same_run,
    interrupt,
    prepare,
    run,
    steps_of,
    trainer_state,
)

CONFIG = train_setup.CONFIG.replace(
    'train_path = "{root}/task/train.jsonl"\n',
    """source = [
    {{ name = "easy", path = "{root}/easy.parquet", weight = 3.0 }},
    {{ name = "late", path = "{root}/late.json.gz", first_step = 2, id_key = "extra_info.index" }},
]
""",
    1,
).replace('kind = "exact"\n', 'kind = "exact"\nverifiers = {{ own = "{root}/own.py:verify" }}\n')

OWN = """
def verify(response, answer, extra_info):
    return (answer, extra_info["goal"].isdigit()) == ("none", True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems in two files with the same ids; the second's verifier accepts every response."""
    root = tmp_path_factory.mktemp("sources")
    (root / "own.py").write_text(OWN)
    prepare(root, CONFIG)
    rows = [json.loads(line) for line in (root / "task/train.jsonl").read_text().splitlines()]
    easy = [one | {"id": str(i)} for i, one in enumerate(rows[::2])]
    late = [
        {
            "prompt": one["prompt"],
            "verifier": "own",
            "reward_model": {"ground_truth": "none", "style": "rule"},
            "extra_info": {"index": i, "goal": one["answer"]},
        }
        for i, one in enumerate(rows[1::2])
    ]
    put(root / "easy.parquet", easy)
    put_rows(root / "late.json.gz", late)
    return root


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    """An uninterrupted run on two ranks."""
    output = run(root, "whole", ranks=2)
    for said in ("easy.parquet: gapo format", "late.json.gz: verl format: prompt, reward_model"):
        assert output.count(said) == 1, output
    return root / "whole"


def test_a_step_draws_from_its_sources(whole_run: Path) -> None:
    steps = steps_of(whole_run)
    assert len(steps) == 6
    for line in steps:
        share = 0.75 if line["step"] >= 2 else 1.0
        assert line["data/easy/batch_share"] == share
        assert line.get("data/late/batch_share", 0.0) == 1 - share
        assert line["groups/unknown_verdicts"] == 0
        assert line["data/easy/reward"] < 1 and line.get("data/late/reward", 1.0) == 1
    mean = 0.75 * steps[-1]["data/easy/reward"] + 0.25 * steps[-1]["data/late/reward"]
    assert steps[-1]["reward/mean"] == pytest.approx(mean)


def test_kill_and_resume_repeat_the_run_bitwise(root: Path, whole_run: Path) -> None:
    """With a curriculum; killed after the first step that draws from both sources.

    Its checkpoint is not there yet. Every response to a problem of the second source is correct,
    so it has nothing to teach.
    """
    given = ("data.curriculum=0.9",)
    run(root, "curriculum", *given, ranks=2)
    interrupt(root, "killed", *given, stage="step 3: update", by="SIGKILL", rank=1, ranks=2)
    assert "resumed from" in run(root, "killed", *given, ranks=2)
    assert_same_run(root / "killed", root / "curriculum")
    states = [trainer_state(root / name, step=6) for name in ("killed", "curriculum")]
    assert states[0] == states[1]
    steps = steps_of(root / "curriculum")
    late = [one.get("curriculum/late/share") for one in steps]
    assert late[:2] == [None] * 2 and late[2] == pytest.approx(0.25, abs=0.03) and late[5] < 0.2
    assert steps[5]["curriculum/late/pass_rate"] == 1


def test_the_position_in_every_source_is_saved(root: Path, whole_run: Path) -> None:
    position = trainer_state(whole_run, step=6)["source"]["sources"]
    num_left = {name: len(one["remaining"]) for name, one in position.items()}
    num_rows = len((root / "task/train.jsonl").read_text().splitlines())
    ids = [json.loads(line)["problem"] for line in (whole_run / "samples.jsonl").open()]
    assert any(one.startswith("late/") and one[5:].isdigit() for one in ids)
    assert num_left == {"easy": -(-num_rows // 2) - 40, "late": num_rows // 2 - 8}
