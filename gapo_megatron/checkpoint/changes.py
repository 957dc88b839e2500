"""Settings that change when a run resumes: which are allowed, and a record of them.

A setting that changes what is learned must be named in `run.allow_changes`; another file of
held-out problems needs no permission, because it only changes what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from gapo_megatron.config import AdapterConfig, Config
from gapo_megatron.config.roles import changed_work, is_held_out, is_input, role_of
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.manifest import Manifest
from gapo_megatron.io.files import write_atomically
from gapo_megatron.io.run_folder import CHANGES_NAME, read_changes


def require_allowed(path: Path, found: Manifest, config: Config) -> None:
    """Refuse changes of what is learned since the checkpoint in `path`, unless allowed.

    Raises:
        ConfigError: names each setting with both values, and how to allow it, if it can be.
    """
    changed = {
        name: pair
        for name, pair in changed_work(found.config, config).items()
        if not is_input(name)
    }
    # Other trained weights: no allowance makes them fit.
    fixed = {name: pair for name, pair in changed.items() if role_of(name).fixed}
    allowed = config.run.allow_changes
    refused = fixed or {name: pair for name, pair in changed.items() if name not in allowed}
    if not refused:
        return
    shown = "; ".join(f"{name} ({now!r}) was {was!r}" for name, (was, now) in refused.items())
    if fixed:
        advice = f"{AdapterConfig.kept}. Start it in another run.output_dir"
    else:
        advice = (
            "the rest of the run would be a different run. Keep the former value, start it in "
            "another run.output_dir, branch it (checkpoint.branch_from), or allow the change with "
            f"run.allow_changes={json.dumps([*allowed, *refused])}, and the run's reports will "
            "show it"
        )
    raise ConfigError(f"{shown} in {path}: {advice}")


def record_changes(run_dir: Path, found: Manifest, config: Config) -> None:
    """Write CHANGES_NAME: which settings changed before which step. On rank 0, when a run resumes.

    A resume from an older checkpoint drops the changes after it. A branch's first checkpoint has
    the branch's settings: its own changes do not count.
    """
    try:
        kept = [one for one in read_changes(run_dir) if one["step"] < found.step]
    except DataError:
        kept = []  # only a record: no step depends on it
    # Training problems are compared by content, when they are loaded; held-out problems by path.
    changed = {
        name: list(pair)
        for name, pair in changed_work(found.config, config).items()
        if not is_input(name) or is_held_out(name)
    }
    if changed:
        kept.append({"step": found.step, "changes": changed})
    if kept or (run_dir / CHANGES_NAME).exists():
        write_atomically(run_dir / CHANGES_NAME, json.dumps(kept, indent=2))
