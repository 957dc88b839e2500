"""Files of a run folder that record the run's state. Standard library only."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import open_file, read_json
from gapo_megatron.io.files import check_overwritable, naming, real, write_atomically

BRANCH_NAME = "branch.json"
"""The point at which a branched run left another run (`formats.manifest.Branch`)."""

CHANGES_NAME = "changes.json"
"""Settings that were changed on a resume, and the first step with them."""
FINISHED_NAME = "finished.json"
JOURNAL_FOLDER = "environment"
"""Journals of the environment's calls (`rollout.journal`)."""
VERIFIERS_FOLDER = "verifiers"
"""What user verifiers print, and their tracebacks: a file for each rank."""
OWNER_NAME = "OWNER"
"""Names the attempt that may write to the folder."""
_MAX_NAME_BYTES = 1024
_WRITTEN = (
    *("config.toml", "metrics.jsonl", "timings.jsonl", "samples.jsonl", "samples.1.jsonl"),
    *("timelines.jsonl", "timelines.1.jsonl", "evaluations", "tensorboard"),
    *("wandb_run_id.txt", "stage_seconds.json", "failures", BRANCH_NAME, CHANGES_NAME),
    *(JOURNAL_FOLDER, VERIFIERS_FOLDER),
)
"""Files that a run creates, replaces or removes. Launchers create other folders before its first
start, and `hf` has its own marker (`formats.folder`)."""
_IF_DAMAGED = (
    "remove the file: the run then resumes from its last checkpoint and, if all steps are done, "
    "exports the model again"
)


def find_runs(folder: Path) -> list[Path]:
    """Folders of started or submitted runs: the folder itself or, by name, those in it."""
    names = ("config.toml", "metrics.jsonl", "code")  # `code` is frozen on submission
    paths = [folder, *sorted(folder.glob("*/"))]
    found = [path for path in paths if any((path / name).exists() for name in names)]
    return found[:1] if found[:1] == [folder] else found


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
    """Read the settings that were changed when the run was resumed.

    Returns:
        Tables of `step` (the first with the new settings) and `changes` (setting: [before, now]),
        by step; empty if nothing was changed.

    Raises:
        DataError: the file holds something else; names it.
    """
    path = run_dir / CHANGES_NAME
    try:
        found = read_json(path, error=DataError)
    except FileNotFoundError:
        return []
    return parse_changes(found, where=str(path))


def parse_changes(found: Any, *, where: str) -> list[dict[str, Any]]:
    """Check the content of changes.json.

    Raises:
        DataError: names `where` and the rule.
    """
    is_whole = isinstance(found, list) and all(
        isinstance(one, dict)
        and type(one.get("step")) is int
        and isinstance(one.get("changes"), dict)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in one["changes"].values())
        for one in found
    )
    if not is_whole:
        raise DataError(
            f"{where}: not a list of changes: each needs `step` (a whole number) and `changes` "
            "(setting: [before, now])"
        )
    return list(found)


def checkpoints_dir(run_dir: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


def check_ours(run_dir: str | Path) -> None:
    """Refuse a folder with files that no run made, under names that a run writes.

    Raises:
        ConfigError: names the folder and the first such file.
    """
    # Every start writes OWNER first. Checkpoints may have been copied here to resume from them, and
    # their folder may be on another disk.
    brought = any(checkpoints_dir(run_dir).glob("step_*/manifest.json"))
    is_ours = brought or (Path(run_dir) / OWNER_NAME).exists()
    check_overwritable(run_dir, _WRITTEN, field="run.output_dir", is_ours=is_ours)


def read_owner(run_dir: str | Path) -> str:
    """Name of the attempt that may write to the folder; empty if there is none.

    Raises:
        MachineError: the disk cannot deliver the file; names it.
    """
    path = Path(run_dir) / OWNER_NAME
    with naming(path):
        try:
            with open_file(path) as file:
                return file.read(_MAX_NAME_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def check_writable(run_dir: str | Path, *, is_first: bool = True) -> None:
    """Create the run's folder and check that this node can write files there.

    Raises:
        ConfigError: it cannot be created or written; or see `check_ours`.
    """
    if is_first:
        check_ours(run_dir)
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
    """Whether a run of `num_steps` steps has finished in this folder, including the export.

    Raises:
        ConfigError: finished.json cannot be read or is damaged. Nothing else distinguishes a
            finished run from one stopped before its last evaluation.
    """
    path = Path(run_dir) / FINISHED_NAME
    try:
        found = read_json(path)
    except FileNotFoundError:
        return False
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # not the file's fault
            raise
        raise ConfigError(f"{error}; {_IF_DAMAGED}") from None
    if not isinstance(found, dict) or type(done := found.get("num_steps")) is not int:
        raise ConfigError(f"{path} has no whole number num_steps; {_IF_DAMAGED}")
    return bool(done >= num_steps)


def has_finished(run_dir: str | Path) -> bool:
    """Whether a run of any number of steps has finished in this folder."""
    return (Path(run_dir) / FINISHED_NAME).exists()


def mark_finished(run_dir: str | Path, *, num_steps: int) -> None:
    """Make `is_finished` true; for rank 0, after everything is written."""
    document = {"num_steps": num_steps, "run_dir": str(real(run_dir))}
    write_atomically(Path(run_dir) / FINISHED_NAME, json.dumps(document))


def finished_at(run_dir: str | Path) -> Path | None:
    """The folder's path when its run finished; differs if it was copied or moved later.

    None if no run has finished.
    """
    try:
        found = read_json(Path(run_dir) / FINISHED_NAME)
    except (ConfigError, FileNotFoundError):
        return None
    path = found.get("run_dir") if isinstance(found, dict) else None
    return Path(path) if isinstance(path, str) else None
