"""Whole weights on every rank: the same bits from every layout, by few, bounded collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.learn.update import update
from gapo_megatron.policy import destroy, export
from gapo_megatron.policy import model as model_module
from tests.dist import run_distributed
from tests.distributed.conversion_setup import VOCAB_SIZE, save_model
from tests.distributed.policy_setup import (
    EP,
    PP,
    SP,
    TP,
    SinksInFloat32,
    WeightedLoss,
    copies,
    load_policy,
    make_batch,
    make_config,
    read_weights,
)

NUM_LAYERS = 4
SMALL = 20_000
"""Bytes: fits one expert (13,824), and some of a layer's parameters."""


@dataclass
class Sent:
    """Bytes of each collective's result on a rank."""

    broadcasts: list[int] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)

    def broadcast(self, tensor: Tensor, **where: Any) -> None:
        self.broadcasts.append(tensor.nbytes)
        BROADCAST(tensor, **where)

    def gather(self, whole: Tensor, part: Tensor, **where: Any) -> None:
        self.gathers.append(whole.nbytes)
        GATHER(whole, part, **where)


BROADCAST, GATHER = dist.broadcast, dist.all_gather_into_tensor


@dataclass(frozen=True)
class Case:
    """A model and a layout of two ranks, and the collectives of one export."""

    model: str
    parallel: dict[str, Any]
    num_broadcasts: int
    num_gathers: int


CASES = {
    # Embedding, output layer, and one for each layer, whatever its parameters are.
    "tensor": Case("qwen2", {TP: 2}, 0, NUM_LAYERS + 2),
    "tied": Case("llama", {TP: 2}, 0, NUM_LAYERS + 1),
    # Also the last norm; norms and matrices travel together.
    "pipeline": Case("qwen2", {PP: 2}, NUM_LAYERS + 3, 0),
    "pipeline, experts": Case("qwen3_moe", {PP: 2}, NUM_LAYERS + 3, 0),
    # All experts of a layer at once.
    "expert": Case("qwen3_moe", {EP: 2}, 0, NUM_LAYERS),
    "expert, tensor": Case("qwen3_moe", {EP: 2, TP: 2, SP: True}, 0, 2 * NUM_LAYERS + 2),
}


def export_all(root: Path) -> dict[tuple[str, int], Sent]:
    found = {}
    for name, case in CASES.items():
        config = make_config(root / case.model, parallel=case.parallel)
        policy = load_policy(config)
        for bucket_bytes in (export.BUCKET_BYTES, SMALL):
            sent = found[name, bucket_bytes] = Sent()
            with (
                patch.object(dist, "broadcast", sent.broadcast),
                patch.object(dist, "all_gather_into_tensor", sent.gather),
                patch.object(export, "BUCKET_BYTES", bucket_bytes),
            ):
                whole = list(policy.iterate_hf_weights())
            assert len(dict(whole)) == len(whole), name
            kept = dict(whole)  # all of them: nothing is written over what is still held
            for key, value in read_weights(root / case.model):
                assert torch.equal(kept.pop(key), value), (name, bucket_bytes, key)
            assert not kept, name
            assert adjacent([key for key, _ in whole]), name
        destroy()
    return found


def adjacent(names: list[str]) -> bool:
    """Tensors of an engine module are consecutive: the engine holds those of one module only."""
    modules = [engine_module(name) for name in names]
    changes = [b for a, b in zip([None, *modules], modules, strict=False) if a != b]
    return len(changes) == len(set(changes))


def engine_module(name: str) -> str:
    """Fused modules: query, key and value; gate and up projection; all experts of a layer."""
    layer, _, rest = name.partition(".mlp.experts.")
    if rest:
        return f"{layer}.mlp.experts"
    parts = name.rsplit(".", 1)[0].split(".")
    merged = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}
    merged |= {"gate_proj": "gate_up", "up_proj": "gate_up"}
    return ".".join([*parts[:-1], merged.get(parts[-1], parts[-1])])


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Sent]]:
    root = tmp_path_factory.mktemp("models")
    for model in {case.model for case in CASES.values()}:
        save_model(root / model, model)
    return run_distributed(export_all, 2, root)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_takes_one_collective_of_each_kind(
    name: str, sent: list[dict[tuple[str, int], Sent]]
) -> None:
    case = CASES[name]
    for rank in sent:
        found = rank[name, export.BUCKET_BYTES]
        assert len(found.broadcasts) == case.num_broadcasts
        assert len(found.gathers) == case.num_gathers


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_bounded(name: str, sent: list[dict[tuple[str, int], Sent]]) -> None:
    """Only by a single parameter that is larger than any bucket."""
    for rank in sent:
        few, many = rank[name, export.BUCKET_BYTES], rank[name, SMALL]
        for large, small in ((few.broadcasts, many.broadcasts), (few.gathers, many.gathers)):
            assert sum(large) == sum(small)
            assert not large or len(small) > len(large)
        # Query, key and value: [160, 48] in fp32.
        assert max([*many.broadcasts, *many.gathers]) <= max(SMALL, 4 * 160 * 48)


def send_twice(folder: Path) -> list[dict[str, Tensor]]:
    """What a sync sends before and after an update."""
    config = make_config(
        folder,
        model={"precision": "bf16"},
        parallel={EP: 2, TP: 2, SP: True},
        optimizer={"learning_rate": 0.1, "eps": 1e-8},
    )
    with patch.object(model_module, "PackedAttention", SinksInFloat32):
        policy = load_policy(config)
    sent = [copies(policy)]
    batch = make_batch(4, vocab_size=VOCAB_SIZE)
    microbatches = [policy.pack(batch, indices) for indices in ((0, 1), (2, 3))]
    update(policy, microbatches, WeightedLoss(batch, microbatches))
    sent.append(copies(policy))
    destroy()
    return sent


def test_sinks_made_in_float32_are_sent_and_trained_in_16_bits(tmp_path: Path) -> None:
    """An engine holds them in the model's dtype: its digest would differ from float32's."""
    save_model(tmp_path, "gpt_oss")
    for before, after in run_distributed(send_twice, 2, tmp_path):
        assert {one.dtype for one in (*before.values(), *after.values())} == {torch.bfloat16}
        for name, weight in read_weights(tmp_path):
            assert torch.equal(before.pop(name), weight.bfloat16()), name
            if name.endswith(".sinks"):
                assert not torch.equal(after[name], weight.bfloat16()), name
        assert not before
