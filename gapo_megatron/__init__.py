"""Megatron-scale post-training with Group Adaptive Clipping Policy Optimization (GAPO)."""

import os
import warnings

# Importing Megatron-core warns of every optional GPU package that is absent, vLLM of every CPU
# setting; the policy and the engine log what they chose. Both must be said before their import.
warnings.filterwarnings("ignore", module=r"megatron\.core")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

__version__ = "0.1.0"
