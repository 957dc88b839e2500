"""Tiny models in a real vLLM engine."""

import contextlib
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from vllm import EngineArgs

from gapo_megatron.config import Config
from gapo_megatron.rollout import generate as generate_module
from gapo_megatron.rollout.generate import Hooks
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollout.vllm.arguments import engine_args
from gapo_megatron.types import Prompt
from tests.configs import config_of

CPU = torch.device("cpu")
VOCAB, EOS = 61, 1
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "initializer_range": 0.1,  # far from uniform: log-probs differ between tokens and weights
}
# fp32 sums of at most 256 products in another order: 3e-6 is seen on values up to 10.
TOLERANCE = 1e-5
# Two responses that nearly always end by themselves: groups are whole at different times.
LONG = {"num_samples": 2, "max_response_tokens": 150}


def make_model(tied: bool) -> PreTrainedModel:
    """Qwen2 tied, Llama untied: biases and both kinds of output layer in two engines."""
    torch.manual_seed(0)
    if tied:
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=64, tie_word_embeddings=False))


def make_config(
    hf_dir: Path, *, precision: str = "fp32", adapter: Mapping[str, Any] = {}, **rollout: object
) -> Config:
    usual = {
        "model": {"hf_dir": str(hf_dir), "precision": precision},
        "data": {"max_prompt_tokens": 140},
        "batch": {"max_tokens_per_microbatch": 256},
        "rollout": {
            "max_response_tokens": 24,
            "enforce_eager": True,
            "verify_bound": TOLERANCE,
        },
    }
    return config_of(usual, {"rollout": rollout}, {"adapter": adapter})


def vllm_environment(rank: int = 0, world_size: int = 1) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # the process group is up: nobody connects
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # a user's; the config says otherwise
    }


def build_engine(config: Config, *, load_weights: bool = True) -> RolloutEngine:
    hf_config = AutoConfig.from_pretrained(config.model.hf_dir)
    return RolloutEngine(config, hf_config, device="cpu", load_weights=load_weights)


def make_args(config: Config, hf_config: PretrainedConfig, device: torch.device) -> EngineArgs:
    return engine_args(config, hf_config, device, load_weights=False)


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def update_weights(
    engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]], **settings: Any
) -> None:
    """Update an engine that may be asleep."""
    engine.wake()
    engine.update_weights(tensors, **settings)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of one rank, and the environment a launcher gives; the engine closes the group."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, value in vllm_environment().items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield
        assert not dist.is_initialized()


def random_states() -> list[object]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def make_prompts(count: int, length: int = 9) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(f"p{i}", tuple(generator.integers(2, VOCAB, length).tolist()), answer="")
        for i in range(count)
    ]


def generate(engine: RolloutEngine, prompts: list[Prompt], **changes: Any):
    """Changes are those of the settings, of the hooks or of the generation itself."""
    settings = {"num_samples": 4, "seed": 7, "step": 0, "max_response_tokens": 24}
    of = {
        kind: {one.name: changes.pop(one.name) for one in fields(kind) if one.name in changes}
        for kind in (SamplingSettings, Hooks)
    }
    return generate_module.generate(
        engine,
        prompts,
        SamplingSettings(**settings | of[SamplingSettings]),
        hooks=Hooks(**of[Hooks]),
        **changes,
    )


def expected_log_probs(
    model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    tokens = torch.tensor([*prompt, *response]).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].float() / temperature
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return logits.log_softmax(-1)[rows, tokens[len(prompt) :]].numpy()


def trainer_log_probs(model, prompt_ids, response_ids) -> list[np.ndarray]:
    return [expected_log_probs(model, p, r) for p, r in zip(prompt_ids, response_ids, strict=True)]


def largest_difference(model, prompts, groups, temperature: float = 1.0) -> float:
    return max(
        np.abs(
            expected_log_probs(model, prompt.token_ids, r.token_ids, temperature) - r.log_probs
        ).max()
        for prompt, group in zip(prompts, groups, strict=True)
        for r in group
    )


def tokens_of(groups) -> list[list[list[int]]]:
    return [[r.token_ids.tolist() for r in group] for group in groups]


def perturb(model: PreTrainedModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def sequences(engine: RolloutEngine, count: int = 3):
    prompts = make_prompts(count)
    responses = [group[0].token_ids for group in generate(engine, prompts, num_samples=1)]
    return [np.array(p.token_ids, dtype=np.int32) for p in prompts], responses
