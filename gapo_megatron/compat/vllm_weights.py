"""Undocumented parts of vLLM in use: weights and factors, replaced in place and proved."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.config.lora import MaxLoRARanks
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, split_kv_b_proj
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.engine.llm_engine import LLMEngine

from gapo_megatron.compat.vllm_gpt_oss import SinkLoader, naming_base_layers
from gapo_megatron.errors import WeightSyncError

Note = Callable[[str, Tensor, int], None]
"""Called with a name, a part of the tensor on this rank, and the number of ranks of the replica
that have the same part."""

# --- weights -------------------------------------------------------------------------------------


def load_weights(
    llm: LLMEngine,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    note: Note,
) -> list[str]:
    """Replace the engine's weights, including its packed copies.

    Args:
        llm: engine whose weights have memory (awake).
        tensors: (Hugging Face name, whole tensor); tensors of one module must be adjacent.
        note: called for every parameter as kernels read it, or, where vLLM quantises or packs it
            into another, as it was loaded.

    Returns:
        Names of layers of this rank that compute with former weights: they received none, have
        tensors derived from former ones, or new ones in other memory than captured graphs read.
    """
    # Uses: the worker's method "reload_weights", and its weights_iterator
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#31848 (open), #31943 (merged): a public weight transfer
    num_ranks, sinks = get_tensor_model_parallel_world_size(), SinkLoader()
    without = list[str]()
    llm.apply_model(forget_interrupted)
    (addresses,) = llm.apply_model(_addresses)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_zeroed_padding())
        llm.apply_model(lambda model: stack.enter_context(_noting(model, num_ranks, note, without)))
        llm.apply_model(lambda model: stack.enter_context(naming_base_layers(model)))
        tensors = sinks.watched(tensors)
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        llm.apply_model(sinks.load)
    (now,) = llm.apply_model(_addresses)
    (stale,) = llm.apply_model(_stale_latent)
    # On a CPU, where no graph reads an address, these move weights.
    llm.apply_model(repack_experts)
    llm.apply_model(repack_tied_head)
    moved = [name for name, address in addresses.items() if now.get(name) != address]
    return [*without, *stale, *(name.rpartition(".")[0] for name in moved)]


def forget_interrupted(model: nn.Module) -> None:
    """Forget what modules have received in a reload that did not end: all of it comes again.

    vLLM counts elements, and so would take a part that comes twice for the missing parts.
    """
    # Uses: load_numel, loaded_weights and can_load of LayerReloadingInfo; that the next reload
    #     skips a module that `can_load` (model_loader.reload.layerwise)
    # Versions: vllm 0.32.0
    # Upstream: none found
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _addresses(model: nn.Module) -> dict[str, int]:
    """Where the model's parameters are, by name; a sync that failed leaves some without memory."""
    return {name: one.data_ptr() for name, one in model.named_parameters() if not one.is_meta}


@contextlib.contextmanager
def _zeroed_padding() -> Iterator[None]:
    """Reload into zeroed memory: loaders write only what a checkpoint has.

    vLLM takes uninitialised memory, also for the elements with which it pads a parameter.
    """
    # Uses: model_loader.reload.meta.materialize_meta_tensor, replaced
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#50523 (open)
    materialize = meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda one: materialize(one).zero_()
    try:
        yield
    finally:
        meta.materialize_meta_tensor = materialize


