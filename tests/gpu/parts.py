"""The parts of `make test-gpu`, in the order of what they tell. The standard library alone."""

from __future__ import annotations

from dataclasses import dataclass

NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "megatron.core": "megatron-core",
    "pydantic": "pydantic",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "rich": "rich",
    "scipy": "scipy",
}
"""Modules that every part imports -> what to install."""


REPEATABLE = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What makes an update on one GPU the same bits every time (docs/numerics.md)."""


@dataclass(frozen=True)
class Part:
    """Something to run in a process of its own."""

    name: str
    """Of the function `run` in the module `tests.gpu.<module>`."""
    module: str
    tells: str
    limit_s: float
    needs: tuple[str, ...] = ()
    """Modules beside NEEDED, and "fp8": of the device."""
    repeats: bool = False
    """Runs with REPEATABLE."""


# No limit is above 540 s: every part fits into a job of ten minutes.
PARTS = (
    Part("tiny_update", "programs", "a tiny policy is built and updated as by the trainer", 400),
    Part("equal_bits", "training", "old and new pass have the same bits; several packings", 300),
    Part("speed", "resources", "synchronisations, idle time and MFU at 10k and 32k tokens", 300),
    Part("marked_tests", "programs", "every test marked `gpu`", 540, ("pytest", "hypothesis")),
    Part("nothing_to_score", "training", "a micro-batch without a row, two methods", 240),
    Part("memory", "resources", "memory over updates, make_room and offload", 300),
    Part("speed_recomputed", "resources", "the same, 32k tokens in one micro-batch", 300),
    Part("save_and_load", "resources", "save, load and compare (TMPDIR: where)", 540, repeats=True),
    Part("head", "programs", "log-prob head beside torch and the installed peers", 540),
    Part("ten_sft_steps", "training", "the loss falls", 240),
    Part("ten_learn_steps", "training", "ten steps of GAPO", 240),
    Part("fp16", "training", "the policy in fp16 beside bf16 and fp32; its loss scale", 300),
    Part("rounding", "training", "a step's log-ratios beside those without rounding", 300),
    Part("fp8", "engine", "the policy in fp8 beside bf16", 300, ("transformer_engine", "fp8")),
    Part("engine", "engine", "sync, sleep, wake, tokens/s, mismatch in bf16", 540, ("vllm",)),
    Part("engine_fp8", "engine", "the same with vLLM's weights in fp8", 540, ("vllm",)),
)
