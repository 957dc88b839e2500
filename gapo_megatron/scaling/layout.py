"""How a run is cut over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gapo_megatron.config import Config, parse_config
from gapo_megatron.dry_run import arithmetic
from gapo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is cut over GPUs."""

    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    """Ranks that divide a layer's experts, out of the tp_size x dp_size of one stage."""
    sequence_parallel: bool
    recompute: str
    """none, selective or full: `model.recompute`."""
    rollout_tp_size: int

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    @classmethod
    def of(cls, config: Config, *, world_size: int) -> Self:
        """The layout that a config has on `world_size` processes.

        Raises:
            ConfigError: a parallel size does not divide the world size; context parallelism, whose
                times and memory nothing here knows yet.
        """
        if config.parallel.context_parallel_size > 1:
            raise ConfigError(
                f"parallel.context_parallel_size ({config.parallel.context_parallel_size}) must be "
                "1 here: the planner does not know it yet"
            )
        counts = arithmetic(config, world_size=world_size)
        return cls(
            tp_size=counts.tp_size,
            pp_size=counts.pp_size,
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
            "expert_model_parallel_size": self.ep_size,
            "sequence_parallel": self.sequence_parallel,
        }
        tree["model"]["recompute"] = self.recompute
        tree["rollout"]["tensor_parallel_size"] = self.rollout_tp_size
        return parse_config(tree, source=str(self))
