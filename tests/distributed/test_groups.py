"""Process groups are closed, not only dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapo_megatron.policy import Policy, destroy, initialize
from tests.dist import single_rank
from tests.distributed.policy_setup import make_config, save_model


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No automatic garbage collection."""
    gc.disable()
    yield
    gc.enable()


def test_threads_of_closed_groups_do_not_pile_up(no_gc: None, tmp_path: Path) -> None:
    """Groups of the last policy may stay until the next is closed."""
    save_model(tmp_path, "qwen2_tied")
    config = make_config(tmp_path)
    with single_rank():
        before = num_threads()
        used, left = [], []
        for _ in range(3):
            Policy.build(config, initialize(config.parallel), "cpu")
            used.append(num_threads() - before)
            destroy()
            left.append(num_threads() - before)
    assert used[0] > 30, "three for a group of gloo"
    assert max(left) < 1.5 * used[0], left
