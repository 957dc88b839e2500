"""One private cluster per test process, given to a test without jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.needs import need
from tests.slurm.cluster import Cluster, missing_programs, running_cluster


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of 8 pretended GPUs. GAPO_REQUIRE=1 makes it an error to have no Slurm."""
    if missing := missing_programs():
        need(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    folder = tmp_path_factory.mktemp("slurm")
    with running_cluster(folder, first_job=1 + 70 * worker) as running:
        yield running


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster; what the test leaves running on it is cancelled."""
    yield session_cluster
    session_cluster.clear()
