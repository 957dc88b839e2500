"""Linear layers that a folder stores in FP8 with a scale for each block (MXFP4: `test_stacks`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.formats.weights import HfFolder, read_hf, write_hf
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.models.quantization import quantization_of
from gapo_megatron.policy import destroy
from tests.convert_setup import assert_equal, pack_linears
from tests.convert_tools_setup import assert_refused, succeeded, to_hf, to_megatron
from tests.dist import run_distributed
from tests.distributed.conversion_setup import save_model
from tests.distributed.policy_setup import EP, PP, SP, TP, load_policy, make_config
from tests.messages import mentions

BLOCK = (10, 7)
"""Divides no dimension of the model, nor any rank's share of it."""
Q_A, DOWN = "model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("packed") / "hf"
    save_model(folder, "deepseek_v3", num_hidden_layers=2)
    pack_linears(folder, BLOCK)
    return folder


def stored_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of the model, as they are."""
    tensors = load_file(folder / "model.safetensors")
    return {name: one for name, one in tensors.items() if not name.startswith("model.layers.2.")}


def expected_of(stored: dict[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """Every number times its scale, exact in float64; float32, as in transformers; then bf16."""
    found = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    for name, numbers in found.items():
        if numbers.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"].double()
            rows, columns = (
                torch.arange(n) // of for n, of in zip(numbers.shape, block, strict=True)
            )
            product = numbers.double() * scales[rows][:, columns]
            found[name] = product.float().bfloat16()
    return found


def test_a_number_is_multiplied_by_the_scale_of_its_block(packed: Path) -> None:
    folder, stored = HfFolder(packed), stored_in(packed)
    found = {name: folder.read(name) for name in folder.entries}
    assert_equal(found, expected_of(stored, BLOCK))
    for name, entry in folder.entries.items():
        assert (entry.shape, entry.dtype) == (tuple(found[name].shape), found[name].dtype), name
    assert found[Q_A].dtype == torch.bfloat16 and found[Q_A].abs().max() > 0.3
    assert sum(name.endswith("_scale_inv") for name in stored) == 40
    assert len(folder.left_out) == 2
    assert quantization_of(check_model_folder(packed)) == "fp8"


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Where its blocks divide the weight, which is all that it knows."""
    save_model(tmp_path, "deepseek_v3", num_hidden_layers=2)
    pack_linears(tmp_path, (2, 4))
    folder, stored = HfFolder(tmp_path), stored_in(tmp_path)
    theirs = Fp8Dequantize(None)
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"]
            expected = theirs._dequantize_one(tensor, scales, torch.bfloat16)
            assert torch.equal(folder.read(name), expected), name


def test_fp8_becomes_bf16(packed: Path, tmp_path: Path) -> None:
    """In both folders and their config.json; the report says so, and logits were compared."""
    succeeded(to_megatron(packed, tmp_path / "megatron", "--verify", "full"))
    report = json.loads((tmp_path / "megatron" / "conversion.json").read_text())
    assert "fp8" in report["checks"]["quantization"]
    assert "largest difference" in report["checks"]["logits"]
    succeeded(to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "full"))
    assert_equal(stored_in(tmp_path / "back"), expected_of(stored_in(packed), BLOCK))
    for folder in (tmp_path / "megatron" / "hf", tmp_path / "back"):
        assert_plain(folder)


def assert_plain(folder: Path) -> None:
    assert quantization_of(read_facts(folder)) is None
    assert json.loads((folder / "config.json").read_text()).get("dtype") == "bfloat16"


LAYOUTS: dict[str, dict[str, Any]] = {"bf16": {TP: 2, EP: 2, SP: True}, "fp32": {PP: 2}}
"""By precision: cut weights, and whole ones."""


def load_and_save(source: str, root: str) -> None:
    for precision, parallel in LAYOUTS.items():
        config = make_config(Path(source), model={"precision": precision}, parallel=parallel)
        policy = load_policy(config)
        write_hf(
            policy.iterate_hf_weights(torch.bfloat16),
            source_dir=source,
            output_dir=Path(root) / precision,
            made_by="test",
            write=dist.get_rank() == 0,
        )
        destroy()


def test_a_policy_starts_from_fp8_in_any_layout(packed: Path, tmp_path: Path) -> None:
    """Ranks of half a weight, whose edges are in the middle of a block, and what they save."""
    run_distributed(load_and_save, 2, str(packed), str(tmp_path))
    for precision in LAYOUTS:
        saved = tmp_path / precision
        assert_equal(stored_in(saved), expected_of(stored_in(packed), BLOCK))
        assert_plain(saved)


def without(name: str) -> Any:
    return lambda stored: stored.pop(name)


def with_scales(name: str, change: Any) -> Any:
    def damage(stored: dict[str, Tensor]) -> None:
        stored[f"{name}_scale_inv"] = change(stored[f"{name}_scale_inv"]).contiguous()

    return damage


def in_bf16(stored: dict[str, Tensor]) -> None:
    stored[Q_A] = stored[Q_A].bfloat16()


def of_one_dimension(stored: dict[str, Tensor]) -> None:
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)


FILE, SCALES = "model.safetensors", f"{Q_A}_scale_inv"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without(SCALES), [Q_A, SCALES, "missing", [2, 7]]),
        (without(Q_A), [SCALES, Q_A, "float8_e4m3fn"]),
        (in_bf16, [SCALES, Q_A, "float8_e4m3fn"]),
        (of_one_dimension, ["model.norm.weight", [48], "[out, in]"]),
        (with_scales(Q_A, lambda scales: scales.T), [SCALES, [7, 2], [2, 7]]),
        (with_scales(Q_A, lambda scales: scales.bfloat16()), [SCALES, "bfloat16", "float32"]),
    ],
)
def test_what_does_not_fit_together_is_named(
    packed: Path, tmp_path: Path, damage: Any, named: list[object]
) -> None:
    folder = damaged(packed, tmp_path, damage)
    with pytest.raises(ConversionError, match=mentions(FILE, *named)):
        check_model_folder(folder)
    with pytest.raises(ConversionError, match=mentions(FILE, *named)):
        read_hf(folder)


def damaged(packed: Path, tmp_path: Path, damage: Any) -> Path:
    stored = stored_in(packed)
    damage(stored)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text((packed / "config.json").read_text())
    return folder


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_scale_must_be_a_number_above_0(packed: Path, tmp_path: Path, value: float) -> None:
    def set_one(scales: Tensor) -> Tensor:
        scales[4, 2] = value
        return scales

    folder = damaged(packed, tmp_path, with_scales(DOWN, set_one))
    check_model_folder(folder)  # headers alone
    with pytest.raises(ConversionError, match=mentions(folder / FILE, DOWN, "[4, 2]", value)):
        list(read_hf(folder))
    done = to_megatron(folder, tmp_path / "out")
    assert_refused(done, tmp_path / "out", DOWN, exit_code=1)


def test_fp8_that_config_json_does_not_state_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = damaged(packed, tmp_path, lambda stored: None)
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConversionError, match=mentions(FILE, "float8_e4m3fn", "config.json")):
        check_model_folder(folder)
