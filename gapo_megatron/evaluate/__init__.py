"""Held-out accuracy: pass@k, evaluation by the rollout engine, and statistics of comparisons."""
