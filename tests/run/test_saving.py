"""What goes with a checkpoint: journals of steps that no resume repeats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron.checkpoint import State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import CheckpointConfig
from gapo_megatron.hf import manifest
from gapo_megatron.io.run_folder import JOURNAL_FOLDER, checkpoints_dir
from gapo_megatron.run import saving
from gapo_megatron.run.saving import Checkpoints


@pytest.mark.parametrize(
    ("keep_last", "keep_steps", "first"), [(1, (), 8), (2, (), 6), (9, (), 2), (2, (2,), 2)]
)
def test_journals_stay_while_a_resume_may_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, keep_steps: Any, first: int
) -> None:
    """A damaged newest checkpoint must not let the calls after the one before be made twice."""
    settings = CheckpointConfig(every_steps=2, keep_last=keep_last, keep_steps=keep_steps)
    config: Any = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(tmp_path)), checkpoint=settings
    )
    attempt: Any = SimpleNamespace(leads=True, keep_stage_seconds=lambda _: None)
    generation: Any = SimpleNamespace(gather_open_groups=list)
    none: Any = None
    checkpoints = Checkpoints(config, none, generation, none, attempt, Stopwatch())

    def save(_: object, state: State, **__: object) -> None:
        manifest.step_dir(checkpoints_dir(tmp_path), state.step).mkdir(parents=True)
        manifest.prune(checkpoints_dir(tmp_path), settings)

    monkeypatch.setattr(saving.checkpoint, "save", save)
    folder = tmp_path / JOURNAL_FOLDER
    folder.mkdir()
    for step in range(8):
        (folder / f"step_{step}_0.jsonl").touch()
        if step % 2:
            checkpoints.save(State(step=step + 1))
    left = {path.name for path in folder.iterdir()}
    assert left == {f"step_{step}_0.jsonl" for step in range(first, 8)}
