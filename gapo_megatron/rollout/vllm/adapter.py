"""Low-rank factors in vLLM: beside its weights, replaced in place, with one fixed id.

vLLM 0.32 computes, beside every linear layer, y += B' (A x) with B' = scale * B, rounded to the
model's dtype like A. A x is summed in float32, then rounded to the dtype of y. So in fp32 the
factors are exact to rounding. In 16 bits B' is exact if scale is a power of two, and otherwise
within 2**-9 (bf16) of every element. Rows up to the rank that vLLM allocates are zeros.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import vllm
from gapo_megatron.compat.vllm import LLMEngine, LoRARequest
from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import ConversionError, WeightSyncError
from gapo_megatron.hf.adapter_folder import AdapterSettings, tensor_names, write_files
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.types import Factors

_NAME, _ID = "policy", 1
_SHARED_MEMORY = "/dev/shm"


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
            "max_lora_rank": min(rank for rank in vllm.adapter_ranks() if rank >= self.rank),
            "lora_target_modules": sorted(self.layers),
        }


def slots_for(adapter: AdapterConfig, hf_config: PretrainedConfig) -> Slots | None:
    """Room for the factors of section `adapter`; None without an adapter."""
    if adapter.kind == "none":
        return None
    layers = set()
    for one in factors_of(rules_for(hf_config), targets=adapter.targets, rank=adapter.rank):
        last_words = {name.removesuffix(".weight").rpartition(".")[2] for name in one.weight.hf}
        layers |= {"experts"} if one.target == "experts" else last_words
    return Slots(adapter.rank, frozenset(layers))


def why_merged(slots: Slots, *, dtype: torch.dtype, device: torch.device, quantized: bool) -> str:
    """Why vLLM cannot generate with such factors beside its weights; empty if it can."""
    if slots.rank > (largest := max(vllm.adapter_ranks())):
        return f"vLLM takes ranks up to {largest}, not {slots.rank}"
    if "experts" in slots.layers:
        return "vLLM has no factors for experts on a CPU, and those on a GPU are not supported here"
    if device.type == "cuda" and dtype.itemsize > 2:
        return f"vLLM's kernels for factors compute in 16 bits on a GPU, not in {dtype}"
    if quantized:
        return "factors beside quantised weights are not supported"
    return ""


def load_factors(
    llm: LLMEngine, factors: Iterable[Factors], *, slots: Slots, scale: float, replicas: Replicas
) -> LoRARequest:
    """Replace the factors in vLLM's layers, and check that every layer has got its own.

    They travel through files in memory (`/dev/shm`, or the folder for temporary files where that is
    too small), which are gone afterwards: vLLM's public interface takes a path.

    Args:
        llm: vLLM's engine, with memory for the weights.
        factors: of every layer with slots.
        slots: what the engine was built with.
        scale: factor of B A.
        replicas: replicas of the engine.

    Returns:
        What a request must carry to be computed with the factors.

    Collectives: those of `factors`; a gather of a line of text over all ranks.

    Raises:
        WeightSyncError: on a rank a layer has no factors or no slots, factors are misshapen, or
            vLLM refuses them; names the rank and the layers. On every rank.
    """
    tensors: dict[str, Tensor] = {}
    modules = set()
    for module, a, b in factors:
        modules.add(module)
        tensors |= zip(tensor_names(module), (a.detach().cpu(), b.detach().cpu()), strict=True)
    request = LoRARequest(_NAME, _ID, _SHARED_MEMORY)
    problem = ""
    if odd := sorted(modules ^ vllm.adapted_layers(llm)):
        problem = f"{len(odd)} layers with only one of factors and slots: {', '.join(odd[:5])}"
    else:
        try:
            _load(llm, tensors, AdapterSettings(slots.rank, scale * slots.rank))
        except (ConversionError, OSError, RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    for rank, found in enumerate(replicas.gather([problem])):
        if found:
            raise WeightSyncError(f"factors of the adapter on rank {rank}: {found}")
    return request


def _load(llm: LLMEngine, tensors: dict[str, Tensor], settings: AdapterSettings) -> None:
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=_folder_with_room(num_bytes)) as folder:
        write_files(tensors, settings, base_model="", folder=Path(folder))
        # In place: the requests' id stays the same. Only here: vLLM would load the files again for
        # every step of a request that asks for it.
        if not llm.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True)):
            raise ValueError("vLLM has not loaded them")


def _folder_with_room(num_bytes: int) -> str:
    """Where files of this size fit, memory first.

    Raises:
        OSError: nowhere.
    """
    folders = [_SHARED_MEMORY, tempfile.gettempdir()]
    for folder in folders:
        if Path(folder).is_dir() and shutil.disk_usage(folder).free > num_bytes + 2**20:
            return folder
    raise OSError(f"none of {', '.join(folders)} has {num_bytes / 1e9:.3g} GB free")
