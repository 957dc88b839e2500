"""A tiny policy in any layout: built, trained, saved, and read directly from disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from transformers import Qwen2Config, Qwen2ForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import Room, Saving, State, shards
from gapo_megatron.checkpoint.shards import Shards
from gapo_megatron.compat import cpu
from gapo_megatron.config import Config
from gapo_megatron.learn.update import update
from gapo_megatron.policy import ParallelGroups, Policy
from gapo_megatron.rollouts import Rollouts
from tests.attempt_setup import make_attempt
from tests.configs import config_of
from tests.waiting import HANG_S

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vpp": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "uneven": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "single": {},
}


def make_model(folder: Path, *, hidden_size: int) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_config(hf_dir: str, *, layout: str) -> Config:
    sections = {
        "run": {"num_steps": 4},
        "model": {"hf_dir": hf_dir, "precision": "fp32"},
        "parallel": LAYOUTS[layout],
        "data": {"max_prompt_tokens": 8},
        # Large enough that a wrong moment, or a lost step count, moves weights visibly.
        "optimizer": {"learning_rate": 1e-2},
    }
    return config_of(sections)


def train_one_update(policy: Policy, *, seed: int) -> None:
    """Raise the likelihood of random responses: the same data for every layout."""
    generator = np.random.default_rng(seed)
    sequences = [generator.integers(0, 40, size=12, dtype=np.int32) for _ in range(4)]
    batch = Rollouts.of([ids[:5] for ids in sequences], [ids[5:] for ids in sequences])
    groups = policy.groups
    mine = range(groups.dp_rank, 4, groups.dp_size)
    microbatches = [policy.pack(batch, [i]) for i in mine]
    update(policy, microbatches, lambda scored: (-scored.log_probs.sum() / 28, {}))


def make_state(step: int, **fields: Any) -> State:
    """State of a run after `step` steps; fields are those of `State`."""
    source = {"epoch": 1, "remaining": [step], "dataset": {"rows": "d"}}
    given = {"step": step, "source": source, "source_before": source, "num_given_back": 7}
    state = State(**given | fields)
    state.window.load_state_dict([[[1, 2, 0.1, -1]]])
    return state


def stored(state: State) -> tuple[object, ...]:
    """Stored content of a state between two steps."""
    return state.step, state.source_before, state.window.state_dict(), state.num_given_back


def save(
    run_dir: Path,
    policy: Policy,
    config: Config,
    *,
    step: int,
    keep_last: int = 9,
    **fields: Any,
) -> Path:
    settings = config.checkpoint.model_copy(update={"keep_last": keep_last})
    return checkpoint.save(
        run_dir,
        make_state(step, **fields),
        policy=policy,
        config=config.model_copy(update={"checkpoint": settings}),
        attempt=make_attempt(run_dir),
    )


def begin(
    run_dir: Path, policy: Policy, config: Config, state: State, room: Room | None = None
) -> Saving:
    of_run: dict[str, Any] = {"policy": policy, "config": config}
    attempt = make_attempt(run_dir)
    return checkpoint.begin_save(
        run_dir, state, **of_run, attempt=attempt, in_background=True, room=room
    )


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Threads begin to write when the event is set."""
    released, write = threading.Event(), Shards.write

    def late(self: Shards) -> Any:
        assert released.wait(HANG_S)
        return write(self)

    with patch.object(Shards, "write", late):
        try:
            yield released
        finally:
            released.set()  # after a failure, too: a process waits for its threads


def gather_nothing(wanted: list[Any]) -> None:
    assert not wanted, "an optimizer's state"


def write_state(
    state: dict[str, Any],
    folder: Path,
    groups: ParallelGroups,
    *,
    gather: shards.Gather = gather_nothing,
) -> None:
    """Write a sharded state dict into an existing, empty folder, without a manifest. Collective."""
    held = shards.hold(state, folder, groups, gather=gather, copied=False, room=Room())
    results: Any = [None] * dist.get_world_size()
    dist.all_gather_object(results, held.write())
    if dist.get_rank() == 0:
        held.write_metadata(results)
    dist.barrier()


def tensors_on_disk(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, weights and optimizer state alike. Collective."""
    with cpu.device_scope():
        loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
