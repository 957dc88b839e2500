"""Checkpoints of a policy in fp16 contain the loss scale."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gapo_megatron import checkpoint
from gapo_megatron.config import Config
from gapo_megatron.policy import destroy
from gapo_megatron.policy.loss_scale import LossScale
from tests.dist import run_distributed
from tests.distributed import checkpoint_setup
from tests.distributed.policy_setup import load_policy


def resume_across_overflows(hf_dir: str, run_dir: Path) -> None:
    """Three updates without a stop, then the last two again from the checkpoint after the first."""
    config = checkpoint_setup.make_config(hf_dir, layout="dp2")
    model = config.model.model_copy(update={"precision": "fp16"})
    config = config.model_copy(update={"model": model})
    policy = load_policy(config)
    checkpoint_setup.train_one_update(policy, seed=0)
    assert policy.loss_scale is not None and policy.loss_scale.num_overflows > 0
    # Between the two checkpoints it overflows again, from where it was.
    policy.loss_scale.value *= 4
    kept = asdict(policy.loss_scale)
    checkpoint_setup.save(run_dir, policy, config, step=1)
    for seed in (1, 2):
        checkpoint_setup.train_one_update(policy, seed=seed)
    assert policy.loss_scale.num_overflows > kept["num_overflows"]
    whole = checkpoint_setup.save(run_dir / "whole", policy, config, step=3)
    expected, expected_scale = checkpoint_setup.tensors_on_disk(whole), policy.loss_scale
    destroy()
    resumed = load_policy(config)
    assert checkpoint.load_latest(run_dir, policy=resumed, config=config) is not None
    assert resumed.loss_scale == LossScale(**kept)
    for seed in (1, 2):
        checkpoint_setup.train_one_update(resumed, seed=seed)
    assert resumed.loss_scale == expected_scale
    again = checkpoint_setup.save(run_dir / "resumed", resumed, config, step=3)
    checkpoint_setup.assert_bitwise(checkpoint_setup.tensors_on_disk(again), expected)
    destroy()


def test_resuming_across_an_overflow_is_bitwise(tmp_path: Path) -> None:
    hf_dir = checkpoint_setup.make_model(tmp_path / "model", hidden_size=32)
    run_distributed(resume_across_overflows, 2, hf_dir, tmp_path / "run")


def go_on_in_fp16(hf_dir: str, run_dir: Path) -> None:
    """As the warning about bf16's rounding advises: its checkpoint, resumed in fp16."""
    config = checkpoint_setup.make_config(hf_dir, layout="single")

    def with_precision(precision: str) -> Config:
        model = config.model.model_copy(update={"precision": precision})
        run = config.run.model_copy(update={"allow_changes": ["model.precision"]})
        return config.model_copy(update={"model": model, "run": run})

    policy = load_policy(with_precision("bf16"))
    checkpoint_setup.train_one_update(policy, seed=0)
    checkpoint_setup.save(run_dir, policy, with_precision("bf16"), step=1)
    destroy()
    resumed = load_policy(with_precision("fp16"))
    found = checkpoint.load_latest(run_dir, policy=resumed, config=with_precision("fp16"))
    assert found is not None and resumed.num_updates == 1
    assert resumed.loss_scale == LossScale()
    destroy()


def test_a_checkpoint_in_bf16_is_resumed_in_fp16(tmp_path: Path) -> None:
    hf_dir = checkpoint_setup.make_model(tmp_path / "model", hidden_size=32)
    run_distributed(go_on_in_fp16, 1, hf_dir, tmp_path / "run")
