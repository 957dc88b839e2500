"""The whole program in fp16: vLLM in float16, a stop across an overflow, ranks that generate."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import train_setup
from tests.messages import mentions
from tests.programs import Program
from tests.train_setup import (
    arguments,
    assert_same_run,
    documented_names,
    finish,
    run,
    steps_of,
    stop_and_resume,
)

# The bound of a sync is the default one of fp16.
CONFIG = train_setup.CONFIG.replace("verify_bound = 1e-4\n", "").replace(
    "num_steps = 6", "num_steps = 3"
)
FP16 = "model.precision=fp16"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in `test_train`, which makes the warm start in fp32."""
    return train_setup.prepare(tmp_path_factory.mktemp("fp16"), CONFIG)


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    run(root, "whole", FP16)
    return root / "whole"


def test_a_run_in_fp16_trains_scales_its_loss_and_agrees_with_its_engine(
    root: Path, whole_run: Path
) -> None:
    steps = steps_of(whole_run)
    assert [line["step"] for line in steps] == list(range(3))
    for line in steps:
        assert line["optim/loss_scale"] == 2.0**24 / 2 ** line["optim/overflows"]
        # A mean over tokens: 8e-4 measured, 7e-3 in bf16.
        assert 0 < line["mismatch/mean_abs_log_prob_diff"] < 3e-3
        assert 0 < line["sync/max_abs_log_prob_diff"] < 0.05
    # Both mini-batches of the first step overflowed: what a stop between them must keep.
    assert steps[0]["optim/overflows"] > 1
    assert {"optim/loss_scale", "optim/overflows"} <= set(documented_names())
    exported, base = (load_file(f / "model.safetensors") for f in (whole_run / "hf", root / "base"))
    assert {tensor.dtype for tensor in exported.values()} == {torch.float16}
    assert json.loads((whole_run / "hf/config.json").read_text())["dtype"] == "float16"
    assert exported.keys() == base.keys()
    moved = [name for name in base if not torch.equal(base[name].half(), exported[name])]
    assert len(moved) > len(base) / 2
    assert all(math.isfinite(float(tensor.sum())) for tensor in exported.values())


def test_a_stop_between_overflows_of_one_step_repeats_the_run_bitwise(
    root: Path, whole_run: Path
) -> None:
    stop_and_resume(root, "stopped", FP16, stage="step 0: update")
    assert_same_run(root / "stopped", whole_run)


def test_a_model_beyond_the_range_is_refused_before_its_first_step(root: Path) -> None:
    folder = shutil.copytree(root / "base", root / "beyond")
    tensors = load_file(folder / "model.safetensors")
    for part in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{part}.weight"] *= 500
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    command = arguments(root, "refused", FP16, f"model.hf_dir={folder}")
    output = finish(Program("gapo_megatron.train", *command), exit_code=2)
    assert re.search(mentions("model.precision ('fp16')", "layer 1", "linear_fc2"), output)
    assert not (root / "refused/metrics.jsonl").exists()


def test_a_warm_start_is_made_in_fp16(root: Path) -> None:
    overrides = ("supervised.num_steps=2", "supervised.batch_sequences=4")
    command = (root / "config.toml", "model.precision=fp16", f"model.hf_dir={root}/sft", *overrides)
    finish(Program("gapo_megatron.sft", *command))
    made, init = (load_file(root / name / "model.safetensors") for name in ("sft", "init"))
    assert {tensor.dtype for tensor in made.values()} == {torch.float16}
    changed = [name for name in init if not torch.equal(init[name].half(), made[name])]
    assert len(changed) > len(init) / 2
