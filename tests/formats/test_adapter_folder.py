"""Adapter folders: what is written is read again, and nothing that is not plain LoRA is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gapo_megatron.errors import ConfigError, ConversionError, GapoError
from gapo_megatron.formats.adapter_folder import (
    CONFIG,
    WEIGHTS,
    AdapterSettings,
    read_adapter,
    write_adapter,
)
from tests.messages import mentions

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SETTINGS = AdapterSettings(rank=4, alpha=6.0)


def factors(*modules: str, rank: int = 4, dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            module,
            torch.randn(rank, 12, generator=generator).to(dtype),
            torch.randn(20, rank, generator=generator).to(dtype),
        )
        for module in modules or (Q, DOWN)
    ]


def write(folder: Path, given: Any = None, settings: AdapterSettings = SETTINGS) -> Path:
    given = factors() if given is None else given
    write_adapter(given, settings, base_model="BASE", output_dir=folder, made_by="test")
    return folder


def test_the_files_have_the_names_and_settings_of_peft(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "BASE",
        "r": 4,
        "lora_alpha": 6.0,
        "use_rslora": False,
        "target_modules": ["down_proj", "q_proj"],
        "bias": "none",
    }
    assert {name: config[name] for name in expected} == expected
    tensors = load_file(folder / WEIGHTS)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"base_model.model.{module}.lora_{factor}.weight": shape
        for module in (Q, DOWN)
        for factor, shape in (("A", [4, 12]), ("B", [20, 4]))
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("stabilized", "scale"), [(False, 1.5), (True, 3.0)])
def test_what_is_written_is_read(
    tmp_path: Path, dtype: torch.dtype, stabilized: bool, scale: float
) -> None:
    given = factors(dtype=dtype)
    folder = write(tmp_path / "adapter", given, AdapterSettings(4, 6.0, stabilized))
    settings, found = read_adapter(folder)
    assert settings == AdapterSettings(4, 6.0, stabilized)
    assert settings.scale == scale
    for (name, *ours), (expected, *theirs) in zip(found, given, strict=True):
        assert name == expected
        assert all(map(torch.equal, ours, theirs))
        assert ours[0].dtype == dtype


def test_factors_that_cannot_be_written_leave_no_folder(tmp_path: Path) -> None:
    def refused(given: Any, *words: str) -> None:
        with pytest.raises(ConversionError, match=mentions(*words)):
            write(tmp_path / "adapter", given)
        assert not (tmp_path / "adapter").exists()

    ((name, a, b),) = factors(Q)
    refused([], "no factors")
    refused(factors(Q, Q), Q, "twice")
    refused([(name, a[:3], b)], Q, "lora_A", "[3, 12]", "[4, in]")
    refused([(name, a, b[:, :3])], Q, "lora_B", "[20, 3]", "[out, 4]")
    refused([(name, a.float(), b)], Q, "float32", "bfloat16")
    refused([(name, a, torch.full_like(b, torch.nan))], Q, "lora_B", "nan")


def broken(folder: Path, change: dict[str, Any] | None = None, **tensors: Tensor | None) -> None:
    """Change settings, and tensors by the last words of their names; None removes one."""
    config = json.loads((folder / CONFIG).read_text()) | (change or {})
    (folder / CONFIG).write_text(json.dumps(config))
    held = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor is None:
            held.pop(name)
        else:
            held[name] = tensor
    save_file(held, folder / WEIGHTS)


A, B = (f"base_model.model.{Q}.lora_{factor}.weight" for factor in "AB")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, ["peft_type", "LOHA", "LORA"]),
        ({"r": True}, ["r (True)", "integer"]),
        ({"lora_alpha": "16"}, ["lora_alpha ('16')", "number"]),
        ({"lora_alpha": 10**400}, ["adapter_config.json", "largest number"]),
        ({"use_rslora": 1}, ["use_rslora (1)", "true or false"]),
        ({"use_dora": True}, ["use_dora (True)", "False"]),
        ({"rank_pattern": {"q_proj": 2}}, ["rank_pattern", "q_proj"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights ('pissa')"]),
    ],
)
def test_settings_that_are_not_plain_lora_are_refused(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    folder = write(tmp_path / "adapter")
    broken(folder, change)
    with pytest.raises(ConfigError, match=mentions(folder / CONFIG, *words)):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({B: None}, [A, "no partner", B]),
        ({A: torch.zeros(3, 12, dtype=torch.bfloat16)}, [A, "[3, 12]", "[4, in]"]),
        ({A: torch.zeros(4, 12)}, [A, "float32", B, "bfloat16"]),
        ({"lm_head.weight": torch.zeros(4)}, ["lm_head.weight", "no factor"]),
    ],
)
def test_tensors_that_are_no_factors_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor | None], words: list[str]
) -> None:
    folder = write(tmp_path / "adapter")
    broken(folder, **tensors)
    with pytest.raises(ConversionError, match=mentions(folder / WEIGHTS, *words)):
        read_adapter(folder)


def test_damage_is_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    broken(folder, **{B: torch.full((20, 4), torch.inf, dtype=torch.bfloat16)})
    _, found = read_adapter(folder)
    with pytest.raises(ConversionError, match=mentions(folder / WEIGHTS, B, "inf")):
        list(found)
    for name in (CONFIG, WEIGHTS):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(GapoError, match=name):
            read_adapter(folder)
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=name):
            read_adapter(folder)
        (folder / name).write_bytes(content)
