"""The run's configuration: the settings of a TOML file, and their rules."""

from gapo_megatron.config.adapter_section import AdapterConfig
from gapo_megatron.config.data_section import DataConfig, DataSource
from gapo_megatron.config.environment import EnvironmentConfig
from gapo_megatron.config.loading import (
    check_recorded,
    load_config,
    load_recorded,
    parse_config,
    with_digest,
)
from gapo_megatron.config.objective_section import ObjectiveConfig
from gapo_megatron.config.run_sections import (
    CheckpointConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    SupervisedConfig,
)
from gapo_megatron.config.schema import (
    CONFIG_NAME,
    DTYPES,
    VERIFIED_SEQUENCES,
    BatchConfig,
    Config,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)

__all__ = [
    "CONFIG_NAME",
    "DTYPES",
    "VERIFIED_SEQUENCES",
    "AdapterConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "EnvironmentConfig",
    "MetricsConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SupervisedConfig",
    "check_recorded",
    "load_config",
    "load_recorded",
    "parse_config",
    "with_digest",
]
