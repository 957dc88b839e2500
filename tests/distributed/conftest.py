"""Fixtures of the policy's tests on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gapo_megatron.policy import ParallelGroups, destroy, initialize
from tests.dist import single_rank
from tests.distributed.policy_setup import make_config, save_model


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """Those of one rank, whose process group is up."""
    with single_rank():
        yield initialize(make_config(Path("unused")).parallel)
        destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, with tied embeddings."""
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied")
    return path
