"""Authentication between a client and the sandbox service, and integrity of their lines.

Both sides choose a random number. The secret and both numbers give the key of the connection. Every
line carries a code over all lines so far, in both directions, so a line that is changed, repeated,
dropped, moved to another connection or reflected is detected. Nothing is encrypted: programs and
tests can be read on the network.
"""

from __future__ import annotations

import hashlib
import hmac

from gapo_megatron.io.authentication import NotAuthenticError, authentication_code

PROTOCOL = b"gapo_megatron_sandbox/2"
"""First word of the server's greeting."""

CODE_BYTES = 64
"""Length of a code as text."""


class Seal:
    """The codes of one connection; each end has one and uses it for every line, in order."""

    def __init__(self, secret: bytes, greetings: bytes, *, is_server: bool) -> None:
        """Derive the key of the connection.

        Args:
            secret: shared by both ends.
            greetings: first lines of both ends, each with its random number.
            is_server: whether this is the server's end.
        """
        self._key = hmac.digest(secret, b"lines " + greetings, hashlib.sha256)
        self._code = b""
        self._own, self._other = (b"s", b"c") if is_server else (b"c", b"s")

    def sealed(self, line: bytes) -> bytes:
        """Put the code before a line; without newline."""
        return self._next(self._own, line) + b" " + line

    def opened(self, sealed: bytes) -> bytes:
        """Check and remove the code of a line from the other end.

        Raises:
            NotAuthenticError: the other end did not write this line next.
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
    """The code with which a client proves that it knows the secret."""
    return authentication_code(secret, b"client " + greeting + b" " + wish)
