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


_VLLM = ("vllm",)


@dataclass(frozen=True)
class Part:
    """Something to run in a process of its own."""

    name: str
    """Of the function `run` in the module `tests.gpu.<module>`."""
    module: str
    tells: str
    limit_s: float
    needs: tuple[str, ...] = ()
    """Modules beside NEEDED; "fp8" of the device, and "second GPU"."""
    repeats: bool = False
    """Runs with REPEATABLE."""
    has_own_slot: bool = False
    """Runs only if it is named: it would take most of a slot."""


# The most telling parts come first. How many of them a slot takes, a GPU must tell.
PARTS = (
    Part("tiny_update", "programs", "a tiny policy is built and updated as by the trainer", 400),
    Part("equal_bits", "training", "old and new pass have the same bits; several packings", 300),
    Part("fp16", "training", "the policy in fp16 beside bf16 and fp32; its loss scale", 300),
    Part("engine", "engine", "sync, sleep, wake, tokens/s, mismatch, background save", 540, _VLLM),
    Part("gpt_oss", "engine", "a tiny gpt-oss: sync, update, sync; vLLM's routes", 300, _VLLM),
    Part("moonlight", "engine", "the same of a tiny Moonlight: latent attention", 300, _VLLM),
    Part("speed", "resources", "synchronisations, idle time and MFU at 10k and 32k tokens", 300),
    Part("marked_tests", "programs", "every test marked `gpu`", 540, ("pytest", "hypothesis")),
    Part("save_and_load", "resources", "save, load and compare (TMPDIR: where)", 540, repeats=True),
    Part("memory", "resources", "memory over updates, make_room and offload", 300),
    Part("engine_fp16", "engine", "the engine with policy and vLLM in fp16", 540, _VLLM),
    Part("engine_lora", "engine", "the engine with an adapter's factors", 540, _VLLM),
    Part("to_a_second_process", "transfer", "weights to a generation rank", 240, ("second GPU",)),
    Part("nothing_to_score", "training", "a micro-batch without a row, two methods", 240),
    Part("speed_recomputed", "resources", "the same, 32k tokens in one micro-batch", 300),
    Part("ten_sft_steps", "training", "the loss falls", 240),
    Part("ten_learn_steps", "training", "ten steps of GAPO", 240),
    Part("rounding", "training", "a step's log-ratios beside those without rounding", 300),
    Part("fp8", "engine", "the policy in fp8 beside bf16", 300, ("transformer_engine", "fp8")),
    Part("engine_fp8", "engine", "the engine with vLLM's weights in fp8", 540, _VLLM),
    Part("optimizers", "optimizers", "Transformer Engine's, apex's and torch's AdamW", 300),
    Part(
        "head",
        "programs",
        "log-prob head beside torch and the installed peers",
        540,
        has_own_slot=True,
    ),
)
