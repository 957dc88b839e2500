"""Architectures: each in one file, and a sixth one that touches no other."""

import ast
import dataclasses
import itertools
import json
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
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from gapo_megatron.checkpoint.resume import require_same_model
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.hf.megatron_record import to_args
from gapo_megatron.hf.model_folder import check_model_folder
from gapo_megatron.models import Architecture, architecture_of, parts, tables
from gapo_megatron.models.config_json import facts_of, read_facts
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.rules import Rule, hf_shapes, to_megatron
from gapo_megatron.ops.convert.logits_check import compare_logits
from gapo_megatron.ops.plan.activations import LayerBytes
from gapo_megatron.ops.plan.flops import Shape, forward_flops
from gapo_megatron.ops.plan.layout import Layout
from tests.convert_setup import to_hf
from tests.distributed.conversion_setup import convert
from tests.distributed.policy_setup import make_config
from tests.hf.test_convert_config import CONFIGS
from tests.messages import mentions
from tests.waiting import HANG_S

PACKAGE = Path(__file__).parents[2] / "gapo_megatron"
MODELS = PACKAGE / "models"
FILES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")


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
        for path in sorted(PACKAGE.rglob("*.py"))
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

# What versions before this list wrote into a checkpoint's manifest.
RECORDED_BEFORE = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    *("tie_word_embeddings", "attention_bias", "rms_norm_eps", "rope_parameters"),
)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_checkpoint_of_an_older_version_is_this_models(model_type: str) -> None:
    ours = model_identity(CONFIGS[model_type])
    before = {name: ours[name] for name in RECORDED_BEFORE}
    require_same_model(Path("step_1"), before, ours)
    require_same_model(Path("step_1"), ours, ours)
    for saved, field in itertools.product((before, ours), ("vocab_size", "rope_parameters")):
        with pytest.raises(CheckpointError, match=mentions("step_1", field, "another")):
            require_same_model(Path("step_1"), {**saved, field: "another"}, ours)
    with pytest.raises(CheckpointError, match=mentions("hidden_act", "gelu", "silu")):
        require_same_model(Path("step_1"), {**ours, "hidden_act": "gelu"}, ours)


# --- a sixth architecture ------------------------------------------------------------------------


def _phi3_rules(g: parts.Geometry) -> list[Rule]:
    """Phi-3 stores query, key and value in one tensor, and gate and up projection in another."""
    hf, mcore = "model.layers.{layer}", "decoder.layers.{layer}"
    rules = {rule.megatron: rule for rule in [*parts.attention(g), *parts.mlp(g)]}
    qkv = rules[f"{mcore}.self_attention.linear_qkv.weight"]
    rows = [shape[0] for shape in qkv.hf_shapes]
    rules[qkv.megatron] = dataclasses.replace(
        qkv,
        hf=(f"{hf}.self_attn.qkv_proj.weight",),
        hf_shapes=((sum(rows), g.hidden),),
        join=lambda tensors: qkv.join(tensors[0].split(rows)),
        part=lambda full: (torch.cat(qkv.part(full)),),
    )
    fc1 = f"{mcore}.mlp.linear_fc1.weight"
    rules[fc1] = parts.same(
        fc1,
        f"{hf}.mlp.gate_up_proj.weight",
        (2 * g.intermediate, g.hidden),
        tp_dim=0,
        num_layers=g.num_layers,
        glu=True,
    )
    return [parts.embedding(g), *rules.values(), *parts.output(g)]


def _check_phi3(config: Any) -> None:
    parts.refuse_set(config, "attention_bias", "mlp_bias", "resid_pdrop")


PHI3 = Architecture(
    model_type="phi3",
    hf_class="Phi3ForCausalLM",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "resid_pdrop": 0.0,
    },
    fields={"resid_pdrop": ("a number of 0 or more", lambda v: isinstance(v, float) and v >= 0)},
    rules=_phi3_rules,
    check=_check_phi3,
)


@pytest.fixture
def phi3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A random model of transformers' own class, with the architecture added to the one table."""
    monkeypatch.setitem(tables.ARCHITECTURES, "phi3", PHI3)
    config = Phi3Config(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_sixth_architecture_is_read_and_converted_bit_for_bit(phi3: Path) -> None:
    facts = check_model_folder(phi3)
    assert architecture_of(facts) is PHI3
    tensors, rules = weights_of(phi3), tables.rules_for(facts)
    assert hf_shapes(rules) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    back = dict(to_hf(rules, to_megatron(rules, tensors.items())))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    for rule in rules:
        full = torch.arange(torch.Size(rule.full_shape).numel()).view(rule.full_shape)
        assert torch.equal(rule.unshard([rule.shard(full, rank, 2) for rank in range(2)]), full)


def test_a_sixth_architecture_computes_what_transformers_does(phi3: Path, tmp_path: Path) -> None:
    convert(phi3, tmp_path / "megatron")
    report = compare_logits(phi3, tmp_path / "megatron")
    assert report.agrees and report.scale > 1
    assert report.max_difference < 1e-5 * report.scale


def test_a_sixth_architecture_is_planned(phi3: Path) -> None:
    facts, full = read_facts(phi3), AutoConfig.from_pretrained(phi3)
    shape = Shape.of(facts)
    assert shape.num_parameters == Shape.of(full).num_parameters
    assert shape.num_parameters == sum(tensor.numel() for tensor in weights_of(phi3).values())
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        AutoModelForCausalLM.from_config(full)(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    flops = forward_flops(shape, num_tokens=8, mean_squared_length=64, num_sequences=1)
    assert flops.layers + flops.head + 2 * flops.attention == counter.get_total_flops()
    config = make_config(phi3)
    layout = Layout.of(config, world_size=1)
    plain = LayerBytes.of(facts, config, layout, fused=False)
    assert plain.all > plain.hidden > 0
    args = vars(to_args(full))
    assert not args["add_qkv_bias"] and not args["qk_layernorm"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, ["attention_bias", "phi3"]),
        ({"rms_norm_eps": 2.0}, ["rms_norm_eps (2.0)"]),
        ({"resid_pdrop": 0.1}, ["resid_pdrop (0.1)", "phi3"]),
        ({"resid_pdrop": "0.1"}, ['resid_pdrop ("0.1")', "number"]),
        ({"partial_rotary_factor": 0.5, "rope_theta": 1e4}, ["partial_rotary_factor (0.5)"]),
    ],
)
def test_a_sixth_architecture_refuses(phi3: Path, change: dict[str, Any], named: list[str]) -> None:
    fields = json.loads((phi3 / "config.json").read_text())
    fields.pop("rope_parameters")
    with pytest.raises(ConfigError, match=mentions(*named)):
        facts_of({**fields, **change}, source="config.json")


def test_a_sixth_architectures_own_fields_tell_models_apart(phi3: Path) -> None:
    ours = model_identity(AutoConfig.from_pretrained(phi3))
    assert ours["resid_pdrop"] == 0.0
    with pytest.raises(CheckpointError, match=mentions("resid_pdrop is 0.1 there")):
        require_same_model(Path("step_1"), {**ours, "resid_pdrop": 0.1}, ours)


def test_without_its_entry_it_is_refused() -> None:
    assert "phi3" not in tables.ARCHITECTURES
    named = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    with pytest.raises(ConfigError, match=mentions("model_type", "phi3", *FILES)):
        facts_of(named, source="config.json")
