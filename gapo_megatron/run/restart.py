"""Refuse a run folder whose checkpoints are gone: the run would start over and replace its files.

A run that was killed before its first checkpoint does start over by itself. So the check looks for
files that are written only after a first checkpoint:

- stage_seconds.json, finished.json and the exported model;
- a line of metrics, or an evaluation, of the step after which the first was due, or later;
- refused checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from gapo_megatron.config import CONFIG_NAME, Config, load_recorded
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.folder import adopt
from gapo_megatron.formats.manifest import list_steps
from gapo_megatron.io.files import real
from gapo_megatron.io.metric_files import METRICS_NAME, last_step
from gapo_megatron.io.run_folder import checkpoints_dir, finished_at, has_finished, is_finished

logger = logging.getLogger(__name__)

AFTER_A_SAVE = "stage_seconds.json"
"""`attempt.STAGE_SECONDS_NAME`, whose module imports torch."""


def adopt_export(run_dir: Path) -> None:
    """Let a run continue in a copy of its folder and replace the exported model copied with it.

    The copy is recognised because finished.json and the export's marker name the same folder. A
    model that was copied here alone is not adopted.
    """
    former = finished_at(run_dir)
    if former is None or former == real(run_dir):
        return
    if adopt(run_dir / "hf", made_by="train", made_at=former / "hf"):
        logger.warning(
            "run.output_dir (%s) is a copy of %s: the run continues here and replaces its exported "
            "model at the end",
            run_dir,
            former,
        )


def check_not_lost(config: Config) -> None:
    """Refuse to start a run over in a folder that has had checkpoints. Imports no torch.

    Raises:
        ConfigError: names the folder and its remaining files; or `checkpoints` is not a folder, for
            instance a link to a disk that is not mounted.
        CheckpointError: `checkpoints` cannot be read.
    """
    run_dir = Path(config.run.output_dir)
    folder = checkpoints_dir(run_dir)
    if os.path.lexists(folder) and not folder.is_dir():
        target = f" to {os.readlink(folder)}, which does not exist" if folder.is_symlink() else ""
        raise ConfigError(
            f"run.output_dir ({run_dir}): {folder} is a {'link' if target else 'file'}{target}; "
            "it must be the folder of the run's checkpoints (is a disk not mounted?)"
        )
    if is_finished(run_dir, num_steps=config.run.num_steps) or list_steps(folder):
        return
    if signs := list(_signs(config, run_dir, folder)):
        raise ConfigError(
            f"run.output_dir ({run_dir}): there are no checkpoints in {folder}, but the run has "
            f"had some: {', '.join(signs)}. Restore them to continue; to start over, set another "
            f"folder or move this one away"
        )


def _signs(config: Config, run_dir: Path, folder: Path) -> Iterator[str]:
    """Files and steps in the run folder that exist only after a first checkpoint."""
    if has_finished(run_dir):
        yield "finished.json"
    for name in ("hf", AFTER_A_SAVE):
        if (run_dir / name).exists():
            yield name
    if folder.is_dir():
        yield from sorted(path.name for path in folder.glob(".damaged_step_*"))
    first = _first_due(run_dir, config)
    if (step := last_step(run_dir / METRICS_NAME)) is not None and step >= first:
        yield f"{METRICS_NAME} has step {step}, and the first checkpoint was due after step {first}"
    evaluations = run_dir / "evaluations"
    names = [path.name for path in evaluations.iterdir()] if evaluations.is_dir() else []
    matches = [re.fullmatch(r"step_([0-9]+)\.json", name) for name in names]
    if (step := max((int(match[1]) for match in matches if match), default=0)) >= first:
        yield f"evaluations/step_{step}.json"


def _first_due(run_dir: Path, config: Config) -> int:
    """Step after which the first checkpoint was due, by the run's own settings."""
    with contextlib.suppress(ConfigError):
        config = load_recorded(run_dir / CONFIG_NAME)
    steps = (config.checkpoint.every_steps or config.run.num_steps, *config.checkpoint.keep_steps)
    return min(config.run.num_steps, *steps)
