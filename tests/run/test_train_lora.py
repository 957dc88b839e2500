"""Whole runs that train an adapter: they learn, resume with the same bits, and know their base."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gapo_megatron.formats.adapter_folder import AdapterSettings, read_adapter
from gapo_megatron.formats.manifest import read_manifest
from tests import train_setup
from tests.convert_tools_setup import to_hf
from tests.messages import mentions
from tests.train_setup import (
    assert_same_run,
    run,
    steps_of,
    stop_and_resume,
)

CONFIG = train_setup.CONFIG.replace("num_steps = 6", "num_steps = 4").replace(
    "[data]",
    """[adapter]
kind = "lora"
rank = 4
alpha = 8
[data]""",
)
KL = "objective.kl_coef=0.1"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm start trains every weight, although the config has an adapter."""
    root = train_setup.prepare(tmp_path_factory.mktemp("lora"), CONFIG)
    init, base = (load_file(root / name / "model.safetensors") for name in ("init", "base"))
    assert not any(torch.equal(init[name], base[name]) for name in init)
    return root


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    run(root, "whole", KL)
    return root / "whole"


def test_a_run_trains_factors_and_exports_them_merged(root: Path, whole_run: Path) -> None:
    steps = steps_of(whole_run)
    assert [line["step"] for line in steps] == list(range(4))
    for line in steps:
        # vLLM computes with the factors: the bound is that of full weights.
        assert 0 <= line["sync/max_abs_log_prob_diff"] < 1e-4
        assert "sync/merge_rounding" not in line
    assert any(line["optim/grad_norm"] > 0 for line in steps)
    exported, base = (load_file(f / "model.safetensors") for f in (whole_run / "hf", root / "base"))
    moved = {name for name in base if not torch.equal(base[name], exported[name])}
    assert moved == {
        name for name in base if name.endswith(tuple(f"{p}.weight" for p in PROJECTIONS))
    }


def convert(root: Path, kind: str, *more: object, exit_code: int = 0) -> str:
    """The tool on the whole run's newest checkpoint, into ROOT/KIND; returns its output."""
    done = to_hf(root / "whole", root / kind, "--adapter", kind, *more)
    assert done.exit_code == exit_code, done
    return done.out + done.err


def test_its_checkpoint_becomes_an_adapter_folder_or_a_merged_model(
    root: Path, whole_run: Path
) -> None:
    exported, base = (load_file(f / "model.safetensors") for f in (whole_run / "hf", root / "base"))
    convert(root, "peft")
    settings, factors = read_adapter(root / "peft")
    assert settings == AdapterSettings(rank=4, alpha=8.0)
    expected = dict(base)
    for name, a, b in factors:
        assert b.any(), "a trained factor"
        expected[f"{name}.weight"] = base[f"{name}.weight"] + 2.0 * b @ a
    assert re.search(mentions("SHA-256", "rounding"), convert(root, "merged"))
    merged = load_file(root / "merged" / "model.safetensors")
    for name, tensor in exported.items():
        # fp32 sums in another order, of values below 1
        assert torch.allclose(expected[name], tensor, rtol=0, atol=1e-6)
        assert torch.allclose(merged[name], tensor, rtol=0, atol=1e-6)
    assert re.search(mentions("--overwrite"), convert(root, "peft", exit_code=2))
    # Another base: the run's export has the same shapes.
    output = convert(root, "merged", "--overwrite", "--hf-config", whole_run / "hf", exit_code=2)
    assert re.search(mentions(whole_run / "hf", "SHA-256"), output)
    assert torch.equal(
        load_file(root / "merged" / "model.safetensors")["model.norm.weight"],
        merged["model.norm.weight"],
    )


def test_a_killed_run_goes_on_with_the_same_bits(root: Path, whole_run: Path) -> None:
    stop_and_resume(root, "killed", KL, stage="step 2: update", by="SIGKILL")
    saved, *_ = sorted((root / "killed/checkpoints").glob("step_*"))
    assert re.fullmatch("[0-9a-f]{64}", read_manifest(saved).base_sha256 or "")
    assert_same_run(root / "killed", whole_run)
