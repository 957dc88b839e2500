"""Damage of every kind: a conversion tool names it, and leaves nothing that looks whole."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapo_megatron.formats.weights import HfFolder
from gapo_megatron.models.rules import Rule
from gapo_tools.conversion import directions
from tests.convert_tools_setup import (
    TOOLS,
    assert_refused,
    cut,
    leftovers,
    rewrite,
    save_model_with_tokenizer,
    set_field,
    to_hf,
    to_megatron,
)
from tests.slurm.training import fill, small_disk
from tests.waiting import HANG_S

NUM_BYTES = 353_344
"""Of the model's weights."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its Megatron folder: the tests damage copies of them."""
    path: Path = tmp_path_factory.mktemp("models")
    save_model_with_tokenizer(path / "hf", "qwen2")
    assert to_megatron(path / "hf", path / "megatron", "--verify", "none").exit_code == 0
    return path


Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.3.mlp.up_proj.weight"


def begin(tensors: dict[str, Any], old: str, new: str) -> None:
    """Let names begin otherwise."""
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


MODEL_DAMAGE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing tensor": (
        lambda d: rewrite(d, lambda t: t.pop(UP)),
        ("missing", UP),
    ),
    "wrong shape": (
        lambda d: rewrite(d, lambda t: t.update({Q: t[Q][:-16].clone()})),
        ("model.safetensors", Q, "[80, 48]", "[96, 48]"),
    ),
    "another dtype": (
        lambda d: rewrite(d, lambda t: t.update({Q: t[Q].half()})),
        (Q, "torch.float16", "model.layers.0.self_attn.q_proj.weight", "torch.float32", "--dtype"),
    ),
    "NaN": (
        lambda d: rewrite(d, lambda t: t[UP][5].fill_(torch.nan)),
        ("model.safetensors", UP, "nan"),
    ),
    "two rope bases": (
        lambda d: set_field(d / "config.json", rope_theta=5e5),
        ("config.json", "rope_theta", "500000.0", "rope_parameters.rope_theta", "10000.0"),
    ),
    "tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{"),
        ("tokenizer",),
    ),
    **{
        f"{first!r} for 'model.'": (
            lambda d, first=first: rewrite(d, lambda t: begin(t, "model.", first)),
            (f"'{first}'", f"{first}embed_tokens.weight", "'model.'"),
        )
        for first in ("_orig_mod.model.", "model.language_model.", "")
    },
}


@pytest.mark.parametrize(("damage", "said"), MODEL_DAMAGE.values(), ids=MODEL_DAMAGE)
def test_a_damaged_model_folder_is_refused(root, tmp_path, damage, said):
    source = shutil.copytree(root / "hf", tmp_path / "source")
    damage(source)
    done = to_megatron(source, tmp_path / "out")
    assert_refused(done, tmp_path / "out", str(source), *said)


def edit_metadata(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata)
    path.write_bytes(pickle.dumps(metadata))


def replace_bytes(folder: Path, old: Tensor, new: Tensor) -> None:
    """Of a tensor, wherever it lies in a folder."""
    old_bytes, new_bytes = old.numpy().tobytes(), new.numpy().tobytes()
    assert len(old_bytes) == len(new_bytes)
    found = [
        path for path in folder.rglob("*") if path.is_file() and old_bytes in path.read_bytes()
    ]
    assert len(found) == 1
    found[0].write_bytes(found[0].read_bytes().replace(old_bytes, new_bytes))


def put_nan(folder: Path) -> None:
    norm = HfFolder(folder.parent / "hf").read("model.norm.weight")
    replace_bytes(folder, norm, norm.clone().fill_(torch.nan))


def set_part(tensors: dict[str, Any], number: int, sizes: list[int]) -> None:
    """As many elements as before, elsewhere."""
    chunks = tensors[FC2].chunks
    chunks[number] = dataclasses.replace(chunks[number], sizes=torch.Size(sizes))


FC1, FC2 = (f"decoder.layers.mlp.linear_fc{n}.weight" for n in (1, 2))


