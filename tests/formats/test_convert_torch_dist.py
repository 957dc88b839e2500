"""Megatron folders against megatron-core itself: it loads what we write, we read what it saves."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import PretrainedConfig

from gapo_megatron.compat import cpu
from gapo_megatron.compat.megatron_checkpoint import InProcessSave
from gapo_megatron.errors import ConversionError
from gapo_megatron.formats import torch_dist
from gapo_megatron.formats.torch_dist import MegatronFolder, write_megatron
from gapo_megatron.formats.unpickle import check_extra_state, read_common, read_metadata
from gapo_megatron.formats.weights import in_model_order
from gapo_megatron.models.rules import Place, Rule, find_rule
from gapo_megatron.models.tables import rules_for
from tests.convert_setup import make_config
from tests.damage import Trap
from tests.dist import single_rank
from tests.messages import mentions

MODELS = [
    ("qwen2", False),
    ("llama", False),
    ("llama", True),
    ("qwen3", True),
    ("qwen3_moe", False),
]
every_model = pytest.mark.parametrize(("model_type", "tied"), MODELS)
PADDED_VOCAB = 64
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_rank(), cpu.emulation():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()


class Weights:
    """Random weights of a model: what `write_megatron` reads."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.rules = config, rules_for(config)
        self.dtypes = {rule.megatron: dtype for rule in self.rules}
        torch.manual_seed(0)
        self.tensors = {
            rule.megatron_name(place): torch.randn(rule.full_shape).to(dtype)
            for rule, place in in_model_order(self.rules)
        }

    def read(self, rule: Rule, place: Place) -> Tensor:
        return self.tensors[rule.megatron_name(place)]

    def write(self, folder: Path, **options: Any) -> Path:
        folder.mkdir(exist_ok=True)
        write_megatron(
            self.read,
            self.rules,
            hf_config=self.config,
            dtypes=self.dtypes,
            output_dir=folder,
            **options,
        )
        return folder

    def assert_in(self, folder: MegatronFolder) -> None:
        for rule, place in in_model_order(self.rules):
            expected, actual = self.read(rule, place), folder.read(rule, place)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected), rule.megatron_name(place)


@pytest.fixture(params=MODELS, ids=lambda param: f"{param[0]}{'-tied' * param[1]}")
def weights(request) -> Weights:
    model_type, tied = request.param
    return Weights(make_config(model_type, tie_word_embeddings=tied))


@pytest.fixture(scope="module")
def llama() -> Weights:
    return Weights(make_config("llama"))


def make_model(config: PretrainedConfig, *, norms: str = "te") -> GPTModel:
    """Megatron-core's model with its local spec.

    Args:
        norms: how they are named on disk: "te" as Transformer Engine's spec, "local" as the local
            one's map says, "plain" as the parameters.
    """
    num_experts = getattr(config, "num_experts", None)
    sizes = {}
    if num_experts:
        sizes = {
            "num_moe_experts": num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_token_dispatcher_type": "alltoall",
        }
    has_norms = config.model_type.startswith("qwen3")
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=has_norms, normalization="RMSNorm"
    )
    names = spec.submodules.sharded_state_dict_keys_map
    if norms == "plain":
        names.clear()
    elif norms == "te" and num_experts:
        del names["pre_mlp_layernorm."]
    model_config = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=has_norms,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **sizes,
    )
    return GPTModel(
        model_config,
        spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
    )


@torch.no_grad()
def fill(model: GPTModel, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        rule, place = find_rule(weights.rules, name)
        full = weights.read(rule, place)
        parameter.normal_()  # padding too
        parameter[: len(full)].copy_(full)


def save(model: GPTModel, folder: Path, *, others: dict[str, Any] | None = None, **metadata: bool):
    """Save as megatron-core does, except that no process is forked for each file."""
    folder.mkdir(parents=True)
    state = {"model": model.sharded_state_dict(metadata=metadata), **(others or {})}
    strategy = InProcessSave(FileSystemWriter(folder))
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)


# --- megatron-core on the other side -------------------------------------------------------------


def test_megatron_core_loads_what_is_written(tmp_path, weights):
    weights.write(tmp_path / "out")
    MegatronFolder(tmp_path / "out", weights.rules)  # leaves it able to
    model = make_model(weights.config)
    state = {"model": model.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, str(tmp_path / "out"))
    model.load_state_dict(loaded["model"])
    for name, parameter in model.named_parameters():
        full = weights.read(*find_rule(weights.rules, name))
        assert torch.equal(parameter[: len(full)], full), name
        assert not parameter[len(full) :].any(), name
    assert loaded["args"].num_layers == weights.config.num_hidden_layers


