"""Programs of the package on forked ranks: started as by a launcher, but for their imports.

A rank is a process of its own with the arguments, environment and output of a program, and what
runs in it is the program's file as `__main__`. It differs from `python -m` in two things: imports
are done (tests/preloaded.py), and torch compiles nothing. vLLM has two small functions compiled,
4 s in each process.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from multiprocessing.connection import wait
from pathlib import Path

import torch

from tests.dist import rank_context
from tests.waiting import HANG_S


class Program:
    """A running program, with the interface of `subprocess.Popen` as far as tests use it.

    Attributes:
        pids: its processes, by rank.
        returncode: of the rank that failed first, 0 if none did; None while ranks run.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        may_fail: Collection[int] = (),
    ) -> None:
        """`python -m module arguments` on `ranks` processes, `env` on top of this process's.

        They meet at `port`, by default a free one. The ranks that `may_fail` end no others.
        """
        self._may_fail = may_fail
        self._log = tempfile.NamedTemporaryFile("r", prefix="program")  # noqa: SIM115
        self.returncode: int | None = None
        self._processes = [
            rank_context().Process(
                target=_main,
                args=(
                    module,
                    [str(argument) for argument in arguments],
                    {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **launched},
                    self._log.name,
                ),
            )
            for launched in _launcher_variables(ranks, port)
        ]
        for process in self._processes:
            process.start()
        self.pids = [process.pid for process in self._processes]

    @property
    def pid(self) -> int:
        """Process of rank 0."""
        return self.pids[0]

    def poll(self) -> int | None:
        """`returncode`; the first rank that fails ends the others."""
        if self.returncode is None:
            codes = [process.exitcode for process in self._processes]
            for rank in self._may_fail:
                codes[rank] = codes[rank] and 0
            failed = next((code for code in codes if code), 0)
            if failed:
                self.kill()
            if failed or None not in codes:
                self.returncode = failed
        return self.returncode

    def send_signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL for every rank that runs; returns when they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def communicate(self, timeout: float = HANG_S) -> tuple[str, None]:
        """Wait for the end of all ranks; returns what they printed.

        Raises:
            subprocess.TimeoutExpired: they are killed then.
        """
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise subprocess.TimeoutExpired(self.output(), timeout)
            running = [p.sentinel for p in self._processes if p.exitcode is None]
            wait(running, timeout=1)
        return self.output(), None

    def output(self) -> str:
        """What the ranks have printed."""
        return Path(self._log.name).read_text()


def _launcher_variables(ranks: int, port: int | None) -> list[dict[str, str]]:
    """What a launcher tells each rank; nothing to one that is alone."""
    if ranks == 1:
        return [{}]
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def _main(module: str, arguments: list[str], env: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