@contextlib.contextmanager
def _noting(
    model: nn.Module,
    num_ranks: int,
    note: Note,
    without: list[str],
) -> Iterator[None]:
    """Call `note` for the model's parameters once they are loaded; see `load_weights`.

    Appends the names of layers that received no weights to `without`.
    """
    # Uses: that a reload calls module.quant_method.process_weights_after_loading once a module has
    #     its weights (model_loader.reload.layerwise), and copies those of others as they are; that
    #     its `restore_metadata` names the parameters that a module was built with, except a bias:
    #     vLLM derives all others from them (latent attention, W_UV and W_UK_T); that a reload does
    #     not wait for a correction bias, which is in two modules (reload.meta); that a tied
    #     output layer has the very parameter of the embedding; its shard_indices
    # Versions: vllm 0.32.0
    # Upstream: none found
    names = {module: name for name, module in model.named_modules()}
    methods = {
        id(method): method
        for module in names
        if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase)
    }

    layers = (LinearBase, VocabParallelEmbedding, RoutedExperts)
    waiting = {
        module: name
        for module, name in names.items()
        if isinstance(module, layers)
        and id(module.quant_method) in methods
        # The rank's part of a small vocabulary may be padding alone.
        and (not hasattr(module, "shard_indices") or module.shard_indices.num_org_elements > 0)
    }
    shared = Counter(id(getattr(module, "weight", module)) for module in waiting)

    unchanged = {
        module for module in names if id(getattr(module, "quant_method", None)) not in methods
    }

    def note_loaded(module: nn.Module, loaded: dict[str, nn.Parameter]) -> None:
        for name, parameter in loaded.items():
            for part, copies in _parts(module, name, parameter.detach(), num_ranks):
                note(f"{names[module]}.{name}", part, copies)

    def note_changed(process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def process_noted(module: nn.Module) -> None:
            waiting.pop(module, None)
            loaded = _loaded(module)
            process(module)
            now = dict(module.named_parameters(recurse=False))
            if all(name in now and _is_like(now[name], one) for name, one in loaded.items()):
                unchanged.add(module)
            else:
                note_loaded(module, loaded)

        return process_noted

    for method in methods.values():
        method.process_weights_after_loading = note_changed(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading  # restores the method of the class
    # Read on exit, after the layers' names and sinks are final (the order of the contexts).
    for module in unchanged:
        note_loaded(module, _loaded(module))
    for name, parameter in model.named_parameters():  # each once
        if name.endswith(".e_score_correction_bias"):
            note(name, parameter.detach(), num_ranks)
    for module, name in waiting.items():
        if shared[id(getattr(module, "weight", module))] == 1:
            without.append(name)


def _loaded(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, without those that vLLM derives, and without a router's bias."""
    built_with = {"bias", *get_layerwise_info(module).restore_metadata[0]}
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if name in built_with and name != "e_score_correction_bias"
    }


def _is_like(one: Tensor, other: Tensor) -> bool:
    """Whether they may have the same elements, in whatever order."""
    return (one.numel(), one.dtype) == (other.numel(), other.dtype)


def _parts(
    module: nn.Module, name: str, parameter: Tensor, num_ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """Parts of a parameter on this rank, each with the number of ranks that have the same."""
    # Uses: QKVParallelLinear.num_heads, .head_size, .num_kv_head_replicas; LinearBase.tp_size
    # Versions: vllm 0.32.0
    # Upstream: none found
    if isinstance(module, QKVParallelLinear):
        num_query = module.num_heads * module.head_size
        yield parameter[:num_query], 1
        yield parameter[num_query:], module.num_kv_head_replicas
        return
    is_cut = (
        name == "sinks"
        or isinstance(module, VocabParallelEmbedding | RoutedExperts)
        or (
            isinstance(module, ColumnParallelLinear | RowParallelLinear)
            and module.tp_size > 1
            and not (isinstance(module, RowParallelLinear) and name == "bias")
        )
    )
    yield parameter, 1 if is_cut else num_ranks


def _stale_latent(model: nn.Module) -> list[str]:
    """Names of the layers whose W_UV and W_UK_T are not those of their `kv_b_proj`.

    vLLM scores prompts with `kv_b_proj`, but decodes with matrices that it cut out of it when the
    weights were loaded. Log-probs of prompts do not show whether those are of the same weights.
    """
    # Uses: layers.attention.mla_attention.split_kv_b_proj; MLAAttention.W_UV, .W_UK_T
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#48312 (open)
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, MLAAttention):
            if not hasattr(layer, "W_UV"):  # kernels of AMX and of aiter pack it otherwise
                raise WeightSyncError(f"{name}: its attention backend has no W_UV to compare")
            sizes = (layer.kv_lora_rank, layer.num_heads, layer.qk_nope_head_dim, layer.v_head_dim)
            keys, values = split_kv_b_proj(layer.kv_b_proj, layer.W_UV.dtype, *sizes)
            is_fresh = torch.equal(layer.W_UV, values.transpose(0, 1)) and torch.equal(
                layer.W_UK_T, keys.permute(1, 2, 0)
            )
            if not is_fresh:
                found.append(name)
    return found


def repack_experts(model: nn.Module) -> None:
    """Pack the experts' new weights for the CPU kernel.

    vLLM does so when it builds the model but not after a reload, and would then compute with
    wrongly ordered weights.
    """
    # Uses: module.quant_method.moe_kernel.fused_experts.process_weights_after_loading
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#48312, #42821, #42823 (open), #32133 (merged)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and next(module.parameters()).device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def repack_tied_head(model: nn.Module) -> None:
    """Refresh the packed copy of the embedding that a tied output layer uses on a CPU.

    vLLM packs it when it builds the model. A reload only refreshes modules whose tensors it loads,
    and a tied output layer has none: it would keep the old weights.
    """
    # Uses: model.lm_head.quant_method.process_weights_after_loading
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#52147 (merged: ties in ParallelLMHead), #48312 (open)
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


# --- factors of an adapter -----------------------------------------------------------------------


def adapter_ranks() -> list[int]:
    """Maximum ranks of an adapter (`max_lora_rank`) that vLLM accepts."""
    # Uses: config.lora.MaxLoRARanks
    # Versions: vllm 0.32.0
    # Upstream: none found
    return sorted(get_args(MaxLoRARanks))


def adapted_layers(llm: LLMEngine) -> set[str]:
    """Hugging Face names of the layers that have room for an adapter's factors.

    vLLM ignores factors of other layers, and computes a layer without factors as if they were zero.
    """
    # Uses: model.lora_manager; its modules, packed_modules
    # Versions: vllm 0.32.0
    # Upstream: none found

    def names(model: Any) -> set[str]:
        manager = model.lora_manager
        fused = manager.packed_modules
        return {part for name in manager.modules for part in fused.get(name, [name])}

    (found,) = llm.apply_model(names)
    return {re.sub(r"(?<=\d\.)attn\.", "self_attn.", name) for name in found}  # gpt-oss's


def note_factors(llm: LLMEngine, note: Note) -> None:
    """Call `note` for the factors of every layer, as its kernel reads them, with their padding."""
    # Uses: model.lora_manager; its modules, packed_modules, their base_layer, n_slices,
    #     lora_a_stacked and lora_b_stacked [slots, 1, rows, columns]
    # Versions: vllm 0.32.0
    # Upstream: none found

    def noted(model: Any) -> None:
        num_ranks, manager = get_tensor_model_parallel_world_size(), model.lora_manager
        for name, layer in manager.modules.items():
            base = layer.base_layer
            is_row = isinstance(base, RowParallelLinear) and base.tp_size > 1
            # One A of several slices of a matrix is there once for each.
            num_same = layer.n_slices // len(manager.packed_modules.get(name, [name]))
            for a in layer.lora_a_stacked[::num_same]:
                note(f"{name}.lora_a", a, 1 if is_row else num_ranks)
            b = torch.cat([one.flatten(0, 2) for one in layer.lora_b_stacked])
            whole = [(b, num_ranks)]
            for part, copies in whole if is_row else _parts(base, "weight", b, num_ranks):
                note(f"{name}.lora_b", part, copies)

    llm.apply_model(noted)
