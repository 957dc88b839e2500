"""The run's configuration: model and rollouts.

The other sections are in data_section.py, objective_section.py and run_sections.py. Paths are
relative to the working directory.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from gapo_megatron.config.adapter_section import AdapterConfig
from gapo_megatron.config.data_section import REASONING_GYM, DataConfig
from gapo_megatron.config.environment import EnvironmentConfig
from gapo_megatron.config.objective_section import ObjectiveConfig
from gapo_megatron.config.reward_section import RewardConfig
from gapo_megatron.config.reward_section import VerifierConfig as VerifierConfig
from gapo_megatron.config.rules import check_together
from gapo_megatron.config.run_sections import (
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SupervisedConfig,
)
from gapo_megatron.config.section import (
    ENGINE,
    HOW,
    INPUT_PATH,
    LEARNED,
    LIFE,
    SAMPLED,
    SIDES,
    Section,
)
from gapo_megatron.config.types import (
    Bound,
    Count,
    CountOrZero,
    GroupSize,
    MadePath,
    OptionalPath,
    Temperature,
    Text,
    Tokens,
    require_known,
)
from gapo_megatron.user_code import is_code

CONFIG_NAME = "config.toml"
"""File in the run folder with the resolved config of the newest start."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Dtype of weights and activations by `model.precision`; with fp8 only GEMM inputs are fp8."""


class ModelConfig(Section):
    """The policy: its initial weights, and the precision it is trained in."""

    role = LEARNED
    kept = "weights and optimizer state are this model's"

    hf_dir: Annotated[MadePath, INPUT_PATH]
    """Hugging Face folder (config.json, tokenizer, safetensors) of the initial policy."""
    megatron_dir: Annotated[OptionalPath, INPUT_PATH] = ""
    """Megatron checkpoint to read the weights from. `hf_dir` then needs no weights of its own."""
    precision: Annotated[Literal["fp32", "bf16", "fp16", "fp8"], SAMPLED] = "bf16"
    """Precision of the trainer and, but for fp8, of vLLM. All but fp32 keep fp32 master weights;
    fp16 scales the loss; fp8 needs Transformer Engine (docs/scaling.md)."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], SAMPLED] = (
        "tensorwise"
    )
    """Megatron-core's fp8 recipe: which values share a scale (docs/scaling.md). Needs fp8."""
    recompute: Annotated[Literal["none", "selective", "full"], HOW] = "none"
    """Activation recomputation. `full`: every layer. `selective`: attention; where it is
    one kernel, the MLP instead, or a MoE model's expert activations and norms
    (docs/scaling.md)."""
    head: Annotated[Literal["auto", "torch", "triton"], HOW] = "auto"
    """Implementation of the output layer's log-probs. `auto`: the Triton kernels, if they are
    supported here and pass a check at the start; otherwise torch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["fp8_recipe"].default
        if self.precision != "fp8" and self.fp8_recipe != default:
            raise ValueError(
                f"fp8_recipe ({self.fp8_recipe!r}) needs precision 'fp8', not {self.precision!r}"
            )
        return self

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, in the words of torch and vLLM."""
        return DTYPES[self.precision]


class BatchConfig(Section):
    """Sizes of a step, in the paper's terms; a step has prompts x rollouts_per_prompt sequences."""

    role = LEARNED
    kept = "a step, an update and c must mean the same"

    rollout_prompts: Count = 256
    """Prompts per rollout batch (one step)."""
    minibatch_prompts: Count = 64
    """Prompts per optimizer update. Must divide `batch.rollout_prompts`."""
    rollouts_per_prompt: Annotated[GroupSize, SAMPLED] = 8
    """Group size: responses sampled per prompt (the paper's k)."""
    dynamic_sampling_rounds: CountOrZero = 0
    """DAPO's dynamic sampling: how many times per step groups without a gradient (all responses
    correct, or all wrong) are replaced by groups of other prompts."""
    oversampling: Annotated[float, Field(ge=1, le=8)] = 1.0
    """Prompts started per prompt needed. An engine stops when its share of groups is complete;
    unfinished prompts are sampled again later. Favours short responses (docs/data.md)."""
    partial_rollouts: bool = False
    """Resume unfinished responses at the next step instead of sampling them again. Needs
    `batch.oversampling` above 1 (docs/data.md)."""
    max_tokens_per_microbatch: Annotated[Count, HOW] = 32768
    """Packed tokens (prompt + response) per forward pass of a data-parallel rank, over all its
    context-parallel ranks. The longest sequence must fit."""

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


VLLM = "vllm"
"""The engine of this package: value of `rollout.engine`."""
VERIFIED_SEQUENCES = 4
"""Sequences that a weight sync compares, and `rollout.verify_bound` is for."""


