"""Manifest and folders: conditions for a complete checkpoint. No process group, no model."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gapo_megatron.config import CheckpointConfig, Config
from gapo_megatron.errors import CheckpointError
from gapo_megatron.formats import manifest
from tests.branch_setup import NAMES, make_config, publish
from tests.damage import put, sign_document
from tests.messages import mentions

OURS = make_config(Path("unused"), checkpoint={"branch_from": ""})


def make_checkpoint(
    folder: Path, step: int, *, model: dict | None = None, config: Config = OURS
) -> Path:
    return publish(folder, step, config=config, model=model or {"hidden_size": 8})


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


BRANCH: dict[str, Any] = {
    "run": "/old",
    "checkpoint": "step_00000001",
    "step": 1,
    "manifest_sha256": "0" * 64,
    "changes": {"objective.method": ["gspo", "gapo"]},
    "parent": None,
}
ENTRY = ("files", "rng_00000.pt")
MISSHAPEN = [
    *(
        (put(*keys, value=value), keys)
        for *keys, values in (
            ("step", (..., "3", 3.5, True, None, -1, 2**64, 4)),
            ("open_updates", ("1", 2)),
            ("model", (..., [])),
            ("config", (..., {"run": 1}, None)),
            ("layout", (..., {"data_parallel_size": "2"}, 2)),
            ("megatron_version", (..., 0.16)),
            ("files", (..., [])),
            (*ENTRY, ("abc", {"num_bytes": 3})),
            (*ENTRY, "num_bytes", ("3", -3)),
            (*ENTRY, "sha256", (5, "Z" * 64)),
            (*ENTRY, "more", (1,)),
            ("branch", ("there", {"run": "/old"}, BRANCH | {"run": "a\0b"})),
            ("branch", (BRANCH | {"checkpoint": "../x"}, BRANCH | {"parent": {"run": "/old"}})),
            ("branch", (BRANCH | {"changes": {"run.seed": [1]}},)),
            ("more", (1,)),
            ("version", ([2],)),
        )
        for value in values
    ),
    *(
        (put("files", name, value={"num_bytes": 1, "sha256": "0" * 64}), ("files", name))
        for name in ("../rng", "/etc/passwd", "sub/../../x", "./x", "")
    ),
    (put("version", value=...), ()),
]


def test_a_misshapen_manifest_is_damage_whoever_signed_it(tmp_path):
    older = make_checkpoint(tmp_path, 2)
    for change, named in MISSHAPEN:
        path = sign_document(make_checkpoint(tmp_path, 3), change)
        with pytest.raises(CheckpointError, match=mentions(path, *named)):
            manifest.read_manifest(path.parent)
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


def test_a_folder_without_manifest_is_damaged(tmp_path):
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=mentions("step_00000003/manifest.json", "missing")):
        manifest.read_manifest(tmp_path / "step_00000003")


@pytest.mark.parametrize("version", [manifest.VERSION - 1, manifest.VERSION + 1, None])
def test_another_format_is_refused_by_its_version(tmp_path, version):
    path = make_checkpoint(tmp_path, 3)
    sign_document(path, put("version", value=version))
    with pytest.raises(CheckpointError, match=mentions(path, version, manifest.VERSION)):
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
    make_checkpoint(tmp_path, 1)
    manifest.set_aside(tmp_path / "step_00000001")
    make_checkpoint(tmp_path, 1)
    manifest.set_aside(tmp_path / "step_00000002")
    hidden = manifest.prune(tmp_path, CheckpointConfig(every_steps=1, keep_last=2))
    names = ("step_00000001", ".damaged_step_00000001", ".damaged_step_00000002")
    assert [*hidden] == [tmp_path / name for name in names]
    assert all(damage_of(path) is None for path in hidden.values())
    assert [p.name for p in manifest.list_steps(tmp_path)] == ["step_00000004", "step_00000003"]
    assert all(map(manifest.remove, hidden.values()))
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
    (tmp_path / ".tmp_step_00000001.old").touch()
    manifest.remove_half_written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]
