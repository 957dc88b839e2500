"""The two sides of a run's ranks: those that train, and those that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gapo_megatron.config import Config
from gapo_megatron.config.counts import num_generation_ranks
from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.plan.layout import Layout

USUAL_RANKS_PER_NODE = 8
"""Ranks of a node where nobody says how many: one per GPU of a usual node."""


@dataclass(frozen=True, slots=True)
class Sides:
    """How the ranks of a job are divided, and what each side makes of its ranks.

    Ranks 0 to T - 1 train, ranks T to T + G - 1 generate. Colocated runs have G = 0: every rank
    does both in turns.
    """

    layout: Layout
    """How the T ranks that train divide the model. Its engines are those of a colocated run."""
    num_generation: int
    """G."""
    num_engines: int
    """VLLM engines of the run, each of `rollout.tensor_parallel_size` ranks."""
    ranks_per_node: int

    @property
    def num_training(self) -> int:
        """T."""
        return self.layout.world_size

    @property
    def world_size(self) -> int:
        """Ranks of both sides."""
        return self.num_training + self.num_generation

    @classmethod
    def of(cls, config: Config, *, world_size: int, ranks_per_node: int | None = None) -> Self:
        """The sides that a config has on `world_size` ranks.

        Args:
            config: of the run.
            world_size: all ranks of the job.
            ranks_per_node: None: not known; as many as a usual node has GPUs.

        Raises:
            ConfigError: no rank is left to train, or a side's parallel sizes do not divide it.
        """
        ranks_per_node = ranks_per_node or max(1, min(world_size, USUAL_RANKS_PER_NODE))
        rollout = config.rollout
        num_generation = num_generation_ranks(
            rollout, world_size=world_size, ranks_per_node=ranks_per_node
        )
        num_training = world_size - num_generation
        try:
            layout = Layout.of(config, world_size=num_training, num_generation=num_generation)
        except ConfigError as error:
            if not num_generation:
                raise
            raise ConfigError(
                f"{num_training} of {world_size} ranks train, {num_generation} of {world_size} "
                f"generate: {error}"
            ) from None
        return cls(layout, num_generation, layout.rollout_replicas, ranks_per_node)

    def place(self, first: int, number: int) -> str:
        """`ranks 32-47 on nodes 4-5`: where `number` ranks are, rank `first` the first of them."""
        last = first + number - 1
        nodes = first // self.ranks_per_node, last // self.ranks_per_node
        return f"{_span('rank', first, last)} on {_span('node', *nodes)}"


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def schedule(config: Config) -> str:
    """When a run with a generation side generates, in one sentence."""
    if (most := config.rollout.max_staleness) == 0:
        return (
            "on-policy, in turns: a batch is sampled once the generation side has the weights that "
            "learn from it"
        )
    every = "step" if most == 1 else f"{most} steps"
    return (
        f"generation runs ahead: a batch is sampled by weights at most {most} behind those that "
        f"learn from it, and weights are sent after every {every}"
    )
