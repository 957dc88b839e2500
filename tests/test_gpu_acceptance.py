"""`make test-gpu` without a GPU: its parts at tiny sizes, and what runs and keeps them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from gapo_megatron.policy import destroy
from tests.dist import run_distributed
from tests.gpu import __main__ as command
from tests.gpu import engine, programs, resources, runner, training
from tests.gpu.parts import PARTS, Part
from tests.gpu.report import Report, Row, table
from tests.gpu.setting import Setting

BY_NAME = {part.name: part for part in PARTS}
MODULES = {"engine": engine, "programs": programs, "resources": resources, "training": training}


def run_tiny(*names: str) -> dict[str, list[Row]]:
    """Parts on this rank's CPU; the process group is up."""
    reports = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            report = Report()
            function = getattr(MODULES[BY_NAME[name].module], name)
            function(Setting("cpu", tiny=True, folder=Path(folder)), report)
            reports[name] = report.rows
            destroy()
    return reports


def test_every_part_is_there() -> None:
    for part in PARTS:
        assert callable(getattr(MODULES[part.module], part.name))


@pytest.mark.parametrize(
    "names",
    [
        ("equal_bits", "nothing_to_score"),
        ("ten_sft_steps", "ten_learn_steps"),
        ("memory", "speed"),
        ("speed_recomputed", "save_and_load"),
    ],
    ids="-".join,
)
def test_parts_on_a_cpu(names: tuple[str, ...]) -> None:
    (reports,) = run_distributed(run_tiny, 1, *names)
    for name, rows in reports.items():
        broken = [row for row in rows if row.kind == "claim" and not row.holds]
        assert any(row.kind == "claim" for row in rows) and not broken, f"{name}: {broken}"
        for row in rows:
            assert not isinstance(row.value, float) or math.isfinite(row.value), f"{name}: {row}"


def holds(rows: list[Row]) -> bool:
    return all(row.holds for row in rows if row.kind == "claim")


def off_by_a_bit(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one + 1e-6 for one in values]


def the_same(loss: float) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "target", "damage"),
    [
        ("equal_bits", "log_probs", off_by_a_bit),
        ("ten_sft_steps", "_supervised_step", the_same),
    ],
)
def test_parts_fail_where_they_should(name: str, target: str, damage: Any) -> None:
    (reports,) = run_distributed(run_damaged, 1, name, target, damage)
    assert not holds(reports)


def run_damaged(name: str, target: str, damage: Any) -> list[Row]:
    real = getattr(training, target)
    setattr(training, target, lambda *args, **options: damage(real(*args, **options)))
    return run_tiny(name)[name]


def test_marked_files_are_those_with_tests_for_a_gpu() -> None:
    names = {path.name for path in programs.marked_files()}
    assert {"test_attention.py", "test_logprob_triton.py", "test_offload.py"} <= names
    assert "test_config.py" not in names


def test_a_failed_or_missing_test_fails_the_part() -> None:
    case = '<testcase classname="m" name="t{}">{}</testcase>'
    kinds = {"ok": "", "bad": "<failure/>", "left": '<skipped message="no GPU"/>'}
    for present, expected in {("ok", "left"): True, ("ok", "bad"): False, ("left",): False}.items():
        cases = "".join(case.format(kind, kinds[kind]) for kind in present)
        report = Report()
        programs.count_tests(ET.fromstring(f"<s>{cases}</s>"), report, needs_all=True)
        assert report.holds == expected, report.rows


def head_records(*, exact: bool = True, ours_s: float = 0.05) -> list[dict[str, Any]]:
    key = {"shape": "16384x1536x151936"}
    found = {"note": "triton_kernels", "d_error_max": 1e-7}
    peers = {"ours": ours_s, "liger": 0.2, "cce": 0.01}
    alone = [{"exact": exact if p == "ours" else p != "cce", "provider": p} | found for p in peers]
    alone.append({"provider": "verl", "failed": "no module verl"})
    times = [
        {"provider": p, "active": f, "forward_s": [f * s / 2] * 3, "backward_s": [f * s / 2] * 3}
        for p, s in peers.items()
        for f in (1, 0.5)
    ]
    return [
        {"kind": "run"},
        *({"kind": "alone"} | key | one for one in alone),
        *({"kind": "time"} | key | one for one in times),
    ]


def test_the_head_is_compared_with_exact_peers_alone() -> None:
    report = Report()
    programs.compare_heads(head_records(), report, has_goals=True)
    rate, ratio = (row for row in report.rows if row.kind == "goal")
    assert rate.value == pytest.approx(8 * 16384 * 1536 * 151936 / 0.05 / 1e12) and rate.holds
    assert ratio.value == pytest.approx(4) and ratio.holds  # liger's: cce is not exact
    assert any("no module verl" in str(row) for row in report.rows) and report.holds
    slow, wrong = Report(), Report()
    programs.compare_heads(head_records(ours_s=0.15), slow, has_goals=True)
    assert slow.holds and not any(row.holds for row in slow.rows if row.kind == "goal")
    programs.compare_heads(head_records(exact=False), wrong, has_goals=True)
    assert not wrong.holds


