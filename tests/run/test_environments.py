"""Runs in an environment of the user's own: real Megatron-core, real vLLM, real kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gapo_megatron.io.sample_files import read_samples, read_timelines
from tests.programs import Program
from tests.train_setup import (
    CONFIG,
    arguments,
    finish,
    interrupt,
    metrics_of,
    prepare,
    run,
    steps_of,
)

pytestmark = pytest.mark.system

ENVIRONMENT = r"""
import json, os, pathlib, signal, time
from gapo_megatron.rollout.environments.one_turn import OneTurn

class Adds(OneTurn):
    '''Says a digit after the first turn. Each call leaves a line in a file.

    A call whose number is that in the file's companion, if there is one, or more kills the process.
    '''

    def __init__(self, tokenizer, log, delay_s=0.0):
        super().__init__(tokenizer)
        self.said = tokenizer.encode("1", add_special_tokens=False)
        self.log, self.delay_s = log, delay_s

    def respond(self, episode):
        if episode.response_mask is not None:
            return None
        with open(self.log, "a") as file:
            tokens = episode.token_ids.tolist()
            file.write(json.dumps([episode.prompt.id, episode.sample, tokens]) + "\n")
        deadly = pathlib.Path(self.log + ".kill")
        if deadly.exists() and len(open(self.log).readlines()) >= int(deadly.read_text()):
            deadly.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.delay_s * (episode.sample + 1))
        return self.said
"""

SECTION = """
[environment]
kind = "{root}/adds.py:Adds"
settings = {{ log = "{root}/log" }}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("environments")
    (root / "adds.py").write_text(ENVIRONMENT)
    return prepare(root, CONFIG + SECTION)


def settings_of(root: Path, name: str, *, delay_s: float = 0.0) -> tuple[str, ...]:
    return (
        f'environment.settings={{log = "{root}/{name}.log", delay_s = {delay_s}}}',
        "run.num_steps=4",
        "evaluation.every_steps=0",
    )


def train(root: Path, name: str, *, delay_s: float = 0.0) -> str:
    return run(root, name, *settings_of(root, name, delay_s=delay_s))


def calls_of(root: Path, name: str) -> list[str]:
    return (root / f"{name}.log").read_text().splitlines()


def learned(root: Path, name: str) -> list[dict[str, float]]:
    """Metrics but for what depends on the rounding of vLLM's batches: who waits for whom."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("mismatch/", "sync/"))}
        for line in metrics_of(root / name)
    ]


def weights_differ(root: Path, name: str, other: str) -> list[str]:
    ours, theirs = (load_file(root / one / "hf/model.safetensors") for one in (name, other))
    return [key for key in theirs if not ours[key].equal(theirs[key])]


@pytest.fixture(scope="module")
def whole(root: Path) -> str:
    train(root, "whole")
    assert len(calls_of(root, "whole")) > 100
    return "whole"


def test_a_kill_within_a_call_makes_no_call_twice(root: Path, whole: str) -> None:
    """Its episode is unknown; the answers before it are replayed.

    So are the episodes of calls that other threads had begun; some were not in the file yet.
    """
    num_a_step = len(calls_of(root, whole)) // 4
    kill_at = 3 * num_a_step + num_a_step // 2
    (root / "killed.log.kill").write_text(str(kill_at))
    killed = Program(
        "gapo_megatron.train", *arguments(root, "killed", *settings_of(root, "killed"))
    )
    finish(killed, exit_code=-signal.SIGKILL)
    assert len(steps_of(root / "killed")) == 3
    assert kill_at <= len(calls_of(root, "killed")) < 4 * num_a_step
    assert "resumed from" in train(root, "killed")
    calls = calls_of(root, "killed")
    assert len(calls) == len({*calls}) and {*calls} <= {*calls_of(root, whole)}
    missing = {*calls_of(root, whole)} - {*calls}
    lines, expected = learned(root, "killed"), learned(root, whole)
    assert lines[:3] == expected[:3]
    assert expected[3]["groups/unknown_verdicts"] == 0
    assert len(missing) < lines[3]["groups/unknown_verdicts"]
    # The checkpoint after step 1 is kept: a resume from it repeats steps 2 and 3.
    journals = (root / "killed/environment").iterdir()
    assert {path.name.split("_")[1] for path in journals} == {"2", "3"}


def test_a_resumed_run_replays_answers_and_is_the_same_run(root: Path, whole: str) -> None:
    """Killed after the answers of a step, before its update."""
    settings = settings_of(root, "replayed")
    interrupt(root, "replayed", *settings, stage="step 3: update", by="SIGKILL")
    calls = calls_of(root, "replayed")
    assert "resumed from" in train(root, "replayed")
    assert calls_of(root, "replayed") == calls and sorted(calls) == sorted(calls_of(root, whole))
    assert learned(root, "replayed") == learned(root, whole)
    assert not weights_differ(root, "replayed", whole)
    ours, theirs = (root / name / "samples.jsonl" for name in ("replayed", whole))
    assert ours.read_bytes() == theirs.read_bytes()
    for name in ("replayed", whole):
        samples, timelines = read_samples(root / name), read_timelines(root / name)
        assert {one.step for one in samples} == {*range(4)}
        keys = [[(one.step, one.problem, one.sample) for one in of] for of in (samples, timelines)]
        assert keys[0] == keys[1]
        for one, timeline in zip(samples, timelines, strict=True):
            sampled = sum(span.num_tokens for span in timeline.spans)
            assert sampled == one.num_tokens or one.truncated
