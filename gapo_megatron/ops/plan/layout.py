"""Layouts: how a run is cut over GPUs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Self

from gapo_megatron.config import Config, ParallelConfig, parse_config
from gapo_megatron.config.counts import check_world_size, layers_of_stages
from gapo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Layouts: how a run is cut over GPUs."""

    tp_size: int
    pp_size: int
    cp_size: int
    """Ranks that share every sequence."""
    dp_size: int
    ep_size: int
    """Ranks that divide a layer's experts, out of those of one stage."""
    sequence_parallel: bool
    recompute: str
    """none, selective or full: `model.recompute`."""
    rollout_tp_size: int
    vpp_size: int = 1
    """Virtual stages of every pipeline rank."""
    first_layers: int | None = None
    """Layers of the first pipeline rank, and (below) of the last one; None: as of the others."""
    last_layers: int | None = None
    num_generation: int = 0
    """Ranks after those of the trainer that only generate; 0: the trainer's own generate."""

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
        """The world size as a product."""
        context = f"x context {self.cp_size} " if self.cp_size > 1 else ""
        return f"tensor {self.tp_size} x pipeline {self.pp_size} {context}x data {self.dp_size}"

    @property
    def rollout_replicas(self) -> int:
        """VLLM engines."""
        return self.rollout_ranks // self.rollout_tp_size

    @property
    def copies(self) -> int:
        """Ranks with the same weights (experts apart), which divide the optimizer's state."""
        return self.cp_size * self.dp_size

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts, which divide their optimizer state."""
        return self.ranks_per_stage // self.ep_size

    @property
    def parallel(self) -> ParallelConfig:
        """The layout's settings; the others have their defaults."""
        return _parallel(self)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp_size,
            "pipeline_model_parallel_size": self.pp_size,
            "virtual_pipeline_model_parallel_size": self.vpp_size,
            "num_layers_in_first_pipeline_stage": self.first_layers,
            "num_layers_in_last_pipeline_stage": self.last_layers,
            "context_parallel_size": self.cp_size,
            "expert_model_parallel_size": self.ep_size,
            "sequence_parallel": self.sequence_parallel,
        }

    def layers_of_ranks(self, num_layers: int) -> tuple[int, ...]:
        """Number of layers of each pipeline rank, in equal virtual stages.

        Raises:
            ConfigError: see `config.counts.layers_of_stages`.
        """
        return _layers_of_ranks(self.parallel, num_layers)

    @classmethod
    def of(cls, config: Config, *, world_size: int, num_generation: int = 0) -> Self:
        """The layout that a config has on `world_size` processes that train.

        Args:
            config: the run's settings.
            world_size: processes that train.
            num_generation: further ones that only generate (`config.counts.num_generation_ranks`);
                0: those that train generate too.

        Raises:
            ConfigError: a parallel size does not divide the number of processes.
        """
        parallel, rollout_tp_size = config.parallel, config.rollout.tensor_parallel_size
        check_world_size(parallel, world_size)
        if (num_generation or world_size) % rollout_tp_size:
            whose = "generation ranks" if num_generation else "world size"
            raise ConfigError(
                f"rollout.tensor_parallel_size ({rollout_tp_size}) must divide the {whose} "
                f"({num_generation or world_size})"
            )
        pp_size = parallel.pipeline_model_parallel_size
        return cls(
            tp_size=parallel.tensor_model_parallel_size,
            pp_size=pp_size,
            cp_size=parallel.context_parallel_size,
            dp_size=world_size // (parallel.ranks_per_layer * pp_size),
            ep_size=parallel.expert_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            recompute=config.model.recompute,
            rollout_tp_size=rollout_tp_size,
            vpp_size=parallel.virtual_pipeline_model_parallel_size,
            first_layers=parallel.num_layers_in_first_pipeline_stage,
            last_layers=parallel.num_layers_in_last_pipeline_stage,
            num_generation=num_generation,
        )

    def apply(self, config: Config) -> Config:
        """The config with this layout's settings; `dp_size` follows from the number of processes.

        Which ranks generate stays as the config says.

        Raises:
            ConfigError: the settings contradict each other.
        """
        tree = config.model_dump(mode="python", exclude_none=True)
        tree["parallel"] |= self._settings
        tree["model"]["recompute"] = self.recompute
        tree["rollout"]["tensor_parallel_size"] = self.rollout_tp_size
        return parse_config(tree, source=str(self))


def most_microbatches(config: Config, layout: Layout) -> int:
    """Micro-batches of an update on a rank if every sequence has the greatest length."""
    batch = config.batch
    per_microbatch = batch.max_tokens_per_microbatch // config.max_sequence_tokens
    num_sequences = batch.minibatch_prompts * batch.rollouts_per_prompt
    return math.ceil(num_sequences / layout.dp_size / per_microbatch)


# A planner asks time after time for the same.
@functools.lru_cache(maxsize=1024)
def _parallel(layout: Layout) -> ParallelConfig:
    return ParallelConfig(**layout._settings)


@functools.lru_cache(maxsize=1024)
def _layers_of_ranks(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    return tuple(sum(map(len, virtual)) for virtual in layers_of_stages(parallel, num_layers))
