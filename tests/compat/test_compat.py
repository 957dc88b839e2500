"""What libraries keep private is named in compat/ alone, with versions and what is upstream."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from gapo_megatron.errors import ConfigError
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gapo_megatron"
COMPAT = PACKAGE / "compat"
LIBRARIES = {"megatron", "torch", "transformer_engine", "transformers", "triton", "vllm"}
# Of vLLM these are documented; of the others most are.
PUBLIC_VLLM = {"vllm", "vllm.outputs", "vllm.sampling_params"}
INTERNAL_MODULES = (
    "megatron.core.dist_checkpointing.core",
    "megatron.core.dist_checkpointing.dict_utils",
    "megatron.core.dist_checkpointing.strategies",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe",
    "transformer_engine",
    "transformers.models",
    "triton.errors",
    "triton.knobs",
    "triton.tools",
)
# Attributes and methods that look public.
INTERNAL_NAMES = {
    "bucket_groups",
    "chained_optimizers",
    "combine_postprocess",
    "engine_core",
    "external_req_id",
    "fuse_wgrad_accumulation",
    "gbuf_ranges",
    "get_replay_topk",
    "get_rotary_seq_len",
    "grad_added_to_main_grad",
    "grad_reduce_handle",
    "init_state_fn",
    "input_tensor",
    "inv_freq",
    "knobs",
    "main_grad",
    "moe_kernel",
    "output_processor",
    "quant_method",
    "request_states",
    "router_replay",
    "sharded_state_dict_keys_map",
    "start_grad_sync",
}
# Methods of Megatron-core's that only a class in compat/ replaces.
REPLACED = {
    "_communicate_shapes",
    "_make_backward_post_hook",
    "_set_attention_backend",
}
STANDARD = {"_asdict", "_exit", "_fields", "_replace"}
# Of libraries that compat/ is not about, or ours.
OTHERS = {
    "gapo_megatron/logprob/operator.py: main_grad",
    "gapo_megatron/rewards/math/expressions.py: _prec",
    "gapo_megatron/rewards/math/expressions.py: _unsorted_args",
    "gapo_megatron/rewards/math/parsing.py: _unsorted_args",
}
BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines: functions, classes, variables, fields, attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_of_self(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def of_modules(modules: list[str]) -> Iterator[str]:
    for module in modules:
        library, *rest = module.split(".")
        if library not in LIBRARIES:
            continue
        if any(map(is_private, rest)) or module.startswith(INTERNAL_MODULES):
            yield module


def private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of what belongs to a library and is private, as far as can be told."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = list(of_modules([alias.name for alias in node.names]))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = list(of_modules([f"{node.module}.{alias.name}" for alias in node.names]))
            if node.module.split(".")[0] == "vllm" and node.module not in PUBLIC_VLLM:
                found.append(node.module)
        elif isinstance(node, ast.Attribute):
            is_theirs = is_private(node.attr) and node.attr not in own | STANDARD
            if node.attr in INTERNAL_NAMES or (is_theirs and not is_of_self(node)):
                found = [node.attr]
        elif isinstance(node, ast.FunctionDef) and node.name in REPLACED:
            found = [node.name]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found = [
                name
                for name in map(str, names)
                if name in INTERNAL_NAMES or (is_private(name) and name not in own)
            ]
        yield from ((node.lineno, name) for name in found)


def test_private_names_are_in_compat_alone() -> None:
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in (*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py"))
        if not path.is_relative_to(COMPAT)
    }
    own = {name for tree in trees.values() for name in own_names(tree)}
    found = [
        f"{path}:{line}: {name}"
        for path, tree in sorted(trees.items())
        for line, name in private_names(tree, own)
        if f"{path}: {name}" not in OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._subclasses.fake_tensor import FakeTensor", True),
        ("from torch.distributed.checkpoint.filesystem import _StorageInfo", True),
        ("import torch.testing._internal", True),
        ("from vllm.v1.engine import FinishReason", True),
        ("from vllm import LLM", False),
        ("from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner", True),
        ("from transformer_engine.pytorch import fp8", True),
        ("from megatron.core.models.gpt import GPTModel", False),
        ("tensor.untyped_storage()._cdata", True),
        ("part._get_main_param_and_optimizer_states(parameter)", True),
        ("attempt._ours", False),
        ("self._anything", False),
        ("os._exit(0)", False),
        ("llm.engine_core.shutdown()", True),
        ("getattr(module, '_fp8_workspaces', {})", True),
        ("getattr(optimizer, 'chained_optimizers', [])", True),
        ("getattr(module, '_ours', {})", False),
        ("class Model(GPTModel):\n    def _set_attention_backend(self): ...", True),
    ],
)
def test_a_private_name_is_known_as_one(source: str, expected: bool) -> None:
    assert bool(list(private_names(ast.parse(source), {"_ours"}))) == expected


VERSIONS = re.compile(
    r"# Uses: \S[^\n]*\n(\s+#     \S[^\n]*\n)*"
    r"\s*# Versions: (apex|CPython|latex2sympy2-extended|megatron-core|torch|transformer-engine|"
    r"transformers|triton|verifiers|vllm) \d[^\n]*\n"
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


@pytest.mark.parametrize("method", sorted(REPLACED))
def test_a_megatron_core_without_what_is_replaced_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gapo_megatron.compat import megatron

    megatron.check()
    (owner,) = (owner for owner, name in megatron._REPLACED if name == method)
    (defined,) = (base for base in owner.__mro__ if method in vars(base))
    monkeypatch.delattr(defined, method)
    with pytest.raises(ConfigError, match=mentions("megatron-core", megatron.version(), method)):
        megatron.check()
