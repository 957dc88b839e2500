"""Manifest and folders: conditions for a complete checkpoint. No process group, no model."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from gapo_megatron.checkpoint import OpenStep, check_resume, files, rng
from gapo_megatron.checkpoint.changes import record_changes
from gapo_megatron.checkpoint.open_groups import load_open_groups
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.checkpoint.state import State
from gapo_megatron.config import CheckpointConfig, Config, parse_config
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.hf import manifest
from gapo_megatron.hf.manifest import Manifest
from gapo_megatron.io.run_folder import check_writable, checkpoints_dir, read_changes
from gapo_megatron.rollouts import ROW, Rollouts
from tests.damage import sign_document
from tests.dist import single_rank
from tests.messages import mentions
from tests.slurm.training import fill, small_disk

OURS = parse_config(
    {
        "run": {"output_dir": "unused", "num_steps": 9},
        "model": {"hf_dir": "unused"},
        "data": {"train_path": "unused"},
        "rollout": {"max_response_tokens": 64},
        "reward": {"kind": "exact"},
    },
    source="test",
)
NAMES = ["__0_0.distcp", "rng_00000.pt", "sub/common.pt"]


def make_checkpoint(
    folder: Path, step: int, *, model: dict | None = None, config: Config = OURS
) -> Path:
    """A published checkpoint of a few bytes."""
    temporary = folder / f".tmp_step_{step:08d}"
    (temporary / "sub").mkdir(parents=True)
    for name in NAMES:
        (temporary / name).write_bytes(f"{name} of step {step}".encode())
    entries = manifest.describe_files(temporary, manifest.list_files(temporary))
    manifest.write_manifest(
        temporary,
        Manifest(
            step=step,
            model=model or {"hidden_size": 8},
            config=config.model_dump(mode="json"),
            layout={"data_parallel_size": 1},
            megatron_version="0.16.1",
            files=entries,
        ),
    )
    final = manifest.step_dir(folder, step)
    manifest.publish(temporary, final)
    return final


def damage_of(folder: Path) -> str | None:
    return manifest.find_damage(folder, manifest.read_manifest(folder).files)


def test_a_published_checkpoint_is_whole_and_says_what_it_is(tmp_path):
    path = make_checkpoint(tmp_path, 40)
    found = manifest.read_manifest(path)
    assert (found.step, sorted(found.files)) == (40, NAMES)
    assert found.config == OURS.model_dump(mode="json")
    assert damage_of(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000040"]


@pytest.mark.parametrize("name", NAMES)
def test_any_damage_names_the_file(tmp_path, name):
    path = make_checkpoint(tmp_path, 1) / name
    content = path.read_bytes()

    path.write_bytes(content[:-1])
    named = mentions(path, f"{len(content) - 1} bytes", len(content))
    assert re.search(named, damage_of(tmp_path / "step_00000001") or "")
    flipped = bytearray(content)
    flipped[3] ^= 1
    path.write_bytes(flipped)
    assert re.search(mentions(path, "SHA-256"), damage_of(tmp_path / "step_00000001") or "")

    path.unlink()
    assert re.search(mentions(path, "missing"), damage_of(tmp_path / "step_00000001") or "")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda text: "", "JSON"),
        (lambda text: "[]", "[]"),
        (lambda text: text.replace('"step": 3', '"step": 4'), "SHA-256"),
    ],
)
def test_a_damaged_manifest_is_found(tmp_path, change, named):
    path = make_checkpoint(tmp_path, 3) / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError, match=mentions(path, named)):
        manifest.read_manifest(path.parent)


def put(*keys: str, value: Any) -> Any:
    """Change of a document: sets the value at the keys; `...` removes it."""

    def change(document: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        if value is ...:
            del document[last]
        else:
            document[last] = value

    return change


BRANCH: dict[str, Any] = {
    "run": "/old",
    "checkpoint": "step_00000001",
    "step": 1,
    "manifest_sha256": "0" * 64,
    "changes": {"objective.method": ["gspo", "gapo"]},
    "parent": None,
}
ENTRY = ("files", "rng_00000.pt")
MISSHAPEN: dict[str, tuple[Any, tuple[object, ...]]] = {
    **{
        f"no {field}": (put(field, value=...), (field,))
        for field in ("step", "model", "config", "layout", "megatron_version", "files")
    },
    **{
        f"{'.'.join(keys)} is {value!r:.20}": (put(*keys, value=value), keys)
        for *keys, value in (
            ("step", "3"),
            ("step", 3.5),
            ("step", True),
            ("step", None),
            ("step", -1),
            ("step", 2**64),
            ("open_updates", "1"),
            ("model", []),
            ("config", {"run": 1}),
            ("config", None),
            ("layout", {"data_parallel_size": "2"}),
            ("layout", 2),
            ("megatron_version", 0.16),
            ("files", []),
            (*ENTRY, "abc"),
            (*ENTRY, {"num_bytes": 3}),
            (*ENTRY, "num_bytes", "3"),
            (*ENTRY, "num_bytes", -3),
            (*ENTRY, "sha256", 5),
            (*ENTRY, "sha256", "Z" * 64),
            (*ENTRY, "more", 1),
            ("branch", "there"),
            ("branch", {"run": "/old"}),
            ("branch", BRANCH | {"run": "a\0b"}),
            ("branch", BRANCH | {"checkpoint": "../x"}),
            ("branch", BRANCH | {"changes": {"run.seed": [1]}}),
            ("branch", BRANCH | {"parent": {"run": "/old"}}),
            ("more", 1),
        )
    },
    **{
        f"a file named {name}": (
            put("files", name, value={"num_bytes": 1, "sha256": "0" * 64}),
            ("files", name),
        )
        for name in ("../rng", "/etc/passwd", "sub/../../x", "./x", "")
    },
    "another step": (put("step", value=4), ("step", 4)),
    "within a step": (put("open_updates", value=2), ("open_updates", 2)),
    "no version": (put("version", value=...), ("manifest",)),
    "version of another kind": (put("version", value=[2]), ("version", "[2]")),
}


@pytest.mark.parametrize(("change", "named"), MISSHAPEN.values(), ids=MISSHAPEN)
def test_a_misshapen_manifest_is_damage_whoever_signed_it(tmp_path, change, named):
    path = sign_document(make_checkpoint(tmp_path, 3), change)
    with pytest.raises(CheckpointError, match=mentions(path, *named)):
        manifest.read_manifest(path.parent)
    older = make_checkpoint(tmp_path, 2)
    assert manifest.newest_manifest(tmp_path) == (older, manifest.read_manifest(older))


def test_a_branch_and_a_branch_of_a_branch_are_read(tmp_path):
    folder = make_checkpoint(tmp_path, 3)
    sign_document(folder, put("branch", value=BRANCH | {"parent": BRANCH}))
    found = manifest.read_manifest(folder).branch
    assert found is not None and found.parent is not None and asdict(found.parent) == BRANCH


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    manifest.read_manifest(path.rename(tmp_path / "a_copy_of_mine"))
    for name in ("step_00000004", "step_00000003_1"):
        path = (tmp_path / "a_copy_of_mine").rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=mentions(path / "manifest.json", "step 3")):
            manifest.read_manifest(path)
        path.rename(tmp_path / "a_copy_of_mine")


def test_what_is_no_file_is_damage_and_nobody_waits_for_it(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    entries = manifest.read_manifest(path).files
    for name in (NAMES[0], "manifest.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
    assert re.search(mentions(path / NAMES[0]), manifest.find_damage(path, entries) or "")
    with pytest.raises(CheckpointError, match=mentions(path / "manifest.json")):
        manifest.read_manifest(path)


def test_what_the_disk_cannot_read_is_damage(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 3)
    entries = manifest.read_manifest(path).files
    fail_to_read(monkeypatch, manifest, path / NAMES[1])
    named = mentions(path / NAMES[1], "Input/output error")
    assert re.search(named, manifest.find_damage(path, entries) or "")


def fail_to_read(monkeypatch: pytest.MonkeyPatch, module: Any, path: Path) -> None:
    """Later reads fail as on a failing disk."""
    opened = module.open_file

    def broken(one: Path) -> Any:
        if one == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(one))
        return opened(one)

    monkeypatch.setattr(module, "open_file", broken)


SOURCE = {"epoch": 0, "remaining": [2, 0], "dataset": "d"}
WINDOW = [[[1, 8.0, 0.5, -1]], []]


def write_state(folder: Path) -> None:
    state = State(step=3, source=SOURCE, num_given_back=7)
    state.window.load_state_dict(WINDOW)
    state.write_shared(folder)


def test_the_trainer_state_comes_back_as_it_was(tmp_path):
    write_state(tmp_path)
    path = tmp_path / "trainer_state.json"
    document = json.loads(path.read_text())
    for _ in range(2):
        state = State.load(tmp_path, step=3)
        assert (state.step, state.source, state.window.state_dict()) == (3, SOURCE, WINDOW)
        assert state.num_given_back == 7
        document.pop("step", None)  # before it said the step
        path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("step", value=4), ("step", 4, 3)),
        (put("step", value="3"), ("step", 3)),
        (put("source", value=...), ("source",)),
        (put("source", "epoch", value=-1), ("source.epoch", -1)),
        (put("source", "remaining", value=[1, "2"]), ("source.remaining.1", 2)),
        (put("source", "remaining", value=None), ("source.remaining", None)),
        (put("source", "dataset", value=5), ("source.dataset", 5)),
        (put("window", value={}), ("window",)),
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


def test_a_manifest_from_before_context_parallelism_is_of_one_context_rank(tmp_path):
    folder = make_checkpoint(tmp_path, 1)
    written = json.loads((folder / "manifest.json").read_text())
    assert written["layout"] == {"data_parallel_size": 1}
    found = manifest.read_manifest(folder)
    assert found.layout == {"data_parallel_size": 1, "context_parallel_size": 1}


def test_a_folder_without_manifest_is_damaged(tmp_path):
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=mentions("step_00000003/manifest.json", "missing")):
        manifest.read_manifest(tmp_path / "step_00000003")


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 3)
    monkeypatch.setattr(manifest, "VERSION", 0)
    with pytest.raises(CheckpointError, match=mentions(path, "version 2", 0)):
        manifest.read_manifest(path)


def test_half_written_and_refused_folders_are_not_listed(tmp_path):
    for step in (9, 100, 20):
        make_checkpoint(tmp_path, step)
    (tmp_path / ".tmp_step_00000200").mkdir()
    refused = manifest.set_aside(tmp_path / "step_00000100")
    assert refused.is_dir()
    assert [p.name for p in manifest.list_steps(tmp_path)] == ["step_00000020", "step_00000009"]
    assert manifest.list_steps(tmp_path / "absent") == []


def test_publishing_over_a_damaged_checkpoint_replaces_it(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    (path / NAMES[0]).write_bytes(b"")
    assert damage_of(make_checkpoint(tmp_path, 5)) is None


@pytest.mark.parametrize("exists", [True, False])
def test_what_was_refused_gives_way_and_what_a_link_leads_to_stays(tmp_path, exists):
    path, elsewhere = make_checkpoint(tmp_path, 5), tmp_path / "elsewhere"
    if exists:
        elsewhere.mkdir()
    (tmp_path / ".damaged_step_00000005").symlink_to(elsewhere)
    aside = manifest.set_aside(path)
    assert damage_of(aside) is None and not aside.is_symlink()
    assert elsewhere.exists() == exists


def test_prune_keeps_the_newest_and_clears_what_was_refused(tmp_path):
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    manifest.set_aside(tmp_path / "step_00000002")
    manifest.prune(tmp_path, CheckpointConfig(every_steps=1, keep_last=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]
    manifest.prune(tmp_path, CheckpointConfig(every_steps=1, keep_last=9))
    assert len(manifest.list_steps(tmp_path)) == 2


def test_what_was_refused_stays_until_the_run_is_as_far_again(tmp_path):
    for step in (2, 6):
        make_checkpoint(tmp_path, step)
    refused = manifest.set_aside(tmp_path / "step_00000006")
    settings = CheckpointConfig(every_steps=1, keep_last=1)
    for step, stays in ((4, True), (6, False)):
        make_checkpoint(tmp_path, step)
        manifest.prune(tmp_path, settings)
        assert refused.exists() is stays


def left_after(folder: Path, steps: Sequence[int], **settings: Any) -> list[int]:
    """Checkpoints left by a run that saves and prunes after each of `steps`."""
    for step in steps:
        make_checkpoint(folder, step)
        manifest.prune(folder, CheckpointConfig(**settings))
    return [int(path.name.removeprefix("step_")) for path in reversed(manifest.list_steps(folder))]


@pytest.mark.parametrize(
    ("every_steps", "keep_last", "steps", "left"),
    [
        (100, 2, [100, 137, 200], [100, 200]),  # a stop takes no place of the others
        (100, 2, [100, 200, 237], [100, 200, 237]),  # but is the newest
        (100, 2, [100, 200, 237, 250], [100, 200, 250]),  # the end of the run
        (100, 2, [30, 60, 90], [60, 90]),  # a fallback, while there is no other
        (100, 2, [30, 60, 100], [60, 100]),
        (100, 1, [100, 137, 160], [100, 160]),
        (0, 2, [30, 60, 90], [60, 90]),
    ],
)
def test_what_a_stop_saved_gives_way(tmp_path, every_steps, keep_last, steps, left):
    assert left == left_after(tmp_path, steps, every_steps=every_steps, keep_last=keep_last)


def test_named_steps_are_saved_and_stay(tmp_path):
    settings = {"every_steps": 50, "keep_last": 2, "keep_steps": [120, 600]}
    due = [step for step in range(1, 801) if CheckpointConfig(**settings).is_due(step)]
    assert due == [50, 100, 120, *range(150, 801, 50)]
    assert left_after(tmp_path, due, **settings) == [120, 600, 750, 800]
    only_named = CheckpointConfig(every_steps=0, keep_steps=[3])
    assert [step for step in range(1, 9) if only_named.is_due(step)] == [3]
    for wrong in ([0], ["3"], 3):
        with pytest.raises(ValidationError, match="keep_steps"):
            CheckpointConfig(keep_steps=wrong)


def test_checkpoints_within_a_step_are_ordered_and_go_when_passed(tmp_path):
    make_checkpoint(tmp_path, 4)
    for step, open_updates in ((3, 2), (4, 0), (4, 10), (4, 9)):
        manifest.step_dir(tmp_path, step, open_updates).mkdir()
    names = ["step_00000004_10", "step_00000004_9", "step_00000004_0", "step_00000004"]
    assert [path.name for path in manifest.list_steps(tmp_path)] == [*names, "step_00000003_2"]
    settings = CheckpointConfig(every_steps=2, keep_last=1)
    manifest.prune(tmp_path, settings)  # the newest stays, and one that serves every layout
    assert [path.name for path in manifest.list_steps(tmp_path)] == [
        "step_00000004_10",
        "step_00000004",
    ]
    make_checkpoint(tmp_path, 5)
    manifest.step_dir(tmp_path, 5, 1).mkdir()
    manifest.prune(tmp_path, settings)  # the newest that serves every layout was not due
    assert [path.name for path in manifest.list_steps(tmp_path)] == [
        "step_00000005_1",
        "step_00000005",
        "step_00000004",
    ]
    make_checkpoint(tmp_path, 6)
    manifest.prune(tmp_path, settings)
    assert [path.name for path in manifest.list_steps(tmp_path)] == ["step_00000006"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_has_a_checkpoints_name_and_is_none_counts_as_a_damaged_one(tmp_path, kind):
    older, newest = make_checkpoint(tmp_path, 4), tmp_path / "step_00000006"

    def make() -> None:
        newest.symlink_to(tmp_path / "gone") if kind == "link" else newest.write_text("")

    make()
    assert manifest.list_steps(tmp_path) == [newest, older]
    with pytest.raises(CheckpointError, match=re.escape(str(newest))):
        manifest.read_manifest(newest)
    found = manifest.newest_manifest(tmp_path)
    assert found is not None and found[0] == older
    manifest.set_aside(newest)
    make()
    assert manifest.set_aside(newest).name == ".damaged_step_00000006"
    assert manifest.list_steps(tmp_path) == [older]
    make()
    made = make_checkpoint(tmp_path, 6)  # in its place
    assert made.is_dir() and not made.is_symlink()
    manifest.prune(tmp_path, CheckpointConfig(keep_last=1))
    assert manifest.list_steps(tmp_path) == [made]


def test_half_written_checkpoints_go_whoever_writes_them(tmp_path):
    make_checkpoint(tmp_path, 4)
    (tmp_path / ".tmp_step_00000009.17.0" / "sub").mkdir(parents=True)
    manifest.remove_half_written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_check_writable(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run", "/proc/run"):
        with pytest.raises(ConfigError) as caught:
            check_writable(path)
        assert f"run.output_dir ({str(path)!r})" in str(caught.value)


def test_check_resume_names_the_fields_that_differ(tmp_path):
    def qwen2(**fields):
        return Qwen2Config(architectures=["Qwen2ForCausalLM"], **fields)

    ours = qwen2(hidden_size=64)
    check_resume(tmp_path, ours, OURS)  # no checkpoint: nothing to disagree with
    make_checkpoint(checkpoints_dir(tmp_path), 1, model=model_identity(ours))
    check_resume(tmp_path, ours, OURS)
    # What only concerns generation does not make another model.
    check_resume(tmp_path, qwen2(hidden_size=64, pad_token_id=1), OURS)
    with pytest.raises(CheckpointError) as caught:
        check_resume(tmp_path, qwen2(hidden_size=32), OURS)
    assert re.search(mentions("hidden_size", 64, 32), str(caught.value))
    assert "vocab_size" not in str(caught.value)
    with pytest.raises(
        CheckpointError, match=mentions("architectures", "Qwen2ForCausalLM", "LlamaForCausalLM")
    ):
        check_resume(
            tmp_path, LlamaConfig(hidden_size=64, architectures=["LlamaForCausalLM"]), OURS
        )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_experts", 8, ("num_local_experts", 4, 8)),
        ("num_experts_per_tok", 1, ("num_experts_per_tok", 2, 1)),
        ("norm_topk_prob", True, ("norm_topk_prob", False, True)),
        ("moe_intermediate_size", 16, ("moe_intermediate_size", 8, 16)),
    ],
)
def test_other_experts_make_another_model(tmp_path, field, value, named):
    fields = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "moe_intermediate_size": 8,
    }
    model = model_identity(Qwen3MoeConfig(**fields))
    make_checkpoint(checkpoints_dir(tmp_path), 1, model=model)
    with pytest.raises(CheckpointError, match=mentions(*named)):
        check_resume(tmp_path, Qwen3MoeConfig(**fields | {field: value}), OURS)


def with_settings(**settings: Any) -> Config:
    """OURS with new values of `section.key`, dots as double underscores."""
    tree = OURS.model_dump(mode="json", exclude_none=True)
    for name, value in settings.items():
        section, key = name.split("__")
        tree[section][key] = value
    return parse_config(tree, source="test")


LEARNED = {
    "objective__method": "gspo",
    "optimizer__learning_rate": 1e-3,
    "batch__rollouts_per_prompt": 4,
    "rollout__temperature": 0.5,
    "run__seed": 1,
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_may_not_change_unless_it_is_said(tmp_path, name):
    ours = Qwen2Config(hidden_size=64)
    path = make_checkpoint(checkpoints_dir(tmp_path), 3, model=model_identity(ours))
    setting = name.replace("__", ".")
    changed = with_settings(**{name: LEARNED[name]})
    with pytest.raises(
        ConfigError, match=mentions(setting, repr(LEARNED[name]), str(path), "run.allow_changes")
    ):
        check_resume(tmp_path, ours, changed)
    allowed = {name: LEARNED[name], "run__allow_changes": [setting, "optimizer.weight_decay"]}
    check_resume(tmp_path, ours, with_settings(**allowed))


def test_what_is_computed_otherwise_may_change(tmp_path):
    ours = Qwen2Config(hidden_size=64)
    make_checkpoint(checkpoints_dir(tmp_path), 3, model=model_identity(ours))
    changed = with_settings(
        run__num_steps=20, batch__max_tokens_per_microbatch=8192, checkpoint__every_steps=2
    )
    check_resume(tmp_path, ours, changed)


def test_changes_are_recorded_by_the_step_before_which_they_were_made(tmp_path):
    def resume(step: int, before: Config, now: Config) -> list[dict]:
        path = make_checkpoint(tmp_path / str(len(list(tmp_path.iterdir()))), step, config=before)
        record_changes(tmp_path, manifest.read_manifest(path), now)
        return read_changes(tmp_path)

    gspo, slow = with_settings(objective__method="gspo"), with_settings(optimizer__learning_rate=1)
    assert resume(2, OURS, OURS) == []
    assert not (tmp_path / "changes.json").exists()
    first = {"step": 3, "changes": {"objective.method": ["gapo", "gspo"]}}
    assert resume(3, OURS, gspo) == [first]
    assert resume(3, OURS, gspo) == [first]  # killed before it saved
    assert resume(5, gspo, gspo) == [first]
    assert [one["step"] for one in resume(7, gspo, slow)] == [3, 7]
    assert resume(5, gspo, gspo) == [first]  # from an older checkpoint: what was after is void
    assert resume(2, OURS, OURS) == []
    (tmp_path / "changes.json").write_text("{}")
    with pytest.raises(DataError, match=r"changes\.json"):
        read_changes(tmp_path)


def test_other_held_out_problems_are_recorded_and_need_no_allowance(tmp_path):
    """Renamed input files of a step are no change: the files' contents are compared."""
    ours = Qwen2Config(hidden_size=64)
    before = with_settings(data__eval_path="aime.jsonl")
    now = with_settings(data__eval_path="amc.jsonl", data__train_path="moved/train.jsonl")
    path = make_checkpoint(checkpoints_dir(tmp_path), 3, config=before, model=model_identity(ours))
    check_resume(tmp_path, ours, now)
    record_changes(tmp_path, manifest.read_manifest(path), now)
    change = {"data.eval_path": ["aime.jsonl", "amc.jsonl"]}
    assert read_changes(tmp_path) == [{"step": 3, "changes": change}]


