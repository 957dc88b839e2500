"""Files of a checkpoint that this package writes and reads; a wrong one is damage."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from gapo_megatron.checkpoint import OpenStep, files, resume, rng
from gapo_megatron.checkpoint.open_groups import from_content, load_open_groups
from gapo_megatron.checkpoint.state import State
from gapo_megatron.errors import CheckpointError
from gapo_megatron.rollouts import ROW, Rollouts
from tests.damage import put
from tests.dist import single_rank
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
        (put("step", value="3"), ("step", 3)),
        (put("source", value=...), ("source",)),
        (put("source", "epoch", value=-1), ("source.epoch", -1)),
        (put("source", "remaining", value=[1, "2"]), ("source.remaining.1", 2)),
        (put("source", "remaining", value=None), ("source.remaining", None)),
        (put("source", "dataset", value=5), ("source.dataset", 5)),
        (put("source", "dataset", "rows", value=5), ("source.dataset.rows", 5)),
        (put("window", value={}), ("window",)),
        (put("answer_forms", value=[2**63]), ("answer_forms.0", 2**63)),
        (put("window", value=[[[1, 2, 3]]]), ("window.0.0",)),
        (put("window", value=[[[-1, 2, 3, 4]]]), ("window.0.0.0", -1)),
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


def saved_groups() -> dict[str, Any]:
    versions = torch.tensor([1, 1], dtype=torch.int32)
    carried = {"versions": versions, "old_log_probs": torch.tensor([-0.5, -0.25])}
    tokens = {"token_ids": torch.tensor([1, 2], dtype=torch.int32)}
    rollout = {"log_probs": torch.tensor([-0.5, -0.25]), "truncated": False, "finished": True}
    rollout["response_mask"] = None
    rollout["routes"] = torch.arange(12, dtype=torch.uint8).view(3, 4)
    prompt = {"id": "a", "token_ids": (1, 2), "answer": "3", "level": ""}
    return {"groups": [{"prompt": prompt, "rollouts": [tokens | rollout | carried]}]}


PROMPT, ROLLOUT = ("groups", 0, "prompt"), ("groups", 0, "rollouts", 0)


@pytest.mark.parametrize(
    "change",
    [
        put("groups", value=...),
        put("groups", value=3),
        put(*PROMPT, value=...),
        put(*PROMPT, "id", value=4),
        put(*PROMPT, "token_ids", value=[1]),
        put(*PROMPT, "more", value=4),
        put(*PROMPT, "token_ids", value=()),
        put(*PROMPT, "token_ids", value=(2**40,)),
        put("groups", 0, "rollouts", value=[]),
        lambda content: content["groups"].append(
            content["groups"][0] | {"rollouts": 2 * content["groups"][0]["rollouts"]}
        ),
        put(*ROLLOUT, "response_mask", value=torch.zeros(2, dtype=torch.bool)),
        put(*ROLLOUT, "finished", value=...),
        put(*ROLLOUT, "truncated", value=None),
        put(*ROLLOUT, "token_ids", value=torch.ones(2)),
        put(*ROLLOUT, "token_ids", value=torch.tensor([1, -1]).int()),
        put(*ROLLOUT, "log_probs", value=torch.ones(3)),
        put(*ROLLOUT, "log_probs", value=torch.tensor([-1.0, torch.nan])),
        put(*ROLLOUT, "old_log_probs", value=torch.tensor([-torch.inf])),
        put(*ROLLOUT, "versions", value=...),
        put(*ROLLOUT, "routes", value=torch.zeros(4, 4, dtype=torch.uint8)),
        put(*ROLLOUT, "routes", value=torch.zeros(0, 4, dtype=torch.uint8)),
        put(*ROLLOUT, "routes", value=torch.zeros(3, 4)),
    ],
)
def test_misshapen_open_groups_are_damage(tmp_path, change):
    path, content = tmp_path / "open_groups.pt", saved_groups()
    files.write(path, files.serialise(content))
    (group,) = load_open_groups(tmp_path)
    assert group[0].prompt.token_ids == (1, 2) and group[0].carried_log_probs is not None
    routes = group[0].routes
    assert routes is not None and routes.tolist() == np.arange(12).reshape(3, 4).tolist()
    change(content)
    files.write(path, files.serialise(content))
    with pytest.raises(CheckpointError, match=mentions(path)):
        load_open_groups(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("groups", put(*ROLLOUT, "token_ids", value=torch.tensor([1, 99]).int()), ("token", 99)),
        ("groups", put(*PROMPT, "token_ids", value=(1, 100)), ("token", 100)),
        ("groups", put(*ROLLOUT, "routes", value=torch.full((3, 4), 12).byte()), ("expert", 12)),
        ("step", put("batch", "response_ids", value=[torch.tensor([99]).int()]), ("token", 99)),
        ("step", put("batch", "prompt_ids", value=[torch.tensor([99]).int()]), ("token", 99)),
        ("step", put("batch", "routes", value=[torch.tensor([[12]]).byte()]), ("expert", 12)),
    ],
)
def test_what_the_model_does_not_have_is_damage(tmp_path, monkeypatch, name, change, named):
    """A model with 99 tokens and 12 experts."""
    monkeypatch.setattr(resume, "geometry_of", lambda _: SimpleNamespace(num_experts=12))
    groups, (shared, _) = saved_groups(), saved_step()

    def check() -> None:
        state = State(open_groups=from_content(groups["groups"]))
        state.open_step = OpenStep.from_shared(shared)
        resume.require_known(tmp_path, state, PretrainedConfig(vocab_size=99))

    with single_rank():
        check()
        change({"groups": groups, "step": shared}[name])
        with pytest.raises(CheckpointError, match=mentions(tmp_path, *named)):
            check()


@pytest.mark.parametrize(
    "change",
    [
        put(*ROLLOUT, "versions", value=None),
        put(*ROLLOUT, "versions", value="34"),
        put(*ROLLOUT, "versions", value=torch.tensor([3, 4])),
        put(*ROLLOUT, "versions", value=torch.tensor([3], dtype=torch.int32)),
        put(*ROLLOUT, "versions", value=torch.tensor([3, -1], dtype=torch.int32)),
        put(*ROLLOUT, "old_log_probs", value=torch.zeros(0)),
        put(*ROLLOUT, "old_log_probs", value=torch.zeros(3)),
        put(*ROLLOUT, "old_log_probs", value=torch.zeros(1).double()),
    ],
)
def test_misshapen_versions_of_tokens_are_damage(tmp_path, change):
    """Of those tokens some, all or none have the trainer's log-probs."""
    path, content = tmp_path / "open_groups.pt", saved_groups()
    (rollout,) = content["groups"][0]["rollouts"]
    rollout["versions"] = torch.tensor([3, 4], dtype=torch.int32)
    for old in (None, torch.tensor([-0.5]), torch.tensor([-0.5, -0.25])):
        rollout["old_log_probs"] = old
        files.write(path, files.serialise(content))
        ((episode,),) = load_open_groups(tmp_path)
        assert episode.carried_versions is not None
        assert episode.carried_versions.tolist() == [3, 4]
        read = episode.carried_log_probs
        assert (read is None) == (old is None) and (read is None or read.tolist() == old.tolist())
    change(content)
    files.write(path, files.serialise(content))
    with pytest.raises(CheckpointError, match=mentions(path)):
        load_open_groups(tmp_path)


