"""Predicted seconds, FLOPs and memory in layouts and settings that each add a term.

The figures are the planner's own: a change of one is a change of the prediction, and meant. Write
them anew with `python -m tests.ops.plan.test_predictions`. Whether predictions are right is for
`test_scaling_anchors` (published step times), for what replays schedules and draws lengths, and for
`test_scaling_memory` and `test_scaling_flops` (what torch keeps and counts).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.ops.plan.flops import Shape, step_flops
from gapo_megatron.ops.plan.hardware import GPUS, Efficiency
from gapo_megatron.ops.plan.memory import memory
from gapo_megatron.ops.plan.times import step_time
from tests.scaling_setup import WORKLOAD, config, hf, layout

PATH = Path(__file__).parents[2] / "golden" / "predictions.json"
MOE, LATENT, TIED = "Qwen3-30B-A3B", "Moonlight-16B-A3B", "Qwen2.5-1.5B"
LORA = {"kind": "lora", "rank": 8, "targets": ("qkv", "fc2")}
BEHIND = {"generation_nodes": 1, "memory_fraction": 0.9, "max_staleness": 2}
CLIPPED = dataclasses.replace(WORKLOAD, clipped_share=0.4, active_share=0.99)
CASES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "an H20": {"gpu": "h20"},
    "tied": {"model": TIED, "cut": {"pp": 2, "dp": 4}},
    "tensor parallel": {"cut": {"tp": 4, "dp": 2, "sp": False, "rollout_tp": 2}},
    "sequence parallel": {"cut": {"tp": 8, "dp": 1, "rollout_tp": 4}},
    "across nodes": {"cut": {"tp": 2, "dp": 32}},
    "overlap": {"cut": {"dp": 64}, "parallel": {"overlap_grad_reduce": True}},
    "pipeline": {"cut": {"pp": 4, "dp": 8}, "batch": {"max_tokens_per_microbatch": 4500}},
    "unequal stages": {"cut": {"pp": 4, "dp": 2, "first": 4, "last": 6}},
    "virtual stages": {"cut": {"pp": 4, "vpp": 7, "dp": 11}},
    "context parallel": {"cut": {"cp": 4, "dp": 4}},
    "context parallel, full": {"cut": {"cp": 4, "dp": 4, "recompute": "full"}},
    "selective": {"cut": {"recompute": "selective"}},
    "experts": {"model": MOE, "cut": {"dp": 32, "ep": 8}},
    "experts across nodes": {"model": MOE, "cut": {"dp": 32, "ep": 16, "recompute": "selective"}},
    "latent attention": {"model": LATENT, "cut": {"tp": 2, "dp": 8, "ep": 4}},
    "fp8": {"model_section": {"precision": "fp8"}, "rollout": {"quantization": "fp8"}},
    "fp32": {"model_section": {"precision": "fp32"}, "cut": {"recompute": "selective"}},
    "adapter": {"adapter": LORA, "cut": {"tp": 2, "pp": 2, "dp": 2, "rollout_tp": 2}},
    "merged adapter": {"adapter": LORA, "rollout": {"quantization": "fp8"}},
    "offloaded": {"optimizer": {"offload": "all"}, "cut": {"tp": 2, "dp": 4}},
    "offloaded optimizer": {"optimizer": {"offload": "optimizer"}},
    "small cache": {"rollout": {"memory_fraction": 0.13}},
    "rounds": {"batch": {"dynamic_sampling_rounds": 2}, "reward": {"num_workers": 4}},
    "KL": {"objective": {"kl_coef": 0.01}},
    "engine's log-probs": {"objective": {"old_log_probs": "rollout"}},
    "bounds": {"objective": {"method": "m2po"}},
    "clipped": {"workload": CLIPPED},
    "windows": {"model": "Gemma-3-1B", "cut": {"pp": 2, "dp": 4, "recompute": "full"}},
    "shared experts": {"model": "GLM-4.5-Air", "cut": {"tp": 2, "pp": 2, "dp": 16, "ep": 16}},
    "two sides": {"rollout": {"generation_nodes": 1, "memory_fraction": 0.9}, "generation": 8},
    "a step ahead": {"rollout": BEHIND, "generation": 64, "cut": {"tp": 2, "dp": 4}},
    "two sides, adapter": {"rollout": BEHIND, "generation": 8, "adapter": LORA},
    "sides in one node": {"rollout": BEHIND, "generation": 4, "cut": {"dp": 4}},
    "one generates": {"rollout": BEHIND, "generation": 1, "cut": {"dp": 1}},
    "two generate": {"rollout": BEHIND, "generation": 2, "cut": {"dp": 2}},
    "context parallel, fp32": {"model_section": {"precision": "fp32"}, "cut": {"cp": 2, "dp": 4}},
    "sides of a pipeline": {"rollout": BEHIND, "generation": 8, "cut": {"pp": 2, "dp": 1}},
}


def predicted(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    sections = {
        name: case[name]
        for name in ("parallel", "batch", "rollout", "reward", "objective", "adapter", "optimizer")
        if name in case
    }
    if "max_staleness" in sections.get("rollout", {}):
        sections["objective"] = {"importance_weight_max": 2.0}
    if "model_section" in case:
        sections["model"] = case["model_section"]
    run, model = config(**sections), hf(case.get("model", "Qwen2.5-7B"))
    gpu, workload = GPUS[case.get("gpu", "h200")], case.get("workload", WORKLOAD)
    num_generation = case.get("generation", 0)
    cut = dataclasses.replace(layout(**case.get("cut", {})), num_generation=num_generation)
    needed = memory(model, run, cut, gpu)
    found: dict[str, Any] = {
        "seconds": step_time(model, run, cut, workload, gpu, Efficiency()),
        "flops": step_flops(Shape.of(model), run, workload),
        "trainer": needed.trainer,
        "engine": needed.engine,
    }
    sums = {
        "training": needed.training,
        "generating": needed.generating,
        "checkpoint": needed.checkpoint,
        "offloaded": needed.offloaded,
    }
    return {name: dataclasses.asdict(one) for name, one in found.items()} | {"memory": sums}


@pytest.mark.parametrize("name", CASES)
def test_predictions_are_as_written(name: str) -> None:
    written = json.loads(PATH.read_text())[name]
    for part, figures in predicted(CASES[name]).items():
        assert figures == pytest.approx(written[part], rel=1e-6), part


if __name__ == "__main__":
    figures = {name: predicted(case) for name, case in CASES.items()}
    PATH.write_text(json.dumps(figures) + "\n")