def test_check_resume_leaves_damage_to_the_resume(tmp_path):
    ours = Qwen2Config(hidden_size=64)
    make_checkpoint(checkpoints_dir(tmp_path), 1, model=model_identity(ours))
    other = make_checkpoint(checkpoints_dir(tmp_path), 2, model={"hidden_size": 1})
    (other / "manifest.json").write_text("{")
    check_resume(tmp_path, ours, OURS)


def test_identity_is_plain_json():
    identity = model_identity(
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    assert json.loads(json.dumps(identity)) == identity
    assert identity["rope_parameters"]["rope_theta"] == 1e4


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    content = {"tokens": torch.zeros(10_000)}
    with small_disk(tmp_path / "disk") as is_there:
        if not is_there:
            pytest.skip("a small disk needs the right to mount one")
        for pages in range(10):
            fill(tmp_path / "disk/filler", leave=4096 * pages)
            with pytest.raises(OSError, match="No space left on device"):
                files.write(tmp_path / "disk/rng.pt", content)
            (tmp_path / "disk/rng.pt").unlink()
            (tmp_path / "disk/filler").unlink()


def saved_groups() -> dict[str, Any]:
    carried = {"oldest_version": 1, "old_log_probs": torch.tensor([-0.5, -0.25])}
    tokens = {"token_ids": torch.tensor([1, 2], dtype=torch.int32)}
    rollout = {"log_probs": torch.tensor([-0.5, -0.25]), "truncated": False, "finished": True}
    prompt = {"id": "a", "token_ids": (1, 2), "answer": "3", "level": ""}
    return {"groups": [{"prompt": prompt, "rollouts": [tokens | rollout | carried]}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("groups"),
        lambda content: content.update(groups=3),
        lambda content: content["groups"][0].pop("prompt"),
        lambda content: content["groups"][0]["prompt"].update(id=4),
        lambda content: content["groups"][0]["prompt"].update(token_ids=[1]),
        lambda content: content["groups"][0]["prompt"].update(more=4),
        lambda content: content["groups"][0]["prompt"].update(token_ids=()),
        lambda content: content["groups"][0]["prompt"].update(token_ids=(2**40,)),
        lambda content: content["groups"][0]["rollouts"].clear(),
        lambda content: content["groups"].append(
            content["groups"][0] | {"rollouts": 2 * content["groups"][0]["rollouts"]}
        ),
        lambda content: content["groups"][0]["rollouts"][0].update(oldest_version=2**40),
        lambda content: content["groups"][0]["rollouts"][0].update(
            response_mask=torch.zeros(2, dtype=torch.bool)
        ),
        lambda content: content["groups"][0]["rollouts"][0].pop("finished"),
        lambda content: content["groups"][0]["rollouts"][0].update(truncated=None),
        lambda content: content["groups"][0]["rollouts"][0].update(token_ids=torch.ones(2)),
        lambda content: content["groups"][0]["rollouts"][0].update(log_probs=torch.ones(3)),
        lambda content: content["groups"][0]["rollouts"][0].update(old_log_probs=None),
        lambda content: content["groups"][0]["rollouts"][0].update(oldest_version="1"),
    ],
)
def test_misshapen_open_groups_are_damage(tmp_path, change):
    path, content = tmp_path / "open_groups.pt", saved_groups()
    files.write(path, content)
    (group,) = load_open_groups(tmp_path)
    assert group[0].prompt.token_ids == (1, 2) and group[0].carried_log_probs is not None
    change(content)
    files.write(path, content)
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
    }
    progress = {
        "old_log_probs": [None, [None, one.float()]],
        "sums": {"loss": one.double().sum()},
        "grad_norms": [0.5],
        "learning_rate": 1e-6,
    }
    array = np.ones(1, dtype=np.int32)
    table = Rollouts.of([array], [array], [array.astype(np.float32)]).table
    shared = {"batch": batch, "metrics": {"reward/mean": 0.5}, "evaluated": {}}
    return shared | {"facts": torch.from_numpy(table.view(np.int32)[None])}, progress


