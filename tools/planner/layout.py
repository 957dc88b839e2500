"""Layouts: how a run is divided over GPUs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

from gapo_megatron.config import Config, ParallelConfig, parse_config
from gapo_megatron.config.counts import (
    check_sides,
    layers_of_stages,
    split_ranks,
    usual_ranks_per_node,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes, recomputation and generation ranks of a run."""

    tp_size: int
    pp_size: int
    cp_size: int
    dp_size: int
    ep_size: int
    """Ranks that share a layer's experts; they are ranks of the same pipeline stage."""
    sequence_parallel: bool
    recompute: str
    """none, selective or full: `model.recompute`."""
    rollout_tp_size: int
    vpp_size: int = 1
    """Virtual stages of every pipeline rank."""
    first_layers: int | None = None
    """Layers of the first pipeline rank; None: as many as the others."""
    last_layers: int | None = None
    """Layers of the last pipeline rank; None: as many as the others."""
    num_generation: int = 0
    """Ranks that only generate, after those that train; 0: colocated."""

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.ranks_per_stage * self.pp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        return self.world_size + self.num_generation

    @property
    def rollout_ranks(self) -> int:
        """Ranks that generate."""
        return self.num_generation or self.world_size

    @property
    def ranks_per_stage(self) -> int:
        return self.tp_size * self.copies

    @property
    def cut(self) -> str:
        """The world size as a product of parallel sizes."""
        context = f"x context {self.cp_size} " if self.cp_size > 1 else ""
        return f"tensor {self.tp_size} x pipeline {self.pp_size} {context}x data {self.dp_size}"

    @property
    def rollout_replicas(self) -> int:
        """VLLM engines."""
        return self.rollout_ranks // self.rollout_tp_size

    @property
    def copies(self) -> int:
        """Ranks with the same weights (except experts); they shard the optimizer state."""
        return self.cp_size * self.dp_size

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts; they shard the experts' optimizer state."""
        return self.ranks_per_stage // self.ep_size

    @property
    def parallel(self) -> ParallelConfig:
        """The layout as a section of the config; settings that it does not cover are defaults."""
        return _parallel(self)

    @property
    def settings(self) -> dict[str, Any]:
        """The layout as settings of a config, by name; `dp_size` and generation ranks are none."""
        return {
            "parallel.tensor_model_parallel_size": self.tp_size,
            "parallel.pipeline_model_parallel_size": self.pp_size,
            "parallel.virtual_pipeline_model_parallel_size": self.vpp_size,
            "parallel.num_layers_in_first_pipeline_stage": self.first_layers,
            "parallel.num_layers_in_last_pipeline_stage": self.last_layers,
            "parallel.context_parallel_size": self.cp_size,
            "parallel.expert_model_parallel_size": self.ep_size,
            "parallel.sequence_parallel": self.sequence_parallel,
            "model.recompute": self.recompute,
            "rollout.tensor_parallel_size": self.rollout_tp_size,
        }

    def layers_of_ranks(self, num_layers: int) -> tuple[int, ...]:
        """Number of layers of each pipeline rank, all its virtual stages together.

        Raises:
            ConfigError: see `config.counts.layers_of_stages`.
        """
        stages = layers_of_stages(self.parallel, num_layers)
        return tuple(sum(map(len, virtual)) for virtual in stages)

    @classmethod
    def of(cls, config: Config, *, world_size: int, num_generation: int = 0) -> Self:
        """The layout of a config on `world_size` training processes.

        Args:
            config: the run's settings.
            world_size: processes that train.
            num_generation: further processes that only generate
                (`config.counts.num_generation_ranks`); 0: colocated.

        Raises:
            ConfigError: a parallel size does not divide the number of processes.
        """
        check_sides(config, num_training=world_size, num_generation=num_generation)
        parallel = config.parallel
        pp_size = parallel.pipeline_model_parallel_size
        return cls(
            tp_size=parallel.tensor_model_parallel_size,
            pp_size=pp_size,
            cp_size=parallel.context_parallel_size,
            dp_size=world_size // (parallel.ranks_per_layer * pp_size),
            ep_size=parallel.expert_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            recompute=config.model.recompute,
            rollout_tp_size=config.rollout.tensor_parallel_size,
            vpp_size=parallel.virtual_pipeline_model_parallel_size,
            first_layers=parallel.num_layers_in_first_pipeline_stage,
            last_layers=parallel.num_layers_in_last_pipeline_stage,
            num_generation=num_generation,
        )

    @classmethod
    def of_job(cls, config: Config, *, world_size: int, ranks_per_node: int | None = None) -> Self:
        """The layout of a config on all ranks of a job, those that only generate included.

        Args:
            config: the run's settings.
            world_size: all ranks of the job: ranks 0 to T - 1 train, the others generate.
            ranks_per_node: None if unknown: as many as a usual node has GPUs.

        Raises:
            ConfigError: no rank is left to train, or parallel sizes do not divide a side.
        """
        num_training, num_generation = split_ranks(
            config,
            world_size=world_size,
            ranks_per_node=ranks_per_node or usual_ranks_per_node(world_size),
        )
        return cls.of(config, world_size=num_training, num_generation=num_generation)

    def apply(self, config: Config) -> Config:
        """The config with this layout's settings.

        `dp_size` is no setting: it follows from the number of processes. The config's generation
        ranks are kept.

        Raises:
            ConfigError: the settings contradict each other.
        """
        tree = config.model_dump(mode="python", exclude_none=True)
        for name, value in self.settings.items():
            section, key = name.split(".")
            tree[section][key] = value
        return parse_config(tree, source=str(self))


# The planner asks for the same layouts many times.
@functools.lru_cache(maxsize=1024)
def _parallel(layout: Layout) -> ParallelConfig:
    sizes = {name.partition("parallel.")[2]: size for name, size in layout.settings.items()}
    return ParallelConfig(**{name: sizes[name] for name in sizes if name})


def place_of_ranks(first: int, number: int, *, ranks_per_node: int) -> str:
    """Where `number` ranks from rank `first` on are: `ranks 32-47 on nodes 4-5`."""
    last = first + number - 1
    nodes = first // ranks_per_node, last // ranks_per_node
    return f"{_span('rank', first, last)} on {_span('node', *nodes)}"


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
