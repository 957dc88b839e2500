"""Who may import what: the mathematics runs where neither Megatron-core nor vLLM is installed."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
PACKAGE, TOOLS = ROOT / "gapo_megatron", ROOT / "gapo_tools"  # a link to tools/
PURE = [
    "gapo_megatron.objective",
    "gapo_megatron.rewards",
    "gapo_megatron.batching",
    "gapo_megatron.evaluate",
    "gapo_megatron.logprob",
    "gapo_megatron.models",
    "gapo_megatron.formats",
    "gapo_megatron.config",
    "gapo_megatron.io",
    "gapo_tools.evaluation",
]

# From the bottom to the top: each imports only what stands before it. Those of one line know
# nothing of each other.
LAYERS = [
    ["errors", "clock", "isolation"],
    ["types", "user_code"],
    ["rollouts"],
    ["exchange"],
    ["io"],
    ["compat", "device"],
    ["config"],
    ["models"],
    ["formats"],
    ["logprob"],
    ["objective"],
    ["batching", "rewards"],
    ["data", "policy"],
    ["learn"],
    ["rollout"],
    ["checkpoint", "evaluate"],
    ["run"],
    ["train", "sft", "launch"],
    ["gapo_tools"],
]

# Runs in a process of its own: this one may have imported anything already.
IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    found = sorted({name.split(".")[0] for name in sys.modules} & {"megatron", "vllm"})
    if found:
        raise SystemExit(f"{package} imports {found}")
"""


def sources() -> list[Path]:
    """Files of the package, and of the tools."""
    return [*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]


def name_of(path: Path) -> str:
    """Path of a file from the package on, or `gapo_tools/...`."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def importers_of(library: str) -> set[str]:
    """Files with an `import library...` anywhere."""
    files = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == library for name in names):
                files.add(name_of(path))
    return files


def packages_of(files: Iterable[str]) -> set[str]:
    """Folders of the package that hold the files, or files at its top; `gapo_tools`."""
    return {file.partition("/")[0] for file in files}


def files_with(pattern: str) -> set[str]:
    """Files of the package in which the regular expression occurs."""
    return {
        name_of(path)
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a file that its import executes: all but the bodies of functions."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_at_import(child)


def imports_between_packages() -> Iterator[tuple[str, str, str]]:
    """Every import of one package by another, also for types alone: file and line, who, whom."""
    for path in sources():
        relative = name_of(path)
        package = relative.partition("/")[0].removesuffix(".py")
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
                top, *parts = name.split(".")
                other = TOOLS.name if top == TOOLS.name else "".join(parts[:1])
                if top in (PACKAGE.name, TOOLS.name) and other not in ("", package):
                    yield f"{relative}:{node.lineno}", package, other


def test_imports_point_down_the_layers() -> None:
    height = {package: i for i, packages in enumerate(LAYERS) for package in packages}
    there = {name.removesuffix(".py") for name in packages_of(map(name_of, sources()))}
    there.remove("__init__")
    assert height.keys() == there, "every package has its place in LAYERS"
    up = [
        f"{where}: {package} imports {other}"
        for where, package, other in imports_between_packages()
        if other in height and height[other] >= height[package]
    ]
    assert up == []


def test_importing_a_pure_room_loads_neither_megatron_nor_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *PURE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr


def test_verifiers_know_episodes_and_no_table() -> None:
    """Their workers start without torch."""
    known = {other for _, package, other in imports_between_packages() if package == "rewards"}
    assert known <= {"compat", "config", "errors", "io", "isolation", "types", "user_code"}


def test_only_the_rollout_imports_vllm() -> None:
    files = importers_of("vllm")
    assert packages_of(files) <= {"rollout", "compat"}
    assert all(name.startswith(("rollout/vllm/", "compat/")) for name in files)


def test_only_what_computes_or_keeps_the_policy_imports_megatron() -> None:
    files = importers_of("megatron")
    outside = {name for name in files if name.startswith("gapo_tools/")}
    assert outside == {"gapo_tools/conversion/full_logits.py"}  # to compare, after a conversion
    assert packages_of(files - outside) <= {"learn", "policy", "checkpoint", "compat"}


def test_the_package_imports_no_tool() -> None:
    """A training job needs none. `--dry-run` is another program, which `train` starts by name."""
    assert packages_of(importers_of("gapo_tools")) == {"gapo_tools"}
    assert files_with(r"""["']gapo_tools\.""") == {"train.py"}
    (name,) = re.findall(r"""["'](gapo_tools[.\w]+)""", (PACKAGE / "train.py").read_text("utf-8"))
    assert ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()


