"""What a test needs from outside the environment: without it the test skips, and says so.

`GAPO_REQUIRE=1`, which continuous integration sets, turns the skips of `need` and `needs` into
errors: there everything that can be installed is. `GAPO_REQUIRE=all` does the same for `by_hand`,
in an environment that somebody has made for these tests.
"""

from __future__ import annotations

import importlib
import os

import pytest

_GIVEN = os.environ.get("GAPO_REQUIRE", "")


def need(missing: str) -> None:
    """Skip the running test (or fixture) if `missing` says that something is not there.

    Args:
        missing: what is missing and how to get it; empty: nothing is.
    """
    if missing and _GIVEN in ("1", "all"):
        pytest.fail(f"GAPO_REQUIRE={_GIVEN}, but {missing}", pytrace=False)
    if missing:
        pytest.skip(missing)


def needs(missing: str) -> pytest.MarkDecorator:
    """A mark that does the same for tests whose need is known when they are collected."""
    if missing and _GIVEN in ("1", "all"):
        raise RuntimeError(f"GAPO_REQUIRE={_GIVEN}, but {missing}")
    return pytest.mark.skipif(bool(missing), reason=missing)


def by_hand(module: str) -> None:
    """Skip the running test without a package that no requirements file installs.

    Such as a framework that asks for other versions than ours: who changes what the test is about
    installs it in an environment of its own.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = f"not installed: {module} ({error}); no requirements file has it"
        if _GIVEN == "all":
            pytest.fail(f"GAPO_REQUIRE=all, but {missing}", pytrace=False)
        pytest.skip(missing)