MEGATRON_DAMAGE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated": (
        lambda d: cut(d / "release" / "__1_0.distcp"),
        ("/release/__1_0.distcp", "bytes"),
    ),
    "missing file": (
        lambda d: (d / "release" / "__2_0.distcp").unlink(),
        ("__2_0.distcp", "missing"),
    ),
    "truncated metadata": (
        lambda d: cut(d / "release" / ".metadata"),
        ("/release/.metadata", "damaged"),
    ),
    "missing tensor": (
        lambda d: edit_metadata(d, lambda t: t.pop(FC2)),
        ("/release", "no key", "decoder.layers.0.mlp.linear_fc2.weight"),
    ),
    "extra tensor": (
        lambda d: edit_metadata(d, lambda t: t.update({"decoder.more.weight": t[FC2]})),
        ("/release", "config.json", "decoder.more.weight"),
    ),
    "wrong shape": (
        lambda d: edit_metadata(d, lambda t: t.update({FC2: t[FC1]})),
        ("/release", FC2, "[4, 112, 48]", "[4, 48, 56]"),
    ),
    "integers": (
        lambda d: edit_metadata(d, lambda t: setattr(t[FC2].properties, "dtype", torch.uint8)),
        (".distcp", FC2, "torch.uint8"),
    ),
    "overlapping parts": (
        lambda d: edit_metadata(d, lambda t: set_part(t, 1, [2, 24, 56])),
        ("/release", FC2, "[1, 0, 0]", "[2, 0, 0]", "overlap"),
    ),
    "part outside": (
        lambda d: edit_metadata(d, lambda t: set_part(t, 3, [2, 24, 56])),
        ("/release", FC2, "[3, 0, 0]", "[2, 24, 56]", "[4, 48, 56]"),
    ),
    "hole": (
        lambda d: edit_metadata(d, lambda t: t[FC2].chunks.pop(2)),
        ("/release", FC2, "8064", "10752"),
    ),
    "NaN": (
        put_nan,
        ("/release", "decoder.final_layernorm.weight", "nan"),
    ),
    "vocabulary": (
        lambda d: set_field(d / "hf" / "config.json", vocab_size=64),
        ("embedding.word_embeddings.weight", "[61, 48]", "[64, 48]"),
    ),
    "names of a wrapper": (
        lambda d: edit_metadata(d, lambda t: begin(t, "", "module.")),
        ("'module.embedding.'", "'embedding.'", "module.embedding.word_embeddings.weight"),
    ),
    "rope base": (
        lambda d: set_field(
            d / "hf" / "config.json",
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        ),
        ("/release/common.pt", "config.json", "rotary_base", " 10000.0", " 1000000.0"),
    ),
}


@pytest.mark.parametrize(("damage", "said"), MEGATRON_DAMAGE.values(), ids=MEGATRON_DAMAGE)
def test_a_damaged_megatron_folder_is_refused(root, tmp_path, damage, said):
    shutil.copytree(root / "hf", tmp_path / "hf")
    source = shutil.copytree(root / "megatron", tmp_path / "megatron")
    damage(source)
    assert_refused(to_hf(source, tmp_path / "out"), tmp_path / "out", str(source), *said)


