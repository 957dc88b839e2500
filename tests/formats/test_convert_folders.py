"""Hugging Face folders: what is written loads in transformers, what is damaged is named."""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.folder import (
    adopt,
    claim,
    is_marked,
    mark,
    new_folder,
)
from gapo_megatron.formats.headers import find_files
from gapo_megatron.formats.weights import HfFolder, read_hf, write_hf
from gapo_megatron.models.tables import ARCHITECTURES
from tests.convert_setup import assert_equal, make_config, make_model, written_weights
from tests.messages import mentions


def save(tmp_path: Path, model_type: str = "qwen2", tied: bool = True) -> dict[str, Tensor]:
    """A model folder tmp_path/source, and its tensors."""
    model = make_model(make_config(model_type, tie_word_embeddings=tied))
    return written_weights(model, tmp_path / "source")


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        (name, tied)
        for name in ARCHITECTURES
        for tied in (False, True)
        if not (name == "gpt_oss" and tied)  # which is refused
    ],
)
@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
def test_written_folder_loads_in_transformers(tmp_path, model_type, tied, shard_bytes):
    weights = save(tmp_path, model_type, tied)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    write_hf(
        read_hf(tmp_path / "source"),
        source_dir=tmp_path / "source",
        output_dir=tmp_path / "out",
        made_by="test",
        max_shard_bytes=shard_bytes,
    )
    has_index = (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert has_index == (shard_bytes == 20_000)
    assert_equal(dict(read_hf(tmp_path / "out")), weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert_equal(loaded.state_dict(), original.state_dict())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_earlier_result_is_replaced_and_nothing_else(tmp_path, monkeypatch):
    weights, source, output = save(tmp_path), tmp_path / "source", tmp_path / "out"

    def write(folder):
        write_hf(weights.items(), source_dir=source, output_dir=folder, made_by="test")

    write(output)
    (output / "left over").write_text("")
    write(output)
    assert not (output / "left over").exists()
    shutil.copytree(output, tmp_path / "copy")  # a copy is somebody else's
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    for folder in (source, tmp_path / "copy", tmp_path):
        before = sorted(folder.rglob("*"))
        with pytest.raises(ConfigError, match=re.escape(str(folder))):
            write(folder)
        assert sorted(folder.rglob("*")) == before
    monkeypatch.chdir(output)
    with pytest.raises(ConfigError, match=re.escape(str(output))):
        write(output)
    monkeypatch.chdir(tmp_path)
    # What says that a folder may be replaced is of that folder alone.
    for _ in range(2):
        write_hf(weights.items(), source_dir=output, output_dir=tmp_path / "next", made_by="test")


def test_a_result_is_known_where_it_was_moved_and_by_its_own_command_alone(tmp_path):
    weights, source, output = save(tmp_path), tmp_path / "source", tmp_path / "out"
    write_hf(weights.items(), source_dir=source, output_dir=output, made_by="train")
    moved = output.rename(tmp_path / "moved")
    assert is_marked(moved, made_by="train") and not is_marked(moved, made_by="sft")
    (tmp_path / "link").symlink_to(moved)
    assert is_marked(tmp_path / "link", made_by="train")
    (tmp_path / "link to the source").symlink_to(source)
    shutil.copytree(moved, tmp_path / "copy")
    for other in ("link to the source", "copy", "source", "out"):
        assert not is_marked(tmp_path / other, made_by="train")


def test_files_of_a_folder_are_claimed_and_not_the_folder(tmp_path):
    def take(name, made_by, folder=tmp_path / "task"):
        claim(folder, [name], field="--output", made_by=made_by)
        (folder / name).write_text("")

    for name in ("task", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "task" / "mine").write_text("")
    for _ in range(2):  # neither forgets its files over the other's
        take("table", "evaluate")
        take("page", "report")
    with pytest.raises(ConfigError, match=mentions("--output", tmp_path / "task", "mine")):
        take("mine", "another")
    mark(tmp_path / "model", made_by="train", made_at=tmp_path / "model")
    with pytest.raises(ConfigError, match=mentions("--output", tmp_path / "model", "train")):
        take("table", "evaluate", tmp_path / "model")
    assert not any(is_marked(tmp_path / "task", made_by=one) for one in ("evaluate", "report"))


def test_a_copy_of_hard_links_is_adopted_and_the_original_stays_marked(tmp_path):
    model, copy = tmp_path / "hf", tmp_path / "copy"
    model.mkdir()
    mark(model, made_by="train", made_at=model)
    shutil.copytree(model, copy, copy_function=os.link)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert adopt(copy, made_by="train", made_at=model)
    assert is_marked(copy, made_by="train")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_failed_write_leaves_the_old_folder_as_it_was(tmp_path):
    weights, source = save(tmp_path), tmp_path / "source"
    write_hf(weights.items(), source_dir=source, output_dir=tmp_path / "out", made_by="test")
    fewer = dict(list(weights.items())[:-1])
    with pytest.raises(ConversionError, match="missing tensors"):
        write_hf(fewer.items(), source_dir=source, output_dir=tmp_path / "out", made_by="test")
    assert_equal(dict(read_hf(tmp_path / "out")), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_other_ranks_read_the_tensors_and_write_nothing(tmp_path):
    tensors = iter(save(tmp_path).items())
    write_hf(
        tensors,
        source_dir=tmp_path / "source",
        output_dir=tmp_path / "out",
        made_by="test",
        write=False,
    )
    assert next(tensors, None) is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: shutil.rmtree(d), "does not exist"),
        (lambda d: (d / "config.json").unlink(), r"no config\.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-1.safetensors"}}'
            ),
            r"missing files: model-1\.safetensors",
        ),
    ],
)
def test_incomplete_model_folder_is_named_before_any_tensor_is_read(tmp_path, damage, named):
    save(tmp_path)
    damage(tmp_path / "source")
    with pytest.raises(ConfigError, match=named) as caught:
        read_hf(tmp_path / "source")
    assert str(tmp_path / "source") in str(caught.value)


