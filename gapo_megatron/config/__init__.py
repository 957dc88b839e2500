"""The run's configuration: what a TOML file may say, and what follows from it."""

from gapo_megatron.config.loading import load_config, parse_config
from gapo_megatron.config.run_sections import CheckpointConfig, MetricsConfig, ParallelConfig
from gapo_megatron.config.schema import (
    CONFIG_NAME,
    DTYPES,
    VERIFIED_SEQUENCES,
    BatchConfig,
    Config,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    SupervisedConfig,
)

__all__ = [
    "CONFIG_NAME",
    "DTYPES",
    "VERIFIED_SEQUENCES",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "MetricsConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SupervisedConfig",
    "load_config",
    "parse_config",
]
