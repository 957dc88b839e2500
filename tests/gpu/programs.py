"""Parts that are programs: the tests marked `gpu`, the doctor's probe, the head's benchmark."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gapo_megatron.launch.node_checks import CommandError
from gapo_tools.diagnosis.ask import ask
from gapo_tools.diagnosis.kernels import policy_code
from tests.gpu.report import Report
from tests.gpu.runner import ROOT, run_program
from tests.gpu.setting import Setting

SHAPES = ("16384x1536x151936", "16384x3584x152064")
PEERS = (
    "ours-torch",
    "naive",
    "naive-rounded",
    "torch",
    "torch-large-chunk",
    "liger",
    "liger-tp",
    "cce",
    "verl-triton",
)


def marked_files() -> list[Path]:
    """Test files with tests that only a GPU runs."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    mark = re.compile(r"mark\.gpu|^@on_kernels", re.MULTILINE)
    return [path for path in files if mark.search(path.read_text(encoding="utf-8"))]


def marked_tests(setting: Setting, report: Report) -> None:
    """`pytest -m gpu`, one process: a test that breaks the device breaks those after it."""
    found = setting.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # As installed, plug-ins or none; the part has a limit, and a first compilation takes its time.
    command += ["-o", "addopts=", "-o", "minversion=8", "-o", "timeout=0"]
    command += [f"--basetemp={setting.folder / 'pytest'}", f"--junitxml={found}"]
    files = [str(path.relative_to(ROOT)) for path in marked_files()]
    code = run_program([*command, *files])
    if not found.exists():
        report.claim("pytest", f"exit code {code}", "0", holds=False)
        return
    count_tests(ET.parse(found).getroot(), report, needs_some=setting.is_cuda)


def count_tests(root: ET.Element, report: Report, *, needs_some: bool) -> None:
    """Rows of a JUnit file.

    Args:
        root: of the file.
        report: takes them.
        needs_some: at least one must have run, as on a GPU.
    """
    cases = list(root.iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    num_passed = len(cases) - len(bad) - len(skipped)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in bad]
    report.claim("failed", ", ".join(names) or 0, "none", holds=not bad)
    report.claim("passed", num_passed, "some", holds=num_passed > 0 or not needs_some)
    report.figure("skipped", len(skipped))
    for reason in sorted({case.find("skipped").get("message", "") for case in skipped}):  # type: ignore[union-attr]
        report.figure("skipped because", reason)


def tiny_update(setting: Setting, report: Report) -> None:
    """The doctor's probe: process group, DDP, optimizer, attention and head of the trainer."""
    first = "from tests.gpu.runner import end_with_parent\nend_with_parent()\n"
    answer = ask(first + policy_code(precision=setting.precision), os.environ)
    if isinstance(answer, CommandError):
        report.claim("one update", str(answer), "done", holds=False)
        return
    for name, value in answer.items():
        report.figure(name, value if isinstance(value, str) else json.dumps(value))
    if setting.is_cuda:
        report.claim("device", answer["device"], "cuda", holds=answer["device"] == "cuda")
        name = answer["collectives"]
        report.claim("collectives", name, "nccl", holds="nccl" in name)


def head(setting: Setting, report: Report) -> None:
    """benchmarks/head.py at the heads of a 1.5B and a 7B model."""
    shapes = ("64x128x512",) if setting.tiny else SHAPES
    output = setting.folder / "head.jsonl"
    command = [sys.executable, "benchmarks/head.py", "--device", setting.device.type]
    command += [
        "--shapes",
        *shapes,
        "--output",
        str(output),
        "--clipped-only",
        "--active",
        "1",
        "0.5",
    ]
    command += ["--dtype", "bfloat16", "--repeats", "2" if setting.tiny else "15"]
    command += ["--patience-s", "20"]
    command += ["--providers", "ours", *(PEERS[:2] if setting.tiny else PEERS)]
    # In time to compare what it has: its records come one by one.
    code = run_program(command, limit_s=480)
    if code:
        report.claim("benchmarks/head.py", f"exit code {code}", "0", holds=False)
    if output.exists():
        lines = output.read_text(encoding="utf-8").splitlines()
        compare_heads([json.loads(line) for line in lines], report, has_goals=setting.is_cuda)


def compare_heads(records: Iterable[Mapping[str, Any]], report: Report, *, has_goals: bool) -> None:
    """Rows of what benchmarks/head.py measured: effective TFLOP/s, and ours beside its peers."""
    records = [one for one in records if one["kind"] != "run"]
    for shape in dict.fromkeys(one["shape"] for one in records):
        flops = 8 * math.prod(map(float, shape.split("x")))
        alone = {r["provider"]: r for r in records if r["kind"] == "alone" and r["shape"] == shape}
        seconds = {
            (r["provider"], r["active"]): statistics.median(
                map(sum, zip(r["forward_s"], r["backward_s"], strict=True))
            )
            for r in records
            if r["kind"] == "time" and r["shape"] == shape
        }
        for name, found in alone.items():
            if "failed" in found:
                report.figure(f"{shape} {name}", f"not run: {found['failed'][:200]}")
                continue
            if any((name, active) not in seconds for active in (1, 0.5)):
                report.figure(f"{shape} {name}", "not timed")
                continue
            rates = [flops / seconds[name, active] / 1e12 for active in (1, 0.5)]
            report.figure(f"{shape} {name}, at full", rates[0], "TFLOP/s")
            report.figure(f"{shape} {name}, at half active", rates[1], "TFLOP/s")
            how = f"{found['note']}, D error {found['d_error_max']:.1e}"
            how += f", {found['other_bits']:.1%} of rows have other bits in another packing"
            report.figure(f"{shape} {name}", how)
        ours = alone.get("ours", {"failed": "not among the records"})
        is_exact = ours.get("exact", False)
        report.claim(f"{shape} ours exact", is_exact, "True", holds=is_exact)
        is_timed = ("ours", 1) in seconds and ("ours", 0.5) in seconds
        report.claim(f"{shape} ours timed", is_timed, "True", holds=is_timed)
        if not (is_exact and is_timed and has_goals):
            continue
        report.goal(f"{shape} ours", flops / seconds["ours", 1] / 1e12, "TFLOP/s", at_least=450)
        peers = [n for n, r in alone.items() if n != "ours" and r.get("exact")]
        times = [seconds[name, 0.5] for name in peers if (name, 0.5) in seconds]
        if times:
            best = min(times)
            ratio = best / seconds["ours", 0.5]
            report.goal(f"{shape} half active, best exact peer / ours", ratio, "", at_least=1.5)
        else:
            report.figure(f"{shape} half active", "no exact peer ran")
