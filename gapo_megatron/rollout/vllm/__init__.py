"""vLLM on the trainer's devices, as an `Engine`. The only package that imports vllm."""

from gapo_megatron.rollout.vllm.arguments import check_engine
from gapo_megatron.rollout.vllm.engine import RolloutEngine

__all__ = ["RolloutEngine", "check_engine"]
