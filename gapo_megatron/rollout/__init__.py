"""Generation with vLLM on the trainer's devices. The only package that imports vllm."""

from gapo_megatron.rollout.arguments import check_engine, eos_token_ids
from gapo_megatron.rollout.engine import RolloutEngine
from gapo_megatron.rollout.progress import Occupancy
from gapo_megatron.rollout.requests import request_seed
from gapo_megatron.rollout.weights import WeightCheck, sync_weights, verify_weights

__all__ = [
    "Occupancy",
    "RolloutEngine",
    "WeightCheck",
    "check_engine",
    "eos_token_ids",
    "request_seed",
    "sync_weights",
    "verify_weights",
]
