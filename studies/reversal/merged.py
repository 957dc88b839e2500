"""vLLM with merged weights: on a CPU its kernels for factors copy them for every token."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from gapo_megatron.config import AdapterConfig, Config
from gapo_megatron.rollout.vllm import RolloutEngine


def merged_engine(config: Config, hf_config: PretrainedConfig, **place: Any) -> RolloutEngine:
    """An engine that knows of no factors, so that every sync brings W + scale * B A in float32."""
    return RolloutEngine(config.model_copy(update={"adapter": AdapterConfig()}), hf_config, **place)
