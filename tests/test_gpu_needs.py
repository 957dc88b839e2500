"""What `make test-gpu` needs on a plain machine is what it asks for: its imports, walked."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.gpu.parts import NEEDED, PARTS, Part
from tests.gpu.programs import marked_files

ROOT = Path(__file__).parents[1]
OURS = ("gapo_megatron", "gapo_tools", "tests", "benchmarks")
BESIDE = ("head_problem", "head_providers")  # benchmarks/head.py finds them there
# What a part starts by name, beside its own module.
PROGRAMS = {
    "tiny_update": ["gapo_tools.diagnosis.probe"],
    "head": ["benchmarks.head", *(f"benchmarks.{name}" for name in BESIDE)],
}


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that are imported where a module is: not in functions, nor for types alone."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported(ast.iter_child_nodes(node))


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imported(ast.parse(path.read_text(encoding="utf-8")).body))


def third_party(roots: Iterable[str]) -> dict[str, str]:
    """Packages of others that importing `roots` imports -> a module of ours that does."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        parts = todo.pop().split(".")
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            path = ROOT.joinpath(*name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if name in seen or not path.exists():
                continue
            seen.add(name)
            for one in imports_of(path):
                top = one.partition(".")[0]
                if top in OURS:
                    todo.append(one)
                elif top not in sys.stdlib_module_names.union(BESIDE):
                    found.setdefault(top, name)
    assert seen
    return found


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_imports_nothing_that_is_not_asked_for(part: Part) -> None:
    roots = ["tests.gpu.one_part", f"tests.gpu.{part.module}", *PROGRAMS.get(part.name, ())]
    if part.name == "marked_tests":
        files = [path.relative_to(ROOT).with_suffix("") for path in marked_files()]
        roots += ["tests.conftest", *(".".join(path.parts) for path in files)]
    known = {name.partition(".")[0] for name in (*NEEDED, *part.needs)}
    found = third_party(roots)
    assert {name: where for name, where in found.items() if name not in known} == {}
    assert {"torch", "pydantic"} <= found.keys()
