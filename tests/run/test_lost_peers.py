"""Message of a rank when another rank is killed and no watcher names it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.errors import RolloutError
from gapo_megatron.run import fail_fast as module
from gapo_megatron.run.fail_fast import WATCH_THREAD, fail_fast
from tests.dist import rank_context
from tests.waiting import HANG_S


def collective(store: dist.Store) -> None:
    dist.barrier()


def point_to_point(store: dist.Store) -> None:
    dist.recv(torch.empty(1), src=1 - dist.get_rank())


def ask_the_store(store: dist.Store) -> None:
    while True:
        store.add("beats", 0)


def lose(rank: int, victim: int, doing: str, port: int, log: Path) -> None:
    """Run one of two ranks; the victim exits without notice."""
    os.environ["RANK"] = str(rank)
    if rank != victim:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())  # type: ignore[union-attr]
    with fail_fast():
        limit = timedelta(seconds=HANG_S)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        globals()[doing](store)


@pytest.mark.parametrize(
    ("doing", "victim"), [("collective", 1), ("point_to_point", 0), ("ask_the_store", 0)]
)
def test_the_loss_of_a_peer_is_one_line(tmp_path: Path, doing: str, victim: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    log, survivor = tmp_path / "log", 1 - victim
    ranks = [
        rank_context().Process(target=lose, args=(rank, victim, doing, port, log))
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            rank.start()
        ranks[survivor].join(HANG_S)
        assert ranks[survivor].exitcode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    # The store's client writes frames of C++ before it raises.
    text = log.read_text()
    assert "Traceback" not in text and "uncaught" not in text, text
    last = text.splitlines()[-1]
    assert last.startswith(f"error (rank {survivor}): ") and "connection" in last, text
    assert f"{doing} {Path(__file__).name}:" in last, "where it was"


class Ended(BaseException):
    """The process would be gone."""


def end(exit_code: int) -> None:
    raise Ended


def test_only_where_a_thread_watches_the_ranks_is_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    monkeypatch.setattr(module.os, "_exit", end)
    lost = RuntimeError("Connection closed by peer")
    with pytest.raises(Ended), fail_fast():
        raise lost
    assert not pauses
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name=WATCH_THREAD)
    thread.start()
    try:
        with pytest.raises(Ended), fail_fast():
            raise lost
        assert len(pauses) == 1
        capsys.readouterr()
        with pytest.raises(Ended), fail_fast():
            raise RolloutError("the engine: connection closed")
        assert len(pauses) == 1 and "rank" not in capsys.readouterr().err
    finally:
        over.set()
        thread.join()
