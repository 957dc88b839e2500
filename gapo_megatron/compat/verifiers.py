"""Undocumented parts of the package `verifiers` in use (0.4.0)."""

from __future__ import annotations

from typing import Any


def serve_each_run_alone(env: Any) -> None:
    """Let every run of an agent start its own interception server, and close it at its end.

    An environment that is being served (`Env.serving`) shares one server among all runs. It keeps
    an HTTP client for each pair of address and key until it closes, and here every session has its
    own key: 0.8 MB of each episode would stay in memory. Shared tool servers stay shared.

    Args:
        env: an environment, inside its `serving()`.
    """
    # Uses: verifiers.v1.Env._interception
    # Versions: verifiers 0.4.0
    # Upstream: none found
    env._interception = None