def saved_step() -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch of one response, and the progress of rank 0."""
    one = torch.tensor([1])
    batch = {
        "prompt_ids": [one.int()],
        "response_ids": [one.int()],
        "rollout_log_probs": [one.float()],
        "advantages": one.double(),
        "num_correct": one,
        "group_size": one,
        "valid": one.bool(),
        "carried_log_probs": [],
        "carried_versions": [],
        "response_masks": [],
        "routes": [one[None].byte()],
    }
    progress = {
        "old_log_probs": [[], [one.float()]],
        "scores": None,
        "sums": {"loss": one.double().sum()},
        "grad_norms": [0.5],
        "learning_rate": 1e-6,
        "routes": {
            "routes": {1: [{0: torch.zeros(2, 3, dtype=torch.uint8)}]},
            "counts": torch.zeros(1, 6, dtype=torch.int64),
        },
    }
    array = np.ones(1, dtype=np.int32)
    routes = [array[None].astype(np.uint8)]
    table = Rollouts.of([array], [array], [array.astype(np.float32)], routes=routes).table
    shared = {"batch": batch, "metrics": {"reward/mean": 0.5}, "evaluated": {}}
    return shared | {"facts": torch.from_numpy(table.view(np.int32)[None])}, progress


def count_one_more(name: str) -> Any:
    def change(shared: dict[str, Any]) -> None:
        shared["facts"].numpy().view(ROW)[0][name] += 1

    return change


SHARED = (
    put("metrics", value=...),
    put("metrics", "reward/mean", value="x"),
    put("batch", value=[]),
    put("batch", "valid", value=...),
    put("batch", "more", value=torch.ones(1)),
    put("batch", "valid", value=torch.ones(1)),
    put("batch", "advantages", value=torch.ones(2).double()),
    put("batch", "advantages", value=torch.tensor([torch.nan]).double()),
    put("batch", "prompt_ids", value=[]),
    put("batch", "response_ids", value=[[1]]),
    put("batch", "response_ids", value=[torch.tensor([-1]).int()]),
    put("batch", "rollout_log_probs", value=[torch.tensor([torch.nan])]),
    put("batch", "group_size", value=torch.tensor([-1])),
    put("batch", "carried_log_probs", value=[torch.ones(2)]),
    put("facts", value=[[1]]),
    lambda shared: shared.update(facts=shared["facts"].long()),
    lambda shared: shared.update(facts=shared["facts"].repeat(2, 1)),
    put("batch", "routes", value=...),
    put("batch", "routes", value=[]),
    put("batch", "routes", value=[torch.zeros(2, 1, dtype=torch.uint8)]),
    put("batch", "routes", value=[torch.zeros(1, 1)]),
    *(
        count_one_more(f"num_{kind}")
        for kind in (
            *("prompt_tokens", "response_tokens", "sampled_tokens", "carried_tokens"),
            *("routed_tokens", "routes"),
        )
    ),
)
PROGRESS = (
    put("sums", value=...),
    put("grad_norms", value=[]),
    put("grad_norms", value=["x"]),
    put("learning_rate", value=None),
    put("old_log_probs", value=[[1.0]]),
    put("old_log_probs", value=[None]),
    put("old_log_probs", value=[[torch.tensor([torch.nan])]]),
    put("scores", value=...),
    put("more", value=1),
    put("routes", value=None),
    put("routes", "routes", value=...),
    put("routes", "routes", 1, 0, 0, value=torch.zeros(6, dtype=torch.uint8)),
    put("routes", "routes", 1, 0, 0, value=torch.zeros(2, 3)),
    put("routes", "counts", value=torch.zeros(6, dtype=torch.int64)),
)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("batch.pt", change) for change in SHARED),
        *(("progress_00000.pt", change) for change in PROGRESS),
    ],
)
def test_a_misshapen_open_step_is_damage(tmp_path, name, change):
    shared, progress = saved_step()

    def write_and_load() -> OpenStep:
        files.write(tmp_path / "batch.pt", files.serialise(shared))
        files.write(tmp_path / "progress_00000.pt", files.serialise(progress))
        return OpenStep.load(tmp_path, torch.device("cpu"), num_updates=1)

    with single_rank():
        assert write_and_load().progress.num_updates == 1
        change({"batch.pt": shared, "progress_00000.pt": progress}[name])
        with pytest.raises(CheckpointError, match=mentions(tmp_path / name)):
            write_and_load()


@pytest.mark.parametrize(
    "change",
    [
        put("torch", value=...),
        put("torch", value=torch.ones(3)),
        put("python", value=(3, (1, 2), None)),
        put("numpy", "bit_generator", value="PCG64"),
        put("numpy", "state", value=...),
        put("megatron", value={"one": [1]}),
        put("cuda", value=5),
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
