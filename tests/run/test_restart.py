"""A run folder without checkpoints: which runs start over, and which are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import Config, parse_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.folder import is_marked, mark
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.launch.prepare import check_before_nodes
from gapo_megatron.run import attempt
from gapo_megatron.run.restart import AFTER_A_SAVE, check_not_lost
from gapo_megatron.train import check_before_imports
from tests.branch_setup import make_checkpoint, tree_of
from tests.configs import merged
from tests.messages import mentions
from tests.tools.dry_run.test_dry_run import text_of


def make_config(root: Path, **sections: dict[str, Any]) -> Config:
    """A run of 9 steps in `new/`, saved after every third."""
    usual = {"run": {"num_steps": 9}, "checkpoint": {"every_steps": 3, "branch_from": ""}}
    return parse_config(tree_of(root, **merged(usual, sections)), source="test")


RANK_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """State of a run killed before its first checkpoint was published."""
    folder = tmp_path / "new"
    (folder / "checkpoints/.tmp_step_00000003.7.0").mkdir(parents=True)
    (folder / "evaluations").mkdir()
    (folder / "evaluations/step_0.json").write_text("{}")
    write_metrics(folder, 0, 1, 2)
    for name in ("config.toml", "OWNER", "timings.jsonl"):
        (folder / name).write_text("")
    return folder


def write_metrics(folder: Path, *steps: int) -> None:
    lines = [json.dumps({"step": step}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def test_what_had_no_checkpoint_begins_anew(tmp_path: Path, run_dir: Path) -> None:
    check_not_lost(make_config(tmp_path))
    check_not_lost(make_config(tmp_path / "never_begun"))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')  # cut off by the kill
    check_not_lost(make_config(tmp_path))


def test_the_sign_of_a_save_is_what_a_save_leaves() -> None:
    assert attempt.STAGE_SECONDS_NAME == AFTER_A_SAVE


SIGNS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda folder: write_metrics(folder, 0, 1, 2, 3),
    "evaluations/step_3.json": lambda folder: (folder / "evaluations/step_3.json").write_text(""),
    "hf": lambda folder: (folder / "hf").mkdir(),
    "finished.json": lambda folder: mark_finished(folder, num_steps=6),
    "stage_seconds.json": lambda folder: (folder / "stage_seconds.json").write_text("{}"),
    ".damaged_step_00000003": lambda folder: (
        folder / "checkpoints/.damaged_step_00000003"
    ).mkdir(),
}


@pytest.mark.parametrize(("name", "leave"), SIGNS.items(), ids=SIGNS)
def test_what_had_one_does_not(
    tmp_path: Path, run_dir: Path, name: str, leave: Callable[[Path], Any]
) -> None:
    leave(run_dir)
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match=mentions(f"run.output_dir ({run_dir})", name)):
        check_not_lost(config)
    make_checkpoint(run_dir, config, step=3)
    check_not_lost(config)


def test_a_run_that_is_finished_needs_none(tmp_path: Path, run_dir: Path) -> None:
    write_metrics(run_dir, *range(10))
    mark_finished(run_dir, num_steps=9)
    check_not_lost(make_config(tmp_path))
    more = make_config(tmp_path, run={"num_steps": 12})
    with pytest.raises(ConfigError, match=mentions("run.output_dir", "finished.json")):
        check_not_lost(more)


def test_a_run_that_saves_at_its_end_has_none_before(tmp_path: Path, run_dir: Path) -> None:
    write_metrics(run_dir, *range(9))
    config = make_config(tmp_path, checkpoint={"every_steps": 0})
    check_not_lost(config)
    named = make_config(tmp_path, checkpoint={"every_steps": 0, "keep_steps": [8]})
    with pytest.raises(ConfigError, match=mentions("metrics.jsonl", 8)):
        check_not_lost(named)


def test_the_first_save_was_due_by_the_settings_of_that_time(tmp_path: Path, run_dir: Path) -> None:
    write_metrics(run_dir, *range(6))
    began = make_config(tmp_path, checkpoint={"every_steps": 8})
    (run_dir / "config.toml").write_text(to_toml(began))
    check_not_lost(make_config(tmp_path, checkpoint={"every_steps": 2}))
    (run_dir / "config.toml").write_text(to_toml(make_config(tmp_path)))
    with pytest.raises(ConfigError, match=mentions("metrics.jsonl", 5)):
        check_not_lost(began)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_disk_that_is_not_mounted_is_no_new_run(tmp_path: Path, kind: str) -> None:
    checkpoints = tmp_path / "new/checkpoints"
    checkpoints.parent.mkdir()
    if kind == "link":
        checkpoints.symlink_to(tmp_path / "elsewhere")
    else:
        checkpoints.write_text("")
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match=mentions("run.output_dir", checkpoints, kind)):
        check_not_lost(config)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        check_not_lost(config)


def test_a_copied_run_folder_goes_on_and_a_model_brought_by_itself_is_kept(
    tmp_path: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After `cp -r` to another disk, path and inode of the export differ from its marker."""
    (run_dir / "hf").mkdir()
    mark(run_dir / "hf", made_by="train", made_at=run_dir / "hf")
    (run_dir / "checkpoints/step_00000005").mkdir(parents=True)
    (run_dir / "checkpoints/step_00000005/manifest.json").write_text("{}")
    mark_finished(run_dir, num_steps=5)
    brought = tmp_path / "brought"
    for copy in (tmp_path / "copy", brought):
        shutil.copytree(run_dir, copy)
    (brought / "finished.json").unlink()
    mark_finished(brought, num_steps=5)  # by its own run, and `hf` alone is the other one's
    model = mentions("model.hf_dir")  # what is checked next
    for folder, says in ((tmp_path / "copy", model), (brought, mentions("run.output_dir/hf"))):
        run = {"output_dir": str(folder), "num_steps": 9}
        config = make_config(tmp_path, run=run, metrics={"tensorboard": False})
        with pytest.raises(ConfigError, match=says):
            check_before_imports(config)
    (record,) = caplog.records
    assert re.search(mentions(tmp_path / "copy", run_dir), record.getMessage())
    assert is_marked(tmp_path / "copy/hf", made_by="train")  # so it is replaced at the end


