"""An engine that a config names: a whole run with it, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gapo_megatron.config import Config, load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.run.early_checks import check_before_imports
from gapo_megatron.run.engines import build_engine, check_engine, find_engine
from gapo_tools.dry_run.command import why_not_run
from tests.configs import config_of
from tests.distributed.conversion_setup import hf_config, save_model
from tests.messages import mentions
from tests.rollout_setup import make_model
from tests.train_setup import CONFIG, prepare, run, steps_of

SOURCE = """
from transformers import AutoModelForCausalLM

from gapo_megatron.rollout.replicas import Replicas
from tests.transformers_engine import TransformersEngine

NUMBER = 3


def build(config, hf_config, *, device, gloo_group):
    return TransformersEngine(
        AutoModelForCausalLM.from_config(hf_config),
        eos_token_id=hf_config.eos_token_id,
        replicas=Replicas.create(1, gloo_group=gloo_group),
        verify_bound=1e-4,
    )
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_engine.py"
    path.write_text(SOURCE)
    return path


def config(folder: Path, engine: str) -> Config:
    (folder / "config.toml").write_text(CONFIG.format(root=folder))
    return load_config(folder / "config.toml", [f"rollout.engine={engine}"])


def test_vllm_is_the_engine_unless_another_is_named(tmp_path: Path, source: Path) -> None:
    assert find_engine("vllm") is RolloutEngine
    found = config(tmp_path, f"{source}:build")
    assert found.rollout.code_names == [f"{source}:build"]
    assert find_engine(found.rollout.engine).__name__ == "build"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("my_engine.py:built", ("'built'", "'build'")),
        ("my_engine.py:NUMBER", ("class or a function", "int")),
        ("other.py:build", ("no file", "other.py")),
    ],
)
def test_an_engine_that_is_none_is_refused_before_a_model_is_built(
    tmp_path: Path, source: Path, name: str, named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=mentions("rollout.engine", *named)):
        find_engine(f"{tmp_path}/{name}")
    with pytest.raises(ConfigError, match=mentions("rollout", "engine", "'vlm'", "'vllm'")):
        config(tmp_path, "vlm")


def test_a_dry_run_says_what_is_missing(tmp_path: Path, source: Path) -> None:
    found = config(tmp_path, f"{source}:built")
    assert any("rollout.engine" in reason and "'build'" in reason for reason in why_not_run(found))


TAKERS = """
class Plain:
    def __init__(self, *_, **__): ...


class Merging(Plain):
    needs = "merged"

    def update_adapter(self, *_, **__): ...


class Taking(Merging):
    needs = "base"
"""


@pytest.mark.parametrize(
    ("name", "is_refused"), [("Plain", True), ("Merging", True), ("Taking", False)]
)
def test_ratios_to_an_engine_that_takes_no_factors_are_refused_at_the_start(
    tmp_path: Path, name: str, is_refused: bool
) -> None:
    (path := tmp_path / "takers.py").write_text(TAKERS)
    engine, world = f"{path}:{name}", SimpleNamespace(device=None, gloo_group=None)
    usual = {"rollout": {"engine": engine}, "objective": {"old_log_probs": "rollout"}}
    lora = {"adapter": {"kind": "lora"}}
    for sections in ({}, lora, lora | {"objective": {"old_log_probs": "trainer"}}):
        asked = config_of(usual, sections)
        if sections == lora and is_refused:
            named = mentions("objective.old_log_probs ('rollout')", "'trainer'", engine)
            with pytest.raises(ConfigError, match=named):
                build_engine(asked, None, world)
        else:
            assert type(build_engine(asked, None, world)).__name__ == name


@pytest.mark.parametrize("old_log_probs", ["rollout", "trainer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ratios_to_vllm_with_merged_weights_are_refused_before_it_is_built(
    tmp_path: Path, device: str, precision: str, old_log_probs: str
) -> None:
    """In fp32 its kernels for factors do not run on a GPU."""
    model = make_model(tied=True)
    model.save_pretrained(tmp_path)
    sections = {"model": {"hf_dir": str(tmp_path), "precision": precision}}
    sections |= {"adapter": {"kind": "lora"}, "objective": {"old_log_probs": old_log_probs}}
    asked = config_of(sections)
    if (device, precision, old_log_probs) == ("cuda", "fp32", "rollout"):
        named = mentions("objective.old_log_probs ('rollout')", "model.precision ('fp32')", "GPU")
        with pytest.raises(ConfigError, match=named):
            check_engine(asked, model.config, torch.device(device), world_size=1)
    else:
        check_engine(asked, model.config, torch.device(device), world_size=1)


def test_sequences_beyond_yarns_positions_are_refused_before_it_is_built(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek_v3")
    asked = config_of(
        {"model": {"hf_dir": str(tmp_path)}}, {"rollout": {"max_response_tokens": 500}}
    )
    with pytest.raises(ConfigError, match=mentions("rollout.max_response_tokens", 8 * 32)):
        check_engine(asked, hf_config("deepseek_v3"), torch.device("cuda"), world_size=1)


@pytest.mark.system
def test_a_whole_run_generates_with_it(tmp_path: Path, source: Path) -> None:
    """On two ranks, resumed once; the weight sync compares its log-probs with the trainer's.

    It gets an adapter merged, and the run logs what that costs.
    """
    root = prepare(tmp_path, CONFIG)
    given = [f"rollout.engine={source}:build", "adapter.kind=lora", "evaluation.every_steps=0"]
    check_before_imports(load_config(root / "config.toml", given))
    for num_steps in (1, 2):
        run(root, "run", *given, f"run.num_steps={num_steps}", ranks=2)
    rows = steps_of(root / "run")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 < row["reward/mean"] < 1
        assert 0 <= row["sync/max_abs_log_prob_diff"] < 1e-3
        assert 0 < row["sync/merge_rounding"] < 1e-2, "fp32"
        assert math.isfinite(row["optim/grad_norm"])
    assert f'engine = "{source}:build"' in (root / "run/config.toml").read_text()
