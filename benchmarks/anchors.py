"""Published step times and their settings, to test the planner's predictions.

All rows are predicted with the same default efficiencies; none is tuned. What a source does not say
is an assumption, and stands in the row. Other systems do more work in a step than this one (no rows
left out, the first mini-batch's old log-probs computed too): that is predicted as they do it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gapo_megatron.config import Config, parse_config
from gapo_megatron.models.published import find_model
from gapo_tools.planner.flops import Shape
from gapo_tools.planner.hardware import ASSUMED, GPUS, Efficiency
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.times import StepTime, step_time
from gapo_tools.planner.workload import Workload

_QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "quantization_config": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One published run."""

    name: str
    source: str
    model: str
    """Name of a model in `models.published`, or Qwen3-32B."""
    gpu: str
    layout: Layout
    rollout_prompts: int
    minibatch_prompts: int
    rollouts_per_prompt: int
    max_prompt_tokens: int
    max_response_tokens: int
    mean_prompt_tokens: float
    mean_response_tokens: float
    memory_fraction: float
    published: dict[str, float]
    """Seconds by stage (`generation`, `old_log_probs`, `update`) and `total`; of a range its middle
    is compared."""
    assumed: str
    """Assumptions where the source says nothing."""
    max_tokens_per_microbatch: int | None = None
    """Micro-batch size of systems that pack by tokens; None: `sequences_per_microbatch` counts."""
    sequences_per_microbatch: int = 1
    reference_pass: bool = False
    """Whether there is a KL term, which costs one more pass over all sequences."""

    @property
    def shape(self) -> Shape:
        if self.model == "Qwen3-32B":
            return Shape.of(SimpleNamespace(**_QWEN3_32B))
        return Shape.of(find_model(self.model)[0])

    @property
    def workload(self) -> Workload:
        """Workload with all sequences: these systems skip none."""
        return Workload(
            mean_prompt_tokens=self.mean_prompt_tokens,
            mean_response_tokens=self.mean_response_tokens,
            longest_response_tokens=self.max_response_tokens,
        )

    def config(self) -> Config:
        """The settings as this package has them; micro-batches need not hold the longest."""
        longest = self.max_prompt_tokens + self.max_response_tokens
        budget = self.max_tokens_per_microbatch or int(
            self.sequences_per_microbatch * self.workload.mean_tokens
        )
        tree = {
            "run": {"output_dir": "-", "num_steps": 1},
            "model": {"hf_dir": self.model, "recompute": self.layout.recompute},
            "data": {"train_path": "-", "max_prompt_tokens": self.max_prompt_tokens},
            "batch": {
                "rollout_prompts": self.rollout_prompts,
                "minibatch_prompts": self.minibatch_prompts,
                "rollouts_per_prompt": self.rollouts_per_prompt,
                "max_tokens_per_microbatch": max(budget, longest),
            },
            "rollout": {
                "max_response_tokens": self.max_response_tokens,
                "memory_fraction": self.memory_fraction,
            },
            "reward": {"kind": "math"},
            "objective": {"kl_coef": 0.01 if self.reference_pass else 0.0},
        }
        config = parse_config(tree, source=self.name)
        batch = config.batch.model_copy(update={"max_tokens_per_microbatch": budget})
        return config.model_copy(update={"batch": batch})

    def predict(self, efficiency: Efficiency = ASSUMED) -> StepTime:
        """The step as the published system takes it: every row, the old pass of every mini-batch.

        Systems that cut weights or sequences otherwise (FSDP, context parallelism) are taken as
        plain data parallel.
        """
        config, gpu = self.config(), GPUS[self.gpu]
        times = step_time(self.shape, config, self.layout, self.workload, gpu, efficiency)
        n = config.batch.num_minibatches
        own, theirs = (2 * n - 1, 2 * n) if self.reference_pass else (n - 1, n)
        if n == 1 and not self.reference_pass:
            return times  # one update per step needs no old log-probs
        return dataclasses.replace(times, old_log_probs_s=times.old_log_probs_s * theirs / own)


def _layout(
    dp: int, *, tp: int = 1, pp: int = 1, ep: int = 1, recompute: str = "none", rollout_tp: int = 1
) -> Layout:
    return Layout(
        tp_size=tp,
        pp_size=pp,
        cp_size=1,
        dp_size=dp,
        ep_size=ep,
        sequence_parallel=tp > 1,
        recompute=recompute,
        rollout_tp_size=rollout_tp,
    )


