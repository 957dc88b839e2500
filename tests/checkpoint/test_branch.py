"""Begin a branch without a model: its record, kills and pruning."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gapo_megatron.checkpoint import begin_branch, branch, check_branch, record_branch
from gapo_megatron.errors import CheckpointError, FencedError
from gapo_megatron.formats import manifest
from gapo_megatron.io import files
from gapo_megatron.io.files import fsync
from tests.attempt_setup import make_attempt
from tests.branch_setup import MODEL, NAMES, begin, make_config, make_old_run
from tests.messages import mentions

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_old_run(tmp_path)
    return tmp_path


def listing(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification time of all files, and times of folders."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
    }


def test_the_branch_point_becomes_the_first_checkpoint(root: Path) -> None:
    before, config = listing(root / "old"), make_config(root)
    path = begin(root, config)
    assert listing(root / "old") == before
    assert [step.name for step in path.parent.iterdir()] == ["step_00000600"]
    there = manifest.read_manifest(root / "old/checkpoints/step_00000600")
    found = manifest.read_manifest(path)
    assert (found.step, found.layout, found.files) == (600, there.layout, there.files)
    assert manifest.find_damage(path, found.files) is None
    for name in NAMES:  # no second copy of what may be many gigabytes
        assert (path / name).samefile(root / "old/checkpoints/step_00000600" / name)
    # It is this run's: its settings, and where it came from.
    assert found.config == config.model_dump(mode="json")
    assert found.branch is not None and there.branch is None
    assert not (root / "new/branch.json").exists()  # the manifest is first: a kill may come here
    record_branch(root / "new", found.branch)
    record = json.loads((root / "new/branch.json").read_text())
    stored = json.loads((root / "old/checkpoints/step_00000600/manifest.json").read_text())
    assert record == {
        "run": str(root / "old"),
        "checkpoint": "step_00000600",
        "step": 600,
        "manifest_sha256": stored["sha256"],
        "changes": {"objective.method": ["gspo_asym", "gapo"]},
        "parent": None,
    }
    assert asdict(found.branch) == record
    record_branch(root / "new", None)  # what began again in this folder, and is no branch
    assert not (root / "new/branch.json").exists()


def test_a_branch_of_a_branch_knows_them_all(root: Path) -> None:
    first = manifest.read_manifest(begin(root, make_config(root))).branch
    place = root / "new/checkpoints/step_00000600/manifest.json"
    # As written by a version that recorded no parents.
    document = json.loads(place.read_text())
    del document["branch"]["parent"], document["sha256"]
    document["sha256"] = hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    place.write_text(json.dumps(document))
    config = make_config(
        root,
        run={"output_dir": str(root / "third")},
        objective={"method": "gspo"},
        checkpoint={"branch_from": str(place.parent)},
    )
    point = check_branch(config, MODEL)
    assert point is not None and point.branch.parent == first
    assert point.branch.manifest_sha256 == document["sha256"]
    begin_branch(point, config, make_attempt(root / "third"))
    found = manifest.read_manifest(root / "third/checkpoints/step_00000600")
    assert found.branch == point.branch
    assert found.branch.changes == {"objective.method": ["gapo", "gspo"]}


def test_the_other_run_may_prune_its_checkpoint_while_it_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After linking, before the first byte is read."""
    real = manifest.find_damage

    def prune_first(*args: Any, **options: Any) -> str | None:
        shutil.rmtree(root / "old/checkpoints/step_00000600")
        return real(*args, **options)

    monkeypatch.setattr(manifest, "find_damage", prune_first)
    path = begin(root, make_config(root))
    monkeypatch.undo()
    assert manifest.find_damage(path, manifest.read_manifest(path).files) is None


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS])
def test_where_there_are_no_links_there_are_copies(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_links(monkeypatch, number)
    flushed = watch_fsync(monkeypatch, branch)  # by the rank that copied
    path = begin(root, make_config(root))
    assert sorted(name for _, name in flushed) == sorted(NAMES)
    original = root / "old/checkpoints/step_00000600"
    for name in NAMES:
        assert (path / name).read_bytes() == (original / name).read_bytes()
        assert not (path / name).samefile(original / name)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda path: path.write_text("other"), ("step_00000600", "rng_00000.pt", "5 bytes")),
        (lambda path: path.unlink(), ("No such file", "rng_00000.pt", "checkpoint.keep_steps")),
    ],
    ids=["damaged", "gone"],
)
def test_a_bad_branch_point_publishes_nothing(
    root: Path, harm: Any, named: tuple[str, ...]
) -> None:
    config = make_config(root)
    point = check_branch(config, MODEL)
    assert point is not None
    harm(point.path / "rng_00000.pt")
    with pytest.raises(CheckpointError, match=mentions("branch", point.path, *named)):
        begin_branch(point, config, make_attempt(root / "new"))
    assert manifest.list_steps(root / "new/checkpoints") == []
    (point.path / "trainer_state.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=mentions("branch", point.path / "trainer_state.json", "1 bytes")
    ):
        point.state()
    assert not (root / "new/branch.json").exists()


