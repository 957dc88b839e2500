"""The engine that `rollout.engine` names: vLLM, or user code."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from gapo_megatron import user_code
from gapo_megatron.config import Config
from gapo_megatron.config.rules import merged_refusal
from gapo_megatron.config.schema import VLLM
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.lora import why_merged_on
from gapo_megatron.rollout.adapter_sync import needs_of
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollout.vllm import check_engine as check_vllm
from gapo_megatron.run.process_group import World


class EngineFactory(Protocol):
    """Builds one rank's part of an engine: a class or a function, which a user may write."""

    def __call__(
        self,
        config: Config,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        gloo_group: dist.ProcessGroup | None,
    ) -> Engine:
        """Build the engine, without the policy's weights: the first weight sync brings them.

        Called on every rank that generates, once per process.

        Args:
            config: the run's settings.
            hf_config: the model's Hugging Face config.
            device: this rank's device.
            gloo_group: all ranks that generate, used by nothing else while the engine generates;
                for `Replicas.create`.

        Collectives: any, in the same order on all ranks that generate.
        """


def find_engine(name: str) -> EngineFactory:
    """Return vLLM's engine, or load the user's; `name` is `rollout.engine`.

    Raises:
        ConfigError: the code cannot be loaded or called.
    """
    if name == VLLM:
        return RolloutEngine
    found: EngineFactory = user_code.load(name, setting="rollout.engine")
    if not callable(found):
        raise ConfigError(
            f"rollout.engine ({name!r}) must be a class or a function, not {type(found).__name__}"
        )
    return found


def build_engine(config: Config, hf_config: PretrainedConfig, world: World) -> Engine:
    """Build this rank's part of the run's engine, without the policy's weights. Collective.

    Raises:
        ConfigError: ratios would be against an engine that gets merged weights.
    """
    build = find_engine(config.rollout.engine)
    engine = build(config, hf_config, device=world.device, gloo_group=world.gloo_group)
    if _needs_factors(config) and needs_of(engine) == "merged":
        reason = f"rollout.engine ({config.rollout.engine!r}), which takes no factors"
        raise ConfigError(merged_refusal(config, reason))
    return engine


def _needs_factors(config: Config) -> bool:
    """Whether the rounding of merged weights would be in every ratio."""
    return config.adapter.kind != "none" and config.objective.old_log_probs == "rollout"


def check_engine(
    config: Config, hf_config: PretrainedConfig, device: torch.device, *, world_size: int
) -> None:
    """Refuse settings that vLLM cannot run; another engine checks its own when it is built.

    Raises:
        ConfigError: see `rollout.vllm.check_engine`; ratios would be against log-probs of merged
            weights (`models.lora.why_merged_on`).
    """
    if config.rollout.engine != VLLM:
        return
    check_vllm(config, hf_config, device, world_size=world_size)
    if _needs_factors(config) and (reason := why_merged_on(device.type, config, hf_config)):
        raise ConfigError(merged_refusal(config, reason))
