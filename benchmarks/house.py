"""Structure of the package: sizes, imports, private names, and the path of one batch.

    python benchmarks/house.py [CHECKOUT ...]     a column each, so OLD NEW is before and after

Reads the sources of each checkout (older ones have their tools in the package), and runs one step
of its tests' tiny model with its own Python (.venv, else this one): which functions a batch passes
from `learn` to the optimizer, over all mini-batches. `--json` names every find. Standard library
only.

Functions are measured from `def` to their last line. Parameters are counted without `self` and
`cls`. An `elif` is as deep as its `if`, and nesting starts again in an inner function. Imports
inside functions and for type checkers count too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

HERE, PACKAGE, TOOLS = Path(__file__).resolve().parents[1], "gapo_megatron", "gapo_tools"
# Layers from bottom to top; an import may stay in its layer or go down.
ORDER = (HERE / "tests/test_imports.py").read_text(encoding="utf-8").split("\nLAYERS = ")[1]
LAYERS = ast.literal_eval(ORDER[: ORDER.index("\n]") + 2])
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
LIMITS = {"functions over 60 lines": 60, "functions over 7 parameters": 7, "nesting over 4": 4}
LONG_FILES, PRIVATE = "files over 400 lines", "private names outside compat"
PRIVATE_NAME = re.compile(r"_[A-Za-z]\w*")
LIBRARIES = {"megatron", "vllm", "transformer_engine", "torch"}
# Names inside an engine, reached through public attributes.
DEEP = {"engine_core", "model_executor", "driver_worker", "model_runner"}
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


class Module(NamedTuple):
    """A file; `name` is dotted, in the package relative to it, else from `gapo_tools` on."""

    name: str
    text: str
    is_package: bool
    nodes: list[ast.AST]

    @property
    def top(self) -> str:
        return self.name.split(".")[0]


def read_modules(checkout: Path) -> dict[str, Module]:
    """Read every file of the package and of the tools; the package's `__init__` is ""."""
    modules, tools = {}, (checkout / TOOLS).rglob("*.py")
    for path in [*sorted((checkout / PACKAGE).rglob("*.py")), *sorted(tools)]:
        is_package, text = path.stem == "__init__", path.read_text(encoding="utf-8")
        path = path.parent if is_package else path.with_suffix("")
        parts = path.relative_to(checkout).parts
        name = ".".join(parts if parts[0] == TOOLS else parts[1:])
        modules[name] = Module(name, text, is_package, [*ast.walk(ast.parse(text))])
    return modules


def code_lines(module: Module) -> int:
    """Count lines with a token that is neither comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in module.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                lines -= set(range(first, (last or first) + 1))
    return len(lines)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters without a method's first; * and ** count as one each."""
    given = function.args
    listed = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return sum(one is not None and one.arg not in ("self", "cls") for one in listed)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Depth of nested blocks below `node`, without inner functions and classes."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            is_elif = (
                isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            )
            deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) > is_elif)))
    return deepest


def imports(module: Module, modules: dict[str, Module]) -> set[str]:
    """Modules of the package and of the tools that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [PACKAGE, *filter(None, module.name.split("."))]
            here = here[: len(here) + module.is_package - node.level] if node.level else []
            names |= {".".join([*here, node.module or "", a.name]) for a in node.names}
    found = set()
    for name in names:
        top, *parts = name.replace("..", ".").split(".")
        # The import names a module or something in it: take the longest part that is a file.
        prefixes = (".".join(parts[:number]) for number in range(len(parts), -1, -1))
        parts = [top, *parts] if top == TOOLS else parts
        if top in (PACKAGE, TOOLS):
            found.add(next(prefix for prefix in prefixes if prefix in modules or not prefix))
    return found - {module.name, ""}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node."""
    reached = {name: set(targets) for name, targets in graph.items()}
    for middle, name in itertools.product(graph, graph):
        reached[name] |= reached[middle] if middle in reached[name] else set()
    rings = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph}
    return sorted(sorted(ring) for ring in rings if len(ring) > 1)


def own_and_read(modules: dict[str, Module]) -> tuple[set[str], set[str]]:
    """Names that the package defines or assigns to itself; attributes that it reads."""
    own, read = {"_replace", "_asdict", "_fields"}, set()  # of named tuples
    for node in itertools.chain(*(module.nodes for module in modules.values())):
        match node:
            case (
                ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(ast.Name("self" | "cls"), attr=name, ctx=ast.Store())
            ):  # fmt: skip
                own.add(name)
            case ast.Attribute(attr=name):
                read |= {name}
    return own, read