def test_the_loop_knows_the_run_alone() -> None:
    """Of what trains: the stages are behind it."""
    text = (PACKAGE / "train.py").read_text(encoding="utf-8")
    loop = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert loop.end_lineno is not None and loop.end_lineno - loop.lineno < 40
    assert len(text.splitlines()) <= 150
    heavy = [node.module for node in ast.walk(loop) if isinstance(node, ast.ImportFrom)]
    assert heavy == ["gapo_megatron.run.run"]
    (steps,) = (node for node in ast.walk(loop) if isinstance(node, ast.For))
    assert not any(isinstance(node, ast.If | ast.Try | ast.While) for node in ast.walk(steps))


def test_one_file_reads_the_environment_of_a_run() -> None:
    """Elsewhere it is given to a child process, a library's own variable, or restored."""
    files = files_with(r"os\.environ|getenv")
    assert {name for name in files if name.startswith("run/")} == {"run/processes.py"}
    known = {"run", "policy", "rewards", "compat", "rollout", "user_code.py"}
    assert packages_of(files) <= known | {"launch"}  # which is no part of the run
    of_rollout = {name for name in files if name.startswith("rollout/")}
    assert of_rollout == {"rollout/agents/environment.py"}


def test_an_import_sets_no_variable_and_filters_no_warning() -> None:
    names = {"environ", "putenv", "filterwarnings", "simplefilter"}
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in run_at_import(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in names
    ]
    assert found == []


def test_no_call_leaves_it_open_whether_code_is_trusted() -> None:
    loaders = re.compile(r"from_pretrained|get_tokenizer|\w*EngineArgs|LLM")
    calls = []
    for room in ("gapo_megatron", "tools", "benchmarks", "slurm"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                if not loaders.fullmatch(name):
                    continue
                given = {word.arg: word.value for word in node.keywords}
                says = given.get("trust_remote_code")
                said = isinstance(says, ast.Constant) and says.value is False
                calls.append((f"{path.relative_to(ROOT)}:{node.lineno}", said))
    assert [where for where, said in calls if not said] == []
    assert len(calls) >= 5


def test_a_users_own_tools_are_not_hidden() -> None:
    """The checkout is first on the path of a job's processes: it must hold no `tools` package."""
    assert not (ROOT / "tools/__init__.py").exists() and TOOLS.resolve() == ROOT / "tools"


def test_no_tool_is_named_as_a_module_of_python() -> None:
    """A script has its own folder first on the path: it would hide that module from everyone."""
    names = {path.stem for path in TOOLS.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert names & sys.stdlib_module_names == set()


def test_parallel_state_is_read_in_one_place() -> None:
    readers = {
        name_of(path) for path in sources() if "parallel_state." in path.read_text(encoding="utf-8")
    }
    assert readers == {"policy/parallel.py", "compat/megatron.py"}


def test_no_console_takes_brackets_for_markup() -> None:
    """What others wrote, such as `[supervised]` in an error, would vanish."""
    calls = [
        (path.name, node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Console"
    ]
    assert len(calls) > 5
    off = {"markup": "False"}
    wrong = [
        name
        for name, call in calls
        if not off.items() <= {key.arg: ast.unparse(key.value) for key in call.keywords}.items()
    ]
    assert wrong == []
