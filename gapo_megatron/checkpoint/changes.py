"""Settings that a run changes when it resumes: which may, and a record of those that did.

What is learned changes only where `run.allow_changes` names it; another file of held-out problems
needs no allowance, for it changes what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from gapo_megatron.config import Config
from gapo_megatron.config.roles import Changes, changed_work, is_held_out, is_input
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.hf.manifest import Manifest
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.run_folder import CHANGES_NAME, read_changes


def require_allowed(path: Path, found: Manifest, config: Config) -> None:
    """Refuse to learn otherwise than the checkpoint in `path` has, unless the config says so.

    Raises:
        ConfigError: names each setting with both values, and how to allow it.
    """
    refused = {
        name: pair
        for name, pair in changed_work(found.config, config).items()
        if not is_input(name) and name not in config.run.allow_changes
    }
    if refused:
        shown = "; ".join(f"{name} ({now!r}) was {was!r}" for name, (was, now) in refused.items())
        names = json.dumps([*config.run.allow_changes, *refused])
        raise ConfigError(
            f"{shown}, as in {path}: the rest of the run would be another one. Start it in another "
            "run.output_dir, branch it (checkpoint.branch_from), or allow the change with "
            f"run.allow_changes={names}, and the run's reports will show it"
        )


def record_changes(run_dir: Path, found: Manifest, config: Config) -> None:
    """Write CHANGES_NAME: what was changed before which step. On rank 0, when a run resumes.

    A resume from an older checkpoint drops what was changed after it.
    """
    try:
        kept = [one for one in read_changes(run_dir) if one["step"] < found.step]
    except DataError:
        kept = []  # a record, which no step depends on
    changed = _changes(found, config)
    if changed:
        pairs = {name: list(pair) for name, pair in changed.items()}
        kept.append({"step": found.step, "changes": pairs})
    if kept or (run_dir / CHANGES_NAME).exists():
        write_atomically(run_dir / CHANGES_NAME, json.dumps(kept, indent=2))


def _changes(found: Manifest, config: Config) -> Changes:
    """What differs and decides what is learned or measured.

    Problems to train on are compared by content, when they are loaded; held-out ones by their path.
    A branch's first checkpoint has the branch's settings: what it changed there is none of these.
    """
    work = changed_work(found.config, config)
    return {name: pair for name, pair in work.items() if not is_input(name) or is_held_out(name)}
