"""One private cluster per test process, given to a test without jobs; real trainings on it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.needs import need
from tests.slurm.cluster import Cluster, missing_programs, running_cluster
from tests.slurm.training import (
    NUM_STEPS,
    Training,
    damaged_checkpoints,
    differing_files,
    make_checkout,
)

Start = Callable[..., Training]


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


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session see."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "survives"


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by the first process that asks, whole; the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture
def start(cluster: Cluster, shared: Path) -> Start:
    """Makes a `Training` on a folder and settings."""
    checkout = once(shared / "checkout", make_checkout)

    def training(folder: Path, *settings: str) -> Training:
        return Training(cluster, checkout, folder, *settings)

    return training


@pytest.fixture
def require_same(start: Start, shared: Path) -> Callable[[Training], None]:
    """Compares a finished run with an undisturbed one, byte for byte."""

    def undisturbed(folder: Path) -> None:
        run = start(folder)
        run.submit()
        run.cluster.wait(run.job, "COMPLETED")
        assert run.steps(run.attempt) == list(range(NUM_STEPS))

    def compare(run: Training) -> None:
        reference = once(shared / "undisturbed", undisturbed) / "run"
        assert differing_files(run.run_dir, reference) == []
        assert damaged_checkpoints(run.run_dir) == []

    return compare
