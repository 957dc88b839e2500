"""Sections of the configuration on the run, its layout, optimizer, checkpoints and metrics."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gapo_megatron.config.section import INPUT_PATH, LAYOUT, LEARNED, LIFE, MEASURED, SEED, Section
from gapo_megatron.config.types import (
    AdamEps,
    Bound,
    Count,
    LearningRate,
    MadePath,
    MinLearningRate,
    NonNegative,
    Offload,
    OptimizerImplementation,
    OptionalPath,
    PathText,
    SamplesPerStep,
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
    """Seed of the order of prompts, of sampling, and of an adapter's first factors."""
    num_steps: Steps
    """Steps to train for. A step is one rollout batch and its optimizer updates."""
    hang_timeout_s: Seconds = 1200
    """A rank that makes no progress for this long prints its stacks and ends the job. Set it above
    the longest mini-batch, save or load, and below `parallel.timeout_s`."""
    allow_changes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Settings, as `objective.method`, that a resume may change although they decide what the run
    learns. The report marks the step of the change."""
    stop_margin_s: Seconds = 120
    """Reserve before the job's time limit: the run stops if the next stage and a save would not end
    this long before it. Also the longest that generation continues after a request to stop
    (docs/slurm.md)."""


class ParallelConfig(Section):
    """The trainer's parallel layout. Names are Megatron-core's."""

    role = LAYOUT

    tensor_model_parallel_size: Count = 1
    """Tensor-parallel ranks; keep them within a node."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Virtual stages per pipeline rank (interleaved schedule): a shorter bubble, more messages.
    Micro-batches are padded to a multiple of the pipeline size."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first pipeline rank, which also holds the embedding. Unset: an even share."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last pipeline rank, which also holds the output layer. Unset: an even share."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence, for sequences too long for one rank. Saves memory only with
    Transformer Engine's attention; without it every rank gathers all keys and values."""
    expert_model_parallel_size: Count = 1
    """Ranks that share a layer's experts, out of the tensor, context and data-parallel ranks."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: shard activations between tensor-parallel regions."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks during the last micro-batch's backward pass."""
    timeout_s: Annotated[Seconds, LIFE] = 1800
    """Timeout of collective operations; a longer wait ends the job."""

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
    """AdamW and its learning rate; the defaults are those of the paper's table."""

    role = LEARNED
    kept = "a branch keeps the optimizer's state and changes the objective alone"

    learning_rate: LearningRate = 1e-6
    """Learning rate after `optimizer.warmup_steps`, where `optimizer.schedule` starts."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up. `linear` and `cosine`: it falls to
    `optimizer.min_learning_rate` at `optimizer.decay_steps` (docs/objective.md)."""
    min_learning_rate: MinLearningRate = 0.0
    """Learning rate from `optimizer.decay_steps` on; for `linear` and `cosine`."""
    decay_steps: Steps | None = None
    """Optimizer updates until `optimizer.min_learning_rate`, warm-up included (updates, not steps);
    for `linear` and `cosine`. Unset: all updates of the run, `run.num_steps` times mini-batches per
    step."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    eps: AdamEps = 1e-8
    """AdamW's epsilon."""
    clip_grad: Bound = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: StepsOrZero = 0
    """Optimizer updates over which the learning rate rises linearly from 0 (updates, not steps)."""
    implementation: Annotated[OptimizerImplementation, LAYOUT] = "auto"
    """Whose kernels update the weights: AdamW, the gradient's norm and its clipping. `auto`:
    Transformer Engine's, else NVIDIA apex's, else torch's, the first that every rank has.
    All keep the same state (docs/gpu.md)."""
    offload: Annotated[Offload, LAYOUT] = "none"
    """What moves to host memory while vLLM generates. `optimizer`: moments and master weights;
    `all`: the model's weights as well."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "constant":
            for name in ("min_learning_rate", "decay_steps"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} ({value}) needs schedule 'linear' or 'cosine', not 'constant'"
                    )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate ({self.min_learning_rate}) must be at most "
                f"learning_rate ({self.learning_rate})"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) must be greater than "
                f"warmup_steps ({self.warmup_steps})"
            )
        return self

    def over_updates(self, num_updates: int) -> OptimizerConfig:
        """These settings with `decay_steps`; `num_updates` are those of the whole run.

        Raises:
            ValueError: the warm-up leaves no update to decay over.
        """
        if self.schedule == "constant" or self.decay_steps is not None:
            return self
        if num_updates <= self.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.warmup_steps}) must be below run.num_steps times "
                f"mini-batches per step ({num_updates}) with optimizer.schedule {self.schedule!r}"
            )
        return self.model_copy(update={"decay_steps": num_updates})


class CheckpointConfig(Section):
    """Saving, and starting from another run's checkpoint."""

    role = LIFE

    every_steps: StepsOrZero = 50
    """Steps between checkpoints. 0: only at the end."""
    keep_last: Steps = 2
    """How many of the newest checkpoints to keep, not counting those of a stop within a step."""
    keep_steps: Annotated[tuple[Steps, ...], Field(strict=False)] = ()
    """Additional steps to save after. These checkpoints are never removed; branch from them."""
    background: bool = False
    """Write checkpoints while training continues, from copies in host memory (docs/slurm.md).
    Training still waits for a run's first and last one, for that of a stop, and where a node lacks
    memory."""
    branch_from: Annotated[OptionalPath, INPUT_PATH] = ""
    """Checkpoint of another run, `RUN/checkpoints/step_N`, to continue from with another objective
    (docs/slurm.md). Ignored once the branch has a checkpoint of its own."""

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps, whether or not the run ends there."""
        periodic = self.every_steps > 0 and step % self.every_steps == 0
        return periodic or step in self.keep_steps


class EvaluationConfig(Section):
    """Evaluation on `data.eval_path` during training."""

    role = MEASURED

    every_steps: Annotated[StepsOrZero, LIFE] = 0
    """Steps between evaluations; also evaluates before the first step and at the end. 0: never."""
    samples_per_prompt: Count = 8
    """Responses sampled per problem."""
    temperature: Temperature = 1.0
    """Sampling temperature of the evaluation."""


class MetricsConfig(Section):
    """Where metrics go besides metrics.jsonl, and what else is kept of a step."""

    role = LIFE

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: WandbProject = ""
    """Weights & Biases project. Empty: off. Install `wandb` yourself."""
    samples_per_step: SamplesPerStep = 8
    """Responses of each step that are kept, as text and token by token: whole groups if one fits,
    spread over c and verdicts (docs/metrics.md). 0: none."""
    rounding_every_steps: StepsOrZero | None = None
    """Steps between measurements of what rounding does to the ratios (docs/numerics.md), from step
    0 on. 0: never. Unset: 10, and never in fp32, whose rounding is far below any clip."""

    def rounding_every(self, precision: str) -> int:
        """`rounding_every_steps`, or its default with this `model.precision`."""
        if self.rounding_every_steps is None:
            return 0 if precision == "fp32" else 10
        return self.rounding_every_steps


class SupervisedConfig(Section):
    """Supervised training (`.venv/bin/python -m gapo_megatron.sft`); it writes `model.hf_dir`."""

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
