"""The whole program with two data sources: the second begins later, with a verifier of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.train import train
from tests import train_setup
from tests.messages import mentions
from tests.prepare_data_setup import put
from tests.programs import Program
from tests.train_setup import (
    arguments,
    assert_same_run,
    finish,
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
    {{ name = "late", path = "{root}/late.json", first_step = 2 }},
]
""",
    1,
).replace('kind = "exact"\n', 'kind = "exact"\nverifiers = {{ own = "{root}/own.py:verify" }}\n')

OWN = """
def verify(response, answer, goal):
    return (answer, goal.isdigit()) == ("none", True)
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
        one | {"id": str(i), "verifier": "own", "goal": one["answer"], "answer": "none"}
        for i, one in enumerate(rows[1::2])
    ]
    put(root / "easy.parquet", easy)
    put(root / "late.json", late)
    return root


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    """An uninterrupted run on two ranks."""
    run(root, "whole", ranks=2)
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
    """Killed after the first step that draws from both, whose checkpoint is not there yet."""
    interrupt(root, "killed", stage="step 3: update", by="SIGKILL", rank=1, ranks=2)
    assert "resumed from" in run(root, "killed", ranks=2)
    assert_same_run(root / "killed", whole_run)
    states = [trainer_state(folder, step=6) for folder in (root / "killed", whole_run)]
    assert states[0] == states[1]
    position = states[0]["source"]["sources"]
    num_left = {name: len(one["remaining"]) for name, one in position.items()}
    num_rows = len((root / "task/train.jsonl").read_text().splitlines())
    assert num_left == {"easy": -(-num_rows // 2) - 40, "late": num_rows // 2 - 8}


def test_other_weights_or_problems_are_refused(root: Path, whole_run: Path) -> None:
    def source(**late: object) -> str:
        easy = {"name": "easy", "path": f"{root}/easy.parquet", "weight": 3.0}
        tables = [easy, {"name": "late", "path": f"{root}/late.json", "first_step": 2, **late}]
        shown = (", ".join(f"{key} = {json.dumps(one)}" for key, one in t.items()) for t in tables)
        return f"data.source=[{', '.join(f'{{{one}}}' for one in shown)}]"

    def resume(*overrides: str) -> None:
        settings = [f"run.output_dir={whole_run}", "run.num_steps=8", *overrides]
        train(load_config(root / "config.toml", settings))

    with pytest.raises(ConfigError, match=mentions("data.source", "run.allow_changes")):
        resume(source(weight=2.0))
    rows = json.loads((root / "late.json").read_text())
    moved = source(path=str(put(root / "moved" / "late.json", rows[:-1])))
    command = arguments(root, "whole", "run.num_steps=8", moved)
    output = finish(Program("gapo_megatron.train", *command, ranks=2), exit_code=1)
    assert re.search(mentions("training problems", "data.source", "run.output_dir"), output)
    put(root / "moved" / "late.json", rows[:4])
    allowed = 'run.allow_changes=["data.source"]'
    with pytest.raises(DataError, match=mentions("'late'", 8, "5", "moved/late.json", 4)):
        resume(source(path=f"{root}/moved/late.json", weight=5.0), allowed)
