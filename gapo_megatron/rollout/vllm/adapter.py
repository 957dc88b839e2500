"""Low-rank factors in vLLM: beside its weights, replaced in place, with one fixed id.

vLLM 0.32 computes, beside every linear layer, y += B' (A x) with B' = scale * B, rounded to the
model's dtype like A. A x is summed in float32, then rounded to the dtype of y. So in fp32 the
factors are exact to rounding. In 16 bits B' is exact if scale is a power of two, and otherwise
within 2**-9 (bf16) of every element. Rows up to the rank that vLLM allocates are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import vllm_weights
from gapo_megatron.compat.vllm import LLMEngine, LoRARequest
from gapo_megatron.config import Config
from gapo_megatron.errors import WeightSyncError, said
from gapo_megatron.formats.adapter_folder import AdapterSettings, tensor_names, write_files
from gapo_megatron.models.lora import factors_of, why_merged_on
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout.factors import FactorShapes, check_factors
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.vllm.digests import Digests
from gapo_megatron.rollout.vllm.weights import check_loaded
from gapo_megatron.types import Factors

_NAME, _ID = "policy", 1


@dataclass(frozen=True, slots=True)
class Slots:
    """Room for factors in vLLM's layers."""

    rank: int
    """Rows of A and columns of B."""
    layers: frozenset[str]
    """Last words of the adapted layers' names in the Hugging Face model, such as `q_proj`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(n for n in vllm_weights.adapter_ranks() if n >= self.rank),
            "lora_target_modules": sorted(self.layers),
        }


def slots_for(config: Config, hf_config: PretrainedConfig, device: torch.device) -> Slots | None:
    """Room for an adapter's factors; None without an adapter, and if weights come merged."""
    adapter = config.adapter
    if adapter.kind == "none" or why_merged_on(device.type, config, hf_config):
        return None
    factors = factors_of(rules_for(hf_config), targets=adapter.targets, rank=adapter.rank)
    names = [name.removesuffix(".weight") for one in factors for name in one.weight.hf]
    return Slots(adapter.rank, frozenset(name.rpartition(".")[2] for name in names))


def load_factors(
    llm: LLMEngine,
    factors: Iterable[Factors],
    *,
    shapes: FactorShapes,
    scale: float,
    replicas: Replicas,
) -> LoRARequest:
    """Replace the factors in vLLM's layers, and check that every layer has got its own, bit by bit.

    They travel through temporary files, which are gone afterwards: vLLM's public interface takes a
    path.

    Args:
        llm: vLLM's engine, with memory for the weights.
        factors: factors of every layer with slots.
        shapes: shapes of all of them.
        scale: factor of B A.
        replicas: replicas of the engine.

    Returns:
        What a request must carry to be computed with the factors.

    Collectives: those of `factors`; a gather of a line of text over all ranks; those of
    `check_loaded`.

    Raises:
        WeightSyncError: on a rank a layer has no factors or no slots, factors are misshapen, or
            vLLM fails; names the rank and the reason. Or see `check_loaded`. On every rank.
    """
    held = [(module, a.detach().cpu(), b.detach().cpu()) for module, a, b in factors]
    sent, loaded, problem = Digests(), Digests(), ""

    def note(name: str, part: Tensor, copies: int) -> None:
        loaded.note(name, part, times=replicas.size // copies)

    try:
        sent = _load(llm, held, shapes, scale)
        vllm_weights.note_factors(llm, note)
    except Exception as error:  # of any type: the other ranks wait in the gather
        problem = said(error)
    for rank, found in enumerate(replicas.gather([problem])):
        if found:
            raise WeightSyncError(f"factors of the adapter on rank {rank}: {found}")
    check_loaded(sent, loaded, replicas)
    return LoRARequest(_NAME, _ID, "/nowhere")  # it is loaded


def _load(llm: LLMEngine, factors: list[Factors], shapes: FactorShapes, scale: float) -> Digests:
    """Have vLLM load the factors; returns digests of A and B' as it must compute with them."""
    # vLLM checks none of this: it copies a smaller factor into a corner of its slot.
    check_factors(factors, shapes)
    if odd := sorted(shapes.keys() ^ vllm_weights.adapted_layers(llm)):
        raise WeightSyncError(
            f"{len(odd)} layers with only one of factors and slots: {', '.join(odd[:5])}"
        )
    tensors = {
        name: tensor
        for module, *pair in factors
        for name, tensor in zip(tensor_names(module), pair, strict=True)
    }
    rank = len(factors[0][1])
    settings = AdapterSettings(rank, scale * rank)
    with TemporaryDirectory() as folder:
        write_files(tensors, settings, base_model="", folder=Path(folder))
        # In place: the requests' id stays the same. Only here: vLLM would load the files again for
        # every step of a request that asks for it.
        if not llm.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True)):
            raise WeightSyncError("vLLM has not loaded them")
    sent, dtype = Digests(), llm.model_config.dtype
    for module, a, b in factors:
        sent.note(f"{module}.lora_a", a.to(dtype))
        sent.note(f"{module}.lora_b", b.to(dtype) * settings.scale)
    return sent