def change_count(table: torch.Tensor, kind: str) -> None:
    table.numpy().view(ROW)[0][f"num_{kind}_tokens"] += 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch.pt", lambda shared, _: shared.pop("metrics")),
        ("batch.pt", lambda shared, _: shared.update(metrics={"reward/mean": "x"})),
        ("batch.pt", lambda shared, _: shared.update(batch=[])),
        ("batch.pt", lambda shared, _: shared["batch"].pop("valid")),
        ("batch.pt", lambda shared, _: shared["batch"].update(more=torch.ones(1))),
        ("batch.pt", lambda shared, _: shared["batch"].update(valid=torch.ones(1))),
        ("batch.pt", lambda shared, _: shared["batch"].update(advantages=torch.ones(2).double())),
        ("batch.pt", lambda shared, _: shared["batch"].update(prompt_ids=[])),
        (
            "batch.pt",
            lambda shared, _: shared["batch"].update(advantages=torch.tensor([torch.nan]).double()),
        ),
        ("batch.pt", lambda shared, _: shared["batch"].update(response_ids=[[1]])),
        ("batch.pt", lambda shared, _: shared["batch"]["carried_log_probs"].append(torch.ones(2))),
        ("batch.pt", lambda shared, _: shared.update(facts=[[1]])),
        ("batch.pt", lambda shared, _: shared.update(facts=shared["facts"].long())),
        ("batch.pt", lambda shared, _: shared.update(facts=shared["facts"].repeat(2, 1))),
        *(
            ("batch.pt", lambda shared, _, kind=kind: change_count(shared["facts"], kind))
            for kind in ("prompt", "response", "sampled", "carried")
        ),
        ("progress_00000.pt", lambda _, progress: progress.pop("sums")),
        ("progress_00000.pt", lambda _, progress: progress.update(grad_norms=[])),
        ("progress_00000.pt", lambda _, progress: progress.update(grad_norms=["x"])),
        ("progress_00000.pt", lambda _, progress: progress.update(learning_rate=None)),
        ("progress_00000.pt", lambda _, progress: progress.update(old_log_probs=[[1.0]])),
        ("progress_00000.pt", lambda _, progress: progress.update(more=1)),
    ],
)
def test_a_misshapen_open_step_is_damage(tmp_path, name, change):
    shared, progress = saved_step()

    def write_and_load() -> OpenStep:
        files.write(tmp_path / "batch.pt", shared)
        files.write(tmp_path / "progress_00000.pt", progress)
        return OpenStep.load(tmp_path, torch.device("cpu"), num_updates=1)

    with single_rank():
        assert write_and_load().progress.num_updates == 1
        change(shared, progress)
        with pytest.raises(CheckpointError, match=mentions(tmp_path / name)):
            write_and_load()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("torch"),
        lambda state: state.update(torch=torch.ones(3)),
        lambda state: state.update(python=(3, (1, 2), None)),
        lambda state: state["numpy"].update(bit_generator="PCG64"),
        lambda state: state["numpy"].pop("state"),
        lambda state: state.update(megatron={"one": [1]}),
        lambda state: state.update(cuda=5),
    ],
)
def test_a_misshapen_random_state_is_damage_and_sets_nothing(tmp_path, change):
    path = tmp_path / "rng.pt"
    rng.save(path)
    state = torch.load(path, weights_only=True)
    change(state)
    files.write(path, state)
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
    files.write(path, {"python": 1})
    torch.save([1], path)
    with pytest.raises(CheckpointError, match=mentions(path, "list")):
        rng.read(path)


def test_rng_continues_every_sequence(tmp_path):
    def draw():
        return random.random(), float(np.random.normal()), float(torch.rand(()))

    draw()  # NumPy now holds the second half of a Gaussian pair
    rng.save(tmp_path / "rng.pt")
    first = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draw() != first
    rng.restore(rng.read(tmp_path / "rng.pt"))
    assert draw() == first
