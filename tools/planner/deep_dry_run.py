"""`train --dry-run=deep`: builds one rank of any layout and takes one step, on a CPU.

Tensors have shapes but no data, and process groups no other members (`no_data`). The code is the
trainer's: `Policy.build` and `learn.update.update`, with the pipeline schedule, the log-prob head
and the distributed optimizer. It shows that shapes fit, and counts bytes and collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gapo_megatron.compat.megatron import main_grad, spread_tokens_evenly
from gapo_megatron.compat.torch import storage_id
from gapo_megatron.config import Config, ModelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.score import Scored
from gapo_megatron.learn.update import update
from gapo_megatron.logprob import tiles
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy
from gapo_megatron.policy.model import PolicyModel, read_hf_config
from gapo_megatron.policy.optimizer import inner_optimizers
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Microbatch
from gapo_tools.planner.activations import Kernels, kept_activations
from gapo_tools.planner.hardware import GIB
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import step_bytes
from gapo_tools.planner.no_data import (
    KeptForBackward,
    NoData,
    Traffic,
    fake_groups,
    memory_of_a_gpu,
)
from gapo_tools.planner.state import state_bytes

LEFT_OUT = (
    "Not covered: vLLM and weight sync; Transformer Engine's layers (this rank used the local "
    "layers, whose norms keep float32 copies); fp8 and Triton kernels, which need a GPU (bf16 and "
    "torch's log-prob head took their place; state has the same size, but for fp8 copies of the "
    "weights); expert routing (equal shares are assumed); numerical values, so neither overflow "
    "nor convergence."
)


@dataclass(frozen=True, slots=True)
class Found:
    """Shapes, bytes and collectives of one rank."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of this rank's parameters by name."""
    weights: int
    gradients: int
    optimizer: int
    kept: int
    """Peak bytes that autograd kept for the backward pass: activations."""
    peak: int
    """Peak bytes in addition to weights, gradients and optimizer: activations, workspaces, buffers
    that the schedule holds for other stages."""
    num_microbatches: int
    num_tokens: int
    """Tokens of one micro-batch over all its context parallel ranks."""
    traffic: dict[tuple[str, str], Traffic]
    """Traffic by (collective, process group); see `no_data.Traffic`."""


def step_one_rank(config: Config, *, rank: int, world_size: int) -> Found:
    """Build one rank and take one optimizer step of full micro-batches, without data.

    The step has as many micro-batches as pipeline ranks, twice as many with virtual stages, so that
    the first rank reaches its peak. `runs_here` replaces what a CPU lacks.

    Args:
        config: the run's settings; `model.hf_dir` needs no weights.
        rank: the rank to build.
        world_size: ranks that train.

    Raises:
        ConfigError: the model folder, architecture or layout cannot run.
    """
    settings = config.optimizer.model_copy(update={"implementation": "torch"})
    config = config.model_copy(update={"model": runs_here(config.model), "optimizer": settings})
    with (
        fake_groups(config.parallel, rank=rank, world_size=world_size) as groups,
        NoData() as no_data,
        _without_moving(),
    ):
        policy = Policy.build(config, groups, "cpu")
        parameters = {
            f"stage {number}: {name}" if groups.vpp_size > 1 else name: parameter
            for number, stage in enumerate(policy.stages)
            for name, parameter in stage.named_parameters()
        }
        for stage in policy.stages:
            # Without data there is no routing: spread tokens evenly.
            spread_tokens_evenly(stage)
        microbatch = _full_microbatch(config, policy)
        num_tokens = microbatch.tokens.shape[1]
        no_data.reset_peak()
        before = no_data.live_bytes
        num_microbatches = groups.pp_size * min(groups.vpp_size, 2)
        kept = KeptForBackward(besides=parameters.values())
        with kept:
            update(policy, [microbatch] * num_microbatches, _loss)
        weights, gradients, optimizer = allocated_bytes(policy)
        return Found(
            {name: tuple(tensor.shape) for name, tensor in parameters.items()},
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            kept=kept.peak_bytes,
            peak=no_data.peak_bytes - before,
            num_microbatches=num_microbatches,
            num_tokens=num_tokens,
            traffic=dict(no_data.traffic),
        )


def runs_here(model: ModelConfig) -> ModelConfig:
    """The model's settings with bf16 instead of fp8, and torch's log-prob head."""
    precision = "bf16" if model.precision == "fp8" else model.precision
    return model.model_copy(update={"precision": precision, "head": "torch"})


