"""What libraries keep private is named in compat/ alone, with versions and what is upstream."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapo_megatron.compat import megatron
from gapo_megatron.errors import ConfigError
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gapo_megatron"
COMPAT = PACKAGE / "compat"
LIBRARIES = {"megatron", "torch", "transformer_engine", "transformers", "triton", "vllm"}
# Of vLLM these are documented; of the others most are.
PUBLIC_VLLM = {"vllm", "vllm.outputs", "vllm.sampling_params"}
# Internal, though they look public.
INTERNAL = {"bucket_groups", "chained_optimizers", "engine_core", "output_processor", "main_grad"}
STANDARD = {"_asdict", "_exit", "_fields", "_replace"}
# Of libraries that compat/ is not about, or ours.
OTHERS = {
    "gapo_megatron/logprob/operator.py: main_grad",
    "gapo_megatron/rewards/math/expressions.py: _prec",
    "gapo_megatron/rewards/math/expressions.py: _unsorted_args",
    "gapo_megatron/rewards/math/parsing.py: _unsorted_args",
}


def is_private(name: str) -> bool:
    return name in INTERNAL or (name.startswith("_") and not name.startswith("__"))


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines: functions, classes, variables, fields, attributes that it sets."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private_names(tree: ast.AST) -> Iterator[str]:
    """What belongs to a library and is private, as far as can be told."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [one.name for one in names]
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] == "vllm" and module not in PUBLIC_VLLM:
                    yield module
                modules = [f"{module}.{one.name}" for one in names]
            case ast.Attribute(value=owner, attr=name):
                if is_private(name) and ast.unparse(owner) not in ("self", "cls"):
                    yield name
                continue
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(name), *_]
            ):
                if is_private(str(name)):
                    yield str(name)
                continue
            case _:
                continue
        for library, *rest in (module.split(".") for module in modules):
            if library in LIBRARIES and any(map(is_private, rest)):
                yield ".".join([library, *rest])


def test_private_names_are_in_compat_alone() -> None:
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in (*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py"))
        if not path.is_relative_to(COMPAT)
    }
    own = STANDARD.union(*map(own_names, trees.values()))
    found = {
        f"{path}: {name}"
        for path, tree in trees.items()
        for name in private_names(tree)
        if name in INTERNAL or name not in own
    }
    assert found <= OTHERS


VERSIONS = re.compile(
    r"# Uses: \S[^\n]*\n(\s+#     \S[^\n]*\n)*"
    r"\s*# Versions: (apex|CPython|latex2sympy2-extended|megatron-core|reasoning-gym|torch|"
    r"transformer-engine|transformers|triton|verifiers|vllm) \d[^\n]*\n"
    r"\s*# Upstream: (none|as of|beside|[\w-]+/[\w-]+#\d)"
)


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(COMPAT.glob("*.py"))
        if path.stem not in ("__init__", "cpu", "library_errors")
    ],
    ids=lambda path: path.stem,
)
def test_every_entry_says_for_which_versions_it_holds(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    entries = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert entries
    assert [name for name, text in entries.items() if not VERSIONS.search(text)] == []
    # A re-export has them beside it.
    assert source.count("# Uses:") == source.count("# Versions:") == source.count("# Upstream:")


@pytest.mark.parametrize(("owner", "method"), megatron._REPLACED)
def test_a_megatron_core_without_what_is_replaced_is_refused(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron.check()
    (defined,) = (base for base in owner.__mro__ if method in vars(base))
    monkeypatch.delattr(defined, method)
    with pytest.raises(ConfigError, match=mentions("megatron-core", megatron.version(), method)):
        megatron.check()
