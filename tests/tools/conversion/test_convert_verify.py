"""The gate's comparison of two folders: every kind of difference is seen, and where it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.torch_dist import MegatronFolder, write_megatron
from gapo_megatron.formats.weights import HfFolder, write_hf_weights
from gapo_megatron.models.rules import Place, Rule, hf_shapes
from gapo_megatron.models.tables import architecture_of, rules_for
from gapo_tools.conversion.verify import (
    Mode,
    Side,
    cast,
    kept_dtypes,
    num_bytes_to_read,
    verify,
)
from tests.convert_setup import make_config
from tests.messages import mentions

MODELS = ("qwen2", "qwen3_moe")
Weights = dict[str, Tensor]


class Pair:
    """Both folders of a model, written from the same random numbers."""

    def __init__(self, root: Path, config: PretrainedConfig, **options: Any) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.config, self.rules = root, config, rules_for(config)
        torch.manual_seed(0)
        self.weights = {name: torch.randn(shape) for name, shape in hf_shapes(self.rules).items()}
        write_hf_weights(
            self.read,
            self.rules,
            dtypes={rule.megatron: torch.float32 for rule in self.rules},
            output_dir=root,
            **options,
        )
        named = {"architectures": [architecture_of(config).hf_class]}
        (root / "config.json").write_text(json.dumps(config.to_dict() | named))
        self.write_megatron(self.read)

    def read(self, rule: Rule, place: Place) -> Tensor:
        return rule.merge([self.weights[name] for name in rule.hf_names(place)], place)

    def write_megatron(
        self,
        read: Callable[[Rule, Place], Tensor],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Path:
        number = sum(path.name.startswith("megatron") for path in self.root.iterdir())
        folder = self.root / f"megatron{number}"
        folder.mkdir()
        write_megatron(
            read,
            self.rules,
            hf_config=self.config,
            dtypes={rule.megatron: dtype for rule in self.rules},
            output_dir=folder,
            **options,
        )
        return folder

    def verify(
        self,
        *,
        mode: Mode = "full",
        written: Side = "megatron",
        dtype: torch.dtype | None = None,
        megatron: Path | None = None,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> int:
        return verify(
            HfFolder(self.root),
            MegatronFolder(megatron or self.root / "megatron0", self.rules),
            self.rules,
            written=written,
            dtype=dtype,
            mode=mode,
            on_bytes=on_bytes,
        )

    def changed(self, name: str, change: Callable[[Tensor], Any]) -> Path:
        """A Megatron folder with another value of one Hugging Face tensor."""
        weights = {**self.weights, name: self.weights[name].clone()}
        change(weights[name])

        def read(rule: Rule, place: Place) -> Tensor:
            return rule.merge([weights[name] for name in rule.hf_names(place)], place)

        return self.write_megatron(read)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    root: Path = tmp_path_factory.mktemp("pairs")
    return {name: Pair(root / name, make_config(name)) for name in MODELS}


# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["none", "sample", "full"])
def test_equal_folders_pass(pairs, name, mode):
    pair, seen = pairs[name], []
    num_compared = pair.verify(mode=mode, on_bytes=seen.append)
    if mode == "full":
        assert num_compared == sum(len(rule.places) for rule in pair.rules)
    else:
        assert (num_compared > 0) == (mode == "sample")
    hf, megatron = HfFolder(pair.root), MegatronFolder(pair.root / "megatron0", pair.rules)
    assert sum(seen) == num_bytes_to_read(hf, megatron, pair.rules, mode)
    assert len(seen) == num_compared


def set_last(value: float) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("model", "name", "parameter"),
    [
        ("qwen2", "model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        (
            "qwen2",
            "model.layers.1.self_attn.k_proj.bias",
            "decoder.layers.1.self_attention.linear_qkv.bias",
        ),
        (
            "qwen3_moe",
            "model.layers.2.mlp.experts.2.down_proj.weight",
            "decoder.layers.2.mlp.experts.local_experts.2.linear_fc2.weight",
        ),
    ],
)
def test_one_number_that_differs_is_seen_and_named(pairs, model, name, parameter):
    pair = pairs[model]
    last = [size - 1 for size in pair.weights[name].shape]
    value = pair.weights[name][tuple(last)].item()
    megatron = pair.changed(name, set_last(7.0))
    named = (f"{name} in {pair.root / 'model.safetensors'}", f"{parameter} in {megatron}")
    named += (" 1 of ", pair.weights[name].numel(), last, f"{value:.9g}", " 7")
    for written in ("hf", "megatron"):
        with pytest.raises(ConversionError, match=mentions(*named)):
            pair.verify(megatron=megatron, written=written)


@pytest.mark.parametrize(
    ("here", "there", "is_equal"),
    [
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        (math.nan, -math.nan, False),
        (1.0, math.nextafter(1.0, 2.0), True),  # the same in float32
        (1.0, 1.0 + 2**-23, False),
    ],
)
def test_bits_are_compared_and_not_values(tmp_path, here, there, is_equal):
    pair = Pair(tmp_path / "pair", make_config("qwen2"))
    name = "model.norm.weight"
    tensors = load_file(pair.root / "model.safetensors")
    set_last(here)(tensors[name])
    save_file(tensors, pair.root / "model.safetensors")
    megatron = pair.changed(name, set_last(there))
    if is_equal:
        pair.verify(megatron=megatron)
    else:
        with pytest.raises(ConversionError, match=mentions(name, " 1 of 48 ")):
            pair.verify(megatron=megatron)


def test_another_dtype_than_was_asked_for_is_seen(pairs):
    pair = pairs["qwen2"]
    half = pair.write_megatron(lambda rule, place: pair.read(rule, place).half(), torch.float16)
    pair.verify(megatron=half, dtype=torch.float16)
    with pytest.raises(ConversionError, match=mentions("is torch.float16", torch.float32)):
        pair.verify(megatron=half)
    with pytest.raises(ConversionError, match=mentions("is torch.float16", torch.bfloat16)):
        pair.verify(megatron=half, dtype=torch.bfloat16)
    with pytest.raises(ConversionError, match=mentions("model.safetensors is torch.float32")):
        pair.verify(megatron=half, written="hf")


def test_a_table_that_does_not_invert_itself_is_seen(pairs):
    """Cutting alone would not show a merge that is wrong: half of the conversions merge."""
    pair = pairs["qwen2"]
    rules = [
        replace(rule, join=lambda tensors: torch.cat([tensors[1], tensors[0]]))
        if rule.glu
        else rule
        for rule in pair.rules
    ]
    with pytest.raises(ConversionError, match=mentions("linear_fc1.weight", "up_proj")):
        verify(
            HfFolder(pair.root),
            MegatronFolder(pair.root / "megatron0", pair.rules),
            rules,
            written="hf",
            dtype=None,
            mode="sample",
        )


# --- what a sample has ---------------------------------------------------------------------------


class Watched(HfFolder):
    """Notes what is read of it."""

    def read(self, name: str) -> Tensor:
        self.__dict__.setdefault("names", set()).add(name)
        return super().read(name)


class WatchedMegatron(MegatronFolder):
    def read(self, rule: Rule, place: Place) -> Tensor:
        self.__dict__.setdefault("files_read", set()).update(self.files(rule, place))
        return super().read(rule, place)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_has_every_kind_in_three_layers_and_two_experts(tmp_path, name):
    pair = Pair(tmp_path / "pair", make_config(name, num_hidden_layers=5))
    hf, megatron = Watched(pair.root), MegatronFolder(pair.root / "megatron0", pair.rules)
    verify(hf, megatron, pair.rules, written="megatron", dtype=None, mode="sample")
    expected = {
        name
        for rule in pair.rules
        for place in rule.places
        if place.layer in (None, 0, 2, 4) and place.expert in (None, 0, 3)
        for name in rule.hf_names(place)
    }
    assert hf.names == expected
    assert len(expected) < len(pair.weights)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_has_a_tensor_of_every_file(tmp_path, name):
    pair = Pair(tmp_path / "pair", make_config(name, num_hidden_layers=8), max_shard_bytes=8_000)
    folder = pair.write_megatron(pair.read, num_threads=40)
    hf, megatron = Watched(pair.root), WatchedMegatron(folder, pair.rules)
    verify(hf, megatron, pair.rules, written="megatron", dtype=None, mode="sample")
    files = {path.name for path in pair.root.glob("*.safetensors")}
    assert len(files) > 30 and files == {hf.entries[name].file for name in hf.names}
    files = {path.name for path in folder.glob("*.distcp")}
    assert len(files) > 30 and files == megatron.files_read


# --- dtypes --------------------------------------------------------------------------------------


def test_dtypes_that_are_kept_must_be_those_of_a_megatron_tensor(pairs):
    pair = pairs["qwen2"]
    for folder in (HfFolder(pair.root), MegatronFolder(pair.root / "megatron0", pair.rules)):
        assert set(kept_dtypes(folder, pair.rules).values()) == {torch.float32}
        assert set(kept_dtypes(folder, pair.rules)) == {rule.megatron for rule in pair.rules}
    folder = HfFolder(pair.root)
    norms = {name for name in folder.entries if "norm" in name}
    for name in norms:
        folder.entries[name] = replace(folder.entries[name], dtype=torch.bfloat16)
    dtypes = kept_dtypes(folder, pair.rules)
    assert {name for name, of in dtypes.items() if of == torch.bfloat16} == {
        rule.megatron for rule in pair.rules if "norm" in rule.megatron
    }
    name = "model.layers.2.input_layernorm.weight"
    folder.entries[name] = replace(folder.entries[name], dtype=torch.float16)
    with pytest.raises(ConversionError, match=mentions(name, torch.float16, "--dtype")):
        kept_dtypes(folder, pair.rules)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("dtype", "place"), [(torch.bfloat16, 0), (torch.float16, 1000), (torch.float64, 500)]
)
def test_what_is_not_finite_is_not_converted(value, dtype, place):
    tensor = torch.randn(7, 143).to(dtype)
    tensor.view(-1)[place] = value
    for to in (None, dtype, torch.float32):
        with pytest.raises(ConversionError, match=mentions("here", f" {value}", "damaged")):
            cast(tensor, to, name="here")


def test_a_cast_rounds_and_does_not_overflow():
    tensor = torch.tensor([1.0, 65519.0, -65519.0, 1 / 3])
    assert cast(tensor, None, name="here") is tensor
    assert torch.equal(cast(tensor, torch.float16, name="here"), tensor.half())
    for value in (65520.0, -65520.0):
        with pytest.raises(ConversionError, match=mentions("here", f" {value:.0f}", "--dtype")):
            cast(torch.tensor([1.0, value]), torch.float16, name="here")
    cast(torch.tensor([65520.0]), torch.bfloat16, name="here")
