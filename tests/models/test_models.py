"""Architectures: each in one file, and one more that touches no other."""

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
)

from gapo_megatron.checkpoint.resume import require_same_model
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.formats.megatron_args import to_args
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.models import Architecture, architecture_of, tables
from gapo_megatron.models.config_json import facts_of, read_facts
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.rules import hf_shapes, to_megatron
from gapo_tools.conversion.logits_check import compare_logits
from gapo_tools.planner.activations import Kernels, LayerBytes
from gapo_tools.planner.flops import Shape, forward_flops
from gapo_tools.planner.layout import Layout
from tests.convert_setup import to_hf
from tests.distributed.conversion_setup import convert
from tests.distributed.policy_setup import make_config
from tests.formats.test_convert_config import CONFIGS
from tests.messages import mentions
from tests.waiting import HANG_S

PACKAGE = Path(__file__).parents[2] / "gapo_megatron"
MODELS = PACKAGE / "models"
FILES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "phi3",
    "seed_oss",
    "olmo2",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
)


# --- one file each -------------------------------------------------------------------------------


def test_every_architecture_has_its_file() -> None:
    assert tuple(tables.ARCHITECTURES) == FILES
    for name, architecture in tables.ARCHITECTURES.items():
        source = (MODELS / f"{name}.py").read_text()
        assert architecture.model_type == name
        assert f'model_type="{name}"' in source and f'"{architecture.hf_class}"' in source
        others = set(FILES) - {name}
        assert not [other for other in others if f'"{other}"' in source]


def compared_model_types(path: Path) -> Iterator[str]:
    """Comparisons and look-ups by `model_type`, and by the name of an architecture."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            operands = [node.slice]
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = node.args if node.func.attr in ("get", "startswith") else []
        for part in itertools.chain.from_iterable(map(ast.walk, operands)):
            named = isinstance(part, ast.Constant) and part.value in tables.ARCHITECTURES
            if named or (isinstance(part, ast.Attribute) and part.attr == "model_type"):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {ast.unparse(node)}"


def test_nothing_else_asks_which_architecture_it_is() -> None:
    found = [
        line
        for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "tools").rglob("*.py")])
        if path != MODELS / "tables.py"
        for line in compared_model_types(path)
    ]
    assert found == []


def test_architectures_are_known_without_torch() -> None:
    program = (
        "import sys, gapo_megatron.models, gapo_megatron.models.published as p\n"
        "from gapo_megatron.models.tables import rules_for\n"
        "for name in p.shipped_names():\n"
        "    rules_for(p.find_model(name)[0])\n"
        "found = {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr


def test_shipped_shapes_belong_to_their_architecture() -> None:
    listed = {name: one for one in tables.ARCHITECTURES.values() for name in one.published}
    assert listed.keys() == {path.stem for path in (MODELS / "published").glob("*.json")}
    for name, architecture in listed.items():
        assert shipped_fields(name)["model_type"] == architecture.model_type


# --- what a checkpoint says of its model ---------------------------------------------------------


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_checkpoint_of_another_model_is_refused_by_field(model_type: str) -> None:
    ours = model_identity(CONFIGS[model_type])
    require_same_model(Path("step_1"), ours, ours)
    for field in ("vocab_size", "rope_parameters"):
        with pytest.raises(CheckpointError, match=mentions("step_1", field, "another")):
            require_same_model(Path("step_1"), {**ours, field: "another"}, ours)
    name = "hidden_act" if ours["hidden_act"] is not None else "hidden_activation"
    with pytest.raises(CheckpointError, match=mentions(name, "tanh", ours[name])):
        require_same_model(Path("step_1"), {**ours, name: "tanh"}, ours)


# --- one more architecture -----------------------------------------------------------------------


def architecture_of_the_page() -> Architecture:
    """What the file on the page about adding an architecture defines."""
    page = (PACKAGE.parent / "docs/architectures.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n# ministral\.py\n(.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {"__name__": "ministral"}
    exec(compile(source, "docs/architectures.md", "exec"), names)
    found: Architecture = names["MINISTRAL"]
    return found


MINISTRAL = architecture_of_the_page()


@pytest.fixture
def ministral(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A random model of transformers' own class, with the architecture added to the one table."""
    monkeypatch.setitem(tables.ARCHITECTURES, "ministral", MINISTRAL)
    config = MinistralConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = MinistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_one_more_architecture_is_read_and_converted_bit_for_bit(ministral: Path) -> None:
    facts = check_model_folder(ministral)
    assert architecture_of(facts) is MINISTRAL
    tensors, rules = weights_of(ministral), tables.rules_for(facts)
    assert hf_shapes(rules) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    back = dict(to_hf(rules, to_megatron(rules, tensors.items())))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    for rule in rules:
        full = torch.arange(torch.Size(rule.full_shape).numel()).view(rule.full_shape)
        assert torch.equal(rule.unshard([rule.shard(full, rank, 2) for rank in range(2)]), full)


def test_one_more_architecture_computes_what_transformers_does(
    ministral: Path, tmp_path: Path
) -> None:
    convert(ministral, tmp_path / "megatron")
    report = compare_logits(ministral, tmp_path / "megatron")
    assert report.agrees and report.scale > 1
    assert report.max_difference < 1e-5 * report.scale


def test_one_more_architecture_is_planned(ministral: Path) -> None:
    facts, full = read_facts(ministral), AutoConfig.from_pretrained(ministral)
    shape = Shape.of(facts)
    assert shape.num_parameters == Shape.of(full).num_parameters
    assert shape.num_parameters == sum(tensor.numel() for tensor in weights_of(ministral).values())
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        AutoModelForCausalLM.from_config(full)(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    flops = forward_flops(shape, num_tokens=8, mean_squared_length=64, num_sequences=1)
    assert flops.layers + flops.head + 2 * flops.attention == counter.get_total_flops()
    config = make_config(ministral)
    layout = Layout.of(config, world_size=1)
    plain = LayerBytes.of(facts, config, layout, kernels=Kernels.PADDED)
    assert plain.all > plain.hidden > 0
    args = vars(to_args(full))
    assert not args["add_qkv_bias"] and not args["qk_layernorm"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, ["attention_bias", "ministral"]),
        ({"rms_norm_eps": 2.0}, ["rms_norm_eps (2.0)"]),
        ({"sliding_window": 0}, ["sliding_window (0)", "1 or more"]),
        ({"partial_rotary_factor": 0.5, "rope_theta": 1e4}, ["partial_rotary_factor (0.5)"]),
    ],
)
def test_one_more_architecture_refuses(
    ministral: Path, change: dict[str, Any], named: list[str]
) -> None:
    fields = json.loads((ministral / "config.json").read_text())
    fields.pop("rope_parameters")
    with pytest.raises(ConfigError, match=mentions(*named)):
        facts_of({**fields, **change}, source="config.json")


def test_one_more_architectures_own_fields_tell_models_apart(ministral: Path) -> None:
    ours = model_identity(AutoConfig.from_pretrained(ministral))
    assert ours["sliding_window"] == 16
    with pytest.raises(CheckpointError, match=mentions("sliding_window is 32 there")):
        require_same_model(Path("step_1"), {**ours, "sliding_window": 32}, ours)


def test_without_its_entry_it_is_refused() -> None:
    assert "ministral" not in tables.ARCHITECTURES
    named = {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    with pytest.raises(ConfigError, match=mentions("model_type", "ministral", *FILES)):
        facts_of(named, source="config.json")