def swapped(rules: list[Rule]) -> list[Rule]:
    """A table that takes the rows of the first key head for those of the first query head.

    It is its own inverse's inverse, so that a round trip cannot see it.
    """

    def swap(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, size = q.clone(), k.clone(), len(k) // 2
        q[:size], k[:size] = k[:size].clone(), q[:size].clone()
        return q, k, v

    return [
        dataclasses.replace(
            rule,
            join=lambda tensors, join=rule.join: join(swap(*tensors)),
            part=lambda full, part=rule.part: swap(*part(full)),
        )
        if rule.megatron.endswith("linear_qkv.weight")
        else rule
        for rule in rules
    ]


def test_a_table_that_is_wrong_in_both_directions_is_seen_by_the_logits(
    root, tmp_path, monkeypatch
):
    original = directions.rules_for
    monkeypatch.setattr(directions, "rules_for", lambda config: swapped(original(config)))
    output, said = tmp_path / "out", "logits"
    done = to_megatron(root / "hf", output, "--verify", "full")
    assert_refused(done, output, said, exit_code=1)
    done = to_hf(root / "megatron", output, "--verify", "full")
    assert_refused(done, output, said, exit_code=1)


# --- damage to the output, which the gate sees ---------------------------------------------------


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.down_proj.weight"])
def test_what_reaches_the_disk_wrongly_is_seen(root, tmp_path, monkeypatch, name):
    """One number of a tensor changes between the write and the check."""
    tensor = HfFolder(root / "hf").read(name)
    changed = tensor.clone()
    changed.view(-1)[7] *= -1

    def spoil(write: Callable[..., None]) -> Callable[..., None]:
        def write_and_spoil(*arguments: Any, output_dir: Path, **options: Any) -> None:
            write(*arguments, output_dir=output_dir, **options)
            replace_bytes(output_dir, tensor, changed)

        return write_and_spoil

    for function in ("write_megatron", "write_hf_weights"):
        monkeypatch.setattr(directions, function, spoil(getattr(directions, function)))
    output = tmp_path / "out"
    said = (name, "decoder.", " 1 of ")
    assert_refused(to_megatron(root / "hf", output, "--verify", "full"), output, *said)
    assert_refused(to_hf(root / "megatron", output, "--verify", "full"), output, *said)


# --- ends before the end -------------------------------------------------------------------------


def test_a_disk_that_is_too_small_or_fills_up(root, tmp_path):
    with small_disk(tmp_path / "disk") as is_there:
        if not is_there:
            pytest.skip("a small disk needs the right to mount one")
        output, ballast = tmp_path / "disk" / "out", tmp_path / "disk" / "ballast"
        for convert, source in ((to_megatron, "hf"), (to_hf, "megatron")):
            fill(ballast, leave=NUM_BYTES // 2)
            done = convert(root / source, output)
            assert_refused(done, output, str(output.parent), "0.000353 GB")
            # Space for the weights, and not for what each format adds to them.
            fill(ballast, leave=NUM_BYTES + 4096)
            done = convert(root / source, output)
            assert_refused(done, output, str(output.parent), exit_code=1)
            # Which tensor finds the disk full depends on the order of the threads that write.
            tensor = r"(the header|the file's beginning|\w+\.[\w.]+)"
            assert re.search(f"{tensor} to /", done.err)
            ballast.unlink()
            assert convert(root / source, output, "--verify", "none").exit_code == 0
            shutil.rmtree(output)


# The tool as it is, with one function that ends the process instead of returning.
KILLED = """
import os, runpy, signal, sys
from gapo_megatron.formats.weights import HfFolder
from gapo_megatron.formats.torch_dist import MegatronFolder

def deadly(function, number):
    calls = []
    def call(*arguments):
        calls.append(None)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

HfFolder.read = deadly(HfFolder.read, 30)
MegatronFolder.read = deadly(MegatronFolder.read, 20)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("convert", "source"),
    [(to_megatron, "hf"), pytest.param(to_hf, "megatron", marks=pytest.mark.system)],
)
def test_a_killed_conversion_leaves_nothing_under_the_name(root, tmp_path, convert, source):
    output = tmp_path / "out"
    target = "megatron" if source == "hf" else "hf"
    arguments = [TOOLS / f"convert_{source}_to_{target}.py", f"--{source}", root / source]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, f"--{target}", output, "--workers", "1"],
        capture_output=True,
        text=True,
        cwd=TOOLS.parent,
        timeout=HANG_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not output.exists()
    (temporary,) = tmp_path.glob(".out.*.tmp")
    assert any(path.stat().st_size for path in temporary.rglob("*.[ds]*"))  # it was writing
    assert convert(root / source, output, "--verify", "none").exit_code == 0
    assert leftovers(tmp_path) == []
