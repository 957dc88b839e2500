"""Sections of the configuration about the run itself: its life, layout, checkpoints and records."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gapo_megatron.config.metadata import INPUT_PATH, LAYOUT, LIFE, MEASURED, SEED
from gapo_megatron.config.section import Section
from gapo_megatron.config.types import (
    Bound,
    Count,
    MadePath,
    OptionalPath,
    Seconds,
    Seed,
    Steps,
    StepsOrZero,
    Temperature,
    WandbProject,
)


class RunConfig(Section):
    role = LIFE
    kept = "prompts and samples are drawn by it"

    output_dir: MadePath
    """Everything the run writes lands here."""
    seed: Annotated[Seed, SEED] = 0
    num_steps: Steps
    """Rollout batches to train on."""
    hang_timeout_s: Seconds = 1200
    """A process without progress for so long prints where it is and ends. More than the longest
    mini-batch, save or load takes, and than one engine may wait for another to finish generating;
    less than parallel.timeout_s, which would end it without a word about where."""
    stop_margin_s: Seconds = 120
    """Kept free before the job's time limit, beyond what a stage and a save took so far; and the
    longest that generation may still go on after a request to stop (docs/slurm.md)."""


class ParallelConfig(Section):
    role = LAYOUT

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count = 1
    """Stages of every pipeline rank, each with a part of its layers: a shorter bubble for more
    messages. Micro-batches are then filled up to a multiple of the pipeline's ranks."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first pipeline rank, which has the embedding too, and (below) of the last one,
    which has the head. Not given: as many as the others, which share the rest evenly."""
    num_layers_in_last_pipeline_stage: Count | None = None
    context_parallel_size: Count = 1
    """Ranks that share every sequence and its activations, where one cannot hold them: for that,
    attention has to be Transformer Engine's; ours gathers all keys and values on every rank."""
    expert_model_parallel_size: Count = 1
    """Neighbours (tensor, context or data parallel) that divide a layer's experts."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks during the last micro-batch's backward pass."""
    timeout_s: Annotated[Seconds, LIFE] = 1800
    """A collective that waits longer ends the job."""

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
        """Ranks that hold a part each of a layer's weights or of its activations."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def uneven_stages(self) -> dict[str, int]:
        """What is set of the fields that make pipeline stages virtual or unequal."""
        fields = (
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        )
        defaults = type(self).model_fields
        given = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in given.items() if value != defaults[name].default}


class CheckpointConfig(Section):
    role = LIFE

    every_steps: StepsOrZero = 50
    """Save every so many steps (0: only at the end)."""
    keep_last: Steps = 2
    """Newest checkpoints to keep. One that a stop made in between takes the place of none."""
    keep_steps: Annotated[tuple[Steps, ...], Field(strict=False)] = ()
    """Steps to save after as well, and never to remove: what another run is to branch from."""
    branch_from: Annotated[OptionalPath, INPUT_PATH] = ""
    """Checkpoint of another run, RUN/checkpoints/step_N, that this one goes on from under another
    objective (docs/slurm.md). Once begun, it resumes from its own."""

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps, whether or not the run ends there."""
        periodic = self.every_steps > 0 and step % self.every_steps == 0
        return periodic or step in self.keep_steps


class EvaluationConfig(Section):
    role = MEASURED

    every_steps: Annotated[StepsOrZero, LIFE] = 0
    """Evaluate before the first step, every so many steps, and at the end (0: never)."""
    samples_per_prompt: Count = 8
    temperature: Temperature = 1.0


class MetricsConfig(Section):
    role = LIFE

    tensorboard: bool = True
    wandb_project: WandbProject = ""
    """Weights & Biases project; empty: off."""
    noise_floor_every_steps: StepsOrZero = 50
    """Measure the noise floor (docs/numerics.md) at step 0 and every so many steps (0: never)."""
    noise_floor_limit: Bound = 1.0
    """A new run whose mean noise floor is more than so many times eps_low does not start: its
    clip would decide on rounding."""
