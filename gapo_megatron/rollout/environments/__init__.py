"""Environments: what a response meets (`rollout.environment.Environment`), one file each."""
