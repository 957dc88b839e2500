"""A layout is read off a config and put into one; bytes of state are those allocated."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy
from gapo_tools.planner.deep_dry_run import allocated_bytes
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.no_data import fake_groups
from gapo_tools.planner.state import BYTES_PER_PARAMETER, state_bytes
from tests.scaling_setup import (
    QWEN3,
    SIX_LAYERS,
    SIX_LAYERS_EXPERTS,
    TINY,
    TINY_EXPERTS,
    TWELVE_LAYERS,
    UNTIED,
    make_config,
    parallel_of,
    read_model,
    write_model,
)


def test_layout_of_a_config_and_back() -> None:
    given = make_config("/nowhere")
    layout = Layout(
        tp_size=4,
        pp_size=2,
        cp_size=2,
        dp_size=3,
        ep_size=2,
        sequence_parallel=True,
        recompute="full",
        rollout_tp_size=8,
        vpp_size=2,
        last_layers=6,
    )
    config = layout.apply(given)
    assert Layout.of(config, world_size=48) == layout
    equal = dataclasses.replace(layout, vpp_size=1, last_layers=None)
    assert Layout.of(equal.apply(config), world_size=48) == equal
    assert layout.layers_of_ranks(14) == (8, 6) and equal.layers_of_ranks(14) == (7, 7)
    assert (layout.world_size, layout.ranks_per_stage, layout.copies) == (48, 24, 6)
    assert config.batch == given.batch and config.data == given.data


# Model, precision, layout, world size, rank.
LAYOUTS: list[tuple[dict[str, Any], str, dict[str, Any], int, int]] = [
    (TINY, "fp32", parallel_of(1, 1), 1, 0),
    (TINY, "bf16", parallel_of(2, 1, sp=True), 6, 5),
    (TINY, "bf16", parallel_of(1, 2), 4, 1),
    (UNTIED, "bf16", parallel_of(2, 4), 40, 20),
    (QWEN3, "fp32", parallel_of(4, 2, sp=True), 24, 3),
    (TINY_EXPERTS, "bf16", parallel_of(2, 1, 4, sp=True), 12, 7),
    (TINY_EXPERTS, "fp16", parallel_of(2, 1, 4, sp=True), 12, 7),
    (UNTIED, "bf16", parallel_of(2, 2) | {"overlap_grad_reduce": True}, 8, 1),
    (UNTIED, "bf16", parallel_of(2, 2, cp=3, sp=True), 24, 17),
    (TINY_EXPERTS, "bf16", parallel_of(2, 1, 4, cp=2, sp=True), 24, 21),
    (TINY, "fp32", parallel_of(2, 2, sp=True, vpp=2), 12, 11),
    (QWEN3, "bf16", parallel_of(2, 2, sp=True, last=1), 12, 4),
    (SIX_LAYERS, "bf16", parallel_of(1, 2, first=4, vpp=2), 10, 9),
    (TINY_EXPERTS, "bf16", parallel_of(2, 2, 2, sp=True, vpp=2), 20, 19),
    (TINY_EXPERTS, "bf16", parallel_of(1, 2, 2, last=3), 12, 6),
    (SIX_LAYERS_EXPERTS, "bf16", parallel_of(1, 2, 2, vpp=3), 12, 3),
    (TWELVE_LAYERS, "bf16", parallel_of(1, 3, vpp=2, first=6, last=2), 9, 4),
]


ADAPTED: list[tuple[dict[str, Any], str, dict[str, Any], int, int, tuple[str, ...]]] = [
    (TINY, "bf16", parallel_of(2, 1, sp=True), 6, 5, ("qkv", "proj", "fc1", "fc2")),
    (UNTIED, "fp32", parallel_of(2, 2), 4, 3, ("fc2",)),
    (TINY_EXPERTS, "bf16", parallel_of(2, 1, 4, sp=True), 12, 7, ("qkv", "experts")),
]


@pytest.mark.parametrize(
    ("fields", "precision", "parallel", "world_size", "rank", "targets"),
    [*((*layout, ()) for layout in LAYOUTS), *ADAPTED],
)
def test_bytes_are_those_allocated_less_their_padding(
    tmp_path: Path,
    fields: dict[str, Any],
    precision: str,
    parallel: dict[str, Any],
    world_size: int,
    rank: int,
    targets: tuple[str, ...],
) -> None:
    config = make_config(
        write_model(tmp_path, fields),
        model={"precision": precision},
        parallel=parallel,
        adapter={"kind": "lora", "rank": 5, "targets": targets} if targets else {},
    )
    rules = rules_for(read_model(tmp_path, fields))
    layout = Layout.of(config, world_size=world_size)
    with fake_groups(config.parallel, rank=rank, world_size=world_size) as groups:
        policy = Policy.build(config, groups, "cpu")
        found = allocated_bytes(policy)
    weights, gradients, optimizer = state_bytes(rules, config, layout)[
        rank // layout.ranks_per_stage
    ]
    buffers = [
        buffer
        for stage in policy.model
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
    ]
    padding = sum(one.numel - sum(weight.numel() for weight in one.params) for one in buffers)
    weight, gradient, state = BYTES_PER_PARAMETER[precision]
    assert found[:2] == (weights + weight * padding, gradients + gradient * padding)
    # A rank's part of the state may have all of the padding, or only parameters.
    assert abs(found[2] - optimizer) <= state * padding
