"""A sandbox on this machine: an isolated runner process, connected by pipes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time

from gapo_megatron.errors import printable
from gapo_megatron.isolation import Kind
from gapo_megatron.rewards.sandbox import apptainer, bubblewrap
from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.inside.channel import OUT_OF_MEMORY
from gapo_megatron.rewards.sandbox.interpreter import (
    ENVIRONMENT,
    ask_interpreter,
    drop_root,
    host_environment,
    start_command,
)
from gapo_megatron.rewards.sandbox.meter import Meter
from gapo_megatron.rewards.worker_process import SIGNALS_LEFT_TO_TRAINER

END_TIMEOUT_S = 5.0
"""Time for the runner process to end after its channel was closed."""


class ProcessSandbox(Sandbox):
    """Use it in the thread that creates it: the kernel ends the sandbox with that thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        kind: Kind,
        python: str,
        image: str = "",
        hangup: int | None = None,
    ) -> None:
        """Start the process; the first line waits until it is ready.

        Args:
            limits: limits of the program.
            kind: `unsafe` is the bare interpreter.
            python: interpreter of the programs, inside the image if there is one.
            image: image for `apptainer`.
            hangup: descriptor that becomes readable when nobody waits for the program any more.

        Raises:
            SandboxError: it does not start; the first line may raise it too.
        """
        self._limits = limits
        self._hangup = hangup
        self._received = bytearray()
        self._left_s: float = START_TIMEOUT_S
        """Seconds left for all tests of the program, as counted by its meter."""
        walls: list[str] = []
        if kind == "bubblewrap":
            walls = bubblewrap.walls(limits, python=python)
        elif kind == "apptainer":
            walls = apptainer.walls(image)
        inside = walls if kind == "apptainer" else []  # bubblewrap uses one of this machine
        interpreter = ask_interpreter(*inside, python, as_nobody=bool(inside))
        self._folder = tempfile.TemporaryDirectory() if kind == "unsafe" else None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_LEFT_TO_TRAINER)
        try:
            self._process = subprocess.Popen(
                [*walls, *start_command(limits, python=python)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder.name if self._folder else "/",
                env=ENVIRONMENT if kind == "unsafe" else host_environment(),
                start_new_session=True,
                bufsize=0,
                **({} if kind == "unsafe" else drop_root()),
            )
        except OSError as error:
            raise SandboxError(f"the sandbox cannot start: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # reported by the first line
            self._process.stdin.write(interpreter.line)
        os.set_blocking(self._process.stdin.fileno(), False)
        self._meter = Meter(self._process.pid)
        self._is_ready = False

    def await_start(self) -> None:
        """Wait until the runner process is ready.

        Raises:
            SandboxError: it does not start; says why.
        """
        self._is_ready = True
        try:
            self._read_line(START_TIMEOUT_S)
        except (ProgramError, SandboxError) as error:
            reason = self._complaint() or str(error)
            raise SandboxError(f"the sandbox cannot start: {reason}") from None
        self._left_s = self._limits.total_s

    def write_line(self, line: bytes) -> None:
        if not self._is_ready:
            self.await_start()
        data = memoryview(line)
        assert self._process.stdin
        writing = self._process.stdin.fileno()
        left_s: float = self._limits.wall_s
        while data:
            left_s = self._wait(writing, select.POLLOUT, left_s)
            try:
                data = data[os.write(writing, data) :]
            except BrokenPipeError:
                self._ended()

    def read_line(self) -> bytes:
        return self._read_line(self._limits.wall_s)

    def close(self) -> None:
        # When its input is closed, the runner kills the program and exits; then bubblewrap or
        # Apptainer (with its .sif mount) exit. Each waits for its children. Killing them at once
        # would leave zombies to the machine's process 1, which in a container may never reap them.
        # Without a namespace, only the runner knows the program's processes.
        streams = [self._process.stdin, self._process.stdout, self._process.stderr]
        for stream in streams[:2]:
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The runner dies with bubblewrap or Apptainer, and its namespace with the runner.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        streams[2].close()  # type: ignore[union-attr]
        if self._folder:
            self._folder.cleanup()

    def _read_line(self, left_s: float) -> bytes:
        assert self._process.stdout
        reading = self._process.stdout.fileno()
        received = bytes(self._received)
        while b"\n" not in received:
            if len(self._received) > self._limits.line_bytes():
                raise ProgramError(f"returned more than {self._limits.output_mib} MiB")
            left_s = self._wait(reading, select.POLLIN, left_s)
            received = os.read(reading, 2**16)
            if not received:
                self._ended()
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _wait(self, number: int, event: int, left_s: float) -> float:
        """Wait for the sandbox; return what is left of `left_s`, the seconds of one test."""
        poll = select.poll()
        poll.register(number, event)
        if self._hangup is not None:
            poll.register(self._hangup, select.POLLIN)
        while True:
            start, asked_s = time.monotonic(), self._meter.next_look_s
            happened = dict(poll.poll(1000 * asked_s))
            # What it waits beyond that it waits for its turn among the threads of this process.
            self._meter.wait(min(time.monotonic() - start, asked_s))
            happened = happened or dict(poll.poll(0))
            if self._hangup in happened:
                raise SandboxError("the client has disconnected")
            if happened:
                return left_s
            used_s = self._meter.look()
            left_s -= used_s
            self._left_s -= used_s
            if min(left_s, self._left_s) <= 0:
                limit = "total_s" if self._left_s <= left_s else "wall_s"
                raise ProgramError(f"took longer than {getattr(self._limits, limit)} s")

    def _ended(self) -> None:
        """Raise the error that fits the exit code: 0 means that the program ended."""
        try:
            code = self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProgramError("closed its channel") from None
        if code == 0:
            raise ProgramError("exited early")
        if code == OUT_OF_MEMORY:
            raise SandboxError("the machine ran out of memory")
        raise SandboxError(f"the sandbox ended with code {code}: {self._complaint()}")

    def _complaint(self) -> str:
        """The last line on stderr of bubblewrap, Apptainer or the runner, if any."""
        assert self._process.stderr
        number = self._process.stderr.fileno()
        os.set_blocking(number, False)
        with contextlib.suppress(BlockingIOError):
            text = os.read(number, 2**16).decode(errors="replace")
            return printable(text.strip().rpartition("\n")[2])
        return ""


__all__ = ["ProcessSandbox"]
