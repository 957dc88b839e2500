"""The run's configuration: frozen pydantic models, TOML files, `section.key=value` overrides.

Precedence: defaults < the file named by `base` < the file itself < overrides. Nothing changes a
config after it is loaded. Paths are relative to the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gapo_megatron.config.errors import explain
from gapo_megatron.config.methods import METHODS, Method
from gapo_megatron.config.rules import check_together
from gapo_megatron.config.types import (
    AdamEps,
    Bound,
    Count,
    CountOrZero,
    GroupSize,
    LearningRate,
    MadePath,
    NonNegative,
    Offload,
    OptionalPath,
    PathText,
    Positive,
    Seconds,
    Seed,
    Steps,
    StepsOrZero,
    Temperature,
    Text,
    Tokens,
    WandbProject,
    Workers,
)
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import apply_override, read_tree, set_value
from gapo_megatron.isolation import SYSTEM_PYTHON, split_setting

CONFIG_NAME = "config.toml"
"""In the run folder: the resolved config of the newest start."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunConfig(_Section):
    output_dir: MadePath
    """Everything the run writes lands here."""
    seed: Seed = 0
    num_steps: Steps
    """Rollout batches to train on."""
    hang_timeout_s: Seconds = 1200
    """A process without progress for so long prints where it is and ends. More than the longest
    mini-batch, save or load takes, and than one engine may wait for another to finish generating;
    less than parallel.timeout_s, which would end it without a word about where."""
    stop_margin_s: Seconds = 120
    """Kept free before the job's time limit, beyond what a stage and a save took so far; and the
    longest that generation may still go on after a request to stop (docs/slurm.md)."""


class ModelConfig(_Section):
    hf_dir: MadePath
    """Hugging Face folder (config.json, tokenizer, safetensors) of the initial policy."""
    megatron_dir: OptionalPath = ""
    """Megatron checkpoint that the weights are read from instead; `hf_dir` then needs none."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """bf16 and fp8 keep fp32 master weights; fp8 needs Transformer Engine."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Which values share a scale in fp8, by Megatron-core's name (docs/scaling.md)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: `full` every layer; `selective` under Transformer Engine the MLP,
    or with experts their activations and norms, else attention (docs/scaling.md)."""
    head: Literal["auto", "torch", "triton"] = "auto"
    """Code of the log-probs; `auto`: Triton's where it serves and passes a check, else torch's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["fp8_recipe"].default
        if self.precision != "fp8" and self.fp8_recipe != default:
            raise ValueError(
                f"fp8_recipe ({self.fp8_recipe!r}) needs precision 'fp8', not {self.precision!r}"
            )
        return self


class ParallelConfig(_Section):
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
    timeout_s: Seconds = 1800
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


class DataConfig(_Section):
    train_path: PathText
    """JSONL with one problem a line: id, prompt, answer, optional level (docs/data.md)."""
    eval_path: OptionalPath = ""
    """Held-out problems in the same form; empty: no evaluation."""
    max_prompt_tokens: Tokens = 2048
    chat_template: bool = False
    """Wrap `prompt` as a user message in the tokenizer's chat template."""


class BatchConfig(_Section):
    """The paper's batch words. Sequences are prompts x rollouts_per_prompt."""

    rollout_prompts: Count = 256
    """Prompts of one rollout batch (one step)."""
    minibatch_prompts: Count = 64
    """Prompts of one optimizer update; divides rollout_prompts."""
    rollouts_per_prompt: GroupSize = 8
    """k."""
    dynamic_sampling_rounds: CountOrZero = 0
    """How often groups that teach nothing, all correct or all wrong, are replaced by those of
    further prompts (DAPO's dynamic sampling); 0: they stay, at no cost but their generation."""
    oversampling: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Prompts begun for each that is wanted: an engine ends with its share of whole groups, and
    what it breaks off comes again later. Prefers short responses (docs/data.md)."""
    partial_rollouts: bool = False
    """Go on with what is broken off at the next step instead, from the tokens that are there."""
    max_tokens_per_microbatch: Count = 32768
    """Packed tokens (prompt + response) of one forward pass on one data-parallel rank. Its context
    parallel ranks share them; every sequence must fit whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollout_prompts % self.minibatch_prompts:
            raise ValueError(
                f"minibatch_prompts ({self.minibatch_prompts}) must divide "
                f"rollout_prompts ({self.rollout_prompts})"
            )
        if self.partial_rollouts and self.oversampling == 1:
            raise ValueError("partial_rollouts=true needs oversampling > 1")
        return self

    @property
    def num_minibatches(self) -> int:
        return self.rollout_prompts // self.minibatch_prompts


