"""What a test needs from outside the environment: without it the test skips, and says so.

`GAPO_REQUIRE=1`, which continuous integration sets, turns every such skip into an error.
"""

from __future__ import annotations

import os

import pytest

_REQUIRED = os.environ.get("GAPO_REQUIRE") == "1"


def need(missing: str) -> None:
    """Skip the running test (or fixture) if `missing` says that something is not there.

    Args:
        missing: what is missing and how to get it; empty: nothing is.
    """
    if missing and _REQUIRED:
        pytest.fail(f"GAPO_REQUIRE=1, but {missing}", pytrace=False)
    if missing:
        pytest.skip(missing)


def needs(missing: str) -> pytest.MarkDecorator:
    """A mark that does the same for tests whose need is known when they are collected."""
    if missing and _REQUIRED:
        raise RuntimeError(f"GAPO_REQUIRE=1, but {missing}")
    return pytest.mark.skipif(bool(missing), reason=missing)
