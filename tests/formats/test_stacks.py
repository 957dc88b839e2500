"""Experts that a folder stores in one tensor for each layer, and those of it in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.formats.weights import HfFolder, write_hf
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.models.quantization import quantization_of
from tests.convert_setup import one_by_one, pack_experts
from tests.convert_tools_setup import assert_refused, succeeded, to_hf, to_megatron
from tests.distributed.conversion_setup import save_model

EXPERTS = "model.layers.0.mlp.experts"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Of all files of a folder, as they are."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("plain") / "hf"
    save_model(folder, "gpt_oss", num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: experts in MXFP4, everything else in bf16."""
    folder: Path = tmp_path_factory.mktemp("packed") / "hf"
    save_model(folder, "gpt_oss", num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    pack_experts(folder)
    return folder


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_stack_is_read_expert_by_expert(plain: Path) -> None:
    folder, stored = HfFolder(plain), tensors_of(plain)
    assert stored[f"{EXPERTS}.down_proj"].shape == (4, 56, 48)
    assert_same({name: folder.read(name) for name in folder.entries}, one_by_one(stored))
    check_model_folder(plain)


def test_no_other_architecture_has_stacks(tmp_path: Path) -> None:
    """A tensor of that name is an error by its own name."""
    save_model(tmp_path, "qwen3_moe", num_hidden_layers=2)
    name, path = f"{EXPERTS}.down_proj", tmp_path / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(4, 8, 8)}, path, metadata={"format": "pt"})
    assert HfFolder(tmp_path).entries[name].shape == (4, 8, 8)
    with pytest.raises(ConversionError, match=rf"{name}\b"):
        check_model_folder(tmp_path)


def test_both_conversions_give_the_same_stacks(plain: Path, tmp_path: Path) -> None:
    """Also in small files, none of which has a part of a stack."""
    succeeded(to_megatron(plain, tmp_path / "megatron", "--verify", "full"))
    back = tmp_path / "back"
    succeeded(to_hf(tmp_path / "megatron", back, "--verify", "full", "--max-shard-size", "30KB"))
    assert len([*back.glob("*.safetensors")]) > 4
    assert_same(tensors_of(back), tensors_of(plain))
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors_of(plain).keys()


def test_a_stream_of_experts_becomes_stacks(plain: Path, tmp_path: Path) -> None:
    """In the order of the policy: all tensors of an expert, then those of the next."""
    tensors = one_by_one(tensors_of(plain))

    def place(name: str) -> tuple[int, bool, int]:
        numbers = [int(word) for word in name.split(".") if word.isdigit()] or [9]
        return numbers[0], len(numbers) > 1, numbers[-1]

    write_hf(
        ((name, tensors[name]) for name in sorted(tensors, key=place)),
        source_dir=plain,
        output_dir=tmp_path / "out",
        made_by="test",
        max_shard_bytes=30_000,
    )
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    assert_same(tensors_of(tmp_path / "out"), tensors_of(plain))


# --- MXFP4 ---------------------------------------------------------------------------------------


def expected_of(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers makes of packed weights, in stacks."""
    expected = {n: t for n, t in stored.items() if not n.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            expected[stem] = convert_moe_packed_tensors(stored[name], stored[f"{stem}_scales"])
    return expected


def test_mxfp4_is_read_as_transformers_reads_it(packed: Path) -> None:
    folder = HfFolder(packed)
    expected = one_by_one(expected_of(tensors_of(packed)))
    found = {name: folder.read(name) for name in folder.entries}
    assert_same(found, expected)
    for name, entry in folder.entries.items():
        assert (entry.shape, entry.dtype) == (tuple(found[name].shape), torch.bfloat16), name
    assert found[f"{EXPERTS}.3.gate_up_proj"].abs().max() > 0.3
    assert quantization_of(check_model_folder(packed)) == "mxfp4"


def test_mxfp4_becomes_bf16(packed: Path, tmp_path: Path) -> None:
    """In both folders and their config.json; the report says so, and logits were compared."""
    succeeded(to_megatron(packed, tmp_path / "megatron", "--verify", "full"))
    report = json.loads((tmp_path / "megatron" / "conversion.json").read_text())
    assert "mxfp4" in report["checks"]["quantization"]
    assert "largest difference" in report["checks"]["logits"]
    succeeded(to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "full"))
    assert_same(tensors_of(tmp_path / "back"), expected_of(tensors_of(packed)))
    for folder in (tmp_path / "megatron" / "hf", tmp_path / "back"):
        assert quantization_of(read_facts(folder)) is None
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def without_scales(stored: dict[str, Tensor]) -> None:
    del stored[f"{EXPERTS}.down_proj_scales"]


def with_fewer_experts(stored: dict[str, Tensor]) -> None:
    for part in ("blocks", "scales"):
        name = f"{EXPERTS}.down_proj_{part}"
        stored[name] = stored[name][:3].clone()


def with_one_expert_twice(stored: dict[str, Tensor]) -> None:
    stored[f"{EXPERTS}.2.down_proj"] = torch.zeros(96, 64, dtype=torch.bfloat16)


def with_any_number_of_experts(stored: dict[str, Tensor]) -> None:
    stored[f"{EXPERTS}.down_proj_bias"] = torch.zeros(2**40, 0, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_scales, "down_proj_blocks"),
        (with_fewer_experts, "experts.3.down_proj"),
        (with_one_expert_twice, "twice"),
        (with_any_number_of_experts, "down_proj_bias"),
    ],
)
def test_what_does_not_fit_together_is_named(
    packed: Path, tmp_path: Path, damage: Any, named: str
) -> None:
    stored = tensors_of(packed)
    damage(stored)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((packed / "config.json").read_text())
    with pytest.raises(ConversionError, match=named):
        check_model_folder(folder)
    assert_refused(to_megatron(folder, tmp_path / "out"), tmp_path / "out", named, exit_code=1)
