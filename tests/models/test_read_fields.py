"""Fields of config.json that a class of transformers or vLLM reads: read here, too, or refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.config_json import _READ_BY, _RULES, facts_of
from gapo_megatron.models.tables import ARCHITECTURES
from tests.messages import mentions

CONFIGS = {"config", "hf_config", "text_config"}
"""What a config is called in both libraries."""
ELSEWHERE = {
    # Read and checked in functions of their own.
    *("architectures", "dtype", "is_causal", "model_type", "num_local_experts", "per_layer_config"),
    *("quantization_config", "rope_parameters", "original_max_position_embeddings"),
    # Of training, of how and not what is computed, of images, and asserted alone.
    *("attention_dropout", "resid_pdrop", "residual_dropout", "initializer_range", "pad_token_id"),
    *("output_router_logits", "router_aux_loss_coef", "_attn_implementation", "get_text_config"),
    *("image_token_id", "mm_tokens_per_image", "vision_config", "max_window_layers"),
}
BESIDE = re.compile("index_|indexer_|ada_rms_norm_t_cond_dim|qk_(nope|rope)_head_dim")
"""Read beside a field that is refused: `index_topk`, `ada_rms_norm_t_cond`, `kv_lora_rank`."""


@cache
def package(name: str) -> Path:
    """Its folder; not imported."""
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def vllm_files(hf_class: str) -> Iterator[Path]:
    """The file of vLLM's class, and those of its bases."""
    models = package("vllm") / "model_executor" / "models"
    registry = (models / "registry.py").read_text()
    (name,) = set(re.findall(rf'"{hf_class}": \(\s*"(\w+)"', registry))
    if name == "transformers":
        yield from (models / name / "base.py", models / name / "causal.py")
        return
    yield models / f"{name}.py"
    ours = {one.hf_class for one in ARCHITECTURES.values()}
    for base in re.findall(r"^from \.(\w+) import", (models / f"{name}.py").read_text(), re.M):
        if any(f"class {one}(" in (models / f"{base}.py").read_text() for one in ours):
            yield models / f"{base}.py"


def transformers_files(model_type: str) -> list[Path]:
    name = model_type.removesuffix("_text")
    return [
        package("transformers") / "models" / name / f"{kind}_{name}.py"
        for kind in ("modeling", "configuration")
    ]


def fields_read(file: Path) -> set[str]:
    """Attributes of anything that is called a config, by `.` or by getattr."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Attribute(value=owner, attr=field):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(field), *_]
            ):
                pass
            case _:
                continue
        if _word(owner) in CONFIGS:
            found.add(str(field))
    return found


def _word(node: Any) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", "")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_no_class_reads_a_field_that_is_neither_read_here_nor_refused(model_type: str) -> None:
    one = ARCHITECTURES[model_type]
    known = {*one.defaults, *one.fields, *one.refused_fields, *_RULES, *_READ_BY, *ELSEWHERE}
    files = [*vllm_files(one.hf_class), *transformers_files(model_type)]
    fields = set[str]().union(*map(fields_read, files))
    assert {"hidden_size", "num_hidden_layers"} <= fields  # the files are the right ones
    assert sorted(field for field in fields - known if not BESIDE.match(field)) == []


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_another_reader_would_compute_with_is_refused(model_type: str) -> None:
    one = ARCHITECTURES[model_type]
    named = {"model_type": model_type, "architectures": [one.hf_class]}
    for field in _READ_BY.keys() - one.fields.keys():
        with pytest.raises(ConfigError, match=mentions("config.json", field, "0.25")):
            facts_of(named | {field: 0.25}, source="config.json")
