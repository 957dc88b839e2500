"""Load a Megatron folder with Megatron-core's loader, without running code from its pickles."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException
from transformers import PretrainedConfig

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_checkpoint import CheckpointingException
from gapo_megatron.compat.torch import reads_metadata_by
from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.config_check import compare_configs
from gapo_megatron.formats.disk_keys import find_spelling
from gapo_megatron.formats.manifest import MANIFEST_NAME, Manifest, find_damage
from gapo_megatron.formats.torch_dist import MegatronFolder
from gapo_megatron.formats.unpickle import check_extra_state, explain, read_metadata
from gapo_megatron.io.files import real
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy.model import PolicyModel, is_own

logger = logging.getLogger(__name__)

# What Megatron-core raises for a damaged or malicious folder.
_DAMAGE = (
    *(CheckpointingException, CheckpointException, pickle.UnpicklingError, EOFError, OSError),
    *(AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
_DATA_ALONE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NOT_ALONE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def find_weights(path: str | Path, hf_config: PretrainedConfig) -> MegatronFolder:
    """Find the checkpoint in a Megatron folder, and check that it holds the model.

    Args:
        path: the checkpoint, or a folder above it; see `formats.megatron_record.find_megatron`.
        hf_config: the model's Hugging Face config.

    Raises:
        ConfigError: there is no complete checkpoint of the format torch_dist.
        ConversionError: it holds another model, or lacks weights; names folder and key or field.
    """
    folder = MegatronFolder(path, rules_for(hf_config))
    for source, record in folder.records.items():
        compare_configs(hf_config, record, source=str(source))
    return folder


def check_megatron_dir(config: Config, hf_config: PretrainedConfig) -> None:
    """Refuse a `model.megatron_dir` that training cannot start from; reads no tensor.

    Raises:
        ConfigError: it has no complete checkpoint of this model, or lies in the run's own output.
    """
    megatron_dir, output_dir = config.model.megatron_dir, config.run.output_dir
    try:
        folder = find_weights(megatron_dir, hf_config).root
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"model.megatron_dir ({megatron_dir}): {error}") from None
    if real(folder).is_relative_to(real(output_dir)):
        raise ConfigError(
            f"model.megatron_dir ({megatron_dir}) must lie outside run.output_dir ({output_dir}): "
            "a run resumes from its own checkpoints by itself, and removes old ones"
        )


def check_digests(
    folder: MegatronFolder, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Compare every file with its digest in the manifest, or log that there is no manifest.

    Args:
        folder: the folder of the files.
        on_bytes: called with each number of bytes read.

    Collectives, over all ranks: a gather of damage reports; every rank reads its share.

    Raises:
        ConversionError: on every rank; names the file.
    """
    if folder.manifest is not None:
        if damage := find_damage_together(folder.root, folder.manifest, on_bytes=on_bytes):
            raise ConversionError(damage)
    elif dist.get_rank() == 0:
        logger.warning("cannot check the digests of %s: it has no %s", folder.root, MANIFEST_NAME)


