"""Planner: the layouts of a model that fit on so many GPUs, the quickest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_engine_heads, check_shapes, num_experts
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.models.published import find_model
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.generation import generation_s
from gapo_megatron.ops.plan.hardware import GIB, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import Memory, StageMemory, memory
from gapo_megatron.ops.plan.times import StepTime
from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload

_STATE_PARTS = ("weights", "optimizer")
_STEP_PARTS = ("gradients", "fp8_copies", "activations", "layer", "head")
_ROLLOUT_PARTS = ("rollout_weights", "kv_cache")
PARTS = (
    *(*_STATE_PARTS, *_STEP_PARTS, *_ROLLOUT_PARTS),
    *("engine_asleep", "communication", "fragmentation"),
)
_BUDGET_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Multiples of `batch.max_tokens_per_microbatch` that are tried."""
_GENERATING = "out of memory while generating"
SMALLER_FRACTION = f"{_GENERATING}: a smaller rollout.memory_fraction would fit"
_HOST_SHARE = 0.9
"""Usable share of a node's own memory; system, verifiers and page cache need the rest: assumed."""
OUT_OF_HOST = "out of a node's own memory: what is offloaded, and a checkpoint being saved"
LARGER_FRACTION = f"{_GENERATING}: no room for the KV cache of one sequence"


class Refusal(NamedTuple):
    """Why a layout does not fit."""

    reason: str
    """A few words, alike for alike layouts."""
    num_bytes: int
    """Needed on one GPU in that phase, or on a node's own memory."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what it needs and takes."""

    layout: Layout
    max_tokens_per_microbatch: int
    memory: Memory
    times: StepTime

    def refusal(self, gpu: Gpu) -> Refusal | None:
        """Why it does not fit; None: it fits."""
        needed = self.memory.training
        if needed > gpu.memory_bytes:
            parts = (*_STATE_PARTS, *_STEP_PARTS)
            return Refusal(_most_of_all("training", self.memory.trainer, parts), needed)
        needed, engine = self.memory.generating, self.memory.engine
        state = ("weights",) if engine.offloaded else _STATE_PARTS
        if engine.receiving > gpu.memory_bytes:
            parts = (*state, "rollout_weights")
            return Refusal(_most_of_all("the engine receives weights", engine, parts), needed)
        if needed - engine.kv_cache > gpu.memory_bytes:
            parts = (*(() if engine.offloaded > engine.optimizer else state), *_ROLLOUT_PARTS)
            return Refusal(_most_of_all("generating", engine, parts), needed)
        if needed > gpu.memory_bytes:
            return Refusal(SMALLER_FRACTION, needed)
        if self.times.generation_s == float("inf"):
            return Refusal(LARGER_FRACTION, needed)
        host = (self.memory.offloaded + self.memory.checkpoint) * gpu.gpus_per_node
        if self.memory.offloaded and host > _HOST_SHARE * gpu.host_memory_bytes:
            return Refusal(OUT_OF_HOST, host)
        return None


def _most_of_all(phase: str, stage: StageMemory, parts: Sequence[str]) -> str:
    largest = max(parts, key=lambda part: getattr(stage, part))
    return f"out of memory while {phase}: {largest.replace('_', ' ')} most of all"


