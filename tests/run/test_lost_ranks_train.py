"""Whole runs whose generation ranks are killed: real Megatron-core, real vLLM, the same bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dying import Death
from tests.programs import Program
from tests.train_setup import CONFIG, arguments, assert_same_run, finish, metrics_of, prepare

pytestmark = pytest.mark.system

ENVIRONMENT = """
import time
from gapo_megatron.rollout.environments.one_turn import OneTurn

class Adds(OneTurn):
    '''Says a digit after the first turn; may be asked again.'''

    may_repeat = True

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.said = tokenizer.encode("1", add_special_tokens=False)

    def respond(self, episode):
        if episode.response_mask is not None:
            return None
        time.sleep(0.02)
        return self.said
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lost")
    (root / "adds.py").write_text(ENVIRONMENT)
    return prepare(root, CONFIG)


def run(root: Path, name: str, *settings: str, deaths: Sequence[Death] = ()) -> str:
    """One rank that trains and two that generate."""
    env = {
        "DEATHS": json.dumps([asdict(one) for one in deaths]),
        "MOMENTS_LOG": str(root / f"{name}.tsv"),
    }
    command = arguments(root, name, "rollout.generation_ranks=2", *settings)
    may_fail = {one.rank for one in deaths}
    return finish(Program("tests.dying", *command, ranks=3, env=env, may_fail=may_fail))


def seconds_to_train(root: Path, name: str) -> float:
    """From the death of a rank to the trainer's next update."""
    lines = (line.split("\t") for line in (root / f"{name}.tsv").read_text().splitlines())
    moments = [(float(at), what) for at, what in lines]
    died = next(at for at, what in moments if what == "dies")
    return next(at for at, what in moments if at > died and what.endswith(": update")) - died


def in_environment(root: Path) -> str:
    return f'environment.kind="{root}/adds.py:Adds"'


def differing(root: Path, name: str, other: str) -> list[str]:
    """What two runs in an environment have learned otherwise; not how vLLM's batches round."""
    pair = [
        [
            {key: one for key, one in line.items() if not key.startswith(("mismatch/", "sync/"))}
            for line in metrics_of(root / each)
        ]
        for each in (name, other)
    ]
    ours, theirs = (load_file(root / one / "hf/model.safetensors") for one in (name, other))
    weights = [key for key in theirs if not ours[key].equal(theirs[key])]
    return weights + ["metrics"] * (pair[0] != pair[1])


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Path:
    run(root, "undisturbed")
    return root / "undisturbed"


@pytest.mark.parametrize(
    ("moment", "count", "rank"),
    [
        ("idle", 5, 1),
        ("decodes", 20, 1),
        ("decodes", 11, 2),
        ("judges", 2, 2),
        ("receives weights", 2, 1),
        ("verifies", 2, 2),
    ],
)
def test_a_run_goes_on_bit_for_bit(
    root: Path, undisturbed: Path, moment: str, count: int, rank: int
) -> None:
    name = f"{moment.replace(' ', '_')}_{rank}"
    output = run(root, name, deaths=[Death(rank, moment, count)])
    assert f"rank {rank} of the job, rank {rank - 1} of generation, is gone" in output
    assert_same_run(root / name, undisturbed)
    assert seconds_to_train(root, name) < 15


def test_calls_that_may_be_repeated_are(root: Path) -> None:
    """The call that the rank dies in is begun in the journal, and has no answer."""
    run(root, "calm", in_environment(root))
    output = run(root, "called", in_environment(root), deaths=[Death(2, "calls", 20)])
    assert "rank 2 of the job, rank 1 of generation, is gone" in output
    assert differing(root, "called", "calm") == []
