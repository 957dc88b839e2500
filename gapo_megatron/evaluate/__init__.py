"""Held-out accuracy: pass@k, evaluation by the rollout engine, and statistics of comparisons."""

from gapo_megatron.evaluate.evaluate import evaluate, read_counts
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k, pass_at_k
from gapo_megatron.evaluate.statistics import (
    Interval,
    mean_interval,
    paired_difference,
    welch_p_value,
)

__all__ = [
    "Interval",
    "evaluate",
    "mean_interval",
    "mean_pass_at_k",
    "paired_difference",
    "pass_at_k",
    "read_counts",
    "welch_p_value",
]
