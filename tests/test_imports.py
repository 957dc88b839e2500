"""Who may import what: the mathematics runs where neither Megatron-core nor vLLM is installed."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S

PACKAGE = Path(__file__).parents[1] / "gapo_megatron"
PURE = ["objective", "rewards", "batching", "evaluate", "logprob", "convert"]

# Runs in a process of its own: this one may have imported anything already.
IMPORT_ALL = """
import importlib, pkgutil, sys
for room in sys.argv[1:]:
    package = importlib.import_module("gapo_megatron." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    found = sorted({name.split(".")[0] for name in sys.modules} & {"megatron", "vllm"})
    if found:
        raise SystemExit(f"{room} imports {found}")
"""


def importers_of(library: str) -> set[str]:
    """Rooms of the package (folder, or file at the top) with an `import library...` anywhere."""
    rooms = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == library for name in names):
                rooms.add(path.relative_to(PACKAGE).parts[0])
    return rooms


def test_importing_a_pure_room_loads_neither_megatron_nor_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *PURE],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr


def test_only_the_rollout_imports_vllm() -> None:
    assert importers_of("vllm") <= {"rollout"}


def test_only_policy_checkpoint_and_the_cpu_emulation_import_megatron() -> None:
    assert importers_of("megatron") <= {"policy", "checkpoint", "cpu.py"}


def test_parallel_state_is_read_in_one_place() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "parallel_state." in path.read_text(encoding="utf-8")
    }
    assert readers == {"policy/parallel.py"}
