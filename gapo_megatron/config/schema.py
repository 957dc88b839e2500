"""The run's configuration: what is trained, on what, and how it learns.

Sections about the run itself are in run_sections.py. Paths are relative to the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from gapo_megatron.config.metadata import (
    ENGINE,
    HELD_OUT,
    HOW,
    INPUT_PATH,
    LAYOUT,
    LEARNED,
    LIFE,
    MEASURED,
    OBJECTIVE,
    SAMPLED,
)
from gapo_megatron.config.methods import METHODS, Method
from gapo_megatron.config.removed import drop_removed
from gapo_megatron.config.rules import check_together
from gapo_megatron.config.run_sections import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    ParallelConfig,
    RunConfig,
)
from gapo_megatron.config.section import Section
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
    Steps,
    StepsOrZero,
    Temperature,
    Text,
    Tokens,
    Workers,
)
from gapo_megatron.isolation import SYSTEM_PYTHON, split_setting

CONFIG_NAME = "config.toml"
"""In the run folder: the resolved config of the newest start."""


class ModelConfig(Section):
    role = LEARNED
    kept = "weights and optimizer state are this model's"

    hf_dir: Annotated[MadePath, INPUT_PATH]
    """Hugging Face folder (config.json, tokenizer, safetensors) of the initial policy."""
    megatron_dir: Annotated[OptionalPath, INPUT_PATH] = ""
    """Megatron checkpoint that the weights are read from instead; `hf_dir` then needs none."""
    precision: Annotated[Literal["fp32", "bf16", "fp8"], SAMPLED] = "bf16"
    """bf16 and fp8 keep fp32 master weights; fp8 needs Transformer Engine."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], SAMPLED] = (
        "tensorwise"
    )
    """Which values share a scale in fp8, by Megatron-core's name (docs/scaling.md)."""
    recompute: Annotated[Literal["none", "selective", "full"], HOW] = "none"
    """Activation recomputation: `full` every layer; `selective` under Transformer Engine the MLP,
    or with experts their activations and norms, else attention (docs/scaling.md)."""
    head: Annotated[Literal["auto", "torch", "triton"], HOW] = "auto"
    """Code of the log-probs; `auto`: Triton's where it serves and passes a check, else torch's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["fp8_recipe"].default
        if self.precision != "fp8" and self.fp8_recipe != default:
            raise ValueError(
                f"fp8_recipe ({self.fp8_recipe!r}) needs precision 'fp8', not {self.precision!r}"
            )
        return self


class DataConfig(Section):
    role = LEARNED
    kept = "the branch goes on in the same problems"

    train_path: Annotated[PathText, INPUT_PATH]
    """JSONL with one problem a line: id, prompt, answer, optional level (docs/data.md)."""
    eval_path: Annotated[OptionalPath, HELD_OUT, INPUT_PATH] = ""
    """Held-out problems in the same form; empty: no evaluation."""
    max_prompt_tokens: Tokens = 2048
    chat_template: bool = False
    """Wrap `prompt` as a user message in the tokenizer's chat template."""


