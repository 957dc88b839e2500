"""Parts that need vLLM or Transformer Engine."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from typing import Any

import torch
from safetensors.torch import save_file

from gapo_megatron import checkpoint
from gapo_megatron.learn.score import log_probs
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from tests.attempt_setup import make_attempt
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
    """vLLM in the policy's precision; a checkpoint is written while it generates."""
    policy, built = _run_engine(setting, report)
    _save_in_background(setting, report, policy, built)


def engine_fp16(setting: Setting, report: Report) -> None:
    """Policy and vLLM in fp16."""
    _run_engine(setting, report, model={"precision": "fp16"})


def engine_lora(setting: Setting, report: Report) -> None:
    """The first sync brings the frozen weights and an adapter's factors, the second these alone."""
    _run_engine(setting, report, adapter={"kind": "lora"}, optimizer={"learning_rate": 1e-3})


def engine_fp8(setting: Setting, report: Report) -> None:
    """vLLM with the layers' weights in fp8."""
    _run_engine(setting, report, rollout={"quantization": "fp8"})


def gpt_oss(setting: Setting, report: Report) -> None:
    """Two layers of gpt-oss: sinks, a window, experts with biases; on a GPU vLLM's routes."""
    # What vLLM's kernel computes on a CPU.
    small = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 32, "vocab_size": 512}
    small |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    few = {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"]}
    _run_experts(setting, report, "gpt-oss-20b", small, few)


def moonlight(setting: Setting, report: Report) -> None:
    """Two layers of Moonlight: latent attention, sigmoid-routed experts behind a dense layer."""
    small = {"hidden_size": 192, "intermediate_size": 96, "moe_intermediate_size": 64}
    small |= {"num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 512}
    # The latent vector has the one size of vLLM's kernels.
    small |= {"qk_nope_head_dim": 32, "v_head_dim": 32}
    _run_experts(setting, report, "Moonlight-16B-A3B", small, {"n_routed_experts": 8})


def _run_experts(
    setting: Setting, report: Report, name: str, small: dict[str, Any], few: dict[str, Any]
) -> None:
    fields = shipped_fields(name) | few | (small if setting.tiny else {"vocab_size": 32768})
    fields.pop("quantization_config", None)
    setting.fields = fields | {"num_hidden_layers": 2}
    # The CPU's engine returns no routes.
    replay = {"routing_replay": "rollout"} if setting.is_cuda else {}
    _run_engine(setting, report, objective=replay)


def _run_engine(setting: Setting, report: Report, **sections: dict[str, Any]) -> tuple[Policy, Any]:
    """Sync, update, sync; generation after each."""
    rollout: dict[str, Any] = {
        "memory_fraction": 0.4,
        "enforce_eager": setting.tiny,
        # What is looked for is how far they are apart, not whether that passes.
        "verify_bound": 10.0,
    } | sections.pop("rollout", {})
    config = setting.config(rollout=rollout, **sections)
    policy = setting.policy(config)
    # The engine asks for a file of weights, and reads none: they come by the sync.
    save_file({"unread": torch.zeros(1)}, f"{config.model.hf_dir}/model.safetensors")
    rollouts = importlib.import_module("gapo_megatron.rollout.vllm")
    weight_sync = importlib.import_module("gapo_megatron.rollout.sync")
    usual = importlib.import_module("gapo_megatron.rollout.vllm.weights")
    start, free = time.perf_counter(), _free(setting)
    built = rollouts.RolloutEngine(config, policy.hf_config, device=setting.device)
    report.figure("start of the engine, which then sleeps", time.perf_counter() - start, "s")
    if setting.is_cuda:
        report.figure("what an engine keeps that sleeps", (free - _free(setting)) / 2**30, "GiB")
    waking = {
        name: _timed(built.schedule, name) for name in ("wake_for_sync", "wake_for_generation")
    }
    num_bytes = sum(weight.nbytes for _, weight in policy.iterate_hf_weights())
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
        start, brings = time.perf_counter(), built.needs
        check = weight_sync.sync(policy, built, probe, policy_version=turn + 1)
        seconds = time.perf_counter() - start
        report.figure(f"turn {turn}: sync, wake and check", seconds, "s")
        if brings != "factors":
            report.figure(f"turn {turn}: sync, wake and check", num_bytes / 1e9 / seconds, "GB/s")
        for name, found in waking.items():
            report.figure(f"turn {turn}: of that, {name}", found[turn], "s")
        report.figure(f"turn {turn}: largest mismatch", check.max_abs_diff)
        bound = usual.verify_bound(
            config.model, config.rollout.model_copy(update={"verify_bound": None}),
            policy.hf_config, setting.device,
        )  # fmt: skip
        report.claim(
            f"turn {turn}: mean mismatch", check.mean_abs_diff, f"at most {bound}",
            holds=check.mean_abs_diff <= bound,
        )  # fmt: skip
        _generate(setting, report, built, turn=turn)
    return policy, built


def _save_in_background(setting: Setting, report: Report, policy: Policy, built: Any) -> None:
    """What is saved is of the moment at which the save began, whatever comes meanwhile."""
    run_dir, config = setting.folder / "run", built.config
    attempt = make_attempt(run_dir)
    state = checkpoint.State(
        step=1, source={"epoch": 0, "remaining": [], "dataset": {"rows": "test-gpu"}}
    )
    policy.begin_pass()
    saved = {name: weight.cpu().clone() for name, weight in policy.iterate_hf_weights()}
    start = time.perf_counter()
    saving = checkpoint.begin_save(
        run_dir, state, policy=policy, config=config, attempt=attempt, in_background=True
    )
    report.figure("background save: training waits", time.perf_counter() - start, "s")
    is_there = saving.in_background
    report.claim("background save: in a thread", is_there, "True", holds=is_there)
    _generate(setting, report, built, turn=2)
    built.sleep()
    probe = setting.rows_of(policy, num_tokens=setting.tokens(512), length=setting.tokens(512))
    norm = run_update(policy, [probe])
    report.claim("gradient norm meanwhile", norm, "positive", holds=norm > 0)
    folder = saving.finish()
    seconds = time.perf_counter() - start
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    report.figure("background save: until it is whole", seconds, "s")
    checkpoint.load_latest(run_dir, policy=policy, config=config)
    report.figure("background save", num_bytes / 1e9, "GB")
    differing = [
        name
        for name, weight in policy.iterate_hf_weights()
        if not torch.equal(weight.cpu(), saved[name])
    ]
    report.claim("background save: weights that differ", differing, "none", holds=not differing)


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
