"""A run with a checkpoint of a few bytes, and configs of one that branches from it. No model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from gapo_megatron.checkpoint import begin_branch, check_branch
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.config import Config, parse_config
from gapo_megatron.formats import manifest
from gapo_megatron.formats.manifest import Manifest
from tests.attempt_setup import make_attempt
from tests.configs import merged

NAMES = ["__0_0.distcp", "rng_00000.pt", "sub/common.pt", "trainer_state.json"]
MODEL = Qwen2Config(hidden_size=64)


def tree_of(root: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "run": {"output_dir": str(root / "new"), "num_steps": 900},
        "model": {"hf_dir": str(root / "model")},
        "data": {"train_path": str(root / "train.jsonl")},
        "rollout": {"max_response_tokens": 64},
        "reward": {"kind": "math"},
        "objective": {"method": "gapo"},
        "checkpoint": {"branch_from": str(root / "old/checkpoints/step_600")},
    }
    return merged(usual, sections)


def make_config(root: Path, **sections: dict[str, Any]) -> Config:
    return parse_config(tree_of(root, **sections), source="test")


def make_checkpoint(run_dir: Path, config: Config, *, step: int = 600) -> Path:
    """A checkpoint of `MODEL` in the run's folder."""
    return publish(run_dir / "checkpoints", step, config=config, model=model_identity(MODEL))


def publish(folder: Path, step: int, *, config: Config, model: dict[str, Any]) -> Path:
    """A checkpoint of a few bytes; returns its folder."""
    temporary = folder / f".tmp_step_{step:08d}"
    (temporary / "sub").mkdir(parents=True)
    for name in NAMES:
        (temporary / name).write_text(f"{name} of {folder.parent.name} after {step}")
    document = Manifest(
        step=step,
        model=model,
        config=config.model_dump(mode="json"),
        layout={"data_parallel_size": 2},
        megatron_version="0.19.2",
        files=manifest.describe_files(temporary, manifest.list_files(temporary)),
    )
    manifest.write_manifest(temporary, document)
    final = manifest.step_dir(folder, step)
    manifest.publish(temporary, final)
    return final


def make_old_run(root: Path) -> None:
    """`old/`: a run of gspo_asym with a checkpoint after 600 steps."""
    own = {"run": {"output_dir": str(root / "old")}, "checkpoint": {"branch_from": ""}}
    config = make_config(root, **own, objective={"method": "gspo_asym"})
    make_checkpoint(root / "old", config)


def begin(root: Path, config: Config) -> Path:
    point = check_branch(config, MODEL)
    assert point is not None
    begin_branch(point, config, make_attempt(root / "new"))
    return root / "new/checkpoints/step_00000600"
