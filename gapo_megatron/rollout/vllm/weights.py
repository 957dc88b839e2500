"""Loading of the trainer's weights into vLLM, and the bound on differences by rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gapo_megatron.compat import vllm_weights
from gapo_megatron.compat.vllm import LLMEngine
from gapo_megatron.config import ModelConfig, RolloutConfig
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.checks import num_experts
from gapo_megatron.models.rules import checked
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.vllm.digests import Digests, differing, module_of


def reload_weights(
    llm: LLMEngine,
    hf_config: PretrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    replicas: Replicas,
) -> None:
    """Replace vLLM's weights in place, and verify that every tensor was loaded.

    The tensors are streamed: vLLM holds those of a fused module until the last of them arrives,
    then copies this rank's share over the old weights (graphs and compiled code stay valid). At
    most one such module is held besides the two copies of the model. With `rollout.quantization`
    the module is then quantised, with scales of the new weights.

    Digests compare sent and loaded weights before vLLM quantises or packs them; the log-probs that
    follow (`rollout.verify`) check its computation.

    Args:
        llm: vLLM's engine, with memory for the weights.
        hf_config: the model's Hugging Face config.
        weights: see `Engine.update_weights`.
        replicas: replicas of the engine.

    Collectives: those of `weights` and of `check_loaded`.

    Raises:
        ConversionError: a tensor is missing, extra, repeated or misshapen; names it.
        WeightSyncError: see `check_loaded`.
    """
    sent, loaded = Digests(), Digests()

    def note(name: str, part: Tensor, copies: int) -> None:
        loaded.note(name, part, times=replicas.size // copies)

    tensors = sent.noted(checked(rules_for(hf_config), weights))
    for name in vllm_weights.load_weights(llm, tensors, note=note):
        loaded[module_of(f"{name}.weight")] += 1  # it differs, whatever it holds
    check_loaded(sent, loaded, replicas)


def check_loaded(sent: Digests, loaded: Digests, replicas: Replicas) -> None:
    """Compare the weights that every engine has loaded with the sent weights.

    Args:
        sent: digests of whole tensors.
        loaded: digests of this rank's loaded weights; see `differing`.
        replicas: replicas of the engine.

    Collectives: a gather of a few numbers per layer within the replica; a gather of a line of text
    over all ranks.

    Raises:
        WeightSyncError: an engine's weights differ from the sent weights; names the first such
            engine and its modules. On every rank.
    """
    wrong = differing(sent, replicas.gather_in_replica(loaded))
    ours = f"{len(wrong)} modules: {', '.join(wrong[:5])}" if wrong else ""
    for rank, modules in enumerate(replicas.gather([ours])):
        if modules:
            raise WeightSyncError(
                f"weights of the engine of rank {rank} differ from those sent, in {modules}"
            )


def verify_bound(
    model: ModelConfig, rollout: RolloutConfig, hf_config: PretrainedConfig, device: torch.device
) -> float:
    """`rollout.verify_bound`, or by default a bound well above differences by rounding.

    Mean difference of log-probs per token: in fp32 about 1e-6 on a CPU, more on CUDA, where vLLM's
    attention in Triton may multiply in TF32 (not yet measured); in bf16 about 0.01 for sampled
    tokens and a few times that for unlikely tokens, in fp16 an eighth of it; twice as much if
    rounding routes a token to other experts, or with products in fp8. A wrong tensor changes
    log-probs by whole units.
    """
    if rollout.verify_bound is not None:
        return rollout.verify_bound
    if model.precision == "fp32" and not rollout.quantization:
        return 1e-2 if device.type == "cuda" else 1e-3
    if model.precision == "fp8" or rollout.quantization:
        return 0.3
    dense, with_experts = (0.02, 0.06) if model.precision == "fp16" else (0.1, 0.3)
    return with_experts if num_experts(hf_config) else dense
