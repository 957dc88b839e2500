"""Whole runs with a verifier of the user's own, in a file that the package does not know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gapo_megatron.io.sample_files import read_samples
from tests.programs import Program
from tests.rewards.foreign_rewards import NAMES, TEXTS
from tests.train_setup import CONFIG, arguments, finish, prepare, run, steps_of

EXACT = """
def verify(response, answer):
    return response.rsplit(">", 1)[-1] == answer
"""
NEAR = """
class Near:
    def __init__(self, scale: float):
        self.scale = scale

    def verify(self, response, answer):
        given = response.rsplit(">", 1)[-1]
        return 1 - min(abs(int(given) - int(answer)) / self.scale, 1) if given.isdigit() else 0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("own"), CONFIG)


SHORT = ("run.num_steps=2", "evaluation.every_steps=0")


@pytest.fixture(scope="module")
def built_in(root: Path) -> Path:
    """A short run with the verifier of the package."""
    run(root, "built_in", *SHORT)
    return root / "built_in"


@pytest.mark.usefixtures("built_in")
def test_a_verifier_of_the_users_own_trains_to_the_same_bits(root: Path) -> None:
    """A resumed run with a changed file is refused, unless the change is allowed."""
    own = root / "exact.py"
    own.write_text(EXACT)
    kind = f"reward.kind={own}:verify"
    run(root, "own", *SHORT, kind)
    name = "hf/model.safetensors"
    assert (root / "own" / name).read_bytes() == (root / "built_in" / name).read_bytes()
    # It does not say which answer it has judged.
    answers = {"reward/new_form_share", "reward/several_references_share"}
    rows = [
        [json.loads(line) for line in (root / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("own", "built_in")
    ]
    assert rows[0] == [{key: row[key] for key in row if key not in answers} for row in rows[1]]
    # But for the reasons, which the built-in one gives.
    samples = [
        [replace(one, reason="", grade=None) for one in read_samples(root / name)]
        for name in ("own", "built_in")
    ]
    assert samples[0] == samples[1] != []

    own.write_text(EXACT + "\n# another file\n")
    longer = (kind, "run.num_steps=3", "evaluation.every_steps=0")
    command = arguments(root, "own", *longer)
    output = finish(Program("gapo_megatron.train", *command), exit_code=2)
    assert "reward.code" in output and "run.allow_changes" in output
    run(root, "own", *longer, 'run.allow_changes=["reward.code"]')
    assert len(steps_of(root / "own")) == 3


def test_a_reward_of_another_framework_trains_to_the_same_bits(root: Path, built_in: Path) -> None:
    """As one of two components that judge together; what they say is logged by c."""
    (root / "slime_reward.py").write_text(TEXTS["slime"])
    (root / "style.py").write_text(
        "def verify_group(responses, answer):\n"
        "    return [{'score': 1e-3 * (one == min(responses, key=len)), 'length': len(one)}"
        " for one in responses]\n"
    )
    settings = (
        'reward.kind=""',
        f'reward.components={{gsm8k = "{root}/slime_reward.py:{NAMES["slime"]}", '
        f'short = {{kind = "{root}/style.py:verify_group", weight = 0.5}}}}',
    )
    run(root, "foreign", *SHORT, *settings)
    name = "hf/model.safetensors"
    assert (root / "foreign" / name).read_bytes() == (built_in / name).read_bytes()
    steps, expected = steps_of(root / "foreign"), steps_of(built_in)
    for step, other in zip(steps, expected, strict=True):
        assert step["reward/mean"] == other["reward/mean"] == step["verifier/gsm8k"]
        assert step["verifier/gsm8k/acc"] == step["verifier/gsm8k"]
        assert 0 < step["verifier/short"] < 1e-3 and step["verifier/short/length"] > 1
        for key in [key for key in step if key.startswith("per_c/groups/c")]:
            c = key.removeprefix("per_c/groups/c")
            if step[key]:
                assert step[f"per_c/verifier/gsm8k/c{c}"] == int(c) / 4
    samples = read_samples(root / "foreign")
    assert samples and all({"gsm8k", "short", "short/length"} <= {*one.metrics} for one in samples)
    assert all((one.metrics["gsm8k"] == 1) == (one.verdict == "correct") for one in samples)


def test_a_run_whose_verifier_fails_ends_and_says_why(root: Path) -> None:
    """It is told first that the reference answer has no verdict; then its steps are watched."""
    broken = root / "broken.py"
    broken.write_text(
        "def verify(response, answer):\n    print('asked')\n    return {}['missing']\n"
    )
    settings = (f"reward.kind={broken}:verify", "run.num_steps=9", "evaluation.every_steps=0")
    program = Program("gapo_megatron.train", *arguments(root, "broken", *settings))
    output = finish(program, exit_code=2)
    assert f"{broken}:3: KeyError: 'missing'" in output and "reward.max_unknown_share" in output
    assert not (root / "broken" / "hf").exists()
    steps = steps_of(root / "broken")  # the third ends the run
    assert [step["reward/unknown_share"] for step in steps] == [1, 1]
    assert not any("reward/mean" in step or "groups/solve_rate_mean" in step for step in steps)
    printed = (root / "broken" / "verifiers" / "rank_0.log").read_text()
    assert "asked" in printed and f'"{broken}", line 3' in printed


@pytest.mark.system
def test_a_run_learns_from_graded_rewards(root: Path) -> None:
    (root / "near.py").write_text(NEAR)
    settings = (
        f"reward.kind={root}/near.py:Near",
        "reward.settings={scale = 8}",
        "reward.correct_above=0.99",
        "reward.graded=true",
        "objective.method=gspo",
        "evaluation.every_steps=0",
    )
    run(root, "graded", *settings)
    steps = steps_of(root / "graded")
    assert any(line["reward/mean"] * 32 % 1 for line in steps)  # not of zeros and ones
