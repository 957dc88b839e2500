"""Hugging Face model folders: config, generation config, tokenizer, weights."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.formats.model_folder import check_model_folder, end_tokens
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.rules import to_megatron
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy.model import read_hf_config
from gapo_tools.demonstration.demo_task import write_tokenizer
from tests.configs import config_of
from tests.fuzz.campaign import RAN, Target
from tests.fuzz.mutate import Damage, damage_bytes, damage_file, damage_json, damage_tree, json_text

_TEXT = "12+3=15>"
# What this package asks of a config.
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "model_type"),
)


def write_model(folder: Path, *, shard_bytes: str = "5GB") -> None:
    """A Qwen2 of a few thousand parameters that knows digits."""
    tokenizer = write_tokenizer(["0123456789+=>"], folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_bytes)


@functools.cache
def _parallel() -> Any:
    return config_of().parallel


def _read_all(folder: Path) -> dict[str, Any]:
    """What a start makes of a model folder."""
    facts = check_model_folder(folder, field="model.hf_dir")
    check_shapes(facts, _parallel())
    read_hf_config(str(folder))
    tokenizer = load_tokenizer(folder, facts=facts)
    named = end_tokens(folder, facts.vocab_size)
    eos = [tokenizer.eos_token_id, *(one for ids in named.values() for one in ids)]
    tokens = tokenizer(_TEXT)["input_ids"]
    tokenizer.decode(tokens)
    weights = {
        name: digest(tensor) for name, tensor in to_megatron(rules_for(facts), read_hf(folder))
    }
    known = {name: getattr(facts, name) for name in _FIELDS}
    return {"facts": known, "eos": eos, "tokens": list(tokens), "weights": weights}


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes, shape and dtype."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + content).hexdigest()


def _explains_model(folder: Path, damage: Damage, state: Any, whole: Any) -> str:
    """What is wrong, going by what transformers makes of the same folder."""
    theirs = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in _FIELDS:
        if state["facts"][name] != getattr(theirs, name):
            return f"{name} is {state['facts'][name]!r}; transformers has {getattr(theirs, name)!r}"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if list(tokenizer(_TEXT)["input_ids"]) != state["tokens"]:
        return "transformers has other tokens"
    vocab_size = state["facts"]["vocab_size"]
    if not all(0 <= one < vocab_size for one in (*state["eos"], *state["tokens"])):
        return "tokens that the model does not have"
    if state["weights"] != whole["weights"] and not _in_tensors(folder, damage):
        return "other weights"
    return ""


def _in_tensors(folder: Path, damage: Damage) -> bool:
    """Whether the bytes of tensors alone are other ones: no digest of a model folder tells."""
    path = folder / damage.file
    if path.suffix != ".safetensors":
        return False
    whole = next((folder.parents[2] / "whole").glob(f"*/{damage.file}"))
    head = 8 + int.from_bytes(whole.read_bytes()[:8], "little")
    return whole.read_bytes()[:head] == path.read_bytes()[:head]


_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def _names_model(message: str, damage: Damage) -> bool:
    name = Path(damage.file).name
    if name == "config.json":  # what contradicts it may be said of the other
        others = (*_TOKENIZER, "generation_config.json", ".safetensors")
    elif name.endswith((".safetensors", ".index.json")):  # of each other's
        others = (
            ".safetensors",
            "config.json contradicts",
            "missing tensors",
            "unexpected tensors",
        )
    elif name in _TOKENIZER:  # what only the library tells, it tells of the whole
        others = ("the tokenizer",)
    else:
        others = ()
    return any(part in message for part in (name, *others, *damage.settings))


def _damage_model(rng: Random, folder: Path) -> Damage:
    files = sorted(path.name for path in folder.iterdir())
    file = rng.choice(files)
    kind = rng.random()
    if kind < 0.15:
        return damage_file(rng, folder, file)
    if kind < 0.25 and file.endswith(".json"):
        return _point_to_code(rng, folder, file)
    if file.endswith(".json"):
        return damage_json(rng, folder, file)
    if file.endswith(".safetensors") and kind < 0.75:
        return _damage_header(rng, folder, file)
    content, what = damage_bytes(rng, (folder / file).read_bytes())
    (folder / file).write_bytes(content)
    return Damage(file, what)


def _point_to_code(rng: Random, folder: Path, file: str) -> Damage:
    (folder / "code.py").write_text(f"open({str(folder / RAN)!r}, 'w').close()\n")
    fields = json.loads((folder / file).read_text(encoding="utf-8"))
    names = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel")
    fields["auto_map"] = {name: rng.choice(("code.Code", ["code.Code", None])) for name in names}
    if rng.random() < 0.7:
        fields["model_type"] = rng.choice(("code", "", "qwen2"))
        fields["tokenizer_class"] = rng.choice(("Code", "CodeFast", None))
    (folder / file).write_text(json.dumps(fields), encoding="utf-8")
    return Damage(file, "points to code")


def _damage_header(rng: Random, folder: Path, file: str) -> Damage:
    """Of a safetensors file: well-formed, mostly, and wrong."""
    content = (folder / file).read_bytes()
    size = int.from_bytes(content[:8], "little")
    tree, what = damage_tree(rng, json.loads(content[8 : 8 + size]))
    head = json_text(tree).encode("utf-8", "surrogatepass")
    told = len(head) if rng.random() < 0.8 else rng.choice((0, 2**63, len(head) + 1, 2**40))
    (folder / file).write_bytes(told.to_bytes(8, "little") + head + content[8 + size :])
    return Damage(file, f"header: {what}")


def targets() -> list[Target]:
    """All of this file."""
    shared = {
        "damage": _damage_model,
        "read": _read_all,
        "explains": _explains_model,
        "names": _names_model,
        "share": 5,
    }
    return [
        Target(name="model", prepare=write_model, **shared),
        Target(
            name="sharded model", prepare=lambda to: write_model(to, shard_bytes="10KB"), **shared
        ),
    ]