def find_damage_together(
    folder: Path, found: Manifest, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> str | None:
    """Run `formats.manifest.find_damage` on all files of a manifest; the same result on every rank.

    Collectives, over all ranks: a gather of damage reports; every rank reads its share.
    """
    # Dealt round-robin, largest first: every rank reads about the same number of bytes.
    by_size = sorted(found.files, key=lambda name: (-found.files[name].num_bytes, name))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    files = {name: found.files[name] for name in share}
    return first_problem(find_damage(folder, files, on_bytes=on_bytes))


def first_problem(problem: str | None) -> str | None:
    """The problem of the first rank that has one; None if no rank has. Collective, all ranks."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((one for one in problems if one is not None), None)


def load_weights(stage: PolicyModel, folder: str | Path) -> None:
    """Load a pipeline stage from a checkpoint of any layout; each rank reads its part.

    Other tensors in the folder, such as an optimizer's, are not read. Weights are cast to the
    model's precision; rows of vocabulary padding become zero. An adapter's own parameters stay.

    Args:
        stage: the stage as built.
        folder: the folder with the `.metadata`; see `find_weights`.

    Collectives: those of `load_sharded`.

    Raises:
        ConversionError: a tensor is missing or misshapen, or a file is damaged.
    """
    folder = Path(folder)

    def is_of_model(name: str) -> bool:
        return not _is_extra_state(name) and not is_own(name)

    with cpu.device_scope():
        keys = read_metadata(folder).state_dict_metadata.keys()
        # Options of Megatron-core with which the writer named its tensors; see `formats.disk_keys`.
        naming = {
            "non_homogeneous_layers": any(key.startswith("decoder.layers.0.") for key in keys),
            "singleton_local_shards": any(key.endswith(".linear_fc1.weight_w") for key in keys),
        }
        wanted = stage.sharded_state_dict(metadata=naming)
        # Transformer Engine's modules also ask for their fp8 scales. A start does not need them,
        # and a folder written with other layers has none.
        wanted = {name: part for name, part in wanted.items() if is_of_model(name)}
        for part in wanted.values():
            part.key = find_spelling(stage.rules, part.key, keys)
        state = load_sharded({"model": wanted}, folder)["model"]
        missing, unexpected = stage.load_state_dict(state, strict=False)
    lost = [name for name in missing if is_of_model(name)]
    assert not lost and not unexpected, (lost, unexpected)
    stage.clear_padding()


def resume_weights(stage: PolicyModel, state: dict[str, Any], *, lacks_frozen: bool) -> None:
    """Load a stage from its own state, as `load_sharded` has filled it.

    Args:
        stage: the stage as built.
        state: its parameters, and whatever else its modules save.
        lacks_frozen: whether parameters that are not trained may be missing; they stay.
    """
    missing, unexpected = stage.load_state_dict(state, strict=not lacks_frozen)
    trained = {name for name, one in stage.named_parameters() if one.requires_grad}
    assert not unexpected and not trained.intersection(missing), (missing, unexpected)


def load_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load a sharded state dict like `dist_checkpointing.load`, but unpickle only data.

    Args:
        state: sharded state dict; tensors in it are filled in place.
        folder: the folder with the `.metadata`.

    Collectives: those of Megatron-core's load.

    Raises:
        ConversionError: a tensor is missing or misshapen, or a file is damaged, cannot be read or
            would run code.
    """
    try:
        with cpu.device_scope(), _data_alone():
            loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
        _check_extra_states(loaded, source=str(folder))
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes.values()):
            raise  # not the folder's fault
        told = (f"rank {rank}: {explain(cause)}" for rank, cause in causes.items())
        # Prefer an error of the disk as the cause: reading again may then succeed.
        disk = (cause for cause in causes.values() if isinstance(cause, OSError))
        raise ConversionError(f"{folder}: {'; '.join(told)}") from next(disk, error)
    except _DAMAGE as error:
        if isinstance(error, ConversionError):
            raise
        logger.debug("%s", folder, exc_info=True)  # a caller may log only the first line
        raise ConversionError(f"{folder}: {type(error).__name__}: {explain(error)}") from error
    return loaded


@contextlib.contextmanager
def _data_alone() -> Iterator[None]:
    """Forbid torch.distributed.checkpoint to run code from pickles.

    Our reader reads `.metadata`. For objects beside the tensors, and for common.pt if the user's
    environment allows code, torch's environment variable forces weights_only.
    """
    before = dict(os.environ)
    os.environ[_DATA_ALONE] = "1"
    os.environ.pop(_NOT_ALONE, None)
    try:
        with reads_metadata_by(read_metadata):
            yield
    finally:
        for name in (_DATA_ALONE, _NOT_ALONE):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _check_extra_states(tree: Any, *, source: str) -> None:
    """Check the extra states before Transformer Engine unpickles them, which it does unchecked."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            _check_extra_states(value, source=source)
        elif _is_extra_state(str(name)):
            check_extra_state(value, source=f"{source}: {name}")


def _is_extra_state(name: str) -> bool:
    """Whether a name ends in `_extra_state`, or `_extra_state1` etc. for grouped experts."""
    return re.search(r"_extra_state\d*$", name) is not None