def test_waits_are_counted_by_the_line_that_waits() -> None:
    def work() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    setting = Setting("cpu", tiny=True, folder=Path())
    ((place, count),) = resources.count_waits(setting, work).items()
    assert count == 3 and Path(__file__).name in place


def test_time_that_spans_share_counts_once() -> None:
    assert resources.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == (4, 6)
    assert resources.covered([]) == (0, 0)


def command_of(script: str) -> Any:
    return lambda part, rows: [sys.executable, "-c", script, str(rows), part.name]


FACTS = {"modules": [*runner.NEEDED], "device": "a device", "why": ""}
ONE = Part("one", "programs", "something", 60)
WRITE = "import json, sys; rows = {}; open(sys.argv[1], 'w').write(json.dumps(rows))"
GOOD = {"what": "w", "value": 1.5, "unit": "s", "kind": "claim", "rule": "r", "holds": True}


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (WRITE.format([GOOD]), "passed"),
        (WRITE.format([GOOD, GOOD | {"what": "broken", "holds": False}]), "failed"),
        (WRITE.format([GOOD]) + "; sys.exit(3)", "crashed"),
        ("raise SystemExit('the last line')", "crashed"),
        ("pass", "crashed"),  # it said nothing
        ("import time; print('at it', flush=True); time.sleep(600)", "timed out"),
    ],
)
def test_what_becomes_of_a_part(script: str, status: str, tmp_path: Path) -> None:
    part = Part("one", "programs", "something", 1 if status == "timed out" else 60)
    result = runner.run_part(part, command_of(script), log=tmp_path / "log")
    assert result["status"] == status
    if status == "failed":
        assert "broken" in result["why"]
    if "last line" in script:
        assert "the last line" in result["why"]
    assert status in table([result])


def test_a_part_is_alone_in_a_job_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("RANK", "3")
    script = "import os; assert not {{'RANK', 'SLURM_NTASKS'}} & set(os.environ); " + WRITE
    result = runner.run_part(ONE, command_of(script.format([GOOD])), log=tmp_path / "log")
    assert result["status"] == "passed", result


def test_what_is_done_is_kept_until_asked_again(tmp_path: Path) -> None:
    def run(script: str, *, again: bool = False, folder: str = "a") -> str:
        (result,) = runner.run_parts(
            [ONE], FACTS, tmp_path / folder, command_of(script), again=again, say=lambda _: None
        )
        return str(result["status"])

    broken = WRITE.format([GOOD | {"holds": False}])
    assert run("raise SystemExit(1)") == "crashed"  # is not kept
    assert run(WRITE.format([GOOD])) == "passed"
    assert run(broken) == "passed"
    assert run(broken, folder="another identity") == "failed"
    assert run(broken, again=True) == "failed"


def test_what_is_missing_is_said_and_not_run(tmp_path: Path) -> None:
    facts = FACTS | {"modules": [name for name in runner.NEEDED if name != "megatron.core"]}
    part = Part("one", "engine", "something", 60, ("vllm",))
    lines: list[str] = []
    (result,) = runner.run_parts(
        [part], facts, tmp_path, command_of("raise SystemExit(1)"), again=True, say=lines.append
    )
    assert result["status"] == "missing"
    for text in (result["why"], "".join(lines), table([result])):
        assert "megatron-core" in text and "vllm" in text


def test_an_identity_is_commit_device_and_versions() -> None:
    about = runner.identity(FACTS, tiny=False)
    keys = {
        runner.key(about | change)
        for change in ({}, {"commit": "f" * 40}, {"device": "other"}, {"versions": {}})
    }
    assert len(keys) == 4
    assert about["versions"]["torch"] == torch.__version__


def test_without_a_gpu_it_lists_what_it_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runner, "look", lambda parts: {"modules": ["torch"], "device": "", "why": "no device"}
    )
    assert command.main([]) == 2
    said = capsys.readouterr().out
    assert "no device" in said and "no triton" in said
    assert all(part.name in said and part.tells in said for part in PARTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_look_is_honest_here() -> None:
    facts = runner.look(PARTS)
    assert not facts["device"] and facts["why"]
    assert {"torch", "megatron.core", "triton"} <= set(facts["modules"])
    assert runner.missing(BY_NAME["fp8"], facts)


@pytest.mark.system
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    names = ["tiny_update", "equal_bits", "head", "engine", "fp8"]
    process = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(
        [*process, "--only", *names],
        cwd=runner.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    (results,) = tmp_path.glob("*/results.json")
    found = {one["part"]: one for one in json.loads(results.read_text())["results"]}
    statuses = {name: one["status"] for name, one in found.items()}
    expected = dict.fromkeys(names, "passed") | {"fp8": "missing"}
    assert statuses == expected, f"{found}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0
    assert (results.parent / "table.md").read_text() in done.stdout
