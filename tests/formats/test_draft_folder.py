"""Folders of EAGLE-3 drafts: what vLLM could not load is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from gapo_megatron.config import RolloutConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.draft_folder import check_draft, describe_draft
from tests.draft_setup import write_draft
from tests.messages import mentions
from tests.rollout_setup import SIZES, VOCAB

MODEL = SimpleNamespace(model_type="llama", vocab_size=VOCAB, hidden_size=SIZES["hidden_size"])


def section(folder: Path, **changes: object) -> RolloutConfig:
    fields = {"max_response_tokens": 8, "draft": "eagle3", "draft_hf_dir": str(folder)}
    return RolloutConfig.model_validate(fields | changes)


def test_a_draft_for_the_model_is_taken(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft")
    check_draft(section(folder), MODEL)
    check_draft(section(folder, tensor_parallel_size=4), MODEL)
    size = (folder / "model.safetensors").stat().st_size / 2**20
    assert f"{size:,.1f} MiB" in describe_draft(section(folder))
    check_draft(RolloutConfig(max_response_tokens=8), MODEL)
    assert describe_draft(RolloutConfig(max_response_tokens=8)) == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM"]),
        ({"vocab_size": VOCAB + 3}, ["vocab_size", VOCAB + 3, VOCAB]),
        ({"hidden_size": 8}, ["hidden_size", 8, SIZES["hidden_size"]]),
        ({"target_hidden_size": 8}, ["target_hidden_size", 8, SIZES["hidden_size"]]),
        ({"draft_vocab_size": VOCAB + 1}, ["draft_vocab_size", VOCAB + 1]),
        ({"num_attention_heads": 0}, ["num_attention_heads", 0]),
        ({"num_attention_heads": 3}, ["num_attention_heads", 3, "rollout.tensor_parallel_size", 2]),
        ({"auto_map": {"AutoModel": "own.py"}}, ["auto_map", "own.py"]),
    ],
)
def test_a_draft_that_vllm_cannot_load_is_named(tmp_path, changes, named) -> None:
    folder = write_draft(tmp_path / "draft", **changes)
    with pytest.raises(ConfigError, match=mentions("rollout.draft_hf_dir", folder, *named)):
        check_draft(section(folder, tensor_parallel_size=2), MODEL)


def test_a_model_that_gives_a_draft_no_hidden_states_is_named(tmp_path: Path) -> None:
    model = SimpleNamespace(**{**vars(MODEL), "model_type": "gemma3_text"})
    with pytest.raises(ConfigError, match=mentions("rollout.draft", "eagle3", "gemma3_text")):
        check_draft(section(write_draft(tmp_path / "draft")), model)


def test_fewer_tokens_without_an_output_layer_of_their_own_are_named(tmp_path: Path) -> None:
    """The model's output layer, which vLLM shares with such a draft, has all tokens."""
    folder = write_draft(tmp_path / "draft", draft_vocab_size=VOCAB - 1)
    check_draft(section(folder), MODEL)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=mentions("draft_vocab_size", VOCAB - 1, "lm_head")):
        check_draft(section(folder), MODEL)
    shared = write_draft(tmp_path / "shared")
    save_file(tensors, shared / "model.safetensors")
    check_draft(section(shared), MODEL)


def test_an_incomplete_folder_is_named(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=mentions("rollout.draft_hf_dir", "model.safetensors")):
        check_draft(section(folder), MODEL)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match=mentions("rollout.draft_hf_dir", "config.json")):
        check_draft(section(folder), MODEL)
