"""Adapters of random factors in the tests of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapo_megatron.config import Config
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import find_rule, shard_size
from gapo_megatron.policy import Policy
from gapo_megatron.policy.lora import Lora
from tests.distributed.policy_setup import make_config

RANK, ALPHA = 3, 5.0
DENSE, ATTENTION = ["qkv", "proj", "fc1", "fc2"], ["qkv", "proj"]
EVERY_TARGET = [*DENSE, "experts", "latent"]
TARGETS = {
    "qwen2": DENSE,
    "gemma3_text": DENSE,
    "qwen3_moe": [*ATTENTION, "experts"],
    "glm4_moe": ATTENTION,
    # Biases beside all that is adapted, and beside experts that are not.
    "gpt_oss": ATTENTION,
    "deepseek_v3": EVERY_TARGET,
    "moonlight": EVERY_TARGET,
}
"""What is adapted, by model (`training_setup.MODELS`)."""


def section(model: str) -> dict[str, Any]:
    return {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": TARGETS[model]}


def lora_config(folder: Path, model: str, /, **sections: Any) -> Config:
    return make_config(folder, **({"adapter": section(model)} | sections))


def lora_of(policy: Policy) -> Lora:
    assert isinstance(policy.adapter, Lora)
    return policy.adapter


def factors(policy: Policy) -> dict[str, tuple[Tensor, Tensor]]:
    """Copies of A [r, in] and B [out, r] by Hugging Face module name. Collective."""
    policy.begin_pass()
    whole = lora_of(policy).whole_factors(policy.stages)
    return {name: (a.clone(), b.clone()) for name, a, b in whole}


@torch.no_grad()
def randomise(policy: Policy) -> None:
    """Give B values, the same in every layout: with B = 0 the gradient of A is 0."""
    groups = policy.groups
    found = factors_of(policy.stages[0].rules, targets=EVERY_TARGET, rank=RANK)
    rules = [one.b for one in found]
    for stage in policy.stages:
        for name, tensor in stage.get_submodule("adapter").named():  # type: ignore[operator]
            if name.endswith(".lora_b"):
                rule, place = find_rule(rules, name)
                size = shard_size(rule, groups.tp_size)
                numbers = [ord(letter) for letter in rule.megatron_name(place)]
                random = np.random.default_rng(numbers)
                whole = torch.from_numpy(random.normal(0, 0.1, rule.full_shape))
                tensor.copy_(rule.shard(whole, groups.tp_rank % size, size))
    policy.optimizer.reload_model_params()
