"""What `OutsideGroup` calls on a GPU, against torch's own bindings; NCCL itself has not run."""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from gapo_megatron.compat import torch_groups as module
from gapo_megatron.compat.torch_groups import OutsideGroup
from tests.dist import run_distributed
from tests.waiting import HANG_S


class Slow:
    """NCCL's work, complete after some looks: `wait` returns at once."""

    def __init__(self, num_looks: float) -> None:
        self.looks_left, self.num_waits = num_looks, 0

    def is_completed(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def wait(self) -> None:
        self.num_waits += 1


class Nccl:
    """ProcessGroupNCCL's calls by torch's bindings of a backend, which transfer nothing.

    As NCCL, a coalesced block of no message has no work.
    """

    def __init__(self) -> None:
        self._fake = FakeProcessGroup._create_internal(1, 3)
        self.num_open = self.num_messages = 0
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def _start_coalescing(self, *arguments: Any) -> None:
        self._fake._start_coalescing(*arguments)
        self.num_open, self.num_messages = self.num_open + 1, 0

    def _end_coalescing(self, *arguments: Any) -> Any:
        self._fake._end_coalescing(*arguments)
        self.num_open -= 1
        return Slow(1) if self.num_messages else None

    def _allgather_base(self, *arguments: Any) -> Any:
        self._fake._allgather_base(*arguments)
        return Slow(1)

    def send(self, *arguments: Any) -> Any:
        self.num_messages += 1
        return self._fake.send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        self.num_messages += 1
        return self._fake.recv(*arguments)


@pytest.fixture
def group() -> OutsideGroup:
    made = OutsideGroup.__new__(OutsideGroup)
    made.rank, made.size, made.device = 1, 3, torch.device("cuda", 0)
    made.timeout_s = 600
    made._group = Nccl()
    return made


@pytest.mark.parametrize("method", ["send_all", "receive_all"])
@pytest.mark.parametrize("num_messages", [0, 1, 2])
def test_messages_of_one_call_are_one_work_and_none_are_no_work(
    group: OutsideGroup, method: str, num_messages: int
) -> None:
    messages = [(torch.zeros(4), rank) for rank in (0, 2)][:num_messages]
    works = getattr(group, method)(messages, tag=0)
    assert len(works) == min(num_messages, 1)
    group.finish(works)
    assert works == [] and group._group.num_open == 0


def test_an_error_leaves_no_open_block(group: OutsideGroup) -> None:
    """NCCL would queue all later operations of the thread, and start none."""
    with pytest.raises(TypeError):
        group.send_all([(torch.zeros(4), 0), ("no tensor", 2)], tag=0)  # type: ignore[list-item]
    assert group._group.num_open == 0


def test_rows_are_gathered_in_place(group: OutsideGroup) -> None:
    group.finish(group.all_gather(torch.zeros(3, 4)))


def test_the_host_waits_until_the_device_has_done_the_work(group: OutsideGroup) -> None:
    works: list[Any] = [Slow(0), Slow(3)]
    kept = [*works]
    group.finish(works)
    assert works == [] and all(one.looks_left < 0 for one in kept)
    assert [one.num_waits for one in kept] == [1, 1]  # the current stream waits, too


def test_what_never_completes_is_an_error_after_the_time_limit(group: OutsideGroup) -> None:
    group.timeout_s = 0
    with pytest.raises(RuntimeError, match="timed out"):
        group.finish([Slow(float("inf"))])  # type: ignore[list-item]


def test_no_operation_is_waited_for_once_a_group_is_aborted(group: OutsideGroup) -> None:
    """NCCL's work may never be complete, and may say that it is."""
    group.abort()
    assert group._group.is_aborted
    for work in (Slow(math.inf), Slow(0)):
        with pytest.raises(RuntimeError, match="connection closed"):
            group.finish([work])


def test_nccl_leaves_errors_of_these_groups_to_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for before in ("3", None):
        monkeypatch.delenv(name, raising=False)
        if before:
            monkeypatch.setenv(name, before)
        with module._errors_left_to_us():
            assert os.environ[name] == "0"
        assert os.environ.get(name) == before


def _abort(folder: str) -> None:
    """Write the errors of a rank's operations; rank 0 aborts the group, the others wait for it."""
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    size = torch.zeros(1)
    found = []

    def wait(work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=HANG_S))
        except RuntimeError as error:
            found.append(str(error))

    if rank == 0:
        works = [world.recv([size], 1, 5), world.allreduce([torch.zeros(1)])]
        thread = threading.Thread(
            target=lambda: (time.sleep(0.2), module.abort_gloo(world, rank=0, size=3))
        )
        thread.start()
        for work in works:
            wait(work)
        thread.join()
    else:
        wait(world.recv([size], 0, 6))
        module.abort_gloo(world, rank=rank, size=3)
    with pytest.raises(RuntimeError):
        world.recv([size], (rank + 1) % 3, 7).wait()
    Path(folder, str(rank)).write_text("\n".join(found))
    os._exit(0)


def test_gloo_ends_what_is_under_way(tmp_path: Path) -> None:
    """Also of the ranks that wait for the one that aborts."""
    run_distributed(_abort, 3, str(tmp_path))
    errors = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert "losed" in errors[1] and "losed" in errors[2], errors
    assert "closure" in errors[0] or "imed out" in errors[0], errors


def test_a_connection_of_its_own_does_not_wait_for_others() -> None:
    """Ranks that connect wait for a rank's key; if it is gone, a thread has to say so meanwhile."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    shared = dist.PrefixStore("a", store)
    own = module.own_connection(shared)
    gone = dist.PrefixStore("group", store)

    def connect() -> None:
        with pytest.raises(RuntimeError):
            dist.ProcessGroupGloo(gone, 0, 2, timedelta(seconds=2))

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.5)
    assert own.add("noted", 1) == 1 and thread.is_alive()
    thread.join()
    assert shared.add("noted", 0) == 1
