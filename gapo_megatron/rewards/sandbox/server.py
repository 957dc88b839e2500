"""A service that runs programs for other machines, isolated by bubblewrap on this one.

`service` describes the protocol. There are `num_programs` places for programs, and as many for
second sandboxes, which run asserts. Clients queue for a place, first come, first served. One
thread handles all clients that have not authenticated yet, and never blocks on one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import reprlib
import selectors
import socket
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from typing import NoReturn

from gapo_megatron.errors import printable
from gapo_megatron.io.authentication import NotAuthenticError, random_number
from gapo_megatron.io.documents import parse_json
from gapo_megatron.rewards.sandbox.base import START_TIMEOUT_S, Limits, ProgramError, SandboxError
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.rewards.sandbox.seal import CODE_BYTES, PROTOCOL, Seal, proof
from gapo_megatron.rewards.sandbox.service import (
    GRANTED,
    LINE,
    MAX_GREETING_BYTES,
    PROGRAM_FAILED,
    READ,
    SANDBOX_FAILED,
    WRITE,
    read_secret,
)

logger = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Most unauthenticated connections at a time. A further one replaces one of them, so that they can
neither lock clients out nor use up this machine."""

GREETING_TIMEOUT_S = 10.0
"""Time for a client to authenticate: half of the time that it waits for our first line."""


@dataclasses.dataclass(eq=False)
class _Stranger:
    """A connection that has not authenticated yet."""

    socket: socket.socket
    host: str
    name: str
    greeting: bytes
    """Our first line, without its end."""
    until: float
    """Time at which it is disconnected."""
    answer: bytes = b""
    """The part of its first line that has been received."""


