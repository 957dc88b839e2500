"""A sandbox of another machine, by way of a service there (`server`).

One connection is one sandbox. The server speaks first, with a random number; the client's first
line is a code that proves that it has the shared secret, a random number of its own, and what it
wants. Every line after that has a code of its own before it (`seal`), so that the server's first
one proves that it has the secret too: nothing of a program or its tests is sent before.

    PROTOCOL NUMBER                       ->
                                          <-  CODE {"limits": {}, "is_second": false, "number": ""}
    +                                     ->  once there is a place and the sandbox has started
                                          <-  >LINE   for the sandbox
                                          <-  <       asks for its next line:
    =LINE   or   pREASON   or   sREASON   ->  the program failed, or the sandbox did

The server keeps the program's time: waiting for a place, or for the network, is none of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
from pathlib import Path

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
"""For a connection and the first line of the server."""

QUEUE_TIMEOUT_S = 600.0
"""For a place at the server."""

SECRET_PATH = "~/.config/gapo_megatron/sandbox-secret"
"""The same on both machines, as it is where they share the home folder."""

MAX_GREETING_BYTES = 4096

GRANTED, WRITE, READ, LINE = b"+", b">", b"<", b"="
PROGRAM_FAILED, SANDBOX_FAILED = b"p", b"s"


class ServiceSandbox(Sandbox):
    """The client's end of a connection."""

    def __init__(self, limits: Limits, *, address: str, is_second: bool) -> None:
        """The first line connects, and waits for a place: a second sandbox after the first one.

        Args:
            limits: of the program; the server refuses larger ones than its own.
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
        # Longer than the server waits for the program: whoever is late now is the service.
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
                f"{self._service} does not speak {PROTOCOL.decode()} (it says {greeting[:40]!r}): "
                "it is another program, or of another version"
            )
        self._send_bare(proof(secret, greeting, text) + b" " + text)
        self._seal = Seal(secret, greeting + b" " + text, is_server=False)
        self._receive(GRANTED, QUEUE_TIMEOUT_S + START_TIMEOUT_S)

    def _send(self, line: bytes) -> None:
        self._send_bare(self._seal.sealed(line))

    def _receive(self, expected: bytes, timeout_s: float) -> bytes:
        """What follows the expected letter in the next line."""
        sealed = self._receive_bare(timeout_s)
        if sealed.startswith(SANDBOX_FAILED):  # it has not let us in
            reason = sealed[1:].decode(errors="replace")[:200]
            raise SandboxError(f"{self._service} refuses, and proves nothing: {reason}")
        try:
            answer = self._seal.opened(sealed)
        except NotAuthenticError:
            raise SandboxError(
                f"{self._service} has not proved that it has this machine's secret "
                f"({SECRET_PATH}): somebody else listens there, or changes what it says"
            ) from None
        letter, rest = answer[:1], answer[1:]
        if letter == PROGRAM_FAILED:
            raise ProgramError(rest.decode())
        if letter == SANDBOX_FAILED:
            raise SandboxError(f"{self._service}: {rest.decode()}")
        if letter != expected:
            raise SandboxError(f"{self._service} answered {answer[:40]!r}")
        return rest

    def _send_bare(self, line: bytes) -> None:
        assert self._socket
        self._socket.settimeout(self._limits.wall_s + 2 * START_TIMEOUT_S)
        try:
            self._socket.sendall(line + b"\n")
        except OSError as error:
            raise SandboxError(f"{self._service} was lost: {error}") from None

    def _receive_bare(self, timeout_s: float) -> bytes:
        """The next line, without its end."""
        assert self._socket
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline(self._limits.line_bytes() + CODE_BYTES + 2**16)
        except OSError as error:
            raise SandboxError(f"{self._service} was lost: {error}") from None
        if not line.endswith(b"\n"):
            raise SandboxError(f"{self._service} was lost: it ended the connection")
        return line[:-1]


def read_secret() -> bytes:
    """Read the shared secret.

    Raises:
        SandboxError: there is none, or others can read it.
    """
    path = Path(SECRET_PATH).expanduser()
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise SandboxError(
            f"the secret of the sandbox service is not here: {error}; copy the file from the "
            "service's machine"
        ) from None
    if mode & 0o077:
        raise SandboxError(f"{path} (mode {mode & 0o777:o}) can be read by others: chmod 600")
    if not secret:
        raise SandboxError(f"{path} is empty: remove it, and the service writes another")
    return secret


def make_secret() -> None:
    """Write a secret, unless there is one.

    Raises:
        OSError: the folder cannot be written.
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
