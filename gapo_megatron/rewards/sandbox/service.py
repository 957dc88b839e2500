"""Client of a sandbox service on another machine (`server`).

One connection is one sandbox. The server starts with a random number. The client's first line has
an authentication code made with the shared secret, a random number of its own, and its request.
Every later line has a code before it (`seal`), so the server's first reply proves that it has the
secret, too. No program and no test is sent before that.

    PROTOCOL NUMBER                       ->
                                          <-  CODE {"limits": {}, "is_second": false, "number": ""}
    +                                     ->  once there is a place and the sandbox has started
                                          <-  >LINE   for the sandbox
                                          <-  <       asks for its next line:
    =LINE   or   pREASON   or   sREASON   ->  the program failed, or the sandbox did

The server measures the program's time, without the queue and the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from pathlib import Path

from gapo_megatron.errors import printable
from gapo_megatron.io.authentication import NotAuthenticError, random_number
from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.seal import CODE_BYTES, PROTOCOL, Seal, proof

CONNECT_TIMEOUT_S = 20.0
"""Time for a connection and for the first line of the server."""

QUEUE_TIMEOUT_S = 600.0
"""Time to wait in the server's queue."""

SECRET_PATH = "~/.config/gapo_megatron/sandbox-secret"
"""File with the secret, on both machines; a shared home folder has it on both."""

MAX_GREETING_BYTES = 4096

GRANTED, WRITE, READ, LINE = b"+", b">", b"<", b"="
PROGRAM_FAILED, SANDBOX_FAILED = b"p", b"s"


class ServiceSandbox(Sandbox):
    """The client's end of a connection."""

    def __init__(self, limits: Limits, *, address: str, is_second: bool) -> None:
        """Prepare; the first line connects and waits in the server's queue.

        Args:
            limits: limits of the program; the server refuses larger ones than its own.
            address: host:port.
            is_second: see `start_sandbox`.
        """
        self._limits, self._address, self._is_second = limits, address, is_second
        self._service = f"the sandbox service at {address}"
        self._stack = contextlib.ExitStack()
        self._socket: socket.socket | None = None

    def write_line(self, line: bytes) -> None:
        if self._socket is None:
            self._connect()
        self._send(WRITE + line.removesuffix(b"\n"))

    def read_line(self) -> bytes:
        self._send(READ)
        # Longer than the server waits for the program: a timeout here is the service's fault.
        return self._receive(LINE, self._limits.wall_s + 2 * START_TIMEOUT_S)

    def close(self) -> None:
        self._stack.close()

    def _connect(self) -> None:
        secret = read_secret()
        wish = {
            "limits": dataclasses.asdict(self._limits),
            "is_second": self._is_second,
            "number": random_number().decode(),
        }
        text = json.dumps(wish).encode()
        host, _, port = self._address.rpartition(":")
        try:
            self._socket = self._stack.enter_context(
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
            )
        except OSError as error:
            raise SandboxError(f"{self._service} cannot be reached: {error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._stack.enter_context(self._socket.makefile("rb"))
        greeting = self._receive_bare(CONNECT_TIMEOUT_S)
        if greeting.partition(b" ")[0] != PROTOCOL:
            raise SandboxError(
                f"{self._service} does not speak {PROTOCOL.decode()} (it sent {greeting[:40]!r}): "
                "another program, or a service of another version"
            )
        self._send_bare(proof(secret, greeting, text) + b" " + text)
        self._seal = Seal(secret, greeting + b" " + text, is_server=False)
        self._receive(GRANTED, QUEUE_TIMEOUT_S + START_TIMEOUT_S)

    def _send(self, line: bytes) -> None:
        self._send_bare(self._seal.sealed(line))

    def _receive(self, expected: bytes, timeout_s: float) -> bytes:
        """Receive a line and return what follows the expected letter."""
        sealed = self._receive_bare(timeout_s)
        if sealed.startswith(SANDBOX_FAILED):  # refused before authentication
            reason = printable(sealed[1:].decode(errors="replace"), most=200)
            raise SandboxError(f"{self._service} refuses this client (unauthenticated): {reason}")
        try:
            answer = self._seal.opened(sealed)
        except NotAuthenticError:
            raise SandboxError(
                f"{self._service} could not be authenticated with the secret of this machine "
                f"({SECRET_PATH}): another program listens there, or the traffic was modified"
            ) from None
        letter, rest = answer[:1], answer[1:]
        if letter == PROGRAM_FAILED:
            raise ProgramError(rest.decode())
        if letter == SANDBOX_FAILED:
            raise SandboxError(f"{self._service}: {printable(rest.decode(errors='replace'))}")
        if letter != expected:
            raise SandboxError(f"{self._service} answered {answer[:40]!r}")
        return rest

    def _send_bare(self, line: bytes) -> None:
        assert self._socket
        self._socket.settimeout(self._limits.wall_s + 2 * START_TIMEOUT_S)
        try:
            self._socket.sendall(line + b"\n")
        except OSError as error:
            raise SandboxError(f"the connection to {self._service} was lost: {error}") from None

    def _receive_bare(self, timeout_s: float) -> bytes:
        """Receive a line, without its newline."""
        assert self._socket
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline(self._limits.line_bytes() + CODE_BYTES + 2**16)
        except OSError as error:
            raise SandboxError(f"the connection to {self._service} was lost: {error}") from None
        if not line.endswith(b"\n"):
            raise SandboxError(f"the connection to {self._service} was lost: the service closed it")
        return line[:-1]


def read_secret() -> bytes:
    """Read the shared secret.

    Raises:
        SandboxError: the file is missing or empty, or other users can read it.
    """
    path = Path(SECRET_PATH).expanduser()
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise SandboxError(
            f"the secret of the sandbox service cannot be read: {error}; copy the file from the "
            "machine of the service"
        ) from None
    if mode & 0o077:
        raise SandboxError(f"{path} (mode {mode & 0o777:o}) can be read by other users: chmod 600")
    if not secret:
        raise SandboxError(f"{path} is empty: remove it, and the service writes a new one")
    return secret


def make_secret() -> None:
    """Write a new secret, unless the file exists.

    Raises:
        OSError: the folder is not writable.
    """
    path = Path(SECRET_PATH).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(number, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")


__all__ = ["QUEUE_TIMEOUT_S", "ServiceSandbox", "make_secret", "read_secret"]
