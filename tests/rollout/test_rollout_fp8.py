"""A vLLM engine that generates in fp8: its weights after a start and after a sync.

On a CPU with AMX (but without its fp8) vLLM has the weights of layers in fp8, and multiplies them
with bfloat16: the rounding of activations, which GPUs have besides, is the part that is not tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm._custom_ops import cpu_has_amx_fp8
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

from gapo_megatron.config import Config
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed
from tests.rollout_setup import (
    EOS,
    VOCAB,
    build_engine,
    expected_log_probs,
    make_config,
    make_prompts,
    perturb,
    update_weights,
    vllm_environment,
    weights,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not CPUFp8BlockScaledMMKernel.is_supported()[0], reason="vLLM's CPU kernels need AMX"
    ),
    pytest.mark.skipif(cpu_has_amx_fp8(), reason="vLLM rounds activations to fp8 on this CPU"),
]
BLOCK = 128
# Every matrix that vLLM makes of them, on one rank and on two, is cut into whole blocks.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "initializer_range": 0.1,
}


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the weights of layers rounded as vLLM quantises them; float32 otherwise.

    In blocks of 128 x 128, the largest of each becomes 448, the largest number of E4M3.
    """
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(parameter.bfloat16())
            if "layers." in name and parameter.dim() > 1 and "mlp.gate." not in name:
                parameter.copy_(round_blocks(parameter))
    return copy


def round_blocks(weight: Tensor) -> Tensor:
    rows, columns = (size // BLOCK for size in weight.shape[-2:])
    blocks = weight.view(-1, rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((2, 4), keepdim=True).clamp(1e-4) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(weight.shape)


def distance(model: PreTrainedModel, engine: RolloutEngine) -> float:
    """Mean difference of log-probs, over a few sequences of random tokens."""
    tokens = [np.array(prompt.token_ids) for prompt in make_prompts(4, length=40)]
    prompts, responses = [ids[:1] for ids in tokens], [ids[1:] for ids in tokens]
    found = engine.score(Rollouts.of(prompts, responses))
    wanted = [expected_log_probs(model, p, r) for p, r in zip(prompts, responses, strict=True)]
    return float(np.abs(np.concatenate(found) - np.concatenate(wanted)).mean())


def distances(model: PreTrainedModel, engine: RolloutEngine) -> tuple[float, float]:
    """Differences from the model with rounded weights, and from the model itself."""
    return distance(rounded(model), engine), distance(model, engine)


def fp8_config(folder: Path, **rollout: object) -> Config:
    return make_config(folder, precision="bf16", quantization="fp8", **rollout)


def in_bf16(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As a policy of that precision sends them."""
    return ((name, tensor.bfloat16()) for name, tensor in tensors.items())


def start_and_sync(folder: str, tp_size: int) -> list[tuple[float, float]]:
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)  # as on another CPU, where these kernels are not
    os.environ.update(vllm_environment(dist.get_rank(), dist.get_world_size()))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=64, tie_word_embeddings=True)).eval()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    engine = build_engine(fp8_config(Path(folder), tensor_parallel_size=tp_size))
    found = [distances(model, engine)]
    # Larger by far in the first sync, smaller by far in the second: an older scale would cut off
    # the one, and leave nothing of the other.
    for version, factor in enumerate([8.0, 0.02]):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "mlp.up_proj" in name:
                    parameter.mul_(factor)
        perturb(model, seed=version)
        update_weights(engine, in_bf16(weights(model)), policy_version=version)
        found.append(distances(model, engine))
    again = distance(model, engine)
    update_weights(engine, in_bf16(weights(model)), policy_version=2)
    assert distance(model, engine) == again  # the same weights, the same bits
    return found


def sync_experts(folder: str) -> list[tuple[float, float]]:
    """Started without weights, as in a run."""
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    os.environ.update(vllm_environment(0, 1))
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = Qwen3MoeConfig(**sizes, head_dim=64, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    settings = fp8_config(Path(folder, "0"))
    model.save_pretrained(settings.model.hf_dir)
    engine = build_engine(settings, load_weights=False)
    found = []
    for version in (1, 2):
        perturb(model, seed=version)
        model.save_pretrained(f"{folder}/{version}")  # under the names of single experts
        tensors = load_file(f"{folder}/{version}/model.safetensors")
        update_weights(engine, in_bf16(tensors), policy_version=version)
        found.append(distances(model, engine))
    return found


def check(found: list[tuple[float, float]]) -> None:
    for of_rounded, of_model in found:
        # What is left is the rounding of activations to bfloat16, a sixteenth of that of weights
        # to E4M3, with as many roundings.
        assert of_rounded < of_model / 4
        assert of_model > 0.01


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_are_quantised_at_the_start_and_by_every_sync(tmp_path: Path, tp_size: int) -> None:
    for found in run_distributed(start_and_sync, tp_size, str(tmp_path), tp_size):
        check(found)


def test_experts_are_quantised_and_the_router_is_not(tmp_path: Path) -> None:
    (found,) = run_distributed(sync_experts, 1, str(tmp_path))
    check(found)
