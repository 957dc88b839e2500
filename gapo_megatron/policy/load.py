"""A model's weights from a Megatron folder, read by Megatron-core's own loader."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from transformers import PretrainedConfig

from gapo_megatron import cpu
from gapo_megatron.config import Config
from gapo_megatron.convert import rules_for
from gapo_megatron.convert.config_check import compare_configs
from gapo_megatron.convert.disk_keys import find_spelling
from gapo_megatron.convert.torch_dist import MegatronFolder
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.policy.model import PolicyModel


def find_weights(path: str | Path, hf_config: PretrainedConfig) -> Path:
    """The folder with the tensors of a Megatron folder, provided it holds the model.

    Args:
        path: the folder, or one that leads to it; see `convert.megatron_record.find_megatron`.
        hf_config: of the model.

    Raises:
        ConfigError: there is no whole checkpoint of this format.
        ConversionError: it holds another model, or not all of it; names key or field, and folder.
    """
    folder = MegatronFolder(path, rules_for(hf_config))
    for source, record in folder.records.items():
        compare_configs(hf_config, record, source=str(source))
    return folder.root


def check_megatron_dir(config: Config, hf_config: PretrainedConfig) -> None:
    """Refuse a `model.megatron_dir` that training cannot start from; reads no tensor.

    Raises:
        ConfigError: no whole checkpoint of this model, or one below the run's own output.
    """
    megatron_dir, output_dir = config.model.megatron_dir, config.run.output_dir
    try:
        folder = find_weights(megatron_dir, hf_config)
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"model.megatron_dir ({megatron_dir}): {error}") from None
    if folder.resolve().is_relative_to(Path(output_dir).resolve()):
        raise ConfigError(
            f"model.megatron_dir ({megatron_dir}) must lie outside run.output_dir ({output_dir}): "
            "a run continues from its checkpoints by itself, and removes old ones"
        )


def load_weights(stage: PolicyModel, folder: str | Path) -> None:
    """Fill a pipeline stage from a checkpoint of any layout: each rank reads its part of it.

    Tensors of other kinds in the folder (an optimizer's) are not read. Weights are cast to the
    model's precision; rows that pad its vocabulary become zero.

    Args:
        stage: as built.
        folder: with the `.metadata`; see `find_weights`.

    Collectives: those of `dist_checkpointing.load`.

    Raises:
        ConversionError: a tensor is missing or misshapen, or a file is damaged.
    """
    folder = Path(folder)
    with cpu.device_scope():
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
        wanted = stage.sharded_state_dict(metadata=_layout_of(keys))
        # Transformer Engine's modules ask for what they keep beside their weights: scales of fp8.
        # A start does without, and a folder of other layers has none.
        wanted = {name: part for name, part in wanted.items() if not _is_extra_state(name)}
        for part in wanted.values():
            part.key = find_spelling(stage.rules, part.key, keys)
        try:
            state = dist_checkpointing.load({"model": wanted}, str(folder))["model"]
        except (CheckpointingException, CheckpointException, KeyError) as error:
            raise ConversionError(f"{folder}: {error}") from error
        missing, unexpected = stage.load_state_dict(state, strict=False)
    lost = [name for name in missing if not _is_extra_state(name)]
    assert not lost and not unexpected, (lost, unexpected)
    stage.clear_padding()


def _layout_of(keys: Collection[str]) -> dict[str, Any]:
    """How the writer named its tensors; see `convert.disk_keys`."""
    return {
        "non_homogeneous_layers": any(key.startswith("decoder.layers.0.") for key in keys),
        "singleton_local_shards": any(key.endswith(".linear_fc1.weight_w") for key in keys),
    }


def _is_extra_state(name: str) -> bool:
    return name.endswith("_extra_state")
