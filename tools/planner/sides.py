"""The two sides of a run: ranks that train and ranks that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gapo_megatron.config import Config
from gapo_megatron.config.counts import split_ranks, usual_ranks_per_node
from gapo_tools.planner.layout import Layout


@dataclass(frozen=True, slots=True)
class Sides:
    """How the ranks of a job are divided into a training side and a generation side.

    Ranks 0 to T - 1 train, ranks T to T + G - 1 generate. Colocated runs have G = 0: every rank
    trains and generates in turn.
    """

    layout: Layout
    """Layout of the T training ranks."""
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
        """The sides of a config on `world_size` ranks.

        Args:
            config: the run's config.
            world_size: all ranks of the job.
            ranks_per_node: None if unknown: as many as a usual node has GPUs.

        Raises:
            ConfigError: no rank is left to train, or parallel sizes do not divide a side.
        """
        ranks_per_node = ranks_per_node or usual_ranks_per_node(world_size)
        num_training, num_generation = split_ranks(
            config, world_size=world_size, ranks_per_node=ranks_per_node
        )
        layout = Layout.of(config, world_size=num_training, num_generation=num_generation)
        return cls(layout, num_generation, layout.rollout_replicas, ranks_per_node)

    def place(self, first: int, number: int) -> str:
        """Where `number` ranks from rank `first` on are: `ranks 32-47 on nodes 4-5`."""
        last = first + number - 1
        nodes = first // self.ranks_per_node, last // self.ranks_per_node
        return f"{_span('rank', first, last)} on {_span('node', *nodes)}"


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