class RolloutConfig(Section):
    """Sampling responses, and the engines that do it."""

    role = LEARNED
    kept = (
        "samples must come from the same distribution; of over-sampled groups the same ones must "
        "be finished first"
    )

    max_response_tokens: Annotated[Tokens, SAMPLED]
    """Generation limit, in tokens; longer responses are truncated. Tokens that an environment
    appends count, and so do all messages of an agent (docs/environments.md)."""
    temperature: Annotated[Temperature, SAMPLED] = 1.0
    """Sampling temperature; also used for the trainer's log-probs."""
    top_p: Annotated[float, Field(gt=0, le=1), SAMPLED] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this probability. 1: off."""
    engine: Annotated[Text, HOW] = VLLM
    """What generates: `vllm`, or code of your own, `path/to/file.py:NAME` or `package.module:NAME`
    (docs/architecture.md)."""
    code: Annotated[Text, HOW] = ""
    """SHA-256 of the file with code of your own. Filled in when the config is loaded."""
    tensor_parallel_size: Annotated[Count, ENGINE] = 1
    """Tensor-parallel size of each vLLM engine, within a node; independent of the trainer's."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1), ENGINE] = 0.5
    """Fraction of the GPU memory that vLLM may use while it generates."""
    cpu_kv_cache_gib: Annotated[Count, ENGINE] = 1
    """Size of the KV cache on a CPU, in GiB per rank."""
    enforce_eager: Annotated[bool, ENGINE] = False
    """Skip compilation and CUDA graphs: slower generation, faster start."""
    quantization: Literal["", "fp8"] = ""
    """`fp8`: vLLM runs the layers in fp8, quantised anew at every weight sync (docs/scaling.md).
    Empty: the trainer's precision, or bf16 if that is fp8."""
    draft: Annotated[Literal["none", "ngram", "eagle3"], ENGINE] = "none"
    """What proposes tokens, of which vLLM verifies several in a decoding step; responses come from
    the same distribution (docs/scaling.md). `ngram`: what followed the same tokens earlier in the
    sequence. `eagle3`: a small model that stays as it is. `none`: one token per step."""
    draft_tokens: Annotated[int, Field(ge=1, le=15), ENGINE] = 4
    """Most tokens that are proposed for a sequence in a decoding step."""
    draft_ngram: Annotated[int, Field(ge=1, le=16), ENGINE] = 3
    """Number of last tokens that `ngram` looks up in the sequence."""
    draft_hf_dir: Annotated[OptionalPath, INPUT_PATH, ENGINE] = ""
    """Folder of the draft for `eagle3`: config.json and safetensors, made for the model that is
    trained."""
    verify_bound: Annotated[Bound | None, LIFE] = None
    """Largest mean difference per token between vLLM's and the trainer's log-probs after a weight
    sync; above it the run stops. Unset: 1e-3 in fp32 (1e-2 on CUDA), 0.02 in fp16 and 0.1 in bf16
    (three times that for MoE models), 0.3 with fp8 on either side (docs/numerics.md)."""
    generation_nodes: Annotated[CountOrZero, SIDES] = 0
    """The last so many nodes of the job only generate, the others only train (docs/scaling.md). 0:
    every rank generates and trains in turns."""
    generation_ranks: Annotated[CountOrZero, SIDES] = 0
    """The same in ranks instead of nodes, for a job of one node."""
    max_staleness: CountOrZero = 0
    """How many steps old the weights that sample a batch may be. 0: on-policy; generation and
    training alternate. k > 0 needs generation nodes: they sample up to k steps ahead, and get new
    weights every k steps (docs/objective.md)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_known("engine", self.engine, [VLLM])
        self._check_draft()
        return self

    def _check_draft(self) -> None:
        if self.draft != "none" and self.engine != VLLM:
            raise ValueError(f"draft ({self.draft!r}) needs engine {VLLM!r}, not {self.engine!r}")
        needed = {"draft_tokens": ("ngram", "eagle3"), "draft_ngram": ("ngram",)}
        for name, kinds in (needed | {"draft_hf_dir": ("eagle3",)}).items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.draft not in kinds:
                known = " or ".join(map(repr, kinds))
                raise ValueError(f"{name} ({value!r}) needs draft {known}, not {self.draft!r}")
        if self.draft == "eagle3" and not self.draft_hf_dir:
            raise ValueError("draft ('eagle3') needs draft_hf_dir, the folder of the draft")

    @property
    def code_names(self) -> list[str]:
        """User code that this section names."""
        return [self.engine] if is_code(self.engine) else []

    @property
    def has_generation_side(self) -> bool:
        """Whether some ranks only generate."""
        return self.generation_nodes > 0 or self.generation_ranks > 0


class Config(Section):
    """The settings of one run, in the order in which the loop uses them."""

    run: RunConfig
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    rollout: RolloutConfig
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    supervised: SupervisedConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        reward = self.reward
        if self.data.generated and reward.kind != REASONING_GYM and not reward.components:
            # Their rows name it.
            known = {REASONING_GYM: VerifierConfig(kind=REASONING_GYM), **reward.verifiers}
            self.__dict__["reward"] = reward.model_copy(update={"verifiers": known})
        check_together(self)
        # Resolved here, so that the schedule depends on [optimizer] and the update alone, and a
        # resume compares it like any other setting.
        self.__dict__["optimizer"] = self.optimizer.over_updates(self.num_updates)
        return self

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The model of each section, also of one that may be left out."""
        annotations = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: (get_args(one) or (one,))[0] for name, one in annotations.items()}

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.run.num_steps * self.batch.num_minibatches

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens
