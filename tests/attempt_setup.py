"""An attempt without a launcher's environment, signal handlers and watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapo_megatron.run.attempt import Attempt


def make_attempt(run_dir: Path, *, name: str = "7.0", **settings: Any) -> Attempt:
    """Owner of `run_dir`. The process group must be up. Collective."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "OWNER").write_text(f"{name}\n")
    usual = {"folder": None, "job_end_unix_s": None, "hang_timeout_s": 600, "stop_margin_s": 10}
    return Attempt(run_dir, name, **usual | settings)
