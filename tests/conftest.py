"""Settings of every test run."""

from __future__ import annotations

import faulthandler
import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from gapo_megatron.run.processes import quiet_libraries
from tests.clone import make_clone

# The same examples on every machine, and no time limit on one of them: a first call may compile.
settings.register_profile("repository", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repository")

# Files that are long in one stage or the other, in the order in which processes take them (`--dist
# loadfile`): of each stage the longest first, so that none is left alone at the end.
_FIRST = (
    "slurm/test_survives.py",
    "slurm/test_generation_survives.py",
    "run/test_train.py",
    "slurm/test_scripts.py",
    "launch/test_preflight.py",
    "slurm/test_submitit.py",
    "compat/test_cpu.py",
    "rollout/test_rollout.py",
    "rollout/test_rollout_ranks.py",
    "peers/test_conversion.py",
    "launch/test_slurm_scripts.py",
    "distributed/test_checkpoint.py",
    "formats/test_convert_damage.py",
    "tools/planner/test_scaling_layout.py",
    "tools/planner/test_scaling_deep.py",
    "tools/jobs/test_submit.py",
    "tools/evaluation/test_evaluate_tool.py",
    "rollout/test_rollout_fp8.py",
    "rewards/test_code_hostile.py",
)

quiet_libraries()
gc.disable()  # while a million objects are imported, none of them garbage

# A shell starts what is put into the background with SIGINT ignored, and every process of a test
# would inherit that: Ctrl-C is among what is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bare clone as the working directory, not the checkout, whose runs and models may be any."""
    folder = tmp_path / "clone"
    folder.mkdir()
    monkeypatch.chdir(make_clone(folder))
    return folder


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The default process group of one rank."""
    from tests.dist import single_rank

    with single_rank():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first."""
    order = {Path(__file__).parent / name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """Take what is imported by now out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Let no attempt's watch outlive its test: it would end this process minutes later."""
    faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure() -> None:
    """Give everything back: libraries take objects that are left at the end for leaks."""
    gc.unfreeze()
