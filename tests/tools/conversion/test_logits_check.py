"""The comparison of logits: silent about rounding, loud about what a wrong conversion does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from gapo_megatron.errors import ConfigError
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_tools.conversion.logits_check import LogitsReport, compare_logits, obstacle
from tests.convert_tools_setup import save_model_with_tokenizer, set_field
from tests.dist import SOAK, single_rank
from tests.distributed.checkpoint_setup import write_state
from tests.distributed.conversion_setup import ARCHITECTURES, save_model
from tests.distributed.policy_setup import make_config, read_weights
from tests.messages import mentions


def save_megatron(hf_dir: Path, folder: Path) -> Path:
    """What Megatron-core itself saves of the model."""
    folder.mkdir()
    config = make_config(hf_dir)
    with single_rank():
        groups = initialize(config.parallel)
        policy = Policy.build(config, groups, "cpu")
        policy.load_hf_weights(read_weights(hf_dir))
        write_state(policy.stages[0].sharded_state_dict(), folder, groups)
        destroy()
    return folder


class Folders(dict[str, tuple[Path, Path]]):
    """Hugging Face and Megatron folder by architecture, made when they are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> tuple[Path, Path]:
        hf_dir = self.root / name
        save_model(hf_dir, name)
        self[name] = hf_dir, save_megatron(hf_dir, self.root / f"{name}_megatron")
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


SOME = {"qwen2", "llama", "gemma3_text", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in SOME else SOAK) for one in ARCHITECTURES],
)
def test_equal_weights_agree(name: str, folders: Folders) -> None:
    report = compare_logits(*folders[name])
    assert report.agrees
    # As in tests/distributed/test_conversion.py.
    assert report.max_difference < 1e-5 * report.scale
    assert report.scale > 1  # far from a model that says nothing
    assert report.num_tokens == 79
    assert report.greedy_agree == 1.0
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "field"),
    [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")],
)
def test_experts_of_any_width_are_compared(name: str, field: str, tmp_path: Path) -> None:
    """Of 26: a grouped product needs multiples of four in float32."""
    save_model(tmp_path / "hf", name, **{field: 26})
    megatron = save_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert compare_logits(tmp_path / "hf", megatron).agrees


def test_a_process_group_is_left_as_it_was(folders: Folders) -> None:
    with single_rank():
        default = dist.group.WORLD
        assert compare_logits(*folders["qwen2"]).agrees
        assert dist.group.WORLD is default
        dist.barrier()


def swap_query_and_key(tensors: dict[str, Tensor]) -> None:
    """The first key head and the first query head of a layer, as a wrong table would."""
    q, k = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qk")
    size = len(k) // 2
    q[:size], k[:size] = k[:size].clone(), q[:size].clone()


def put_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][3] = torch.nan


@pytest.mark.parametrize("damage", [swap_query_and_key, put_nan])
def test_wrong_weights_do_not_agree(damage: Any, folders: Folders, tmp_path: Path) -> None:
    hf_dir, megatron_dir = folders["llama"]
    tensors = load_file(hf_dir / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((hf_dir / "config.json").read_text())
    report = compare_logits(tmp_path, megatron_dir)
    assert not report.agrees
    assert not report.max_difference < 50 * 1e-4 * report.scale  # far beyond the bound


@pytest.mark.parametrize(
    ("difference", "scale", "agrees"),
    [
        (1e-4, 1.0, True),
        (2e-4, 1.0, False),
        (0.0, 0.0, True),
        (1e-9, 0.0, False),
        (math.inf, math.inf, False),
        (0.0, math.nan, False),
    ],
)
def test_the_bound_is_a_share_of_a_number(difference: float, scale: float, agrees: bool) -> None:
    report = LogitsReport(difference, scale, num_tokens=1, greedy_agree=1.0)
    assert report.agrees == agrees
    assert "1 tokens" in str(report)


def test_a_tokenizer_of_another_vocabulary_is_an_error(folders: Folders, tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path, "qwen2")
    set_field(tmp_path / "config.json", vocab_size=40)
    with pytest.raises(ConfigError, match=mentions(tmp_path, "tokenizer", "config.json", 40)):
        compare_logits(tmp_path, folders["qwen2"][1])


def test_what_cannot_be_compared_is_said(folders: Folders, tmp_path: Path) -> None:
    hf_dir, _ = folders["qwen2"]
    assert obstacle(hf_dir) is None
    config = json.loads((hf_dir / "config.json").read_text())
    config |= {"hidden_size": 2**20, "intermediate_size": 2**22}  # a fifth of a petabyte
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "memory" in str(obstacle(tmp_path))
    save_model(tmp_path / "window", "mistral", sliding_window=16)
    assert "sliding_window (16)" in str(obstacle(tmp_path / "window"))
