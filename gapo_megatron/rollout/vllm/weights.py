"""The trainer's weights into vLLM's model, and how far rounding alone takes the two apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import vllm
from gapo_megatron.compat.vllm import LLMEngine
from gapo_megatron.config import Config
from gapo_megatron.models.checks import num_experts
from gapo_megatron.models.rules import checked
from gapo_megatron.models.tables import rules_for


def reload_weights(
    llm: LLMEngine, hf_config: PretrainedConfig, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Replace vLLM's weights in place.

    The tensors are streamed: vLLM takes them layer by layer as they come, and this rank's share of
    each is copied over the old one (graphs and compiled code stay valid). At most one layer is held
    besides the two copies of the model. With `rollout.quantization` a module's weights are
    quantised when the last of them has come, by scales made of these weights, not of older ones.

    Args:
        llm: vLLM's engine, with memory for the weights.
        hf_config: the model's Hugging Face config.
        weights: see `Engine.update_weights`.

    Raises:
        ConversionError: a tensor is missing, extra, twice or misshapen; names it.
    """
    tensors = checked(rules_for(hf_config), weights)
    vllm.load_weights(llm, tensors)


def verify_bound(config: Config, hf_config: PretrainedConfig, device: torch.device) -> float:
    """`rollout.verify_bound`, or what rounding alone should stay below by far.

    Mean difference of log-probs of a token: in fp32 some 1e-6 on a CPU, more on CUDA, where vLLM's
    attention in Triton may multiply in TF32 (not yet measured); in bf16 about 0.01 for sampled
    tokens and a few times that for unlikely ones; as much again where rounding sends a token to
    other experts, or products are in fp8. A wrong tensor changes whole units.
    """
    if config.rollout.verify_bound is not None:
        return config.rollout.verify_bound
    if config.model.precision == "fp32" and not config.rollout.quantization:
        return 1e-2 if device.type == "cuda" else 1e-3
    is_fp8 = config.model.precision == "fp8" or bool(config.rollout.quantization)
    return 0.3 if is_fp8 or num_experts(hf_config) else 0.1
