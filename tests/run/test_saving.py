"""What goes with a checkpoint: journals of steps that no resume repeats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron.checkpoint import Room, State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import CheckpointConfig
from gapo_megatron.formats import manifest
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
        run=SimpleNamespace(output_dir=str(tmp_path), num_steps=8), checkpoint=settings
    )
    attempt: Any = SimpleNamespace(leads=True, keep_stage_seconds=lambda _: None)
    generation: Any = SimpleNamespace(gather_open_groups=list, num_lost=0)
    none: Any = None
    checkpoints = Checkpoints(config, none, generation, none, attempt, Stopwatch())

    def begin(_: object, state: State, **__: object) -> Any:
        def finish() -> None:
            manifest.step_dir(checkpoints_dir(tmp_path), state.step).mkdir(parents=True)
            manifest.prune(checkpoints_dir(tmp_path), settings)

        document = SimpleNamespace(step=state.step)
        seconds = {"work_s": 0.0, "whole_s": 0.0}
        return SimpleNamespace(finish=finish, in_background=False, document=document, **seconds)

    monkeypatch.setattr(saving.checkpoint, "begin_save", begin)
    folder = tmp_path / JOURNAL_FOLDER
    folder.mkdir()
    for step in range(8):
        (folder / f"step_{step}_0.jsonl").touch()
        if step % 2:
            checkpoints.save(State(step=step + 1))
    left = {path.name for path in folder.iterdir()}
    assert left == {f"step_{step}_0.jsonl" for step in range(first, 8)}


@pytest.mark.parametrize("background", [True, False])
def test_memory_is_kept_from_save_to_save_if_training_continues_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Also for the first one of a run, which training waits for: it fills the memory."""
    settings = CheckpointConfig(every_steps=1, background=background)
    config: Any = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(tmp_path), num_steps=3), checkpoint=settings
    )
    attempt: Any = SimpleNamespace(
        leads=False, keep_stage_seconds=lambda _: None, agree=lambda mine: mine
    )
    generation: Any = SimpleNamespace(gather_open_groups=list, num_lost=0)
    none: Any = None
    checkpoints = Checkpoints(config, none, generation, none, attempt, Stopwatch())
    rooms: list[Any] = []
    waited: list[bool] = []

    def begin(*_: object, room: Room | None, in_background: bool, **__: object) -> Any:
        rooms.append(room)
        waited.append(not in_background)
        written = {"finish": lambda: None, "work_s": 0.0, "whole_s": 0.0}
        return SimpleNamespace(**written, in_background=in_background)

    monkeypatch.setattr(saving.checkpoint, "begin_save", begin)
    for step in (1, 2, 3):
        checkpoints.save(State(step=step))
    assert waited == [True, not background, True]
    assert rooms[1] is rooms[0] and isinstance(rooms[0], Room) == background
    assert rooms[2] is None  # nothing is copied for the last one


@pytest.mark.parametrize(("requeues", "stops"), [(True, [2]), (False, [])])
def test_after_a_checkpoint_a_job_without_all_its_ranks_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeues: bool, stops: list[int]
) -> None:
    """If its launcher requeues it, and unless that was its last step."""
    config: Any = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(tmp_path), num_steps=3), checkpoint=CheckpointConfig()
    )
    asked: list[str] = []
    attempt: Any = SimpleNamespace(
        leads=False,
        keep_stage_seconds=lambda _: None,
        requeues=requeues,
        ask_to_stop=asked.append,
    )
    generation: Any = SimpleNamespace(gather_open_groups=list, num_lost=0)
    none: Any = None
    checkpoints = Checkpoints(config, none, generation, none, attempt, Stopwatch())
    written = {"finish": lambda: None, "work_s": 0.0, "whole_s": 0.0, "in_background": False}
    monkeypatch.setattr(
        saving.checkpoint, "begin_save", lambda *_, **__: SimpleNamespace(**written)
    )
    found = []
    for step, num_lost in ((1, 0), (2, 2), (3, 2)):
        generation.num_lost = num_lost
        checkpoints.save(State(step=step))
        found += [step] * len(asked)
        asked.clear()
    assert found == stops