def test_a_folder_that_holds_two_models_is_refused(tmp_path):
    save(tmp_path)
    source = tmp_path / "source"
    shutil.copy(source / "model.safetensors", source / "older.safetensors")
    names = dict.fromkeys(find_files(source), "older.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"two models.*model\.safetensors\.index"):
        HfFolder(source)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    HfFolder(source)  # an index of the one file


def test_an_output_that_somebody_else_has_made_meanwhile_is_left_alone(tmp_path):
    output = tmp_path / "out"
    mine, theirs = (new_folder(output, num_bytes=0) for _ in range(2))
    with pytest.raises(ConfigError, match=mentions(tmp_path, "another process")), mine as folder:
        (folder / "file").write_text("mine")
        with theirs as other:
            (other / "file").write_text("theirs")
    assert (output / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_too_small_is_named(tmp_path):
    too_small = pytest.raises(ConfigError, match=r"GB free; 1e\+09 GB are needed")
    with too_small, new_folder(tmp_path / "out", num_bytes=10**18):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_what_steps_aside_comes_back_when_the_new_folder_cannot_take_its_place(
    tmp_path, monkeypatch, end
):
    output = tmp_path / "out"
    with new_folder(output, num_bytes=0) as folder:
        (folder / "file").write_text("old")
    rename, calls = os.rename, []

    def fail_once(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise end
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with (
        pytest.raises(KeyboardInterrupt if end is KeyboardInterrupt else OSError),
        new_folder(output, num_bytes=0, replace=True, is_ours=True) as folder,
    ):
        (folder / "file").write_text("new")
    assert (output / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_are_removed_with_or_without_their_lock_and_those_of_others_are_not(tmp_path):
    for name in (".out.0123abcd.tmp", ".out.4567abcd.old", ".out.v2.0123abcd.old", ".out.old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.0123abcd.lock").touch()
    (tmp_path / ".out.v2.0123abcd.lock").touch()
    with new_folder(tmp_path / "out", num_bytes=0, replace=True):
        pass
    left = {".out.old", ".out.v2.0123abcd.lock", ".out.v2.0123abcd.old", "out"}
    assert {path.name for path in tmp_path.iterdir()} == left
    # What stepped aside of the other goes back under its own name.
    with (
        pytest.raises(ConfigError, match="exists already"),
        new_folder(tmp_path / "out.v2", num_bytes=0),
    ):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".out.old", "out", "out.v2"}


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_a_folder_is_made_and_leftovers_stay(tmp_path, monkeypatch, code):
    def no_locks(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    left = {".out.0123abcd.tmp", ".out.4567abcd.old"}
    for name in left:
        (tmp_path / name).mkdir()
    with new_folder(tmp_path / "out", num_bytes=0) as folder:
        (folder / "file").write_text("")
    assert (tmp_path / "out" / "file").exists()
    assert {one.name for one in tmp_path.iterdir() if one.suffix != ".lock"} == {*left, "out"}
