"""`make test-gpu` without a GPU: its parts at tiny sizes, and what runs and keeps them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import os
import signal
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
from gapo_megatron.run.memory import DeviceMemory
from tests.dist import run_distributed
from tests.gpu import __main__ as command
from tests.gpu import engine, optimizers, programs, resources, runner, training, transfer
from tests.gpu.parts import PARTS, REPEATABLE, Part
from tests.gpu.report import Report, Row, table
from tests.gpu.setting import Setting
from tests.stand_ins.fused_optimizers import stand_ins
from tests.waiting import HANG_S, wait_until

BY_NAME = {part.name: part for part in PARTS}
MODULES = {
    module.__name__.split(".")[-1]: module
    for module in (engine, optimizers, programs, resources, training, transfer)
}


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


@pytest.mark.parametrize(
    "names",
    [
        ("equal_bits", "nothing_to_score"),
        ("ten_sft_steps", "ten_learn_steps"),
        ("fp16",),
        ("rounding",),
        ("memory", "speed"),
        ("speed_recomputed", "save_and_load"),
        ("to_a_second_process",),
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


def run_optimizers(broken: bool) -> list[Row]:
    """With stand-ins for the kernels; broken: apex's step has the wrong sign."""
    with stand_ins():
        if broken:
            import amp_C

            real = amp_C.multi_tensor_adam
            amp_C.multi_tensor_adam = lambda *args: real(*args[:3], -args[3], *args[4:])
        return run_tiny("optimizers")["optimizers"]


@pytest.mark.parametrize("broken", [False, True])
def test_optimizers_are_compared_with_torchs(broken: bool) -> None:
    (rows,) = run_distributed(run_optimizers, 1, broken)
    compared = {row.what: row.holds for row in rows if row.kind == "claim"}
    assert {one for one, holds in compared.items() if not holds} == (
        {"fp32, apex: step beside torch's"} if broken else set()
    )
    assert len(compared) == 6


def run_memory(bytes_per_reading: int) -> list[Row]:
    """With a device whose free memory grows by so much from reading to reading."""
    readings = itertools.count()
    resources.device_reader = lambda device: (
        lambda peak: DeviceMemory(100, 200, bytes_per_reading * next(readings))
    )
    return run_tiny("memory")["memory"]


@pytest.mark.parametrize("grows", [False, True])
def test_the_weights_leave_free_memory(grows: bool) -> None:
    (rows,) = run_distributed(run_memory, 1, 2**30 if grows else 1)
    claims = [row for row in rows if row.kind == "claim" and "without the weights" in row.what]
    assert len(claims) == 4 and all(row.holds == grows for row in claims)


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
        programs.count_tests(ET.fromstring(f"<s>{cases}</s>"), report, needs_some=True)
        assert report.holds == expected, report.rows


def head_records(*, exact: bool = True, ours_s: float = 0.05) -> list[dict[str, Any]]:
    key = {"shape": "16384x1536x151936"}
    found = {"note": "triton_kernels", "d_error_max": 1e-7, "other_bits": 0.0}
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


