"""Files of a checkpoint that this package writes and reads; a wrong one is damage."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gapo_megatron.checkpoint import OpenStep, files, rng
from gapo_megatron.checkpoint.open_groups import from_content, load_open_groups, to_content
from gapo_megatron.checkpoint.state import State
from gapo_megatron.errors import CheckpointError
from gapo_megatron.types import Episode, Prompt, TurnSettings
from tests.damage import put
from tests.messages import mentions
from tests.slurm.training import fill, small_disk

SOURCE = {"epoch": 0, "remaining": [2, 0], "dataset": {"rows": "d"}}
WINDOW = [[[1, 8.0, 0.5, -1]], []]


def write_state(folder: Path) -> None:
    state = State(step=3, source=SOURCE, num_given_back=7)
    state.window.load_state_dict(WINDOW)
    for name, content in state.serialised().items():
        files.write(folder / name, content)


def test_the_trainer_state_comes_back_as_it_was(tmp_path):
    write_state(tmp_path)
    state = State.load(tmp_path, step=3)
    assert (state.step, state.source, state.window.state_dict()) == (3, SOURCE, WINDOW)
    assert state.num_given_back == 7


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("step", value=4), ("step", 4, 3)),
        (put("step", value=...), ("step",)),
        (put("source", value=...), ("source",)),
        (put("window", value=5), ("TypeError",)),
        (put("answer_forms", value=5), ("TypeError",)),
    ],
)
def test_a_misshapen_trainer_state_is_damage(tmp_path, change, named):
    write_state(tmp_path)
    path = tmp_path / "trainer_state.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=mentions(path, *named)):
        State.load(tmp_path, step=3)


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    content = {"tokens": torch.zeros(10_000)}
    with small_disk(tmp_path / "disk") as is_there:
        if not is_there:
            pytest.skip("a small disk needs the right to mount one")
        for pages in range(10):
            fill(tmp_path / "disk/filler", leave=4096 * pages)
            with pytest.raises(OSError, match="No space left on device"):
                files.write(tmp_path / "disk/rng.pt", files.serialise(content))
            (tmp_path / "disk/rng.pt").unlink()
            (tmp_path / "disk/filler").unlink()


def test_open_groups_of_before_turns_had_settings_are_read():
    tokens, zeros = np.array([3, 4], np.int32), np.zeros(2, np.float32)
    carried = {"carried_log_probs": zeros, "carried_versions": np.zeros(2, np.int32)}
    episode = Episode(Prompt("a", (1,), "2"), 0, tokens, zeros, **carried)
    content = to_content([[episode]])
    for name in ("turn", "failure", "final_text"):
        del content[0]["rollouts"][0][name]
    (((read,),),) = (from_content(content),)
    assert (read.turn, read.failure, read.final_text) == (TurnSettings(), "", None)
    assert read.token_ids.tolist() == [3, 4]


def test_what_has_no_such_content_is_damage(tmp_path):
    """Its digest tells of damage; so no more is checked than reading it does."""
    files.write(tmp_path / "open_groups.pt", files.serialise({"groups": [{"rollouts": []}]}))
    with pytest.raises(CheckpointError, match=mentions(tmp_path / "open_groups.pt", "prompt")):
        load_open_groups(tmp_path)
    files.write(tmp_path / "batch.pt", files.serialise({"batch": {}}))
    with pytest.raises(CheckpointError, match=mentions(tmp_path / "batch.pt", "facts")):
        OpenStep.load(tmp_path, torch.device("cpu"), num_updates=0)


@pytest.mark.parametrize(
    "change",
    [
        put("torch", value=...),
        put("torch", value=torch.ones(3)),
        put("python", value=(3, (1, 2), None)),
        put("numpy", "bit_generator", value="PCG64"),
        put("numpy", "state", value=...),
    ],
)
def test_a_misshapen_random_state_is_damage_and_sets_nothing(tmp_path, change):
    path = tmp_path / "rng.pt"
    files.write(path, files.serialise(rng.current()))
    state = torch.load(path, weights_only=True)
    change(state)
    files.write(path, files.serialise(state))
    before = random.getstate()
    with pytest.raises(CheckpointError, match=mentions(path)):
        rng.read(path)
    assert random.getstate() == before


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04."])
def test_a_file_that_torch_cannot_read_is_damage(tmp_path, content):
    path = tmp_path / "rng.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=mentions(path)):
        rng.read(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=mentions(path)):
        rng.read(path)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=mentions(path)):
        rng.read(path)
    path.unlink()
    files.write(path, files.serialise({"python": 1}))
    torch.save([1], path)
    with pytest.raises(CheckpointError, match=mentions(path, "list")):
        rng.read(path)


def test_rng_continues_every_sequence(tmp_path):
    def draw():
        return random.random(), float(np.random.normal()), float(torch.rand(()))

    draw()  # NumPy now holds the second half of a Gaussian pair
    files.write(tmp_path / "rng.pt", files.serialise(rng.current()))
    first = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draw() != first
    rng.restore(rng.read(tmp_path / "rng.pt"))
    assert draw() == first
