"""Implementations of `rollout.environment.Environment`, a file for each."""
