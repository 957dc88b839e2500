"""Faults of a weight sync, each planted in a real vLLM engine: all stop the run at that sync.

The model has latent attention and experts, and vLLM computes with both as on a GPU. Changes are
small, as an update's are: what only log-probs would show is far below `rollout.verify_bound` then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise, meta

from gapo_megatron.compat import vllm_weights
from gapo_megatron.compat.vllm_gpt_oss import SinkLoader
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.rollouts import Rollouts
from tests.distributed.conversion_setup import MOONLIGHT, save_model
from tests.rollout_setup import (
    EOS,
    build_engine,
    generate,
    largest_difference,
    make_config,
    make_prompts,
    perturb,
    process_group,
    trainer_log_probs,
    update_weights,
)

SIZES: dict[str, Any] = {
    **{"hidden_size": 192, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    **{"eos_token_id": EOS, "head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 512},
}
# fp32 sums in another order, in logits of up to 40: 6e-5 is seen.
LARGEST = 5e-4
Weights = dict[str, Tensor]


@pytest.fixture(
    scope="module", params=["moonlight", pytest.param("deepseek_v3", marks=pytest.mark.system)]
)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """An engine, and its transformers model."""
    folder = tmp_path_factory.mktemp("model")
    changes = MOONLIGHT if request.param == "moonlight" else {}
    save_model(folder, "deepseek_v3", **SIZES | changes)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with process_group():
        engine = build_engine(make_config(folder, verify_bound=LARGEST), load_weights=False)
        engine.wake()
        built = SimpleNamespace(engine=engine, model=model, folder=folder)
        sync(built, version=0)
        yield built
        engine.close()


def weights_of(built: SimpleNamespace) -> Weights:
    built.model.save_pretrained(built.folder)
    return dict(read_hf(built.folder))


def sync(built: SimpleNamespace, *, version: int, tensors: Weights | None = None) -> None:
    """As `rollout.sync.sync`, with transformers for the policy."""
    update_weights(built.engine, (tensors or weights_of(built)).items(), policy_version=version)
    tokens = np.random.default_rng(0).integers(EOS + 1, 60, (3, 30)).astype(np.int32)
    probe = Rollouts.of(list(tokens[:, :4]), list(tokens[:, 4:]))
    expected = trainer_log_probs(built.model, tokens[:, :4], tokens[:, 4:])
    verify_weights(built.engine, probe, expected)


def on_model(built: SimpleNamespace, function: Callable[[nn.Module], Any]) -> Any:
    (found,) = built.engine.llm.apply_model(function)
    return found


def test_latent_attention_decodes_with_the_weights_of_every_sync(built: SimpleNamespace) -> None:
    def derived(model: nn.Module) -> list[Tensor]:
        layers = [one for one in model.modules() if isinstance(one, MLAAttention)]
        return [tensor.clone() for one in layers for tensor in (one.W_UV, one.W_UK_T)]

    prompts = make_prompts(3, length=20)
    for version in (1, 2):
        before = on_model(built, derived)
        perturb(built.model, seed=version)
        assert largest_difference(built.model, prompts, generate(built.engine, prompts)) > 0.05
        sync(built, version=version)
        groups = generate(built.engine, prompts)
        assert largest_difference(built.model, prompts, groups) < LARGEST
        pairs = [*zip(before, on_model(built, derived), strict=True)]
        assert len(pairs) == 4 and not any(torch.equal(one, other) for one, other in pairs)


Plant = Callable[[pytest.MonkeyPatch, Weights, SimpleNamespace], None]
"""Plants a fault in the next sync; gets the weights of the last one, and what is built."""


def on_its_way(change: Callable[[str, Tensor, Weights], Tensor | None]) -> Plant:
    """Change a tensor, or drop it, between what is sent and vLLM."""

    def plant(patch: pytest.MonkeyPatch, old: Weights, _: SimpleNamespace) -> None:
        watched = SinkLoader.watched

        def changed(loader: SinkLoader, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Any]:
            arriving = ((name, change(name, tensor, old)) for name, tensor in tensors)
            return watched(loader, ((n, one) for n, one in arriving if one is not None))  # type: ignore[misc]

        patch.setattr(SinkLoader, "watched", changed)

    return plant


def replacing(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace an attribute by what is made of it."""
    return lambda patch, *_: patch.setattr(owner, name, make(getattr(owner, name)))