@dataclass(slots=True)
class Refusals:
    """Layouts that were refused for the same reason."""

    count: int = 0
    example: Candidate | None = None
    """The one that needs the least memory; None: sizes do not divide."""
    num_bytes: int = 0
    """Memory that the example needs in the phase that is refused."""

    def add(self, candidate: Candidate, refusal: Refusal) -> None:
        """Count one more."""
        self.count += 1
        if self.example is None or refusal.num_bytes < self.num_bytes:
            self.example, self.num_bytes = candidate, refusal.num_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`."""

    gpu: Gpu
    num_gpus: int
    ranked: list[Candidate]
    """Candidates that fit, quickest first; only the best settings of each trainer's layout."""
    current: Candidate | None
    """The config's own layout, whether or not it fits; None: see `current_refusal`."""
    current_refusal: str
    """Why the config's own does not run; empty: it does."""
    refusals: dict[str, Refusals] = field(default_factory=dict)

    def gpu_hours(self, candidate: Candidate, num_steps: int) -> float:
        """GPU hours of so many steps."""
        return candidate.times.total_s * num_steps * self.num_gpus / 3600


def plan(
    hf_config: Any,
    config: Config,
    *,
    num_nodes: int,
    gpu: Gpu,
    workload: Workload,
    efficiency: Efficiency,
) -> Plan:
    """Try every layout of the trainer and the engine on `num_nodes` full nodes.

    Tensor parallelism stays within a node and, where it is used, sequence parallelism with it. More
    ranks share a sequence than the config asks for only where it does not fit otherwise.
    Micro-batches are tried from an eighth to four times the config's, but hold one sequence. Stages
    are equal, one to a rank; of virtual and unequal ones the config's own are shown. vLLM's share
    of the memory is the config's.

    Args:
        hf_config: the model's.
        config: everything that is not planned.
        num_nodes: nodes of `gpu.gpus_per_node` devices.
        gpu: device.
        workload: lengths of a step.
        efficiency: what is reached of the device.

    Raises:
        ConfigError: num_nodes is not positive, the device does not run the config's fp8, or no
            layout at all computes this model.
    """
    if num_nodes < 1:
        raise ConfigError(f"nodes ({num_nodes}) must be 1 or more")
    check_capability(config.model, gpu.compute_capability, device=gpu.name)
    check_shapes(hf_config, ParallelConfig(), config.model)
    num_gpus = num_nodes * gpu.gpus_per_node
    search = _Search(hf_config, Shape.of(hf_config), config, gpu, workload, efficiency)
    rollout_sizes = search.rollout_sizes(num_gpus)
    refusals: dict[str, Refusals] = {}
    ranked: list[Candidate] = []
    for tp, pp, ep in _trainer_sizes(hf_config, num_gpus, gpu):
        for cp in _divisors(num_gpus // (tp * pp)):
            layout = _layout(num_gpus, tp=tp, pp=pp, cp=cp, ep=ep)
            try:
                search.check(layout)
            except ConfigError as error:
                refusals.setdefault(str(error), Refusals()).count += 1
                candidates = []
            else:
                candidates = search.candidates(layout, rollout_sizes)
            for candidate in candidates:
                if refusal := candidate.refusal(gpu):
                    refusals.setdefault(refusal.reason, Refusals()).add(candidate, refusal)
                else:
                    ranked.append(candidate)
            is_own = cp >= config.parallel.context_parallel_size
            if is_own and not _is_too_long(candidates, gpu):
                break
    ranked.sort(key=lambda candidate: candidate.times.total_s)
    current, reason = search.current(num_gpus)
    return Plan(gpu, num_gpus, ranked, current, reason, refusals)


def _is_too_long(candidates: Sequence[Candidate], gpu: Gpu) -> bool:
    """Whether none fits, and one fails by what it keeps of a micro-batch, not by its state."""
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
    """(tensor, pipeline, expert) sizes that divide the number of GPUs; stages divide the layers."""
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
class _Search:
    """One model on one device: what does not change from layout to layout."""

    hf_config: Any
    shape: Shape
    config: Config
    gpu: Gpu
    workload: Workload
    efficiency: Efficiency
    _generation_s: dict[int, float] = field(default_factory=dict)
    """Seconds of generation by the engine's size: the number of GPUs is always the same."""

    def rollout_sizes(self, num_gpus: int) -> list[int]:
        """Tensor parallel sizes of the engine: within a node, dividing heads and GPUs."""
        return [
            size
            for size in _divisors(self.gpu.gpus_per_node)
            if self.hf_config.num_attention_heads % size == 0 and num_gpus % size == 0
        ]

    def check(self, layout: Layout) -> None:
        """Raise ConfigError unless the trainer runs this layout of this model."""
        parallel = layout.apply(self.config).parallel
        check_shapes(self.hf_config, parallel, self.config.model)
        check_world_size(parallel, layout.world_size)

    def candidates(self, layout: Layout, rollout_sizes: Sequence[int]) -> list[Candidate]:
        """The best of every kind of recomputation."""
        return [
            self.best(replace(layout, recompute=recompute), rollout_sizes)
            for recompute in ("none", "selective", "full")
        ]

    def best(self, layout: Layout, rollout_sizes: Sequence[int]) -> Candidate:
        """The quickest micro-batch and engine that fit; of what does not fit, the leanest.

        Times add up: of the micro-batches the quickest that fits with any engine, and with it the
        quickest engine. What an engine needs to communicate is there while the trainer works, too.
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
                return min(fitting, key=lambda candidate: candidate.times.total_s)
        return min(tried, key=lambda one: one[0])[1]

    def current(self, num_gpus: int) -> tuple[Candidate | None, str]:
        """The config's own layout, and why it does not run (empty: it does)."""
        try:
            check_shapes(self.hf_config, self.config.parallel, self.config.model)
            layout = Layout.of(self.config, world_size=num_gpus)
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
        """Tokens of a micro-batch to try: each holds one sequence."""
        own, longest = self.config.batch.max_tokens_per_microbatch, self.config.max_sequence_tokens
        return sorted({max(longest, int(own * factor)) for factor in _BUDGET_FACTORS})

    def with_budget(self, budget: int) -> Config:
        """The config with that micro-batch."""
        batch = self.config.batch.model_copy(update={"max_tokens_per_microbatch": budget})
        return self.config.model_copy(update={"batch": batch})

    def candidate(self, layout: Layout, budget: int) -> Candidate:
        """Memory and time of one layout."""
        config = self.with_budget(budget)
        needed = memory(self.hf_config, config, layout, self.gpu)
        training = self._training(config, layout)
        size = layout.rollout_tp_size
        if size not in self._generation_s:
            self._generation_s[size] = generation_s(
                self.shape,
                config,
                rollout_tp_size=size,
                world_size=layout.world_size,
                workload=self.workload,
                gpu=self.gpu,
                efficiency=self.efficiency,
            )
        times = StepTime.of(training, generation_s=self._generation_s[size])
        return Candidate(layout, budget, needed, times)

    def training_s(self, budget: int, layout: Layout) -> float:
        """Old pass and updates."""
        config = self.with_budget(budget)
        training = self._training(config, layout)
        return training.old_log_probs_s() + config.batch.num_minibatches * training.update_s()

    def _training(self, config: Config, layout: Layout) -> Training:
        return Training(self.shape, config, layout, self.workload, self.gpu, self.efficiency)


def overrides(candidate: Candidate) -> list[str]:
    """Command-line overrides that give a run a candidate's settings.

    The config must not have the settings of `leave_out`.
    """
    layout = candidate.layout
    ends = {"first": layout.first_layers, "last": layout.last_layers}
    return [
        f"parallel.tensor_model_parallel_size={layout.tp_size}",
        f"parallel.pipeline_model_parallel_size={layout.pp_size}",
        f"parallel.context_parallel_size={layout.cp_size}",
        f"parallel.expert_model_parallel_size={layout.ep_size}",
        f"parallel.virtual_pipeline_model_parallel_size={layout.vpp_size}",
        *(
            f"parallel.num_layers_in_{end}_pipeline_stage={count}"
            for end, count in ends.items()
            if count is not None
        ),
        f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}",
        f"model.recompute={layout.recompute}",
        f"rollout.tensor_parallel_size={layout.rollout_tp_size}",
        f"batch.max_tokens_per_microbatch={candidate.max_tokens_per_microbatch}",
    ]


def leave_out(config: Config) -> list[str]:
    """Settings to remove from a config first: overrides cannot unset a number of layers."""
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    return [f"parallel.{name}" for name in names if getattr(config.parallel, name) is not None]


def gib(num_bytes: float) -> float:
    """Bytes in GiB."""
    return num_bytes / GIB


def read_model(config: Config) -> tuple[Any, str]:
    """The model of `model.hf_dir`: config.json alone, or shapes that are shipped.

    Returns:
        The model, and a sentence where it is not the folder's own; see
        `models.published.find_model`.

    Raises:
        ConfigError: it is not there, and how to get it alone; or it cannot be used.
    """
    folder = Path(config.model.hf_dir)
    is_absent = folder.is_dir() and not (folder / "config.json").is_file()
    model, note = (None, "") if is_absent else find_model(config.model.hf_dir)
    if model is None:
        raise ConfigError(
            f"model.hf_dir ({folder}): no config.json here. The planner needs that file alone: "
            f"copy it from where the model is, or `hf download ORGANISATION/{folder.name} "
            f"config.json --local-dir {folder}`"
        )
    return model, note