class RolloutConfig(_Section):
    max_response_tokens: Tokens
    temperature: Temperature = 1.0
    """Of sampling, and of the trainer's log-probs alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tensor_parallel_size: Count = 1
    """vLLM's own tensor parallelism, inside a node, apart from the trainer's."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of GPU memory vLLM may take while it is awake."""
    cpu_kv_cache_gib: Count = 1
    """KV cache when running on CPU, in GiB per rank."""
    enforce_eager: bool = False
    """Skip compilation and graph capture: slower tokens, faster start."""
    quantization: Literal["", "fp8"] = ""
    """`fp8`: vLLM keeps and multiplies the layers' weights in fp8, quantised anew by every weight
    sync (docs/scaling.md); empty: as in training, but bf16 where that is fp8."""
    verify_sequences: Count = 4
    """Sequences whose log-probs are compared with the trainer's after every weight sync."""
    verify_bound: Bound | None = None
    """Largest mean difference per token that passes; by default 1e-3 in fp32, 0.1 in bf16, and 0.3
    with experts or fp8, in the trainer or in vLLM (docs/numerics.md)."""


class RewardConfig(_Section):
    kind: Literal["math", "code", "instructions", "exact"]
    """`math`: boxed answers; `code`: unit tests; `instructions`: IFEval's checks; `exact`: the last
    field of the response (demo)."""
    num_workers: Workers = 0
    """Processes of each rank that judge; 0: the rank's share of the node's cores, at most 8."""
    timeout_s: Seconds | None = None
    """Wall-clock time to judge one response (10 s by default); longer is unknown, and left out. Of
    code, the time its tests may take together (60 s by default); longer is wrong."""
    sandbox: Text = "bubblewrap"
    """Of code: `bubblewrap`, `apptainer:/PATH/OF/IMAGE`, `tcp://HOST:PORT` (a service on another
    machine) or `unsafe`, which runs the model's programs with your rights."""
    python: PathText = SYSTEM_PYTHON
    """Interpreter of code, in the image where there is one: it and its libraries are all that a
    program sees. A service has its own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            kind, _ = split_setting(self.sandbox)
        except ValueError as error:
            raise ValueError(f"sandbox {error}") from None
        if kind == "service" and self.python != SYSTEM_PYTHON:
            raise ValueError(
                f"python ({self.python!r}) does not go with sandbox ({self.sandbox!r}): a service "
                "has its own (--python)"
            )
        return self


class ObjectiveConfig(_Section):
    """A method of the paper; the other keys override its preset where given."""

    method: Text = "gapo"
    eps_low: Positive | None = None
    eps_high_max: Positive | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    normalize_std: bool | None = None
    focal_gamma: NonNegative | None = None
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy || initial policy); above 0 every sequence is computed."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; above 0 every sequence is computed."""
    importance_weight_max: Annotated[Positive, Field(ge=1)] | None = None
    """Correct for a rollout engine that samples from another policy than the trainer's (its
    kernels, its precision): every response counts times its importance weight, cut off here
    (docs/objective.md). Not given: no correction."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method not in METHODS:
            near = difflib.get_close_matches(self.method, METHODS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"method {self.method!r} is not one of {', '.join(METHODS)}{hint}")
        method = self.resolve()
        if method.eps_low >= 1 and not method.stop_gradient_ratio:
            raise ValueError(f"eps_low ({method.eps_low}) must be below 1: ratios are positive")
        if method.eps_high_max < method.eps_low and not method.stop_gradient_ratio:
            raise ValueError(
                f"eps_high_max ({method.eps_high_max}) must be at least eps_low ({method.eps_low})"
            )
        return self

    def resolve(self) -> Method:
        """The preset with this section's overrides."""
        keys = ("eps_low", "eps_high_max", "aggregation", "normalize_std", "focal_gamma")
        given = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return dataclasses.replace(METHODS[self.method], **given)

    @property
    def needs_every_sequence(self) -> bool:
        """True when rows with A = 0 still carry a gradient."""
        return self.kl_coef > 0 or self.entropy_coef > 0


