"""Generation with vLLM on the trainer's devices. The only package that imports vllm."""

from gapo_megatron.rollout.vllm.arguments import check_engine, eos_token_ids
from gapo_megatron.rollout.vllm.engine import RolloutEngine
from gapo_megatron.rollout.vllm.requests import request_seed
from gapo_megatron.rollout.vllm.weights import WeightCheck, sync_weights, verify_weights

__all__ = [
    "RolloutEngine",
    "WeightCheck",
    "check_engine",
    "eos_token_ids",
    "request_seed",
    "sync_weights",
    "verify_weights",
]