def private_names(module: Module, own: set[str], read: set[str]) -> dict[str, str]:
    """Name -> how sure: `named` after a library that is imported, or `likely` to be one's.

    Likely, in a file that imports one of the libraries: an attribute, or a name in a string, that
    the package defines nowhere; a method of a library's subclass that the package never calls. An
    engine's `deep` chains are public to Python.
    """
    roots, found = dict[str, str](), dict[str, str]()  # roots: local name -> full name
    for node in module.nodes:
        if isinstance(node, ast.Import):
            roots |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    libraries = {local for local, full in roots.items() if full.split(".")[0] in LIBRARIES}
    full_names = {roots[local] for local in libraries}
    found |= {n: "named" for n in full_names if any(map(PRIVATE_NAME.fullmatch, n.split(".")))}
    for node in module.nodes if libraries else ():
        match node:
            case ast.Attribute(attr=name):
                root, *chain = ast.unparse(node).split(".")
                full = ".".join([roots.get(root, root), *chain])
                if name in DEEP and len(chain) > 1:
                    found[full] = "deep"
                elif PRIVATE_NAME.fullmatch(name) and root in libraries:
                    found[full] = "named"
                elif PRIVATE_NAME.fullmatch(name) and root not in roots and name not in own:
                    found[f"?.{name}"] = "likely"
            case ast.Constant(value=str(name)) if name not in own and len(name) > 6:
                found |= {f"?.{name}": "likely"} if PRIVATE_NAME.fullmatch(name) else {}
            case ast.ClassDef(bases=bases, body=body):
                if {ast.unparse(base).split(".")[0] for base in bases} & libraries:
                    names = {one.name for one in body if isinstance(one, ast.FunctionDef)} - read
                    found |= {f"?.{n}": "likely" for n in names if PRIVATE_NAME.fullmatch(n)}
    return found


def measure(checkout: Path) -> dict[str, Any]:
    """All figures from the sources, with every find by name."""
    modules = read_modules(checkout)
    folders: dict[str, dict[str, int]] = {}
    finds: dict[str, dict[str, Any]] = {kind: {} for kind in (LONG_FILES, *LIMITS, PRIVATE)}
    own, read = own_and_read(modules)
    for name, module in modules.items():
        total = module.text.count("\n")
        folder = module.top if "." in name or (module.is_package and name) else "(top level)"
        for key in (folder, "= tools" if module.top == TOOLS else "= package", "= all"):
            entry = folders.setdefault(key, {"code": 0, "lines": 0})
            entry["code"] += code_lines(module)
            entry["lines"] += total
        finds[LONG_FILES] |= {name: total} if total > 400 else {}
        for node in module.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                values = length, num_parameters(node), nesting(node)
                for (kind, limit), value in zip(LIMITS.items(), values, strict=True):
                    if value > limit:
                        finds[kind][f"{name}:{node.lineno}:{node.name}"] = value
        private = private_names(module, own, read) if module.top != "compat" else {}
        finds[PRIVATE] |= {f"{name}: {one}": how for one, how in private.items()}
    return {"folders": dict(sorted(folders.items()))} | finds | measure_imports(modules)


def measure_imports(modules: dict[str, Module]) -> dict[str, Any]:
    """Imports that run up, and packages that import each other."""
    del modules[""]
    graph: dict[str, set[str]] = {module.top: set() for module in modules.values()}
    up: dict[str, str] = {}
    for module in modules.values():
        for target in imports(module, modules):
            graph[module.top] |= {modules[target].top} - {module.top}
            here, there = module.top, modules[target].top
            if RANKS.get(here, len(RANKS)) < RANKS.get(there, 0):
                up[f"{module.name} -> {target}"] = f"{here} -> {there}"
    unplaced = sorted({module.top for module in modules.values()} - RANKS.keys())
    return {"imports that run up": up, "names of no layer": unplaced, "circles": circles(graph)}