class OptimizerConfig(_Section):
    """AdamW, constant learning rate (the paper's table)."""

    learning_rate: LearningRate = 1e-6
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: AdamEps = 1e-8
    clip_grad: Bound = 1.0
    """Largest global gradient norm."""
    warmup_steps: StepsOrZero = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    offload: Offload = "none"
    """What waits in host memory while vLLM is awake: moments and fp32 master weights (`optimizer`),
    and the model's weights too (`all`)."""


class SupervisedConfig(_Section):
    """`python -m gapo_megatron.sft`: supervised training that makes `model.hf_dir`."""

    initial_hf_dir: PathText
    """Hugging Face folder the supervised training starts from."""
    train_path: PathText
    """JSONL with one example a line: prompt, response."""
    num_steps: Steps
    batch_sequences: Annotated[Count, Field(le=2**20)] = 128  # all in memory
    learning_rate: LearningRate = 1e-3
    """Peak: linear warm-up over a tenth of the steps, then linear decay to a tenth."""


class CheckpointConfig(_Section):
    every_steps: StepsOrZero = 50
    """Save every so many steps (0: only at the end)."""
    keep_last: Steps = 2
    """Newest checkpoints to keep. One that a stop made in between takes the place of none."""
    keep_steps: Annotated[tuple[Steps, ...], Field(strict=False)] = ()
    """Steps to save after as well, and never to remove: what another run is to branch from."""
    branch_from: OptionalPath = ""
    """Checkpoint of another run, RUN/checkpoints/step_N, that this one goes on from under another
    objective (docs/slurm.md). Once begun, it resumes from its own."""

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps, whether or not the run ends there."""
        periodic = self.every_steps > 0 and step % self.every_steps == 0
        return periodic or step in self.keep_steps


class EvaluationConfig(_Section):
    every_steps: StepsOrZero = 0
    """Evaluate before the first step, every so many steps, and at the end (0: never)."""
    samples_per_prompt: Count = 8
    temperature: Temperature = 1.0


class MetricsConfig(_Section):
    tensorboard: bool = True
    wandb_project: WandbProject = ""
    """Weights & Biases project; empty: off."""
    noise_floor_every_steps: StepsOrZero = 50
    """Measure the noise floor (docs/numerics.md) at step 0 and every so many steps (0: never)."""
    noise_floor_limit: Bound = 1.0
    """A new run whose mean noise floor is more than so many times eps_low does not start: its
    clip would decide on rounding."""


class Config(_Section):
    """One run. Sections in the order in which the loop uses them."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    rollout: RolloutConfig
    reward: RewardConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    supervised: SupervisedConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_together(self)
        return self

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, settings: Mapping[str, Any] = {}
) -> Config:
    """Read a TOML file (and the file its `base` names), replace single values, validate.

    Args:
        path: of the file.
        overrides: `section.key=value`.
        settings: values by `section.key`, over the overrides.

    Raises:
        ConfigError: names the file or override, the field, the value and the rule.
    """
    tree = read_tree(Path(path))
    for override in overrides:
        apply_override(tree, override)
    for name, value in settings.items():
        set_value(tree, name, value)
    return parse_config(tree, source=str(path))


def parse_config(tree: dict[str, Any], *, source: str) -> Config:
    """Validate a nested dict; every problem is listed in one ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [explain(item, Config) for item in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None