def test_bits_that_depend_on_the_packing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner.ROOT / "benchmarks")
    head = importlib.import_module("head")
    problem = head.make_problem("96x32x64", "float32", "random", "cpu")
    ours = head.load_head("ours", problem).log_probs

    def by_number_of_rows(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log_probs: torch.Tensor = ours(h, w, y)
        return log_probs * (1 + 1e-6 * (len(y) == len(problem.labels)))

    assert head.other_bits(ours, problem) == 0
    assert head.other_bits(by_number_of_rows, problem) > 0.9


def test_time_that_spans_share_counts_once() -> None:
    assert resources.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == (4, 6)
    assert resources.covered([]) == (0, 0)


def command_of(script: str) -> Any:
    return lambda part, rows, scratch: [sys.executable, "-c", script, str(rows), str(scratch)]


def run_one(
    part: Part, script: str, folder: Path, *, again: bool = True, lines: list[str] | None = None
) -> dict[str, Any]:
    """The result of `run_parts` for one part, whose process runs the script."""
    say = [].append if lines is None else lines.append
    command = command_of(script)
    (result,) = runner.run_parts([part], FACTS, folder, command, again=again, say=say)
    return result


FACTS = {"modules": [*runner.NEEDED], "device": "a device", "why": "", "broken": ""}
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
        return str(run_one(ONE, script, tmp_path / folder, again=again)["status"])

    broken = WRITE.format([GOOD | {"holds": False}])
    assert run("raise SystemExit(1)") == "crashed"
    assert run(broken) == "failed"
    assert run(WRITE.format([GOOD])) == "passed"  # neither of the two counted as done
    assert run(broken) == "passed"
    assert run(broken, folder="another identity") == "failed"
    assert run(broken, again=True) == "failed"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_runs_without_what_every_part_needs(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = [name for name in runner.NEEDED if name != "megatron.core"]
    monkeypatch.setattr(runner, "look", lambda parts: FACTS | {"modules": modules})
    monkeypatch.setattr(runner, "run_parts", lambda *args, **options: [])
    assert command.main(["--device", device, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert f"{sys.executable} -m pip install megatron-core\n" in said and not [*tmp_path.iterdir()]


def processes(folder: Path) -> list[int]:
    """Of the part's process and of a program it has started, once both are there."""
    return [int(path.read_text()) for path in folder.glob("*.pid") if path.read_text()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_part_ends_with_the_runner(number: signal.Signals, tmp_path: Path) -> None:
    own = f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, '{{}}.pid')"
    own += ".write_text(str(os.getpid())); "
    program = own.format("program") + "import time; time.sleep(600)"
    part = own.format("part") + "import sys; from tests.gpu import runner; "
    part += f"runner.run_program([sys.executable, '-c', {program!r}])"
    started = (
        "import signal, sys; from pathlib import Path; from tests.gpu import parts, runner\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup
        "runner.exit_on_signals()\n"
        "part = parts.Part('one', 'programs', '', 600)\n"
        f"runner.run_part(part, lambda *_: [sys.executable, '-c', {part!r}],"
        f" log=Path({str(tmp_path / 'one.log')!r}))"
    )
    found = subprocess.Popen([sys.executable, "-c", started], cwd=runner.ROOT)
    try:
        wait_until(lambda: len(processes(tmp_path)) == 2, "the part and its program")
        pids = processes(tmp_path)
        found.send_signal(number)
        assert found.wait(HANG_S) == (-9 if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not any(map(is_alive, pids)), "their end")
    finally:
        found.kill()
        for pid in processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["", "os._exit(3)", "time.sleep(600)"])
def test_a_parts_folder_goes_with_it(end: str, tmp_path: Path) -> None:
    folders: list[Path] = []

    def command(part: Part, rows: Path, scratch: Path) -> list[str]:
        folders.append(scratch)
        (scratch / "big").write_text("of a part")
        return [sys.executable, "-c", f"import os, time; {end}"]

    part = Part("one", "programs", "something", 1 if "sleep" in end else HANG_S)
    runner.run_part(part, command, log=tmp_path / "one.log")
    (folder,) = folders
    assert folder.is_absolute() and not folder.exists()


def test_the_summary_has_every_part(tmp_path: Path) -> None:
    first, second, third = PARTS[:3]
    kept = {"part": first.name, "status": "passed", "why": "", "seconds": 1.0, "rows": [GOOD]}
    (tmp_path / f"{first.name}.json").write_text(json.dumps(kept))
    Report(path=tmp_path / f"{second.name}.rows.json").figure("half", 1)
    found = runner.all_results(tmp_path, FACTS)
    assert [one["part"] for one in found] == [part.name for part in PARTS]
    statuses = {one["part"]: one["status"] for one in found}
    assert found[0] == kept and statuses[second.name] == "not finished"
    assert statuses[third.name] == "not run" and statuses["engine"] == "missing"
    about = runner.identity(FACTS, tiny=False)
    text = runner.write_summary(tmp_path, about, found)
    assert all(part.name in text for part in PARTS) and "half" in text


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
        runner,
        "look",
        lambda parts: FACTS | {"modules": ["torch"], "device": "", "why": "no device"},
    )
    assert command.main([]) == 2
    said = capsys.readouterr().out
    assert "no device" in said and "no vllm" in said and "triton" in said
    assert all(part.name in said and part.tells in said for part in PARTS if part.name != "head")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_look_is_honest_here() -> None:
    facts = runner.look(PARTS)
    assert not facts["device"] and facts["why"]
    assert {"torch", "megatron.core", "triton"} <= set(facts["modules"])
    assert runner.missing(BY_NAME["fp8"], facts)


@pytest.mark.system
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    names = ["tiny_update", "equal_bits", "engine", "gpt_oss", "moonlight", "engine_fp16"]
    names += ["engine_lora", "head", "fp8"]
    process = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(
        [*process, "--minutes", "0", "--only", *names],
        cwd=runner.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    (results,) = tmp_path.glob("*/results.json")
    found = {one["part"]: one for one in json.loads(results.read_text())["results"]}
    statuses = {name: one["status"] for name, one in found.items()}
    expected = dict.fromkeys(found, "not run") | dict.fromkeys(names, "passed") | {"fp8": "missing"}
    assert statuses == expected, f"{found}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0
    assert (results.parent / "table.md").read_text() in done.stdout


def test_what_is_missing_is_said_and_not_run(tmp_path: Path) -> None:
    part = Part("one", "engine", "something", 60, ("transformer_engine", "fp8"))
    lines: list[str] = []
    result = run_one(part, "raise SystemExit(1)", tmp_path, lines=lines)
    assert result["status"] == "missing"
    for text in (result["why"], "".join(lines), table([result])):
        assert "transformer_engine" in text and "fp8" in text


def test_every_part_is_there() -> None:
    for part in PARTS:
        assert callable(getattr(MODULES[part.module], part.name))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_part_that_compares_bits_of_updates_has_what_they_need(
    repeats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in REPEATABLE:
        monkeypatch.delenv(name, raising=False)
    script = f"import os; assert all((name in os.environ) == {repeats} for name in {[*REPEATABLE]})"
    script += "\n" + WRITE.format([GOOD])
    result = run_one(dataclasses.replace(ONE, repeats=repeats), script, tmp_path)
    assert result["status"] == "passed"
    assert BY_NAME["save_and_load"].repeats


def test_rows_are_written_as_they_are_found(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from tests.gpu.report import Report\n"
        "Report(path=pathlib.Path(sys.argv[1])).figure('a figure', 3)\n"
        "for i in range(100): print('line', i)\n"
        "raise SystemExit(4)"
    )
    lines: list[str] = []
    result = run_one(dataclasses.replace(PARTS[1], limit_s=60), script, tmp_path, lines=lines)
    assert result["status"] == "crashed" and result["rows"][0]["what"] == "a figure"
    assert "line 71\n" in "\n".join(lines) and "line 69\n" not in "\n".join(lines)


def test_waits_are_counted_by_the_line_that_waits() -> None:
    def work() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    setting = Setting("cpu", tiny=True, folder=Path())
    ((place, count),) = resources.count_waits(setting, work).items()
    assert count == 3 and Path(__file__).name in place