_NEMO: dict[str, Any] = {
    "gpu": "h100",
    "rollout_prompts": 64,
    "minibatch_prompts": 16,
    "rollouts_per_prompt": 32,
    "max_prompt_tokens": 512,
    "max_response_tokens": 3584,  # 4,096 with the prompt
    "max_tokens_per_microbatch": 4096,
    "mean_prompt_tokens": 150,
    "memory_fraction": 0.6,
    "reference_pass": True,
}
_NEMO_V4 = "NeMo-RL v0.4, docs/about/performance-summary.md and its recipe"
_PROMPTS = "prompts of 150 tokens, of the published mean length"
_GAPO: dict[str, Any] = {
    "source": "GAPO paper, table of hyperparameters: 10 epochs of 39,202 prompts, 256 a step",
    "gpu": "h200",
    "layout": _layout(8),
    "rollout_prompts": 256,
    "minibatch_prompts": 64,
    "rollouts_per_prompt": 8,
    "max_prompt_tokens": 2048,
    "max_tokens_per_microbatch": 32768,
    "mean_prompt_tokens": 130,
    "memory_fraction": 0.6,
}
_FSDP = "FSDP taken as data parallel; micro-batches of 32k tokens, no recomputation; k = 8"

ANCHORS = (
    Anchor(
        name="NeMo-RL Qwen3-30B-A3B, 32 H100",
        source="NeMo-RL v0.6, docs/about/performance-summary.md: 1,102 tokens/s/GPU, 192 s",
        model="Qwen3-30B-A3B",
        layout=_layout(32, ep=8, rollout_tp=2),
        # 1,102 x 192 s x 32 GPUs / 2,048 sequences = 3,306 tokens a sequence
        mean_response_tokens=3156,
        published={"total": 192},
        assumed=f"{_PROMPTS}; layout of the recipe in the repository",
        **_NEMO,
    ),
    Anchor(
        name="NeMo-RL Qwen3-30B-A3B, v0.4",
        source=f"{_NEMO_V4}: mean length 3,154, 225 s",
        model="Qwen3-30B-A3B",
        layout=_layout(16, tp=2, ep=8, rollout_tp=4),
        mean_response_tokens=3004,
        published={"total": 225},
        assumed=_PROMPTS,
        **_NEMO,
    ),
    Anchor(
        name="NeMo-RL Qwen3-32B, 32 H100",
        source=f"{_NEMO_V4}: mean length 3,206, 393 s",
        model="Qwen3-32B",
        layout=_layout(2, tp=4, pp=4, rollout_tp=4),
        mean_response_tokens=3056,
        published={"total": 393},
        assumed=_PROMPTS,
        **_NEMO,
    ),
    Anchor(
        name="NeMo-RL Llama-3.1-8B, 16 H100",
        source=f"{_NEMO_V4}: mean length 1,060, 97.7 s",
        model="Llama-3.1-8B-Instruct",
        layout=_layout(8, pp=2, recompute="full"),
        mean_response_tokens=910,
        published={"total": 97.7},
        assumed=_PROMPTS,
        **_NEMO,
    ),
    Anchor(
        name="verl DAPO Qwen2.5-Math-7B, 16 H20",
        source="verl docs/advance/one_step_off.md and dapo_7b_math_megatron_colocate.sh",
        model="Qwen2.5-7B",
        gpu="h20",
        # Gradient checkpointing is asked for, with a granularity of null, which recomputes nothing.
        layout=_layout(4, tp=2, pp=2, rollout_tp=2),
        rollout_prompts=512,
        minibatch_prompts=32,
        rollouts_per_prompt=16,
        max_prompt_tokens=2048,
        max_response_tokens=8192,
        sequences_per_microbatch=2,
        mean_prompt_tokens=130,
        mean_response_tokens=1500,
        memory_fraction=0.8,
        published={"total": 699, "generation": 207, "old_log_probs": 119, "update": 344},
        assumed="mean response 1,500 tokens; offloading costs nothing",
    ),
    Anchor(
        name="GAPO Qwen2.5-Math-1.5B, 8 H200",
        model="Qwen2.5-Math-1.5B",
        max_response_tokens=3092,
        mean_response_tokens=700,
        published={"total": 56},
        assumed=f"mean response 700 tokens; {_FSDP}; evaluation is in the published day",
        **_GAPO,
    ),
    Anchor(
        name="GAPO Llama-3.2-3B, 8 H200",
        model="Llama-3.2-3B-Instruct",
        max_response_tokens=8192,
        mean_response_tokens=700,
        published={"total": 56},
        assumed=f"mean response 700 tokens; {_FSDP}; evaluation is in the published day",
        **_GAPO,
    ),
    Anchor(
        name="GAPO R1-Distill-Qwen-1.5B, 8 H200",
        model="DeepSeek-R1-Distill-Qwen-1.5B",
        max_response_tokens=24576,
        mean_response_tokens=5000,
        published={"total": 254},  # 226 to 282
        assumed=f"mean response 5,000 tokens; {_FSDP}; evaluation is in the published days",
        **_GAPO,
    ),
)
