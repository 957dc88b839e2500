"""Parts that need vLLM or Transformer Engine."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from typing import Any

import torch
from safetensors.torch import save_file

from gapo_megatron.learn.score import log_probs
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from tests.gpu.report import Report
from tests.gpu.resources import seconds_of
from tests.gpu.setting import Setting
from tests.gpu.training import run_update


def fp8(setting: Setting, report: Report) -> None:
    """Log-probs and seconds of an update, in fp8 beside the usual precision; the same weights."""
    length = setting.tokens(1024)
    values = {}
    for precision in (setting.precision, "fp8"):
        policy = setting.policy(setting.config(model={"precision": precision}))
        packed = [setting.rows_of(policy, num_tokens=2 * length, length=length)]
        (values[precision],) = log_probs(policy, packed)
        run_update(policy, packed)
        seconds = seconds_of(functools.partial(run_update, policy, packed))
        report.figure(f"{precision}: an update", seconds, "s")
        del policy, packed
        gc.collect()  # wrappers and hooks hold each other
    usual, rounded = values.values()
    difference = (usual - rounded).abs()
    report.figure("mean difference of a log-prob", float(difference.mean()))
    report.figure("largest difference of a log-prob", float(difference.max()))
    finite = bool(rounded.isfinite().all())
    report.claim("log-probs in fp8 finite", finite, "True", holds=finite)


def engine(setting: Setting, report: Report) -> None:
    """vLLM in the policy's precision."""
    _run_engine(setting, report, quantization="")


def engine_fp8(setting: Setting, report: Report) -> None:
    """vLLM with the layers' weights in fp8."""
    _run_engine(setting, report, quantization="fp8")


def _run_engine(setting: Setting, report: Report, *, quantization: str) -> None:
    rollout: dict[str, Any] = {
        "memory_fraction": 0.4,
        "quantization": quantization,
        "enforce_eager": setting.tiny,
        # What is looked for is how far they are apart, not whether that passes.
        "verify_bound": 10.0,
    }
    config = setting.config(rollout=rollout)
    policy = setting.policy(config)
    # The engine asks for a file of weights, and reads none: they come by the sync.
    save_file({"unread": torch.zeros(1)}, f"{config.model.hf_dir}/model.safetensors")
    rollouts = importlib.import_module("gapo_megatron.rollout.vllm")
    weight_sync = importlib.import_module("gapo_megatron.rollout.sync")
    start, free = time.perf_counter(), _free(setting)
    built = rollouts.RolloutEngine(config, policy.hf_config, device=setting.device)
    report.figure("start of the engine, which then sleeps", time.perf_counter() - start, "s")
    if setting.is_cuda:
        report.figure("what an engine keeps that sleeps", (free - _free(setting)) / 2**30, "GiB")
    waking = {
        name: _timed(built.schedule, name) for name in ("wake_for_sync", "wake_for_generation")
    }
    probe = weight_sync.prompts_as_sequences(setting.prompts(config, 4), 4)
    packed = [policy.pack(probe, [i]) for i in range(len(probe))]
    for turn in range(2):
        if turn:  # it starts asleep
            free = _free(setting)
            report.figure(f"turn {turn}: sleep", seconds_of(built.sleep), "s")
            if setting.is_cuda:
                freed = (_free(setting) - free) / 2**30
                report.figure(f"turn {turn}: freed by sleep", freed, "GiB")
        norm = run_update(policy, packed)
        report.claim(f"turn {turn}: gradient norm", norm, "positive", holds=norm > 0)
        start = time.perf_counter()
        check = weight_sync.sync(policy, built, probe, policy_version=turn + 1)
        report.figure(f"turn {turn}: sync, wake and check", time.perf_counter() - start, "s")
        for name, seconds in waking.items():
            report.figure(f"turn {turn}: of that, {name}", seconds[turn], "s")
        report.figure(f"turn {turn}: mean mismatch", check.mean_abs_diff)
        report.figure(f"turn {turn}: largest mismatch", check.max_abs_diff)
        bound = 0.1 if setting.is_cuda else 1e-3
        report.claim(
            f"turn {turn}: mismatch", check.mean_abs_diff, f"at most {bound}",
            holds=check.mean_abs_diff <= bound,
        )  # fmt: skip
        _generate(setting, report, built, turn=turn)


def _free(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.is_cuda else 0


def _timed(owner: Any, name: str) -> list[float]:
    """The seconds of every call of a method from here on, filled in as they come."""
    work, seconds = getattr(owner, name), []

    def wrapper() -> None:
        seconds.append(seconds_of(work))

    setattr(owner, name, wrapper)
    return seconds


def _generate(setting: Setting, report: Report, built: Any, *, turn: int) -> None:
    config = built.config
    start = time.perf_counter()
    settings = SamplingSettings(
        2 if setting.tiny else 8, config.rollout.max_response_tokens, seed=0, step=turn
    )
    prompts = setting.prompts(config, 2 if setting.tiny else 32)
    rollouts = generate(built, prompts, settings)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(one.token_ids) for group in rollouts for one in group)
    report.figure(f"turn {turn}: generation", num_tokens / seconds, "tokens/s")
    report.claim(f"turn {turn}: tokens", num_tokens, "some", holds=num_tokens > 0)
