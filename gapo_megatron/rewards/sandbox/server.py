"""A service that runs programs for judges on other machines, behind bubblewrap on this one.

What goes over a connection: `service`. One program has one place; a second sandbox, of its asserts,
has one of as many others. Whoever gets no place waits, first come, first served. Who has not
proved yet that it may waits in one thread, which never waits for any of them.
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
"""At a time: who connects and has not proved yet that it has the secret. One more takes the place
of another, so that they cannot keep a client out by staying, and take no more of this machine."""

GREETING_TIMEOUT_S = 10.0
"""For a client to prove that it has the secret: half of what it waits for our first line."""


@dataclasses.dataclass(eq=False)
class _Stranger:
    """A connection that has not proved yet that it may."""

    socket: socket.socket
    host: str
    name: str
    greeting: bytes
    """Our first line, without its end."""
    until: float
    """When it is sent away."""
    answer: bytes = b""
    """What it has said of its first line."""


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
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[_Stranger] = []
        """In the order in which they came."""
        # The kernel ends a sandbox together with its thread, and these stay. Second sandboxes have
        # places of their own, as many: a program that has one place never waits for the other.
        self._places, self._second_places = (
            ThreadPoolExecutor(num_programs, thread_name_prefix=name)
            for name in ("program", "second")
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> NoReturn:
        """Let clients in, for ever."""
        while True:
            waits = bool(self._strangers)
            left_s = max(0.0, self._strangers[0].until - time.monotonic()) if waits else None
            ready = [key.data for key, _ in self._selector.select(left_s)]
            for stranger in filter(None, ready):  # first: whose line has come is not sent away
                self._hear(stranger)
            if None in ready:
                self._accept()
            while self._strangers and self._strangers[0].until <= time.monotonic():
                self._send_away(self._strangers[0])

    def _accept(self) -> None:
        """Take whoever has connected for a stranger."""
        try:
            client, (host, port, *_) = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionError):  # too many open files
                logger.warning("let nobody in: %s", error)
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
        with contextlib.suppress(OSError):  # it has gone
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.send(greeting + b"\n")

    def _least_welcome(self) -> _Stranger:
        """The one that came first of the host from which most have come."""
        crowd = Counter(one.host for one in self._strangers)
        return max(self._strangers, key=lambda one: crowd[one.host])

    def _send_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.socket)

    def _hear(self, stranger: _Stranger) -> None:
        """Read on in a stranger's first line; let it in when that is whole, or say why not."""
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
        # It says nothing more before it is answered.
        if not received.endswith(b"\n") and len(stranger.answer) < MAX_GREETING_BYTES:
            return
        answer = stranger.answer.rstrip(b"\n")
        try:
            limits, is_second = self._read_wish(stranger.greeting, answer)
        except ValueError as error:
            logger.warning("refused %s: %s", stranger.name, error)
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
        except RuntimeError as error:  # no new thread: one that is there serves it once it is free
            logger.warning("%s has to wait: %s", stranger.name, error)

    def _read_wish(self, greeting: bytes, answer: bytes) -> tuple[Limits, bool]:
        """The limits, and whether it is the second sandbox of a program.

        Raises:
            ValueError: says why not.
        """
        code, _, wish = answer.partition(b" ")
        if not hmac.compare_digest(code, proof(self._secret, greeting, wish)):
            raise ValueError(
                "the secret is another than this service's, or the client of another version"
            )
        fields = parse_json(wish, where="the greeting", is_data=True)  # NaN is named below
        largest = dataclasses.asdict(self._largest)
        try:
            asked, is_second = fields["limits"], fields["is_second"]
            odd = largest.keys() ^ asked.keys()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the service is of another version: {error}") from None
        if odd:
            raise ValueError(f"the service is of another version: limits differ in {sorted(odd)}")
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
        """Run one sandbox for one client, until either has ended."""
        with contextlib.suppress(OSError), client, client.makefile("rb") as lines:  # it may go
            # A judge that says nothing for longer than that has gone, and its machine with it.
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
                logger.warning("a line of a client was changed on its way: hung up")


def _relay(
    client: socket.socket,
    lines: BufferedReader,
    box: ProcessSandbox,
    seal: Seal,
    *,
    limits: Limits,
) -> None:
    """Carry lines to and fro until the client ends the connection.

    It always does so first: to close on what it still sends could cost it our last answer.
    """
    max_bytes = 6 * limits.disk_mib * 2**20 + 2**16  # what is longer finds no room in there
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
    """So that a mistake of ours is logged, as it is in a thread."""
    future.result()


__all__ = ["Server"]
