"""Search over layouts: memory and time of each layout of a model on a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.config.counts import check_world_size, num_generation_ranks
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_engine_heads, check_shapes, num_experts
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.ops.plan.fit import Refusal, find_refusal
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import Efficiency, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import Memory, memory
from gapo_megatron.ops.plan.times import StepTime, generation_s, step_of
from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload

_BUDGET_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Multiples of `batch.max_tokens_per_microbatch` to try."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its predicted memory and times."""

    layout: Layout
    max_tokens_per_microbatch: int
    memory: Memory
    times: StepTime
    settings: tuple[str, ...] = ()
    """Further overrides: the generation nodes, and the settings that they require."""

    def refusal(self, gpu: Gpu) -> Refusal | None:
        """Why the layout does not fit; None if it fits."""
        return find_refusal(self.memory, self.layout, gpu)


@dataclass(slots=True)
class Refusals:
    """Layouts that do not run for the same reason."""

    count: int = 0
    example: Candidate | None = None
    """The one that needs least memory; None if the reason is not memory."""
    num_bytes: int = 0
    """Memory that the example needs in the phase that does not fit."""

    def add(self, candidate: Candidate, refusal: Refusal) -> None:
        """Count a candidate, and keep the one that needs least memory."""
        self.count += 1
        if self.example is None or refusal.num_bytes < self.num_bytes:
            self.example, self.num_bytes = candidate, refusal.num_bytes


def quickest(candidate: Candidate) -> tuple[float, float]:
    """Sort key: seconds of a step; of equal ones (a side waits), the least work first."""
    times = candidate.times
    work_s = times.generation_s + times.reward_s + times.old_log_probs_s + times.update_s
    return times.total_s, work_s + times.sync_s


def _is_too_long(candidates: Sequence[Candidate], gpu: Gpu) -> bool:
    """Whether none fits, and for one the cause is its micro-batch, not its state."""
    return all(one.refusal(gpu) for one in candidates) and any(
        one.memory.trainer.state < gpu.memory_bytes < one.memory.training for one in candidates
    )


def _layout(num_gpus: int, *, tp: int, pp: int, cp: int, ep: int) -> Layout:
    return Layout(
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        dp_size=num_gpus // (tp * pp * cp),
        ep_size=ep,
        sequence_parallel=tp > 1,
        recompute="none",
        rollout_tp_size=1,
    )


