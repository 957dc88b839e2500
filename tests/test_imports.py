"""Who may import what: the mathematics runs where neither Megatron-core nor vLLM is installed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import HANG_S

PACKAGE = Path(__file__).parents[1] / "gapo_megatron"
PURE = ["objective", "rewards", "batching", "evaluate", "logprob", "models", "hf", "config", "io"]

# From the bottom to the top: each imports only what stands before it. Those of one line know
# nothing of each other.
LAYERS = [
    ["errors", "types", "clock", "isolation"],
    ["io"],
    ["compat", "device"],
    ["config"],
    ["models"],
    ["hf"],
    ["objective"],
    ["logprob", "batching", "rewards"],
    ["data", "policy"],
    ["learn"],
    ["rollout"],
    ["checkpoint", "evaluate"],
    ["run"],
    ["train", "sft"],
    ["ops"],
]

NO_ROOMS = ("__init__.py", "__pycache__")

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


def imports_between_rooms() -> Iterator[tuple[str, str, str]]:
    """Every import of one room by another: file and line, who, whom. Also those for types alone."""
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{relative}:{node.lineno} imports relatively"
                names = [node.module or ""]
            for name in names:
                parts = name.split(".")
                if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] != room:
                    yield f"{relative}:{node.lineno}", room, parts[1]


def test_imports_point_down_the_layers() -> None:
    height = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
    there = {path.stem for path in PACKAGE.iterdir() if path.name not in NO_ROOMS}
    assert height.keys() == there, "every room has its place in LAYERS"
    up = [
        f"{where}: {room} imports {other}"
        for where, room, other in imports_between_rooms()
        if other in height and height[other] >= height[room]
    ]
    assert up == []


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
    assert importers_of("vllm") <= {"rollout", "compat"}


def test_only_what_computes_or_keeps_the_policy_imports_megatron() -> None:
    assert importers_of("megatron") <= {"learn", "policy", "checkpoint", "compat"}


def test_parallel_state_is_read_in_one_place() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "parallel_state." in path.read_text(encoding="utf-8")
    }
    assert readers == {"policy/parallel.py", "compat/megatron.py"}