class BatchConfig(Section):
    """The paper's batch words. Sequences are prompts x rollouts_per_prompt."""

    role = LEARNED
    kept = "a step, an update and c must mean the same"

    rollout_prompts: Count = 256
    """Prompts of one rollout batch (one step)."""
    minibatch_prompts: Count = 64
    """Prompts of one optimizer update; divides rollout_prompts."""
    rollouts_per_prompt: Annotated[GroupSize, SAMPLED] = 8
    """k."""
    dynamic_sampling_rounds: CountOrZero = 0
    """How often groups that teach nothing, all correct or all wrong, are replaced by those of
    further prompts (DAPO's dynamic sampling); 0: they stay, at no cost but their generation."""
    oversampling: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Prompts begun for each that is wanted: an engine ends with its share of whole groups, and
    what it breaks off comes again later. Prefers short responses (docs/data.md)."""
    partial_rollouts: bool = False
    """Go on with what is broken off at the next step instead, from the tokens that are there."""
    max_tokens_per_microbatch: Annotated[Count, HOW] = 32768
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


class RolloutConfig(Section):
    role = LEARNED
    kept = (
        "samples must come from the same distribution; of over-sampled groups the same ones must "
        "be finished first"
    )

    max_response_tokens: Annotated[Tokens, SAMPLED]
    temperature: Annotated[Temperature, SAMPLED] = 1.0
    """Of sampling, and of the trainer's log-probs alike."""
    top_p: Annotated[float, Field(gt=0, le=1), SAMPLED] = 1.0
    tensor_parallel_size: Annotated[Count, ENGINE] = 1
    """vLLM's own tensor parallelism, inside a node, apart from the trainer's."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1), ENGINE] = 0.5
    """Share of GPU memory vLLM may take while it is awake."""
    cpu_kv_cache_gib: Annotated[Count, ENGINE] = 1
    """KV cache when running on CPU, in GiB per rank."""
    enforce_eager: Annotated[bool, ENGINE] = False
    """Skip compilation and graph capture: slower tokens, faster start."""
    quantization: Literal["", "fp8"] = ""
    """`fp8`: vLLM keeps and multiplies the layers' weights in fp8, quantised anew by every weight
    sync (docs/scaling.md); empty: as in training, but bf16 where that is fp8."""
    verify_bound: Annotated[Bound | None, LIFE] = None
    """Largest mean difference per token that passes; by default 1e-3 in fp32, 0.1 in bf16, and 0.3
    with experts or fp8, in the trainer or in vLLM (docs/numerics.md)."""


class RewardConfig(Section):
    role = LEARNED
    kept = "verdicts must mean the same"

    kind: Literal["math", "code", "instructions", "exact"]
    """`math`: boxed answers; `code`: unit tests; `instructions`: IFEval's checks; `exact`: the last
    field of the response (demo)."""
    num_workers: Annotated[Workers, HOW] = 0
    """Processes of each rank that judge; 0: the rank's share of the node's cores, at most 8."""
    timeout_s: Seconds | None = None
    """Wall-clock time to judge one response (10 s by default); longer is unknown, and left out. Of
    code, the time its tests may take together (60 s by default); longer is wrong."""
    sandbox: Annotated[Text, HOW] = "bubblewrap"
    """Of code: `bubblewrap`, `apptainer:/PATH/OF/IMAGE`, `tcp://HOST:PORT` (a service on another
    machine) or `unsafe`, which runs the model's programs with your rights."""
    python: Annotated[PathText, HOW] = SYSTEM_PYTHON
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


class ObjectiveConfig(Section):
    """A method of the paper; the other keys override its preset where given."""

    role = OBJECTIVE

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


class OptimizerConfig(Section):
    """AdamW, constant learning rate (the paper's table)."""

    role = LEARNED
    kept = "its state goes on, and the objective alone is exchanged"

    learning_rate: LearningRate = 1e-6
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: AdamEps = 1e-8
    clip_grad: Bound = 1.0
    """Largest global gradient norm."""
    warmup_steps: StepsOrZero = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    offload: Annotated[Offload, LAYOUT] = "none"
    """What waits in host memory while vLLM is awake: moments and fp32 master weights (`optimizer`),
    and the model's weights too (`all`)."""


class SupervisedConfig(Section):
    """`python -m gapo_megatron.sft`: supervised training that makes `model.hf_dir`."""

    role = MEASURED

    initial_hf_dir: Annotated[PathText, INPUT_PATH]
    """Hugging Face folder the supervised training starts from."""
    train_path: Annotated[PathText, INPUT_PATH]
    """JSONL with one example a line: prompt, response."""
    num_steps: Steps
    batch_sequences: Annotated[Count, Field(le=2**20)] = 128  # all in memory
    learning_rate: LearningRate = 1e-3
    """Peak: linear warm-up over a tenth of the steps, then linear decay to a tenth."""


class Config(Section):
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

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, tree: Any) -> Any:
        return drop_removed(tree)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_together(self)
        return self

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The model of each section, also of one that may be left out."""
        annotations = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: (get_args(one) or (one,))[0] for name, one in annotations.items()}

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens
