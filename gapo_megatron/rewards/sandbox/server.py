"""A service that runs programs for judges on other machines, behind bubblewrap on this one.

What goes over a connection: `service`. One program has one place; a second sandbox, of its asserts,
comes with it. Whoever gets no place waits, first come, first served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from typing import NoReturn

from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.rewards.sandbox.service import (
    GRANTED,
    LINE,
    MAX_GREETING_BYTES,
    PROGRAM_FAILED,
    READ,
    SANDBOX_FAILED,
    WRITE,
    proof,
    read_secret,
)

logger = logging.getLogger(__name__)

MAX_GREETINGS = 256
"""At a time: strangers, who may connect as often as they like, take no more of this machine."""

GREETING_TIMEOUT_S = 10.0
"""For a client to prove that it has the secret: half of what it waits for our first line."""


class Server:
    """Listens from when it is made; `serve` lets clients in."""

    def __init__(
        self, *, host: str, port: int, python: str, num_programs: int, largest: Limits
    ) -> None:
        """Bind the address.

        Args:
            host: address of the interface to listen on.
            port: 0 for any that is free; see `port`.
            python: interpreter of the programs.
            num_programs: at a time.
            largest: limits that a client may ask for.

        Raises:
            OSError: the address cannot be had.
            SandboxError: there is no secret.
        """
        self._secret = read_secret()
        self._python, self._largest = python, largest
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._greetings = threading.BoundedSemaphore(MAX_GREETINGS)
        # The kernel ends a sandbox together with its thread, and these stay.
        self._places = ThreadPoolExecutor(num_programs, thread_name_prefix="program")

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> NoReturn:
        """Let clients in, for ever."""
        while True:
            self._greetings.acquire()
            client = None
            try:
                client, address = self._listener.accept()
                greet = partial(self._greet, client, name=f"{address[0]}:{address[1]}")
                threading.Thread(target=greet, daemon=True).start()
            except (OSError, RuntimeError) as error:  # it has gone again, or there are too many
                self._greetings.release()
                if client:
                    client.close()
                logger.warning("let nobody in: %s", error)
                time.sleep(0.1)

    def _greet(self, client: socket.socket, *, name: str) -> None:
        """Let one client in, or say why not."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))  # it has gone
            stack.enter_context(client)
            with contextlib.ExitStack() as greeting:
                greeting.callback(self._greetings.release)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                nonce = secrets.token_hex(16).encode()
                client.settimeout(GREETING_TIMEOUT_S)
                client.sendall(nonce + b"\n")
                try:
                    limits, is_second = self._read_wish(nonce, _read_greeting(client))
                except ValueError as error:
                    logger.warning("refused %s: %s", name, error)
                    client.sendall(SANDBOX_FAILED + str(error).encode() + b"\n")
                    return
            lines = stack.enter_context(client.makefile("rb"))
            serve = partial(self._serve, client, lines, limits, stack.pop_all())
            if is_second:
                serve()
            else:
                self._places.submit(serve).add_done_callback(_raise)

    def _read_wish(self, nonce: bytes, line: bytes) -> tuple[Limits, bool]:
        """The limits, and whether it is the second sandbox of a program.

        Raises:
            ValueError: says why not.
        """
        code, _, wish = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(code, proof(self._secret, nonce, wish)):
            raise ValueError("the secret is another than this service's")
        try:
            fields = json.loads(wish)
            limits, is_second = Limits(**fields["limits"]), bool(fields["is_second"])
        except (TypeError, KeyError) as error:
            raise ValueError(f"the service is of another version: {error}") from None
        for name, most in dataclasses.asdict(self._largest).items():
            if (asked := getattr(limits, name)) > most:
                cure = "lower reward.timeout_s, or raise --max-total-s of the service"
                raise ValueError(
                    f"{name} ({asked}) is more than this service allows ({most})"
                    + (f": {cure}" if name == "total_s" else "")
                )
        return limits, is_second

    def _serve(
        self,
        client: socket.socket,
        lines: BufferedReader,
        limits: Limits,
        stack: contextlib.ExitStack,
    ) -> None:
        """Run one sandbox for one client, until either has ended."""
        with stack:
            # A judge that says nothing for longer than that has gone, and its machine with it.
            client.settimeout(limits.total_s + START_TIMEOUT_S)
            try:
                with ProcessSandbox(
                    limits, kind="bubblewrap", python=self._python, client=client.fileno()
                ) as box:
                    box.await_start()
                    client.sendall(GRANTED + b"\n")
                    _relay(client, lines, box, limits=limits)
            except SandboxError as error:
                client.sendall(_failure(error))


def _read_greeting(client: socket.socket) -> bytes:
    """The first line of a client, which says nothing more before it is answered.

    Raises:
        OSError: it has gone, or is too slow.
    """
    until = time.monotonic() + GREETING_TIMEOUT_S
    greeting = b""
    while not greeting.endswith(b"\n") and len(greeting) < MAX_GREETING_BYTES:
        client.settimeout(max(0.001, until - time.monotonic()))
        received = client.recv(2**16)
        if not received:
            break
        greeting += received
    return greeting


def _relay(
    client: socket.socket, lines: BufferedReader, box: ProcessSandbox, *, limits: Limits
) -> None:
    """Carry lines to and fro until the client ends the connection.

    It always does so first: to close on what it still sends could cost it our last answer.
    """
    max_bytes = 6 * limits.disk_mib * 2**20 + 2**16  # what is longer finds no room in there
    failure = b""
    for line in iter(partial(lines.readline, max_bytes), b""):
        if not line.endswith(b"\n"):
            raise SandboxError(f"a line of more than {max_bytes} bytes")
        try:
            if not failure and line.startswith(WRITE):
                box.write_line(line[1:])
            elif not failure:
                client.sendall(LINE + box.read_line() + b"\n")
        except (ProgramError, SandboxError) as error:
            failure = _failure(error)
        if failure and line.startswith(READ):
            client.sendall(failure)


def _failure(error: ProgramError | SandboxError) -> bytes:
    letter = PROGRAM_FAILED if isinstance(error, ProgramError) else SANDBOX_FAILED
    return letter + " ".join(str(error).split()).encode() + b"\n"


def _raise(future: Future[None]) -> None:
    """So that a mistake of ours is logged, as it is in a thread."""
    future.result()


__all__ = ["Server"]