@pytest.mark.parametrize(
    ("owner", "env", "refused"),
    [
        ("7.0", {}, "GAPO_ATTEMPT"),
        ("7.0", {"GAPO_ATTEMPT": "7.0"}, "model.hf_dir"),  # what is checked next
        ("8.0", {}, "model.hf_dir"),  # another job's; this one is started by hand
    ],
)
def test_a_rank_without_its_launchers_variables_does_not_own_the_run(
    tmp_path: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    env: dict[str, str],
    refused: str,
) -> None:
    """As `sbatch --export=NONE` would make them."""
    (run_dir / "OWNER").write_text(f"{owner}\n")
    slurm = dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
    slurm |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NODELIST": "a"}
    for name, value in (slurm | env).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=mentions(refused)):
        check_before_imports(make_config(tmp_path, metrics={"tensorboard": False}))


def test_it_is_refused_before_anything_is_imported_and_by_a_dry_run(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "stage_seconds.json").write_text("{}")
    config = make_config(tmp_path, metrics={"tensorboard": False})
    for check in (check_before_imports, text_of):
        with pytest.raises(ConfigError, match=mentions("run.output_dir", "stage_seconds.json")):
            check(config)
    with pytest.raises(ConfigError, match=mentions("run.output_dir", "stage_seconds.json")):
        check_before_nodes(config, world_size=1)
    # What the other ranks see of a shared disk may be old; rank 0 judges.
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    (run_dir / "OWNER").unlink()
    with pytest.raises(ConfigError, match=mentions("model.hf_dir")):
        check_before_imports(config)
    for name in RANK_1:
        monkeypatch.delenv(name)
    (run_dir / "OWNER").touch()
