"""Megatron-scale post-training with Group Adaptive Clipping Policy Optimization (GAPO)."""

__version__ = "0.1.0"
