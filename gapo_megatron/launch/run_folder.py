"""Files of a run folder that tell how the run stands. The standard library alone."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from gapo_megatron.errors import ConfigError

BRANCH_NAME = "branch.json"
"""Of a branched run: where it left another one (`checkpoint.manifest.Branch`)."""


def checkpoints_dir(run_dir: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def check_writable(run_dir: str | Path) -> None:
    """Create the run's folder and prove that files can be written there.

    Raises:
        ConfigError: it cannot be created or written.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise ConfigError(
            f"run.output_dir ({str(run_dir)!r}) must be a folder this user can write to: "
            f"{error.strerror}"
        ) from None


def is_finished(run_dir: str | Path, *, num_steps: int) -> bool:
    """Whether a run of `num_steps` steps was completed in this folder, model exported and all."""
    try:
        text = (Path(run_dir) / "finished.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return bool(json.loads(text)["num_steps"] >= num_steps)


def has_finished(run_dir: str | Path) -> bool:
    """Whether a run of any number of steps was completed in this folder."""
    return (Path(run_dir) / "finished.json").exists()


def mark_finished(run_dir: str | Path, *, num_steps: int) -> None:
    """Make `is_finished` true. Rank 0, once everything is written."""
    write_atomically(Path(run_dir) / "finished.json", json.dumps({"num_steps": num_steps}))


def write_atomically(path: Path, text: str) -> None:
    """Write a line or more, which a reader sees whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)
