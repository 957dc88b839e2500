"""Fixtures of the tests of `learn`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.policy_setup import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, with tied embeddings."""
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied")
    return path
