"""How a run is cut over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gapo_megatron.config import Config, ParallelConfig, parse_config
from gapo_megatron.counts import arithmetic
from gapo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is cut over GPUs."""

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

    @property
    def world_size(self) -> int:
        return self.ranks_per_stage * self.pp_size

    @property
    def ranks_per_stage(self) -> int:
        return self.tp_size * self.copies

    @property
    def copies(self) -> int:
        """Ranks with the same weights (experts apart), which divide the optimizer's state."""
        return self.cp_size * self.dp_size

    @classmethod
    def of(cls, config: Config, *, world_size: int) -> Self:
        """The layout that a config has on `world_size` processes.

        Raises:
            ConfigError: a parallel size does not divide the world size; see `check_even_stages`.
        """
        check_even_stages(config.parallel)
        counts = arithmetic(config, world_size=world_size)
        return cls(
            tp_size=counts.tp_size,
            pp_size=counts.pp_size,
            cp_size=counts.cp_size,
            dp_size=counts.dp_size,
            ep_size=counts.ep_size,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.model.recompute,
            rollout_tp_size=config.rollout.tensor_parallel_size,
        )

    def apply(self, config: Config) -> Config:
        """The config with this layout's settings; `dp_size` follows from the number of processes.

        Raises:
            ConfigError: the settings contradict each other.
        """
        tree = config.model_dump(mode="python", exclude_none=True)
        tree["parallel"] |= {
            "tensor_model_parallel_size": self.tp_size,
            "pipeline_model_parallel_size": self.pp_size,
            "context_parallel_size": self.cp_size,
            "expert_model_parallel_size": self.ep_size,
            "sequence_parallel": self.sequence_parallel,
        }
        tree["model"]["recompute"] = self.recompute
        tree["rollout"]["tensor_parallel_size"] = self.rollout_tp_size
        return parse_config(tree, source=str(self))


def check_even_stages(parallel: ParallelConfig) -> None:
    """Refuse virtual and unequal stages: neither their bytes nor their bubble is planned yet.

    Raises:
        ConfigError: names the field and its value.
    """
    for field, value in parallel.uneven_stages.items():
        raise ConfigError(
            f"parallel.{field} ({value}) must be left out here: the planner knows equal stages "
            "alone, one to a rank"
        )