def test_a_large_model_has_more_files_than_threads(tmp_path, monkeypatch, weights):
    num_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
    monkeypatch.setattr(torch_dist, "_PART_BYTES", -(-num_bytes // 5))
    assert len(list(weights.write(tmp_path / "out").glob("*.distcp"))) == 5
    weights.assert_in(MegatronFolder(tmp_path / "out", weights.rules))


@pytest.mark.parametrize("file", ["common.pt", "metadata.json", ".metadata.tmp"])
def test_a_disk_that_is_full_at_the_end_is_an_error_of_the_system(tmp_path, llama, file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        llama.write(tmp_path / "out")


@pytest.mark.parametrize("norms", ["te", "local", "plain"])
@pytest.mark.parametrize(
    "metadata", [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}], ids=str
)
def test_what_megatron_core_saves_is_read(tmp_path, weights, norms, metadata):
    model = make_model(weights.config, norms=norms)
    fill(model, weights)
    save(model, tmp_path / "saved", **metadata)
    folder = MegatronFolder(tmp_path / "saved", weights.rules)
    weights.assert_in(folder)
    is_numbered = any(key.startswith("decoder.layers.2.") for key in folder.entries)
    assert is_numbered == bool(metadata)
    assert folder.entries["embedding.word_embeddings.weight"].shape[0] == PADDED_VOCAB
    # As written, when it was saved as we write.
    if norms == "te" and not metadata:
        written = MegatronFolder(weights.write(tmp_path / "out"), weights.rules)
        assert written.entries.keys() == folder.entries.keys()


# --- what is pickled -----------------------------------------------------------------------------


class DelayedScaling:
    """Stands in for Transformer Engine's."""


class Storage:
    """Of a tensor: a pickle within a pickle, in torch's older format."""

    def __init__(self, content: bytes) -> None:
        stream = io.BytesIO()
        torch.save(None, stream, _use_new_zipfile_serialization=False)
        self.content = stream.getvalue().replace(b"\x80\x02N.", content)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.content,)


def as_extra_state(content: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def test_what_transformer_engine_keeps_is_looked_at_before_it_unpickles_it(tmp_path, monkeypatch):
    module = "transformer_engine.common.recipe"
    for name in ("transformer_engine", "transformer_engine.common", module):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(DelayedScaling=DelayedScaling))
    monkeypatch.setattr(DelayedScaling, "__module__", module)
    kept = {"recipe": DelayedScaling(), "scale_fwd": torch.ones(3), "amax": [torch.zeros(2, 3)]}
    stream = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, stream)
    for value in (as_extra_state(kept), torch.empty(0, dtype=torch.uint8), stream, None):
        check_extra_state(value, source="here")
    trace = tmp_path / "trace"
    for content in (
        Trap(trace),
        {"scale_fwd": Storage(pickle.dumps(Trap(trace), 2))},
        [print],
        [os.path.join],
    ):
        with pytest.raises(ConversionError, match=mentions("here")):
            check_extra_state(as_extra_state(content), source="here")
    with pytest.raises(ConversionError, match=mentions("here", "damaged")):
        check_extra_state(as_extra_state(kept)[:-3], source="here")
    assert not trace.exists()


Change = Callable[[Any], Any]


def set_first(field: str, value: Any) -> Change:
    """Of the places in files."""

    def change(metadata: Any) -> None:
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = dataclasses.replace(info, **{field: value})

    return change


FIRST = "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: setattr(metadata, "state_dict_metadata", None),
        lambda metadata: setattr(metadata, "storage_data", [1]),
        lambda metadata: metadata.state_dict_metadata.update({FIRST: "a tensor"}),
        lambda metadata: setattr(metadata.state_dict_metadata[FIRST], "size", (-1, 2)),
        lambda metadata: setattr(metadata.state_dict_metadata[FIRST], "chunks", 3),
        lambda metadata: setattr(metadata.state_dict_metadata[FIRST].properties, "dtype", 2),
        set_first("relative_path", "../other"),
        set_first("offset", -1),
        set_first("transform_descriptors", ["zstd"]),
    ],
)
def test_misshapen_metadata_is_damage(tmp_path, llama, change):
    path = llama.write(tmp_path / "out") / ".metadata"
    before = read_metadata(path.parent)
    metadata = pickle.loads(path.read_bytes())
    assert (before.state_dict_metadata, before.storage_data) == (
        metadata.state_dict_metadata,
        metadata.storage_data,
    )
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=mentions(path)):
        MegatronFolder(path.parent, llama.rules)


def test_large_pickles_of_data_are_read(tmp_path):
    """Of many tensors, and with Python's own random state: a tuple of 625 numbers."""
    part = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))
    of = {
        f"layers.{n}": TensorStorageMetadata(TensorProperties(), torch.Size((2, 3)), [part])
        for n in range(1000)
    }
    places = {MetadataIndex(name, torch.Size((0, 0)), 0): _StorageInfo("a", 0, 24) for name in of}
    metadata = Metadata(
        of, planner_data={name: ("model", name) for name in of}, storage_data=places
    )
    common = {"random": random.getstate(), "numpy": np.random.get_state(), "num_updates": 3}
    torch.save(common, tmp_path / "common.pt")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
        found = read_metadata(tmp_path)
        assert (found.state_dict_metadata, found.storage_data) == (of, places)
    assert read_common(tmp_path, found)["random"] == random.getstate()


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_nobody_waits_for_what_is_no_file(tmp_path, llama, name):
    path = llama.write(tmp_path / "out") / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConversionError, match=mentions(path)):
        MegatronFolder(path.parent, llama.rules)