def _loss(scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    return -scored.log_probs.sum(), {}


def _full_microbatch(config: Config, policy: Policy) -> Microbatch:
    """The largest micro-batch: sequences of the maximum length, and one for the rest."""
    longest = config.max_sequence_tokens - 1  # the last token is not fed
    budget = config.batch.max_tokens_per_microbatch
    budget -= budget % policy.sequence_multiple
    lengths = [longest] * (budget // longest)
    if budget % longest:
        lengths.append(budget % longest)
    prompts = [min(config.data.max_prompt_tokens, length) for length in lengths]
    responses = [length + 1 - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    sequences = Rollouts.of(
        prompt_ids=[np.zeros(size, dtype=np.int32) for size in prompts],
        response_ids=[np.zeros(size, dtype=np.int32) for size in responses],
    )
    return policy.pack(sequences, range(len(lengths)))


def allocated_bytes(policy: Policy) -> tuple[int, int, int]:
    """Bytes of a policy's weights, gradients and optimizer state."""
    parameters = [one for stage in policy.stages for one in stage.parameters()]
    state = []
    for part in inner_optimizers(policy.optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                state.append(parameter)  # a master weight, or a view of the weight
                moments = part.state[parameter]
                state += [moment for name, moment in moments.items() if name != "step"]
    weights = _storages(parameters)
    main_grads = [main_grad(parameter) for parameter in parameters if parameter.requires_grad]
    masters = {key: size for key, size in _storages(state).items() if key not in weights}
    return sum(weights.values()), sum(_storages(main_grads).values()), sum(masters.values())


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage_id(storage): storage.nbytes() for storage in storages}


@contextlib.contextmanager
def _without_moving() -> Iterator[None]:
    """Replace calls that fail on tensors without data, or that are needlessly slow."""
    with (
        # Moving a module would replace its parameters; they are in place already.
        mock.patch.object(PolicyModel, "to", lambda module, *_: module),
        # Use a GPU's tiles: a CPU would have a hundred times as many.
        mock.patch.object(
            tiles, "_tile_shape", lambda weight: (2**24 // max(min(8192, len(weight)), 64), 8192)
        ),
        mock.patch.object(tiles, "row_multiple", lambda _: 16),
        memory_of_a_gpu(),
    ):
        yield


def print_deep_dry_run(
    config: Config,
    *,
    rank: int,
    world_size: int,
    ranks_per_node: int | None = None,
    console: Console | None = None,
) -> None:
    """Build one rank, take a step, and print its shapes, collectives and memory.

    Args:
        config: the run's settings; `model.hf_dir` needs no weights.
        rank: a rank that trains.
        world_size: ranks of the job.
        ranks_per_node: see `Layout.of_job`.
        console: where to print; None: stdout.

    Raises:
        ConfigError: see `step_one_rank`; or the rank only generates.
    """
    console = console or Console(markup=False)
    if not console.is_terminal:
        console.width = 120
    hf_config = read_hf_config(config.model.hf_dir)
    check_shapes(hf_config, config.parallel, config.model)
    layout = Layout.of_job(config, world_size=world_size, ranks_per_node=ranks_per_node)
    num_training = layout.world_size
    if rank >= num_training:
        raise ConfigError(
            f"--rank {rank}/{world_size}: the rank must be below {num_training}: ranks from "
            f"{num_training} on generate, and only ranks that train can be built without a GPU"
        )

    # Build it and take a step; then print what that took, beside the planner's prediction.
    found = step_one_rank(config, rank=rank, world_size=num_training)
    console.print(
        f"Rank {rank} of {num_training} that train: {layout.cut}, "
        f"stage {rank // layout.ranks_per_stage}. The trainer's own code built it and took one "
        f"step of {found.num_microbatches} micro-batch(es) of {found.num_tokens:,} tokens, without "
        "data.",
    )
    shapes = [
        (name, " x ".join(map(str, shape))) for name, shape in found.shapes.items() if _shown(name)
    ]
    sent = sorted(
        (*of, f"{one.num_calls:,}", f"{one.num_bytes / GIB:,.4f}")
        for of, one in found.traffic.items()
    )
    memory = [
        (name, f"{size / GIB:,.4f}", f"{guess / GIB:,.4f}", f"{guess / size:.4f}")
        for name, size, guess in _memory(hf_config, config, rank, layout, found)
    ]
    _print(console, "Parameters, of the first layer and expert", "parameter shape", shapes)
    _print(console, "Collectives in building and one step", "collective group calls GiB", sent)
    _print(console, "Memory of this rank, GiB", "part allocated predicted ratio", memory)
    console.print(LEFT_OUT)


def _shown(name: str) -> bool:
    """Whether a parameter is of the first layer and the first expert, or of neither."""
    repeated = ("decoder.layers.", ".local_experts.")
    return all(name.split(part)[1].split(".")[0] == "0" for part in repeated if part in name)


def _memory(
    hf_config: Any, config: Config, rank: int, layout: Layout, found: Found
) -> list[tuple[str, int, int]]:
    """Name, allocated and predicted bytes of each part."""
    stage = rank // layout.ranks_per_stage
    at: Any = {"stage": stage, "num_microbatches": found.num_microbatches}
    kept = kept_activations(hf_config, config, layout, **at, kernels=Kernels.PADDED)
    step = step_bytes(hf_config, config, layout, **at, kernels=Kernels.PADDED)
    weights, gradients, optimizer = state_bytes(rules_for(hf_config), config, layout)[stage]
    return [
        ("weights", found.weights, weights),
        ("gradients", found.gradients, gradients),
        ("optimizer", found.optimizer, optimizer),
        ("activations kept for backward", found.kept, kept.most),
        ("peak beyond weights, gradients, optimizer", found.peak, step.step),
    ]


def _print(console: Console, title: str, headings: str, rows: Iterable[Sequence[str]]) -> None:
    table = Table(*headings.split(), title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