class Tracer:
    """Profile function that records calls from `learn` to its last optimizer step."""

    def __init__(self, checkout: Path) -> None:
        self._start = f"{checkout / PACKAGE}/"
        self._depth = self._calls = self._deepest = (
            0  # counts frames of the package, from `learn` on
        )
        kinds = ("entered", "that hold advantages", "that hold old_log_probs")
        self._places: dict[str, set[str]] = {kind: set() for kind in kinds}
        self.seen: dict[str, Any] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        ours = path.startswith(self._start) and not name.endswith(("comp>", "genexpr>"))
        is_step = "/megatron/" in path and name == "step_with_ready_grads"
        is_step |= "/torch/optim/" in path and name == "step"
        if event == "call" and ours and (self._depth or name == "learn"):
            self._depth += 1
            self._calls += 1
            self._deepest = max(self._deepest, self._depth)
            self._places["entered"].add(self._place(frame))
        elif event == "return" and ours and self._depth:
            self._look(frame)
            self._depth -= 1
        elif event == "call" and is_step and self._depth:
            while frame.f_back is not None:  # these have not returned yet
                frame = frame.f_back
                self._look(frame)
            self.seen = {"calls": self._calls, "deepest stack": self._deepest}
            self.seen |= {f"functions {k}": sorted(found) for k, found in self._places.items()}

    def _place(self, frame: FrameType) -> str:
        return f"{frame.f_code.co_filename.removeprefix(self._start)}:{frame.f_code.co_qualname}"

    def _look(self, frame: FrameType) -> None:
        """Note whether a frame holds the batch's values, by name or as a field."""
        place = self._place(frame)
        for local, value in frame.f_locals.items() if place in self._places["entered"] else ():
            for name in {local, *getattr(type(value), "__dataclass_fields__", ())}:
                self._places.get(f"that hold {name}", set()).add(place)


def trace(checkout: Path) -> dict[str, Any]:
    """Trace one step of the tests' tiny model; this process must import `checkout`."""

    def load(name: str) -> Any:
        path = next((checkout / "tests").rglob(f"{name}.py")).relative_to(checkout)
        return importlib.import_module(".".join(path.with_suffix("").parts))

    setup, tracer = load("learn_setup"), Tracer(checkout)
    setup.record = lambda _: contextlib.nullcontext([])  # it calls functions of its own
    with tempfile.TemporaryDirectory() as folder, load("dist").single_rank():
        setup.policy_setup.save_model(Path(folder), "qwen2_tied")
        config, groups = setup.make_config(Path(folder)), setup.make_groups()
        sys.setprofile(tracer)
        if hasattr(setup, "make_judged"):
            setup.run_learn(config, setup.make_judged())
        else:  # versions before the table of rollouts
            setup.run_learn(config, groups, num_minibatches=setup.NUM_MINIBATCHES)
        sys.setprofile(None)
    assert tracer.seen, "no optimizer step within a function called learn"
    return tracer.seen


def run_trace(checkout: Path) -> dict[str, Any]:
    """Run `trace` with the checkout's own Python; if it fails, return its last line."""
    own = checkout / ".venv/bin/python"
    command = [own if own.exists() else sys.executable, "-B", __file__, "--trace", checkout]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=settings, capture_output=True, text=True)
    last = (done.stderr if done.returncode else done.stdout).splitlines()[-1]
    return {"not traced": last} if done.returncode else dict(json.loads(last))


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of the table: figure and its value in one checkout."""
    for name, entry in found["folders"].items():
        yield f"code lines (all lines): {name}", "{code:,} ({lines:,})".format(**entry)
    for name, finds in found.items():
        if name not in ("folders", "learn to optimizer"):
            yield name, f"{len(finds)}"
        if name == PRIVATE:
            for how in ("named", "likely", "deep"):
                yield f"  of these {how}", f"{[*finds.values()].count(how)}"
    yield "largest circle, modules", f"{max(map(len, found['circles']), default=0)}"
    for name, value in found["learn to optimizer"].items():
        if isinstance(value, list):
            value = f"{len(value)} in {len({place.split(':')[0] for place in value})} files"
        yield f"learn to optimizer: {name}", f"{value}"


def main() -> None:
    """Measure every checkout and print a column for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", default=[HERE])
    parser.add_argument("--json", action="store_true", help="print every find by name")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkouts = [path.resolve() for path in arguments.checkouts]
    if arguments.trace:
        return print(json.dumps(trace(checkouts[0])))
    measured = [measure(path) | {"learn to optimizer": run_trace(path)} for path in checkouts]
    if arguments.json:
        return print(json.dumps(measured, indent=1))
    columns = [dict(rows(found)) for found in measured]
    for name in sorted(dict.fromkeys(itertools.chain(*columns)), key=lambda n: n[:4] != "code"):
        print(name.ljust(52), *(column.get(name, "-").rjust(18) for column in columns))


if __name__ == "__main__":
    main()
