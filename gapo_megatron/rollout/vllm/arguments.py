"""Arguments of vLLM, and the checks before its start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm import EngineArgs

from gapo_megatron.compat import vllm
from gapo_megatron.compat.vllm_grammar import BACKEND
from gapo_megatron.config import Config, ObjectiveConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.headers import find_files
from gapo_megatron.models.checks import check_engine_heads, check_positions
from gapo_megatron.models.cpu_engine import check_head_dim, check_routes
from gapo_megatron.models.quantization import quantization_of
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.rollout.vllm.adapter import Slots
from gapo_megatron.rollout.vllm.drafts import draft_arguments

logger = logging.getLogger(__name__)

_GIB = 2**30
# Prompt tokens of an engine step on a CPU, where vLLM cannot split a seeded prompt.
_CPU_STEP_TOKENS = 8192
# Tokens of a block of the KV cache on a CPU: the fewest that its kernels take. With vLLM's 128 the
# responses to a short prompt would each compute all of it.
_CPU_BLOCK_TOKENS = 32
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "": {},
    "fp8": {
        # A scale for each 128 x 128 weights, and for 128 activations of a token: rounding does not
        # depend on other ranks' weights. (On Hopper vLLM uses another kernel below 32 tokens.)
        "quantization": "fp8_per_block",
        # The router is not quantised: it chooses experts, and the trainer's is never in fp8.
        "quantization_config": {"ignore": ["*.gate"]},
    },
}
"""vLLM's arguments by `rollout.quantization`. Output layer and embedding are never quantised."""


def check_engine(
    config: Config,
    hf_config: PretrainedConfig,
    device: torch.device,
    *,
    world_size: int,
    load_weights: bool = False,
) -> None:
    """Refuse settings that the engine cannot run. Cheap: call it before any model is built.

    For `load_weights` see `RolloutEngine`.

    Raises:
        ConfigError: the rollout's tensor parallel size does not fit the world or the model, vLLM
            has no kernel for the model's head_dim or, on a CPU, for its layers in fp8, the KV cache
            exceeds the machine's memory, or the model folder is incomplete (weights included if
            they are read from it); or see `check_engine_heads`,
            `check_positions` and, for an engine with a trainer, `cpu_engine.check_routes`.
    """
    size = config.rollout.tensor_parallel_size
    if world_size % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({size}) must divide the world size ({world_size})"
        )
    check_engine_heads(hf_config, size)
    check_positions(hf_config, config.max_sequence_tokens)
    if device.type == "cpu":
        geometry = geometry_of(hf_config)
        check_head_dim(
            hf_config,
            field="model.hf_dir",
            folder=config.model.hf_dir,
            supported=vllm.cpu_head_sizes(),
        )
        if not load_weights:
            check_routes(config.objective)
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _GIB
        if config.rollout.cpu_kv_cache_gib > memory_gib:
            raise ConfigError(
                f"rollout.cpu_kv_cache_gib ({config.rollout.cpu_kv_cache_gib}) must be at most "
                f"this machine's memory, {memory_gib} GiB"
            )
        if config.rollout.quantization:
            reason = vllm.why_no_cpu_fp8()
            if reason is None and geometry.qkv_bias:
                # It expects float32 biases ("expected scalar type Float", vLLM 0.32).
                reason = f"its kernel supports no biases, which {hf_config.model_type} models have"
            if reason is not None:
                raise ConfigError(
                    f"rollout.quantization ('{config.rollout.quantization}') does not run on this "
                    f"CPU: {reason}"
                )
    if not config.model.megatron_dir:
        find_files(config.model.hf_dir)


def _as_floats(
    hf_config: PretrainedConfig, overrides: dict[str, Any]
) -> dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig]:
    """The overrides, for an engine whose weights come from the trainer, which has only floats."""
    if quantization_of(hf_config) is None:
        return overrides

    def override(config: PretrainedConfig) -> PretrainedConfig:
        config.update(overrides)
        vars(config).pop("quantization_config", None)
        return config

    return override


def returns_routes(objective: ObjectiveConfig, *, load_weights: bool) -> bool:
    """Whether the engine returns the experts of every token: not without a trainer."""
    return objective.replayed_routes == "rollout" and not load_weights


def engine_args(
    config: Config,
    hf_config: PretrainedConfig,
    device: torch.device,
    *,
    load_weights: bool = False,
    slots: Slots | None = None,
) -> EngineArgs:
    """Arguments of vLLM, the same on every rank.

    For `load_weights` see `RolloutEngine`. With `slots` the layers have room for factors.
    """
    rollout = config.rollout
    # One token more than the longest sequence: scoring it also samples a token after it.
    max_model_len = config.max_sequence_tokens + 1
    positions = hf_config.max_position_embeddings
    if config.max_sequence_tokens > positions:
        logger.warning(
            "data.max_prompt_tokens + rollout.max_response_tokens (%d) exceed the %d positions %s "
            "was trained on; rotary embeddings are extrapolated",
            config.max_sequence_tokens,
            positions,
            config.model.hf_dir,
        )
    # vLLM precomputes rotary angles for all positions of config.json, however many (with YaRN for
    # others: `check_positions`).
    overrides: dict[str, Any] = {"max_position_embeddings": max_model_len}
    device_args: dict[str, Any]
    if device.type == "cuda":
        device_args = {
            "gpu_memory_utilization": rollout.memory_fraction,
            "enable_sleep_mode": True,
            "sleep_mode_offload_cudagraph": True,  # otherwise graphs stay on the GPU
        }
        # Logits in fp32, as in the trainer's head: in 16 bits, logits of 16 and more have errors of
        # up to 0.06. This changes the output of one product and copies no weights.
        overrides["head_dtype"] = "float32"
    else:
        device_args = {
            "kv_cache_memory_bytes": rollout.cpu_kv_cache_gib * _GIB,
            # A split seeded prompt fails on a CPU: its generator cannot be reset
            # (vLLM 0.32, "CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _CPU_STEP_TOKENS),
        }
        if geometry_of(hf_config).latent:
            # The faster one, for 16 bits, drops the weights that a sync copies into.
            device_args["attention_backend"] = "CPU_MLA"
        else:  # latent attention has blocks of a fixed size
            device_args["block_size"] = _CPU_BLOCK_TOKENS
    routes_args: dict[str, Any] = {}
    if returns_routes(config.objective, load_weights=load_weights):
        # vLLM stores routes by blocks of its prefix cache, and refuses them without one.
        routes_args = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    return EngineArgs(
        model=config.model.hf_dir,
        trust_remote_code=False,
        load_format="auto" if load_weights else "dummy",
        skip_tokenizer_init=not config.environment.structured_outputs,  # grammars need it
        structured_outputs_config={"backend": BACKEND},
        generation_config="vllm",  # sampling parameters come only from the config
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        hf_overrides=overrides if load_weights else _as_floats(hf_config, overrides),
        tensor_parallel_size=rollout.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        enforce_eager=rollout.enforce_eager,
        logprobs_mode="processed_logprobs",
        seed=0,  # vLLM's global generators, which no request uses; equal on all ranks
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_QUANTIZATION[rollout.quantization],
        **draft_arguments(rollout),
        **(slots.arguments if slots else {}),
        **routes_args,
        **device_args,
    )
