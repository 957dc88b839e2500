"""Sections of the configuration on the run, its layout, optimizer, checkpoints and metrics."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gapo_megatron.config.section import INPUT_PATH, LAYOUT, LEARNED, LIFE, MEASURED, SEED, Section
from gapo_megatron.config.types import (
    AdamEps,
    Bound,
    Count,
    LearningRate,
    MadePath,
    NonNegative,
    Offload,
    OptionalPath,
    PathText,
    Seconds,
    Seed,
    Steps,
    StepsOrZero,
    Temperature,
    WandbProject,
)


class RunConfig(Section):
    """Where a run writes, how long it trains, and when it gives up."""

    role = LIFE
    kept = "it decides which prompts are drawn and what is sampled"

    output_dir: MadePath
    """Run folder: everything the run writes is in it."""
    seed: Annotated[Seed, SEED] = 0
    """Decides the order of prompts and what is sampled."""
    num_steps: Steps
    """Steps to train for, each with one rollout batch."""
    hang_timeout_s: Seconds = 1200
    """A process that makes no progress for this long prints its stack and ends. Set it above the
    longest mini-batch, save or load. Must be below parallel.timeout_s, which ends a process without
    a stack."""
    allow_changes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Settings (`objective.method`) that may have other values than before when the run resumes,
    though they decide what it learns; others need no allowance. The report shows where they were
    changed."""
    stop_margin_s: Seconds = 120
    """Time left before the job's time limit when a run stops, beyond the time that a stage and a
    save have taken so far. Also the longest that generation continues after a request to stop
    (docs/slurm.md)."""


class ParallelConfig(Section):
    """The trainer's parallel layout. Names are Megatron-core's."""

    role = LAYOUT

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count = 1
    """Virtual stages per pipeline rank, each with a part of its layers: a shorter bubble, more
    messages. The number of micro-batches is then padded to a multiple of the pipeline's ranks."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first pipeline rank, which also holds the embedding. Not given: as many as the
    other ranks, which share the rest evenly."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last pipeline rank, which also holds the output layer."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence and its activations, for sequences too long for one rank. To
    save memory it needs Transformer Engine's attention: ours gathers all keys and values on every
    rank."""
    expert_model_parallel_size: Count = 1
    """Ranks that share a layer's experts; they are tensor, context or data parallel otherwise."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks during the last micro-batch's backward pass."""
    timeout_s: Annotated[Seconds, LIFE] = 1800
    """A collective operation that waits longer ends the job."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel=true needs tensor_model_parallel_size > 1")
        if self.pipeline_model_parallel_size == 1:
            for name, value in self.uneven_stages.items():
                raise ValueError(f"{name} ({value}) needs pipeline_model_parallel_size > 1")
        return self

    @property
    def ranks_per_layer(self) -> int:
        """Ranks that each hold a part of a layer's weights or of its activations."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def uneven_stages(self) -> dict[str, int]:
        """The settings that make pipeline stages virtual or unequal, where they are given."""
        fields = (
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        )
        defaults = type(self).model_fields
        given = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in given.items() if value != defaults[name].default}


class OptimizerConfig(Section):
    """AdamW with a constant learning rate, as in the paper's table."""

    role = LEARNED
    kept = "a branch keeps the optimizer's state and changes the objective alone"

    learning_rate: LearningRate = 1e-6
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: AdamEps = 1e-8
    clip_grad: Bound = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: StepsOrZero = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    offload: Annotated[Offload, LAYOUT] = "none"
    """What moves to host memory while vLLM generates. `optimizer`: moments and fp32 master weights;
    `all`: the model's weights as well."""


class CheckpointConfig(Section):
    """Saving, and starting from another run's checkpoint."""

    role = LIFE

    every_steps: StepsOrZero = 50
    """Save after every so many steps. 0: only at the end."""
    keep_last: Steps = 2
    """Number of newest checkpoints to keep. Those that a stop made in the midst of a step are not
    counted."""
    keep_steps: Annotated[tuple[Steps, ...], Field(strict=False)] = ()
    """Further steps to save after. These checkpoints are never removed, so that another run can
    branch from them."""
    branch_from: Annotated[OptionalPath, INPUT_PATH] = ""
    """Checkpoint of another run, RUN/checkpoints/step_N: this run continues from it with another
    objective (docs/slurm.md). After its own first checkpoint it resumes from that."""

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps, whether or not the run ends there."""
        periodic = self.every_steps > 0 and step % self.every_steps == 0
        return periodic or step in self.keep_steps


class EvaluationConfig(Section):
    """Evaluation on `data.eval_path` during training."""

    role = MEASURED

    every_steps: Annotated[StepsOrZero, LIFE] = 0
    """Evaluate before the first step, after every so many steps, and at the end. 0: never."""
    samples_per_prompt: Count = 8
    """Responses per problem."""
    temperature: Temperature = 1.0
    """Sampling temperature of the evaluation."""


class MetricsConfig(Section):
    """What is recorded besides metrics.jsonl, and how often rounding is measured."""

    role = LIFE

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: WandbProject = ""
    """Weights & Biases project. Empty: off."""
    rounding_every_steps: StepsOrZero = 10
    """Measure what rounding does to the ratios (docs/numerics.md) at step 0 and every so many
    steps. 0: never."""


class SupervisedConfig(Section):
    """`python -m gapo_megatron.sft`: supervised training that makes `model.hf_dir`."""

    role = MEASURED

    initial_hf_dir: Annotated[PathText, INPUT_PATH]
    """Hugging Face folder the supervised training starts from."""
    train_path: Annotated[PathText, INPUT_PATH]
    """JSONL file with one example per line: prompt, response."""
    num_steps: Steps
    """Optimizer updates."""
    batch_sequences: Annotated[Count, Field(le=2**20)] = 128  # all in memory
    """Examples per optimizer update."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate: linear warm-up over the first tenth of the steps, then linear decay to a
    tenth of the peak."""