def _trainer_sizes(hf_config: Any, num_gpus: int, gpu: Gpu) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, expert) sizes that divide the GPUs, the layers and the experts."""
    experts = num_experts(hf_config)
    for tp in _divisors(gpu.gpus_per_node):
        for pp in _divisors(hf_config.num_hidden_layers):
            if num_gpus % (tp * pp):
                continue
            for ep in _divisors(experts) if experts else [1]:
                if num_gpus // pp % ep == 0:
                    yield tp, pp, ep


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(slots=True)
class Search:
    """A search over the layouts of one model on one device."""

    hf_config: Any
    shape: Shape
    config: Config
    gpu: Gpu
    workload: Workload
    efficiency: Efficiency
    settings: tuple[str, ...] = ()
    """See `Candidate.settings`."""
    _generation_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of generation by (ranks that generate, tensor parallel size of an engine)."""

    def run(
        self, num_gpus: int, *, num_generation: int = 0
    ) -> tuple[list[Candidate], dict[str, Refusals]]:
        """Try every layout of the trainer, each with the best engine and micro-batch.

        Args:
            num_gpus: GPUs that train.
            num_generation: further GPUs that only generate; 0: colocated.

        Returns:
            The candidates that fit, quickest first; the layouts that do not run, by reason.
        """
        rollout_sizes = self.rollout_sizes(num_generation or num_gpus)
        if num_generation:
            rollout_sizes = self._quickest_engine(rollout_sizes, num_gpus, num_generation)
        refusals: dict[str, Refusals] = {}
        fitting: list[Candidate] = []
        # Context parallelism grows only while sequences do not fit without more of it.
        for tp, pp, ep in _trainer_sizes(self.hf_config, num_gpus, self.gpu):
            for cp in _divisors(num_gpus // (tp * pp)):
                layout = _layout(num_gpus, tp=tp, pp=pp, cp=cp, ep=ep)
                layout = replace(layout, num_generation=num_generation)
                candidates: list[Candidate] = []
                try:
                    parallel = layout.apply(self.config).parallel
                    check_shapes(self.hf_config, parallel, self.config.model)
                    check_adapter(self.hf_config, self.config.adapter, parallel)
                    check_world_size(parallel, layout.world_size)
                except ConfigError as error:  # sizes do not divide
                    refusals.setdefault(str(error), Refusals()).count += 1
                else:
                    candidates = [
                        self.best(replace(layout, recompute=recompute), rollout_sizes)
                        for recompute in ("none", "selective", "full")
                    ]
                for candidate in candidates:
                    if refusal := candidate.refusal(self.gpu):
                        refusals.setdefault(refusal.reason, Refusals()).add(candidate, refusal)
                    else:
                        fitting.append(candidate)
                is_own = cp >= self.config.parallel.context_parallel_size
                if is_own and not _is_too_long(candidates, self.gpu):
                    break
        return sorted(fitting, key=quickest), refusals

    def rollout_sizes(self, num_gpus: int) -> list[int]:
        """Tensor parallel sizes of an engine that divide the node, the heads and the GPUs."""
        return [
            size
            for size in _divisors(self.gpu.gpus_per_node)
            if self.hf_config.num_attention_heads % size == 0 and num_gpus % size == 0
        ]

    def _quickest_engine(
        self, sizes: Sequence[int], num_gpus: int, num_generation: int
    ) -> list[int]:
        """The quickest engine size on generation GPUs, whose speed the trainer does not affect.

        If none fits, the size that needs least memory.
        """
        layout = replace(_layout(num_gpus, tp=1, pp=1, cp=1, ep=1), num_generation=num_generation)
        layouts = [replace(layout, rollout_tp_size=size) for size in sizes]
        found = [self.candidate(one, self.budgets()[-1]) for one in layouts]
        fitting = [one for one in found if one.memory.generating <= self.gpu.memory_bytes]
        best = min(fitting or found[-1:], key=lambda one: one.times.generation_s)
        return [best.layout.rollout_tp_size]

    def best(self, layout: Layout, rollout_sizes: Sequence[int]) -> Candidate:
        """The quickest micro-batch and engine that fit; if none fits, the pair that needs least.

        The two do not affect each other's speed, only memory: an engine's communicators stay
        allocated during training. So the quickest micro-batch that fits with any engine is taken,
        and the quickest engine that fits with it.
        """
        layouts = [replace(layout, rollout_tp_size=size) for size in rollout_sizes]
        tried: list[tuple[int, Candidate]] = []
        for budget in sorted(self.budgets(), key=lambda one: self.training_s(one, layout)):
            fitting = []
            for engine in layouts:
                candidate = self.candidate(engine, budget)
                if refusal := candidate.refusal(self.gpu):
                    tried.append((refusal.num_bytes, candidate))
                else:
                    fitting.append(candidate)
            if fitting:
                return min(fitting, key=quickest)
        return min(tried, key=lambda one: one[0])[1]

    def current(self, num_gpus: int) -> tuple[Candidate | None, str]:
        """The config's own layout, and why it does not run (empty if it does)."""
        try:
            check_shapes(self.hf_config, self.config.parallel, self.config.model)
            apart = num_generation_ranks(
                self.config.rollout, world_size=num_gpus, ranks_per_node=self.gpu.gpus_per_node
            )
            layout = Layout.of(self.config, world_size=num_gpus - apart, num_generation=apart)
            check_engine_heads(self.hf_config, layout.rollout_tp_size)
            if layout.rollout_tp_size > self.gpu.gpus_per_node:
                raise ConfigError(
                    f"rollout.tensor_parallel_size ({layout.rollout_tp_size}) must be at most the "
                    f"GPUs of a node ({self.gpu.gpus_per_node})"
                )
        except ConfigError as error:
            return None, str(error)
        candidate = self.candidate(layout, self.config.batch.max_tokens_per_microbatch)
        refusal = candidate.refusal(self.gpu)
        return candidate, refusal.reason if refusal else ""

    def budgets(self) -> list[int]:
        """Sizes of a micro-batch to try, in tokens; each holds at least one sequence."""
        own, longest = self.config.batch.max_tokens_per_microbatch, self.config.max_sequence_tokens
        return sorted({max(longest, int(own * factor)) for factor in _BUDGET_FACTORS})

    def with_budget(self, budget: int) -> Config:
        """The config with micro-batches of `budget` tokens."""
        batch = self.config.batch.model_copy(update={"max_tokens_per_microbatch": budget})
        return self.config.model_copy(update={"batch": batch})

    def candidate(self, layout: Layout, budget: int) -> Candidate:
        """Predict memory and times of one layout with micro-batches of `budget` tokens."""
        config = self.with_budget(budget)
        needed = memory(self.hf_config, config, layout, self.gpu)
        training = self._training(config, layout)
        engines = layout.rollout_ranks, layout.rollout_tp_size
        if engines not in self._generation_s:
            self._generation_s[engines] = generation_s(training)
        times = step_of(training, generation_s=self._generation_s[engines])
        return Candidate(layout, budget, needed, times, self.settings)

    def training_s(self, budget: int, layout: Layout) -> float:
        """Seconds of the old pass and the updates of a step."""
        config = self.with_budget(budget)
        training = self._training(config, layout)
        return training.old_log_probs_s() + config.batch.num_minibatches * training.update_s()

    def _training(self, config: Config, layout: Layout) -> Training:
        return Training(self.shape, config, layout, self.workload, self.gpu, self.efficiency)
