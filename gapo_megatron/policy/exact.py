"""The policy's log-probs with less rounding: the same weights in a higher precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gapo_megatron.compat import cpu
from gapo_megatron.device import float32_products
from gapo_megatron.policy.model import PolicyModel, build_model
from gapo_megatron.policy.policy import Policy


@contextlib.contextmanager
def exact_arithmetic(policy: Policy) -> Iterator[None]:
    """Let `policy` compute in float32 instead of 16 bits, or in float64 instead of float32.

    For log-probs only. Parallel layout and order of operations stay the same; Transformer Engine's
    layers, which have no such attention, are replaced by Megatron-core's. The weights are copied,
    with four (eight) bytes each. Four bytes fit into the memory of the gradients of all weights,
    which is free except from the beginning of an update to `Policy.make_room`. With an adapter,
    which has hardly any gradients, they come on top (`gapo_tools.planner.memory`).
    """
    stages = exact_stages(policy)
    kept = policy.model, policy.stages, policy.head
    policy.model, policy.stages, policy.head = list(stages), stages, "torch"
    try:
        with float32_products(policy.device):
            yield
    finally:
        policy.model, policy.stages, policy.head = kept
        for stage in stages:  # free the memory even if a tensor is still referenced
            for parameter in stage.parameters():
                parameter.untyped_storage().resize_(0)


def exact_stages(policy: Policy) -> list[PolicyModel]:
    """This rank's virtual stages in a higher precision, with the policy's weights."""
    # Megatron-core seeds the device's random generator, which others use too.
    is_cuda = policy.device.type == "cuda"
    with (
        torch.random.fork_rng([policy.device] if is_cuda else [], enabled=is_cuda),
        cpu.device_scope(),
    ):
        stages = build_model(
            policy.hf_config,
            policy.groups,
            policy.device,
            precision="fp64" if policy.precision == "fp32" else "fp32",
            parallel=policy.parallel,
        )
    for stage in stages:
        stage.requires_grad_(False)
    policy.fill(stages)
    return stages
