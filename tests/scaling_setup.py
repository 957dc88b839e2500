"""Tiny models and configs for the planner's tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from megatron.core.pipeline_parallel import schedules
from scipy.optimize import brentq
from transformers import AutoConfig

from gapo_megatron.config import Config
from gapo_megatron.models.tables import ARCHITECTURES
from gapo_tools.planner.flops import Shape
from gapo_tools.planner.hardware import GPUS, Efficiency
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.training import Training
from gapo_tools.planner.workload import Workload
from tests.configs import config_of, merged
from tests.formats.test_convert_models import CONFIGS

# Sizes that are no multiples of 64: parameters and buckets are padded.
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY_EXPERTS: dict[str, Any] = TINY | {
    "model_type": "qwen3_moe",
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
# An MLP in the first layer, and a shared expert.
TINY_SIGMOID: dict[str, Any] = TINY | {
    "model_type": "glm4_moe",
    "head_dim": 12,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 3,
    "tie_word_embeddings": False,
}
# Values of 8 beside queries of 12.
TINY_LATENT: dict[str, Any] = {
    **TINY_SIGMOID,
    "model_type": "deepseek_v3",
    "head_dim": 4,
    "attention_bias": False,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


UNTIED: dict[str, Any] = TINY | {"tie_word_embeddings": False}
SIX_LAYERS: dict[str, Any] = TINY | {"num_hidden_layers": 6}
TWELVE_LAYERS: dict[str, Any] = TINY | {"num_hidden_layers": 12}
SIX_LAYERS_EXPERTS: dict[str, Any] = TINY_EXPERTS | {"num_hidden_layers": 6}
QWEN3: dict[str, Any] = UNTIED | {"model_type": "qwen3", "head_dim": 12}
# Queries share keys and values; widths are multiples of 32.
WIDE: dict[str, Any] = TINY | {
    "hidden_size": 64,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
WIDE_QWEN3: dict[str, Any] = WIDE | {
    "model_type": "qwen3",
    "head_dim": 24,
    "tie_word_embeddings": False,
}
SINKS: dict[str, Any] = WIDE | {
    "model_type": "gpt_oss",
    "head_dim": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
H200 = GPUS["h200"]
WORKLOAD = Workload(
    mean_prompt_tokens=100, mean_response_tokens=700, longest_response_tokens=3092, active_share=0.7
)
# Everything as the data sheet says, and no call costs anything.
IDEAL = Efficiency(
    matmul=1,
    bandwidth=1,
    communication=1,
    **dict.fromkeys(
        (
            *("layer_s", "collective_s", "update_s", "decode_step_s"),
            *("decode_sequence_s", "verdict_s", "tensor_s"),
        ),
        1e-15,
    ),
)


def hf(name: str) -> Any:
    """The config of a published model."""
    fields = dict(CONFIGS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def write_model(folder: Path, fields: dict[str, Any]) -> str:
    """A folder with config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": [ARCHITECTURES[fields["model_type"]].hf_class], **fields}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def read_model(folder: Path, fields: dict[str, Any]) -> Any:
    return AutoConfig.from_pretrained(write_model(folder, fields))


def make_config(hf_dir: str, **sections: dict[str, Any]) -> Config:
    """Of a tiny model, with sequences of at most 128 tokens, two to a micro-batch."""
    short = {
        "model": {"hf_dir": hf_dir},
        "data": {"max_prompt_tokens": 32},
        "batch": {"max_tokens_per_microbatch": 256},
        "rollout": {"max_response_tokens": 96},
    }
    return config(**merged(short, sections))


def config(**sections: dict[str, Any]) -> Config:
    """Of a model whose lengths are those of the paper's first one."""
    usual = {
        "run": {"num_steps": 10},
        "model": {"hf_dir": "/nowhere/x"},
        "data": {"train_path": "/nowhere.jsonl", "max_prompt_tokens": 1000},
        "rollout": {"max_response_tokens": 3092},
    }
    return config_of(usual, sections)


def layout(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int = 8,
    ep: int = 1,
    sp: bool | None = None,
    recompute: str = "none",
    rollout_tp: int = 1,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> Layout:
    """Sequence parallel, if `sp` does not say otherwise, where it is tensor parallel."""
    return Layout(
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        dp_size=dp,
        ep_size=ep,
        sequence_parallel=tp > 1 if sp is None else sp,
        recompute=recompute,
        rollout_tp_size=rollout_tp,
        vpp_size=vpp,
        first_layers=first,
        last_layers=last,
    )


def training(
    *,
    workload: Workload = WORKLOAD,
    sections: dict[str, dict[str, Any]] | None = None,
    **cut: Any,
) -> Training:
    """One mini-batch of a model of 7B in a layout of so many `tp`, `pp`, ... ranks."""
    shape = Shape.of(hf("Qwen2.5-7B"))
    return Training(shape, config(**sections or {}), layout(**cut), workload, H200, IDEAL)


def draw_lengths(rng: np.random.Generator, size: Any, *, mean: float, spread: float) -> Any:
    """min(X, 3,092), X lognormal, of that mean: drawn by another way than the planner's."""
    body = np.exp(rng.normal(size=200_000) * spread)
    scale = brentq(lambda one: np.minimum(one * body, 3092).mean() - mean, 1.0, 1e5)
    return np.minimum(scale * np.exp(rng.normal(size=size) * spread), 3092)


def parallel_of(
    tp: int,
    pp: int,
    ep: int = 1,
    *,
    cp: int = 1,
    sp: bool = False,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> dict[str, Any]:
    """`first`, `last`: layers of those pipeline ranks."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "sequence_parallel": sp,
        "virtual_pipeline_model_parallel_size": vpp,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }


class Pass(NamedTuple):
    """Of one micro-batch through one stage of the model (of p v, in the model's order)."""

    is_backward: bool
    microbatch: int
    stage: int


class Schedule(NamedTuple):
    """What one pipeline rank does with the micro-batches of an update."""

    forward: list[Pass]
    backward: list[Pass]
    num_ahead: int
    """Forward passes before the first pair of a forward and a backward one."""

    @property
    def order(self) -> list[Pass]:
        pairs = zip(self.forward[self.num_ahead :], self.backward, strict=False)
        both = [one for pair in pairs for one in pair]
        return [*self.forward[: self.num_ahead], *both, *self.backward[len(both) // 2 :]]


def schedule_of(layout: Layout, num_microbatches: int, *, rank: int) -> Schedule:
    """Megatron-core's own, of micro-batches filled up as the trainer does."""
    p, v = layout.pp_size, layout.vpp_size
    group = num_microbatches
    if v > 1:
        num_microbatches, group = num_microbatches + -num_microbatches % p, p
    table = schedules.get_schedule_table(num_microbatches, v, group)
    ranks = SimpleNamespace(size=lambda: p, rank=lambda: rank)
    _, _, num_ahead, _ = schedules.get_pp_rank_microbatches(
        num_microbatches,
        v,
        p,
        p2p_communicator=SimpleNamespace(
            pp_group=ranks, virtual_pipeline_model_parallel_size=v if v > 1 else None
        ),
    )
    return Schedule(
        [Pass(False, number, stage * p + rank) for number, stage in table],
        [Pass(True, number, (v - 1 - stage) * p + rank) for number, stage in table],
        num_ahead,
    )