def stale_derived(patch: pytest.MonkeyPatch, _: Weights, built: SimpleNamespace) -> None:
    """As of fp8 weights, whose derived tensors share no memory with them."""

    def separate(model: nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, MLAAttention):
                layer.W_UV.data = layer.W_UV.data.clone()

    on_model(built, separate)
    patch.setattr(MLAAttention, "process_weights_after_loading", lambda *_: None)


def uncopied(copy: Any) -> Any:
    """What kernels read of the embedding stays as it was."""

    def copy_others(layer: nn.Module, info: Any) -> None:
        is_embedding = type(layer) is VocabParallelEmbedding
        (layerwise._place_kernel_tensors if is_embedding else copy)(layer, info)

    return copy_others


def dirty(process: Any) -> Any:
    """What the embedding is made of has something in the rows that no token has."""

    def process_dirty(method: Any, layer: nn.Module) -> None:
        layer.weight.data[-1, 0] = 1e-3
        process(method, layer)

    return process_dirty


def processed_twice(repack: Any) -> Any:
    """The halves of the experts' first matrices change places once more."""

    def repack_twice(model: nn.Module) -> None:
        repack(model)
        for name, parameter in model.named_parameters():
            if name.endswith("w13_weight"):
                parameter.data.copy_(parameter.roll(parameter.shape[1] // 2, 1))

    return repack_twice


UP = "model.layers.1.mlp.experts.3.up_proj.weight"
EXPERTS, OUTER = r"model\.layers\.1\.mlp", r"model\.layers\.0\.input_layernorm"
FAULTS: dict[str, tuple[Plant, str]] = {
    "skipped tensor": (on_its_way(lambda n, new, _: None if n == UP else new), EXPERTS),
    "yesterday's tensor": (on_its_way(lambda n, new, old: old[n] if n == UP else new), EXPERTS),
    "yesterday's weights": (on_its_way(lambda n, _, old: old[n]), OUTER),
    "yesterday's kernel tensors": (
        replacing(layerwise, "_copy_and_restore_kernel_tensors", uncopied),
        r"1 modules: model\.embed_tokens",
    ),
    "yesterday's derived tensors": (stale_derived, r"model\.layers\.0\.self_attn"),
    "moved pointers": (
        replacing(layerwise, "_copy_and_restore_kernel_tensors", lambda _: lambda *_: None),
        OUTER,
    ),
    "dirty padding": (
        replacing(UnquantizedEmbeddingMethod, "process_weights_after_loading", dirty),
        r"model\.embed_tokens",
    ),
    "processed twice": (replacing(vllm_weights, "repack_experts", processed_twice), "verify_bound"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_at_once(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    old = weights_of(built)
    sync(built, version=3, tensors=old)
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.mul_(1 + 1e-6)  # a few units in the last place
    plant, named = FAULTS[fault]
    with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match=named):
        plant(patch, old, built)
        sync(built, version=4)
    sync(built, version=5)


def test_weights_are_reloaded_into_zeroed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pads a parameter is otherwise whatever was there: no loader writes it."""
    monkeypatch.setattr(meta.torch, "empty_strided", lambda size, **_: torch.full(size, 7.0))
    one = torch.empty(3, 2, device="meta")
    assert meta.materialize_meta_tensor(one).sum() > 0
    with vllm_weights._zeroed_padding():
        assert meta.materialize_meta_tensor(one).sum() == 0
