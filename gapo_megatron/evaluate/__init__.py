"""Held-out accuracy of the policy in training: pass@k, by the rollout engine."""

# The name is the function: it hides the module of the same name, which can still be imported.
from gapo_megatron.evaluate.pass_at_k import pass_at_k

__all__ = ["pass_at_k"]
