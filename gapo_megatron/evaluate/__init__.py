"""Held-out accuracy: pass@k, evaluation by the rollout engine, and statistics of comparisons."""

# The function, not the module of its name, which stays where it was to be imported from.
from gapo_megatron.evaluate.pass_at_k import pass_at_k

__all__ = ["pass_at_k"]
