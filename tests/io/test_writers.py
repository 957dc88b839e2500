"""What commands write must not cost anybody a file: every writer of the package is tried here.

Folders that are replaced whole (`formats.folder`) are in tests/formats/test_convert_folders.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import CheckpointConfig, load_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats import manifest
from gapo_megatron.io.run_folder import check_ours, check_writable
from gapo_megatron.launch.prepare import check_before_nodes
from gapo_tools.reporting.report import MAKERS, write_report
from gapo_tools.reporting.scaling import claim_folder
from gapo_tools.viewer.server import write as write_page
from tests.messages import mentions
from tests.report_setup import write_run

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.toml")


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file, by name: what is in it, and when it was written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in files
    }


def report(folder: Path, run: Path) -> None:
    write_report([run], folder)


def scaling(folder: Path, _: Path) -> None:
    claim_folder(folder)


def page_of_a_run(folder: Path, _: Path) -> None:
    write_page(folder, None)


def page_elsewhere(folder: Path, run: Path) -> None:
    write_page(run, folder / "answers.html")


def start_of_a_run(folder: Path, _: Path) -> None:
    check_writable(folder)


def job(folder: Path, _: Path) -> None:
    check_before_nodes(load_config(DEMO, [f"run.output_dir={folder}"]), world_size=1)


def comparison(folder: Path, _: Path) -> None:
    arguments = argparse.Namespace(compare=[], output=folder)
    evaluate, compared = tool("evaluate"), "gapo_tools.evaluation.compare.compare"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared, lambda *_: [])
        evaluate._compare(arguments, {})


def evaluation(folder: Path, _: Path) -> None:
    arguments = argparse.Namespace(output=folder, model=str(folder), benchmarks=["aime24"])
    tool("evaluate")._keep_settings(arguments, None, {}, None)


def task_of_the_demo(folder: Path, _: Path) -> None:
    overrides = [f"data.train_path={folder}/train.jsonl", f"data.eval_path={folder}/eval.jsonl"]
    overrides += [f"supervised.initial_hf_dir={folder}_initial"]
    config = load_config(DEMO, overrides)
    tool("demo")._claim_task(config)
    tool("demo")._write_task(config)


def model_of_the_demo(folder: Path, _: Path) -> None:
    overrides = [f"supervised.initial_hf_dir={folder}"]
    overrides += [f"data.train_path={folder}_task/train.jsonl"]
    config = load_config(DEMO, overrides)
    tool("demo")._claim_task(config)
    tool("demo")._write_task(config)


WRITERS = {
    report: ["report.html", "figures/step_time.png", "figures/summary.csv"],
    scaling: ["throughput.png", "throughput.csv"],
    page_of_a_run: ["view.html"],
    page_elsewhere: ["answers.html"],
    start_of_a_run: [
        "config.toml",
        "metrics.jsonl",
        "tensorboard/x",
    ],
    job: ["config.toml", "evaluations/step_0.json"],
    comparison: ["comparison.md"],
    evaluation: ["results.json", "results.md", "aime24/notes"],
    task_of_the_demo: ["train.jsonl", "eval.jsonl", "supervised.jsonl"],
    model_of_the_demo: ["model.safetensors", "notes"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(autouse=True)
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take ten seconds."""
    few = {title: MAKERS[title] for title in ("Summary", "Time of a step, by stage")}
    monkeypatch.setattr("gapo_tools.reporting.report.MAKERS", few)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write, name) for write, names in WRITERS.items() for name in names],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_somebody_elses_file_in_the_way_is_named_and_stays(
    write: Callable[[Path, Path], None], name: str, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("theirs\n")
    before = state_of(folder)
    with pytest.raises(ConfigError) as caught:
        write(folder, run)
    assert any(part in str(caught.value) for part in (str(folder), name.split("/")[0]))
    assert state_of(folder) == before


def test_checkpoints_may_be_brought_and_lie_on_another_disk(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    check_ours(folder)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=mentions(folder, "metrics.jsonl")):
        check_ours(folder)
    (folder / "checkpoints/step_00000001").mkdir()
    (folder / "checkpoints/step_00000001/manifest.json").touch()
    check_ours(folder)


def test_other_files_in_the_folder_of_a_report_stay(run: Path, tmp_path: Path) -> None:
    """Also those that are called as a figure is; and the report may be written again.

    So may one that was killed before its page was written.
    """
    folder = tmp_path / "report"
    (folder / "figures").mkdir(parents=True)
    for name in ("notes", "figures/step_time.notes.txt", "figures/step_time.svg"):
        (folder / name).write_text("theirs\n")
    before = state_of(folder)
    for _ in range(2):
        write_report([run], folder)
        after = state_of(folder)
        assert {name: after[name] for name in before} == before
        (folder / "report.html").unlink()
    assert (folder / "figures" / "step_time.png").exists()


def test_a_run_goes_on_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("OWNER", "config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text("7.0\n")
    check_writable(tmp_path)
    (tmp_path / "OWNER").unlink()
    with pytest.raises(ConfigError, match=mentions("run.output_dir", tmp_path, "config.toml")):
        check_writable(tmp_path)


def test_code_is_not_frozen_into_itself() -> None:
    """It would be copied until paths are too long."""
    folder = ROOT / "configs" / "a" / "run"
    with pytest.raises(ConfigError, match=mentions("run.output_dir", folder)):
        job(folder, folder)
    assert not folder.parent.exists()


def test_pruning_keeps_a_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "weights").write_text("theirs")
    folder = tmp_path / "checkpoints"
    for step in (2, 3):
        manifest.step_dir(folder, step).mkdir(parents=True)
    manifest.step_dir(folder, 1).symlink_to(kept)
    manifest.prune(folder, CheckpointConfig(every_steps=1, keep_last=1))
    assert (manifest.step_dir(folder, 1) / "weights").read_text() == "theirs"
    assert not manifest.step_dir(folder, 2).exists()