def watch_fsync(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[tuple[str, str]]:
    """Later calls of fsync: (checkpoint folder, name in it), in order."""
    flushed: list[tuple[str, str]] = []

    def watched(path: Path) -> None:
        fsync(path)
        place = next((one for one in (path, *path.parents) if "step_" in one.name), path)
        flushed.append((place.name, str(path.relative_to(place))))

    monkeypatch.setattr(module, "fsync", watched)
    return flushed


def test_everything_is_on_disk_before_the_checkpoint_has_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = watch_fsync(monkeypatch, files)
    published, real = [], manifest.publish

    def publish(temporary: Path, final: Path) -> None:
        published.extend(flushed)
        real(temporary, final)

    monkeypatch.setattr(manifest, "publish", publish)
    begin(root, make_config(root))
    expected = [*NAMES, "manifest.json", "sub", "."]
    assert sorted(published) == sorted((".tmp_step_00000600.7.0", name) for name in expected)


def test_errors_of_the_disk_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(root)
    point = check_branch(config, MODEL)
    assert point is not None
    attempt = make_attempt(root / "new")
    (root / "new/checkpoints").write_text("a file")
    with pytest.raises(
        CheckpointError, match=mentions("branch", point.path, "Errno", "new/checkpoints")
    ):
        begin_branch(point, config, attempt)
    (root / "new/checkpoints").unlink()
    refuse_links(monkeypatch, errno.ENOSPC)
    with pytest.raises(
        CheckpointError, match=mentions("branch", point.path, "No space left")
    ) as caught:
        begin_branch(point, config, attempt)
    assert "keep_steps" not in str(caught.value)  # helps those alone whose branch point is gone


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_an_attempt_that_lost_the_run_publishes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    config = make_config(root)
    point = check_branch(config, MODEL)
    assert point is not None
    attempt, folder = make_attempt(root / "new"), root / "new/checkpoints"
    owners = folder / ".tmp_step_00000600.8.1"  # of the attempt that has it now
    owner, real = root / "new/OWNER", manifest.find_damage

    def lose_first(*args: Any, **options: Any) -> str | None:
        owner.write_text("8.1\n")
        owners.mkdir()
        return real(*args, **options)

    if moment == "before":
        folder.mkdir()
        lose_first(point.path, {})
    else:
        monkeypatch.setattr(manifest, "find_damage", lose_first)
    with pytest.raises(FencedError, match=mentions("8.1", "7.0")):
        begin_branch(point, config, attempt)
    assert manifest.list_steps(folder) == [] and owners.is_dir()
    assert (folder / ".tmp_step_00000600.7.0").exists() == (moment == "meanwhile")


def test_a_kill_before_the_first_checkpoint_has_its_name_begins_again(root: Path) -> None:
    left = root / "new/checkpoints/.tmp_step_00000600.6.0/sub"
    left.mkdir(parents=True)
    (left / "common.pt").write_text("half")
    path = begin(root, make_config(root))
    assert [step.name for step in path.parent.iterdir()] == ["step_00000600"]
