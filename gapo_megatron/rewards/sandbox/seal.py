"""Proofs between a client and the sandbox service: both have the secret, and no line was changed.

Both sides choose a random number. From the secret and the two comes the key of the connection, and
every line carries a code made with it of all lines before, in either direction: a line that is
changed, repeated, left out, moved to another connection or sent back to who wrote it is found out.
What is not hidden is the text itself: a program and its tests can be read on the network.
"""

from __future__ import annotations

import hashlib
import hmac

from gapo_megatron.io.authentication import NotAuthenticError, authentication_code

PROTOCOL = b"gapo_megatron_sandbox/2"
"""The server's first word."""

CODE_BYTES = 64
"""Of a code, as text."""


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
    return authentication_code(secret, b"client " + greeting + b" " + wish)
