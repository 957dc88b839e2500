"""Seconds of a step by stage: generation by vLLM, verdicts, training, weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapo_megatron.config import Config
from gapo_tools.planner.engine import (
    factor_elements,
    generation_s,
    kept_asleep_bytes,
    sends_factors,
)
from gapo_tools.planner.flops import Shape, element_bytes
from gapo_tools.planner.hardware import ASSUMED, Efficiency, Gpu
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import trained_rules
from gapo_tools.planner.training import Training
from gapo_tools.planner.workload import Workload

_MOST_WORKERS = 8
"""Verifier workers of a rank if `reward.num_workers` is 0."""
STAGES = ("generation", "reward", "old_log_probs", "update", "sync")
"""Stages of a step that are modelled."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by stage.

    Without evaluation, checkpoints, measurements of rounding, and what is offloaded.
    """

    generation_s: float
    reward_s: float
    old_log_probs_s: float
    update_s: float
    sync_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds(stage) for stage in STAGES)

    def seconds(self, stage: str) -> float:
        """Seconds of one of `STAGES`, or of the whole step (`total`)."""
        return float(getattr(self, f"{stage}_s"))


@dataclass(frozen=True, slots=True)
class SidesTime(StepTime):
    """Seconds of a step by stage in a run with generation ranks.

    The generation side generates and judges, the training side computes old log-probs and updates;
    both take part in the sync. On-policy (staleness 0) they alternate. Otherwise they work at the
    same time, on batches that are `max_staleness` = k steps apart, and weights are sent every k
    steps, so that `sync_s` is a step's share of a transfer:

        staleness 0:  step = (generation + reward) + (old log-probs + updates) + sync
        staleness k:  step = max(generation + reward, old log-probs + updates) + sync / k
    """

    max_staleness: int

    @property
    def total_s(self) -> float:
        sides = (self.generation_s + self.reward_s, self.old_log_probs_s + self.update_s)
        return (max(sides) if self.max_staleness else sum(sides)) + self.sync_s


def step_time(
    hf_config: Any | Shape,
    config: Config,
    layout: Layout,
    workload: Workload,
    gpu: Gpu,
    efficiency: Efficiency = ASSUMED,
) -> StepTime:
    """Predict the times of one step.

    Args:
        hf_config: the model's config, or its `Shape`.
        config: the run's settings; parallel sizes come from `layout`.
        layout: how the run is divided.
        workload: lengths of a step.
        gpu: device.
        efficiency: share of the device's peaks that is reached.

    Returns:
        `SidesTime` if the layout has generation ranks.
    """
    shape = hf_config if isinstance(hf_config, Shape) else Shape.of(hf_config)
    training = Training(shape, config, layout, workload, gpu, efficiency)
    stages = {
        "generation_s": generation_s(training),
        "reward_s": _reward_s(training),
        "old_log_probs_s": training.old_log_probs_s(),
        "update_s": config.batch.num_minibatches * training.update_s(),
    }
    if not layout.num_generation:
        return StepTime(**stages, sync_s=_sync_s(training))
    most = config.rollout.max_staleness
    return SidesTime(**stages, sync_s=_sync_s(training) / max(1, most), max_staleness=most)


def _reward_s(training: Training) -> float:
    """Verdicts: sequences of a rank x verdict_s / its workers. Every generating rank judges."""
    config = training.config
    prompts = sum(training.workload.prompts_by_round(config.batch))
    sequences = prompts * config.batch.rollouts_per_prompt / training.layout.rollout_ranks
    return sequences * training.efficiency.verdict_s / (config.reward.num_workers or _MOST_WORKERS)


def _sync_s(training: Training) -> float:
    """Weight sync: W bytes of weights reach every rank that generates, and are copied there.

        sync = W / network + 2 W / bandwidth (copy) + tensors x tensor_s

    within one node over the link instead of the network. W: bytes of the weights, or of an
    adapter's factors if a sync brings these alone (`engine.sends_factors`); a colocated engine then
    keeps its weights in host memory while it sleeps, and they move there and back.
    """
    gpu, efficiency, shape = training.gpu, training.efficiency, training.shape
    config, layout = training.config, training.layout
    elements, num_tensors = shape.num_parameters, shape.num_tensors
    if sends_factors(shape, config):
        elements = factor_elements(shape, config)
        rules = trained_rules(shape.rules, config.adapter)
        num_tensors = sum(len(rule.hf) * rule.num_places for rule in rules)
    size = elements * element_bytes(config)
    in_node = layout.num_ranks <= gpu.gpus_per_node
    seconds = size / (gpu.link_bandwidth if in_node else gpu.network_bandwidth)
    seconds += 2 * kept_asleep_bytes(shape, config, layout) / gpu.host_bandwidth
    seconds /= efficiency.communication
    seconds += 2 * size / (gpu.bandwidth * efficiency.bandwidth)
    return seconds + num_tensors * efficiency.tensor_s
