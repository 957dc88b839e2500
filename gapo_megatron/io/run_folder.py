"""Files of a run folder that tell how the run stands. The standard library alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import check_overwritable, real, write_atomically

BRANCH_NAME = "branch.json"
"""Of a branched run: where it left another one (`hf.manifest.Branch`)."""

CHANGES_NAME = "changes.json"
"""Of a run that was resumed with other settings: what was changed, before which step."""
FINISHED_NAME = "finished.json"
OWNER_NAME = "OWNER"
"""Of the attempt that may write."""
_WRITTEN = (
    *("config.toml", "metrics.jsonl", "timings.jsonl", "evaluations", "tensorboard"),
    *("wandb_run_id.txt", "stage_seconds.json", "failures", BRANCH_NAME, CHANGES_NAME),
)
"""What a run begins anew, replaces or removes; launchers make other folders before its first start,
and `hf` has an owner of its own (`hf.folder`)."""
_IF_DAMAGED = (
    "remove the file: the run then goes on from its last checkpoint and, if all steps are done, "
    "exports the model again"
)


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs, started or submitted: the folder itself, or those in it by name."""
    names = ("config.toml", "metrics.jsonl", "code")  # the last: frozen when it was submitted
    paths = [folder, *sorted(folder.glob("*/"))]
    found = [path for path in paths if any((path / name).exists() for name in names)]
    return found[:1] if found[:1] == [folder] else found


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
    """What a run was resumed with that it did not have before.

    Returns:
        Tables of `step` (the first one of the new settings) and `changes` (setting: [before, now]),
        by step; none where nothing was changed.

    Raises:
        DataError: it is no such list; names the file.
    """
    path = run_dir / CHANGES_NAME
    try:
        found = read_json(path, error=DataError)
    except FileNotFoundError:
        return []
    return parse_changes(found, where=str(path))


def parse_changes(found: Any, *, where: str) -> list[dict[str, Any]]:
    """Check what `read_changes` returns.

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
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def check_ours(run_dir: str | Path) -> None:
    """Refuse a folder that holds somebody else's files under names that a run writes.

    Raises:
        ConfigError: names the folder and the first such file.
    """
    # Every start leaves its name in OWNER before it writes anything else. Checkpoints may have been
    # brought here to go on from; a folder for them may be another disk's.
    brought = any(checkpoints_dir(run_dir).glob("step_*/manifest.json"))
    is_ours = brought or (Path(run_dir) / OWNER_NAME).exists()
    check_overwritable(run_dir, _WRITTEN, field="run.output_dir", is_ours=is_ours)


def check_writable(run_dir: str | Path, *, is_first: bool = True) -> None:
    """Create the run's folder and prove that this node can write files there.

    Raises:
        ConfigError: it cannot be created or written, or as of `check_ours`.
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
    """Whether a run of `num_steps` steps was completed in this folder, model exported and all.

    Raises:
        ConfigError: finished.json cannot be read, or is damaged: nothing else tells a finished run
            from one that a stop has ended before its last evaluation.
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
    """Whether a run of any number of steps was completed in this folder."""
    return (Path(run_dir) / FINISHED_NAME).exists()


def mark_finished(run_dir: str | Path, *, num_steps: int) -> None:
    """Make `is_finished` true. Rank 0, once everything is written."""
    document = {"num_steps": num_steps, "run_dir": str(real(run_dir))}
    write_atomically(Path(run_dir) / FINISHED_NAME, json.dumps(document))


def finished_at(run_dir: str | Path) -> Path | None:
    """Where the folder was when its run was finished: elsewhere if it was copied or moved since.

    None where no run was finished, or an older version did not say where.
    """
    try:
        found = read_json(Path(run_dir) / FINISHED_NAME)
    except (ConfigError, FileNotFoundError):
        return None
    path = found.get("run_dir") if isinstance(found, dict) else None
    return Path(path) if isinstance(path, str) else None