class Server:
    """Listens once it is created; `serve` accepts clients."""

    def __init__(
        self, *, host: str, port: int, python: str, num_programs: int, largest: Limits
    ) -> None:
        """Bind the address.

        Args:
            host: address of the interface to listen on.
            port: 0 for any free port; see `port`.
            python: interpreter of the programs.
            num_programs: number of programs at a time.
            largest: largest limits that a client may request.

        Raises:
            OSError: the address cannot be bound.
            SandboxError: see `read_secret`.
        """
        self._secret = read_secret()
        self._python, self._largest = python, largest
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[_Stranger] = []
        """Oldest first."""
        # The kernel ends a sandbox with its thread, so threads are kept. Second sandboxes have as
        # many threads of their own: a running program never waits for its second sandbox.
        self._places, self._second_places = (
            ThreadPoolExecutor(num_programs, thread_name_prefix=name)
            for name in ("program", "second")
        )

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> NoReturn:
        """Accept clients forever."""
        while True:
            waits = bool(self._strangers)
            left_s = max(0.0, self._strangers[0].until - time.monotonic()) if waits else None
            ready = [key.data for key, _ in self._selector.select(left_s)]
            for stranger in filter(None, ready):  # before any of them is disconnected
                self._hear(stranger)
            if None in ready:
                self._accept()
            while self._strangers and self._strangers[0].until <= time.monotonic():
                self._send_away(self._strangers[0])

    def _accept(self) -> None:
        """Accept a connection as unauthenticated."""
        try:
            client, (host, port, *_) = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionError):  # too many open files
                logger.warning("cannot accept connections: %s", error)
                if self._strangers:
                    self._send_away(self._least_welcome())
                else:
                    time.sleep(0.1)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._send_away(self._least_welcome())
        client.setblocking(False)
        greeting = PROTOCOL + b" " + random_number()
        until = time.monotonic() + GREETING_TIMEOUT_S
        stranger = _Stranger(client, host, f"{host}:{port}", greeting, until)
        self._strangers.append(stranger)
        self._selector.register(client, selectors.EVENT_READ, stranger)
        with contextlib.suppress(OSError):  # it has disconnected
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.send(greeting + b"\n")

    def _least_welcome(self) -> _Stranger:
        """The oldest connection of the host that has most of them."""
        crowd = Counter(one.host for one in self._strangers)
        return max(self._strangers, key=lambda one: crowd[one.host])

    def _send_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.socket)

    def _hear(self, stranger: _Stranger) -> None:
        """Receive from a stranger; once its first line is complete, admit or refuse it."""
        try:
            received = stranger.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        stranger.answer += received
        if not received:
            self._send_away(stranger)
            return
        # A client sends one line and then waits for the reply.
        if not received.endswith(b"\n") and len(stranger.answer) < MAX_GREETING_BYTES:
            return
        answer = stranger.answer.rstrip(b"\n")
        try:
            limits, is_second = self._read_wish(stranger.greeting, answer)
        except ValueError as error:
            logger.warning("refused %s: %s", stranger.name, printable(str(error)))
            with contextlib.suppress(OSError):
                stranger.socket.send(_failure(SandboxError(str(error))) + b"\n")
            self._send_away(stranger)
            return
        self._forget(stranger)
        stranger.socket.setblocking(True)
        places = self._second_places if is_second else self._places
        wish = answer.partition(b" ")[2]
        seal = Seal(self._secret, stranger.greeting + b" " + wish, is_server=True)
        try:
            places.submit(self._serve, stranger.socket, limits, seal).add_done_callback(_raise)
        except RuntimeError as error:  # no new thread: an existing one will serve it
            logger.warning("%s has to wait: %s", stranger.name, error)

    def _read_wish(self, greeting: bytes, answer: bytes) -> tuple[Limits, bool]:
        """Check a client's first line; return its limits and whether it is a second sandbox.

        Raises:
            ValueError: the reason to refuse it.
        """
        code, _, wish = answer.partition(b" ")
        if not hmac.compare_digest(code, proof(self._secret, greeting, wish)):
            raise ValueError(
                "the secret differs from this service's, or the client has another version"
            )
        fields = parse_json(wish, where="the greeting", is_data=True)  # NaN is refused below
        largest = dataclasses.asdict(self._largest)
        try:
            asked, is_second = fields["limits"], fields["is_second"]
            odd = largest.keys() ^ asked.keys()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the service has another version: {error}") from None
        if odd:
            raise ValueError(f"the service has another version: limits differ in {sorted(odd)}")
        if not isinstance(is_second, bool):
            raise ValueError(f"is_second ({reprlib.repr(is_second)}) must be true or false")
        for name, most in largest.items():
            value = asked[name]
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"{name} ({reprlib.repr(value)}) must be a whole number, at least 1"
                )
            if value > most:
                cure = "lower reward.timeout_s, or raise --max-total-s of the service"
                raise ValueError(
                    f"{name} ({value!s:.40}) is more than this service allows ({most})"
                    + (f": {cure}" if name == "total_s" else "")
                )
        number = fields.get("number")
        if not isinstance(number, str) or len(number) != len(random_number()):
            raise ValueError(f"number ({reprlib.repr(number)}) must be 16 random bytes, as text")
        return Limits(**asked), is_second

    def _serve(self, client: socket.socket, limits: Limits, seal: Seal) -> None:
        """Run one sandbox for one client, until either ends."""
        with contextlib.suppress(OSError), client, client.makefile("rb") as lines:
            # A client that is silent for longer has crashed with its machine.
            client.settimeout(limits.total_s + START_TIMEOUT_S)
            try:
                with ProcessSandbox(
                    limits, kind="bubblewrap", python=self._python, client=client.fileno()
                ) as box:
                    box.await_start()
                    client.sendall(seal.sealed(GRANTED) + b"\n")
                    _relay(client, lines, box, seal, limits=limits)
            except SandboxError as error:
                client.sendall(seal.sealed(_failure(error)) + b"\n")
            except NotAuthenticError:
                logger.warning("a client's line was modified in transit: disconnected")


def _relay(
    client: socket.socket,
    lines: BufferedReader,
    box: ProcessSandbox,
    seal: Seal,
    *,
    limits: Limits,
) -> None:
    """Relay lines until the client closes the connection.

    The client always closes first: closing while it still sends could lose our last reply.
    """
    max_bytes = 6 * limits.disk_mib * 2**20 + 2**16  # longer input does not fit into /tmp
    failure = b""
    for sealed in iter(partial(lines.readline, max_bytes + CODE_BYTES), b""):
        if not sealed.endswith(b"\n"):
            raise SandboxError(f"a line of more than {max_bytes} bytes")
        line, answer = seal.opened(sealed[:-1]), b""
        try:
            if not failure and line.startswith(WRITE):
                box.write_line(line[1:] + b"\n")
            elif not failure:
                answer = LINE + box.read_line()
        except (ProgramError, SandboxError) as error:
            failure = _failure(error)
        if line.startswith(READ):
            client.sendall(seal.sealed(failure or answer) + b"\n")


def _failure(error: ProgramError | SandboxError) -> bytes:
    letter = PROGRAM_FAILED if isinstance(error, ProgramError) else SANDBOX_FAILED
    return letter + " ".join(str(error).split()).encode("utf-8", "replace")


def _raise(future: Future[None]) -> None:
    """Let an unexpected exception be logged."""
    future.result()


__all__ = ["Server"]
