"""Settings that change when a run resumes: which are allowed, and a record of them.

A setting that changes what is learned must be named in `run.allow_changes`; another file of
held-out problems needs no permission, because it only changes what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from gapo_megatron.config import AdapterConfig, Config
from gapo_megatron.config.roles import Changes, changed_work, is_held_out, is_input, role_of
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.manifest import Manifest
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.run_folder import CHANGES_NAME, read_changes


def require_allowed(path: Path, found: Manifest, config: Config) -> None:
    """Refuse changes of what is learned since the checkpoint in `path`, unless allowed.

    Raises:
        ConfigError: names each setting with both values, and how to allow it, if it can be.
    """
    _refuse_other_adapter(path, found, config)
    refused = {
        name: pair
        for name, pair in changed_work(found.config, config).items()
        if not is_input(name) and name not in config.run.allow_changes
    }
    if refused:
        shown = "; ".join(f"{name} ({now!r}) was {was!r}" for name, (was, now) in refused.items())
        names = json.dumps([*config.run.allow_changes, *refused])
        raise ConfigError(
            f"{shown} in {path}: the rest of the run would be a different run. Keep the former "
            "value, start it in another run.output_dir, branch it (checkpoint.branch_from), or "
            f"allow the change with run.allow_changes={names}, and the run's reports will show it"
        )


def _refuse_other_adapter(path: Path, found: Manifest, config: Config) -> None:
    """Refuse a checkpoint of other trained weights: no allowance makes it fit."""
    changed = changed_work(found.config, config).items()
    fixed = {name: pair for name, pair in changed if role_of(name).fixed}
    if fixed:
        shown = "; ".join(f"{name} ({now!r}) was {was!r}" for name, (was, now) in fixed.items())
        raise ConfigError(
            f"{shown} in {path}: {AdapterConfig.kept}. Start it in another run.output_dir"
        )


def record_changes(run_dir: Path, found: Manifest, config: Config) -> None:
    """Write CHANGES_NAME: which settings changed before which step. On rank 0, when a run resumes.

    A resume from an older checkpoint drops the changes after it.
    """
    try:
        kept = [one for one in read_changes(run_dir) if one["step"] < found.step]
    except DataError:
        kept = []  # only a record: no step depends on it
    changed = _changes(found, config)
    if changed:
        pairs = {name: list(pair) for name, pair in changed.items()}
        kept.append({"step": found.step, "changes": pairs})
    if kept or (run_dir / CHANGES_NAME).exists():
        write_atomically(run_dir / CHANGES_NAME, json.dumps(kept, indent=2))


def _changes(found: Manifest, config: Config) -> Changes:
    """Changed settings that decide what is learned or measured.

    Training problems are compared by content, when they are loaded; held-out problems by path.
    A branch's first checkpoint has the branch's settings, so the branch's own changes do not count.
    """
    work = changed_work(found.config, config)
    return {name: pair for name, pair in work.items() if not is_input(name) or is_held_out(name)}
