"""Checks that need the trainer's code; each function runs in a process of its own.

On a GPU: NOT YET RUN.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from gapo_megatron import rewards
from gapo_megatron.compat.transformer_engine import DEBUG_ENVIRONMENT, attention_in_use
from gapo_megatron.config import DTYPES, Config, load_config, parse_config
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.hf.headers import find_files
from gapo_megatron.hf.model_folder import check_model_folder
from gapo_megatron.logprob import choose_implementation
from gapo_megatron.models.published import find_model
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.ops.plan.hardware import GPUS
from gapo_megatron.ops.plan.memory import fits
from gapo_megatron.ops.sides import Sides, schedule
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import process_group

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
_MOST_PROCESSES = 2**14
_NUM_TOKENS = 64
"""Tokens of each sequence: 16 of the prompt, the others of the response."""


def policy(**model: str) -> None:
    """Build a tiny policy as the trainer does, update it once, and print its parts.

    Args:
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
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        tree: dict[str, Any] = {
            "run": {"output_dir": folder, "num_steps": 1},
            "model": {"hf_dir": folder, **model},
            "data": {"train_path": "unused"},
            "rollout": {"max_response_tokens": _NUM_TOKENS},
            "reward": {"kind": "exact"},
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
    from gapo_megatron.rollout.vllm.installation import installation

    _print(**asdict(installation(getattr(torch, DTYPES[precision]))))


def config(path: str, world_size: int, ranks_per_node: int | None) -> None:
    """Print a resolved config, its model, and its layout on `world_size` processes.

    Args:
        path: path of the TOML file.
        world_size: number of processes; 0: the smallest that works.
        ranks_per_node: see `Sides.of`.
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
    return {
        "config": settings.model_dump(mode="json"),
        "model": _or_error(lambda: _model(settings)),
        "verifier": _or_error(lambda: _verifier(settings)),
        "world_size": _or_error(lambda: _world_size(settings, world_size, ranks_per_node)),
        "memory": _or_error(lambda: _memory(settings, world_size, ranks_per_node)),
    }


def _or_error(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return look()
    except GapoError as error:
        return {"error": str(error)}


def _model(settings: Config) -> dict[str, Any]:
    """Open the model as the trainer does; of the weights, only headers are read."""
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_megatron.models.checks import check_shapes
    from gapo_megatron.policy.load import check_megatron_dir
    from gapo_megatron.policy.model import read_hf_config

    hf_dir, megatron_dir = settings.model.hf_dir, settings.model.megatron_dir
    facts = check_model_folder(hf_dir, weights=not megatron_dir, field="model.hf_dir")
    hf_config = read_hf_config(hf_dir)
    check_shapes(hf_config, settings.parallel, settings.model)
    load_tokenizer(hf_dir, facts=facts)
    if megatron_dir:
        check_megatron_dir(settings, hf_config)
    else:
        find_files(hf_dir)
    return {"architecture": hf_config.architectures[0], "weights": megatron_dir or hf_dir}


def _verifier(settings: Config) -> dict[str, Any]:
    rewards.check(settings.reward)
    return {}


def _world_size(settings: Config, world_size: int, ranks_per_node: int | None) -> dict[str, Any]:
    def fits(size: int) -> bool:
        try:
            Sides.of(settings, world_size=size, ranks_per_node=ranks_per_node)
        except ConfigError:
            return False
        return True

    smallest = next(filter(fits, range(1, _MOST_PROCESSES)), 1)
    sides = Sides.of(settings, world_size=world_size or smallest, ranks_per_node=ranks_per_node)
    trained, generated, batch = sides.num_training, sides.num_generation, settings.batch
    return {
        "smallest": smallest,
        "world_size": sides.world_size,
        "cut": sides.layout.cut,
        "training": f"{trained}, {sides.place(0, trained)}",
        "generation": f"{generated}, {sides.place(trained, generated)}" if generated else "",
        "engines": f"{sides.num_engines} vLLM replicas of {settings.rollout.tensor_parallel_size}",
        "schedule": schedule(settings),
        "rollout_sequences": batch.rollout_prompts * batch.rollouts_per_prompt,
    }


def _memory(settings: Config, world_size: int, ranks_per_node: int | None) -> dict[str, Any]:
    """GPUs that the run fits on `world_size` processes (0: eight); empty without the model."""
    hf_config, _ = find_model(settings.model.hf_dir)
    if hf_config is None:
        return {"fits": [], "not_fits": [], "world_size": 0}
    size = world_size or GPUS["h100"].gpus_per_node
    layout = Sides.of(settings, world_size=size, ranks_per_node=ranks_per_node).layout
    found = fits(hf_config, settings, layout)
    return {
        "fits": [one.shown for one in found if one.fits],
        "not_fits": [one.shown for one in found if not one.fits],
        "world_size": size,
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
