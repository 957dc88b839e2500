"""The configuration of a run that has begun, which may be one of an older version."""

from __future__ import annotations

from pathlib import Path

from gapo_megatron.config import CONFIG_NAME, Config, load_recorded
from gapo_megatron.hf.manifest import newest_manifest
from gapo_megatron.io.run_folder import checkpoints_dir


def recorded_config(run_dir: Path) -> Config:
    """The config.toml of a run, with `objective.routing_replay` as its newest checkpoint has it.

    Older versions routed freely and had no such setting; only the manifest of a checkpoint tells
    (`hf.manifest.read_manifest`). A run without a checkpoint is taken for one of this version.

    Raises:
        ConfigError: config.toml is not valid.
    """
    config = load_recorded(run_dir / CONFIG_NAME)
    newest = newest_manifest(checkpoints_dir(run_dir))
    if config.objective.routing_replay is not None or newest is None:
        return config
    replay = (newest[1].config.get("objective") or {}).get("routing_replay")
    objective = config.objective.model_copy(update={"routing_replay": replay})
    return config.model_copy(update={"objective": objective})
