"""Mistakes of users that end a run before any model is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import Qwen2Config

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError, DataError, GapoError
from gapo_megatron.models.cpu_engine import is_cpu_build
from gapo_megatron.train import train
from tests.distributed.conversion_setup import convert
from tests.messages import mentions
from tests.train_setup import CONFIG, write_inputs

TORN = '{"id": "a", "prompt": "1+1=", "answer": "2"}\n{"id":'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose config.toml names a Hugging Face model, and a Megatron folder of the same."""
    root: Path = tmp_path_factory.mktemp("refused")
    text, _, _ = CONFIG.replace("/base", "/init").partition("[supervised]")
    write_inputs(root, text)
    convert(root / "init", root / "megatron")
    return root


def assert_refused(
    root: Path, *settings: str, named: tuple[object, ...], error: type[GapoError] = ConfigError
) -> None:
    """The error names all of `named`."""
    config = load_config(root / "config.toml", list(settings))
    with pytest.raises(error, match=mentions(*named)):
        train(config)


def test_user_mistakes_are_named(root: Path, tmp_path: Path) -> None:
    missing, output = tmp_path / "nowhere", "run.output_dir"
    (tmp_path / "torn.jsonl").write_text(TORN)
    (tmp_path / "empty.jsonl").write_text("")
    for setting, named in (
        (f"data.train_path={missing}", (missing,)),
        ("data.max_prompt_tokens=4", ("train.jsonl:1", "tokens")),
        (f"data.train_path={tmp_path}/torn.jsonl", ("torn.jsonl:2",)),
        (f"data.train_path={tmp_path}/empty.jsonl", ("empty.jsonl",)),
    ):
        assert_refused(root, setting, named=named, error=DataError)

    (tmp_path / "own/hf").mkdir(parents=True)
    (tmp_path / "own/hf/precious").write_text("")
    (tmp_path / "file").write_text("")
    for setting, named in (
        (f"model.hf_dir={missing}", ("model.hf_dir", missing)),
        (f"model.hf_dir={root}/run/hf", (f"{output}/hf", "model.hf_dir")),
        (f"model.hf_dir={root}/run/hf/x", (f"{output}/hf", "model.hf_dir")),
        (f"{output}={tmp_path}/own", (f"{output}/hf", "own/hf")),
        (f"{output}={tmp_path}/file/run", (output,)),
        ("objective.routing_replay=none", ("objective.routing_replay ('none')", "no experts")),
    ):
        assert_refused(root, setting, named=named)
    assert_refused(root, "reward.kind=code", "reward.python=/nowhere", named=("reward.kind",))


def test_routes_that_the_engine_does_not_return_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "init", tmp_path / "experts")
    path = tmp_path / "experts/config.json"
    document = json.loads(path.read_text())
    document |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    document |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    field = "objective.routing_replay"
    settings = (f"model.hf_dir={tmp_path}/experts", f"{field}=rollout")
    settings += (f"model.megatron_dir={root}/megatron",)  # its weights are looked at later
    for count, said in ((256, "GPU"), (257, 256)):
        path.write_text(json.dumps(document | {"num_experts": count}))
        if count > 256 or is_cpu_build():
            assert_refused(root, *settings, named=(f"{field} ('rollout')", said))


def test_a_wrong_megatron_folder_is_named(root: Path, tmp_path: Path) -> None:
    field, megatron_dir = "model.megatron_dir", root / "megatron"
    shutil.copytree(megatron_dir, tmp_path / "cut")
    (tmp_path / "cut/metadata.json").unlink()
    shutil.copytree(megatron_dir, tmp_path / "around/megatron")
    for folder, named in (
        ("nowhere", (tmp_path / "nowhere",)),
        (".", (tmp_path,)),
        ("cut", ("metadata.json",)),
        ("around/megatron", ("run.output_dir",)),
    ):
        settings = (f"{field}={tmp_path / folder}", f"run.output_dir={tmp_path}/around")
        assert_refused(root, *settings, named=(field, *named))

    fields = Qwen2Config.from_pretrained(root / "init").to_dict()
    for name, value, named in (
        ("intermediate_size", 96, ()),
        ("num_hidden_layers", 3, ()),
        ("rms_norm_eps", 1e-3, ("norm_epsilon", "1e-06", 0.001)),
    ):
        other = shutil.copytree(root / "init", tmp_path / name)
        changed = Qwen2Config.from_dict(fields | {name: value, "layer_types": None})
        changed.save_pretrained(other)
        settings = (f"{field}={megatron_dir}", f"model.hf_dir={other}")
        assert_refused(root, *settings, named=(megatron_dir, *named))
