"""Files that are whole or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError, MachineError
from gapo_megatron.io import files
from gapo_megatron.io.files import naming, write_atomically
from tests.full_disk import full_disk
from tests.messages import mentions


def test_lines_end(tmp_path: Path) -> None:
    for text, written in (("a", "a\n"), ("a\nb\n", "a\nb\n"), ("", "")):
        write_atomically(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == written
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_named_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")
    with full_disk(), pytest.raises(MachineError, match=mentions(path)):
        write_atomically(path, "after")
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]


def test_every_byte_is_on_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves an empty one, which had the name already."""
    path, seen = tmp_path / "file", []
    write_atomically(path, "before")

    def fsync(descriptor: int) -> None:
        flushed = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        content = "" if flushed.is_dir() else flushed.read_text()
        seen.append((flushed.is_dir(), content, path.read_text()))

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomically(path, "after")
    assert seen == [(False, "after\n", "before\n"), (True, "", "after\n")]


def test_an_error_that_names_itself_stays(tmp_path: Path) -> None:
    inner = MachineError("other: No space left on device")
    with pytest.raises(MachineError) as caught, naming(tmp_path):
        raise inner
    assert caught.value is inner
    with pytest.raises(ConfigError), naming(tmp_path):
        raise ConfigError("field")


def test_a_link_gives_way_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "file").symlink_to("theirs")
    write_atomically(tmp_path / "file", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "file").read_text() == "ours\n"
