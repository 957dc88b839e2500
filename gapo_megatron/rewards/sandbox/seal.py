"""Proofs between a client and the sandbox service: both have the secret, and no line was changed.

Both sides choose a random number. From the secret and the two comes the key of the connection, and
every line carries a code made with it of all lines before, in either direction: a line that is
changed, repeated, left out, moved to another connection or sent back to who wrote it is found out.
What is not hidden is the text itself: a program and its tests can be read on the network.

`seal_message` and `open_message` do the same for messages outside of any connection, such as those
in a run's mailbox (`run/mailbox.py`): what ties each to its place is a name that is used once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

PROTOCOL = b"gapo_megatron_sandbox/2"
"""The server's first word."""

CODE_BYTES = 64
"""Of a code, as text."""


class NotAuthenticError(Exception):
    """A line whose code is not that of who has the secret."""


class Seal:
    """The codes of one connection; both ends make one, and use it for every line in turn."""

    def __init__(self, secret: bytes, greetings: bytes, *, is_server: bool) -> None:
        """Begin.

        Args:
            secret: shared by both ends.
            greetings: the first lines of both ends, each with a random number of its own.
            is_server: which end this is.
        """
        self._key = hmac.digest(secret, b"lines " + greetings, hashlib.sha256)
        self._code = b""
        self._own, self._other = (b"s", b"c") if is_server else (b"c", b"s")

    def sealed(self, line: bytes) -> bytes:
        """A line without its end, with its code before it."""
        return self._next(self._own, line) + b" " + line

    def opened(self, sealed: bytes) -> bytes:
        """The line that the other end has sealed.

        Raises:
            NotAuthenticError: it has not, or not as its next one.
        """
        code, _, line = sealed.partition(b" ")
        if not hmac.compare_digest(code, self._next(self._other, line)):
            raise NotAuthenticError
        return line

    def _next(self, sender: bytes, line: bytes) -> bytes:
        made = hmac.new(self._key, self._code + sender, hashlib.sha256)
        made.update(line)
        self._code = made.hexdigest().encode()
        return self._code


def proof(secret: bytes, greeting: bytes, wish: bytes) -> bytes:
    """A client's code, which only who has the secret can write; the secret stays where it is."""
    return _code(secret, b"client " + greeting + b" " + wish)


def seal_message(secret: bytes, name: str, value: bytes) -> bytes:
    """A value with its code before it, which holds for this name alone; no name has a NUL."""
    return _code(secret, b"message " + name.encode() + b"\0" + value) + b" " + value


def open_message(secret: bytes, name: str, sealed: bytes) -> bytes:
    """The value that somebody who has the secret has sealed under this name.

    Raises:
        NotAuthenticError: nobody has.
    """
    value = sealed.partition(b" ")[2]
    if not hmac.compare_digest(sealed, seal_message(secret, name, value)):
        raise NotAuthenticError
    return value


def _code(secret: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, text, hashlib.sha256).hex().encode()


def random_number() -> bytes:
    """16 random bytes, as text."""
    return secrets.token_hex(16).encode()


__all__ = [
    "CODE_BYTES",
    "PROTOCOL",
    "NotAuthenticError",
    "Seal",
    "open_message",
    "proof",
    "random_number",
    "seal_message",
]
