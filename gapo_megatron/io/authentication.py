"""Message authentication: codes that only a holder of the secret can compute.

Callers must prevent replays: a run's messages have names that are used once (`run/mailbox.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


class NotAuthenticError(Exception):
    """The code of a message does not match the secret."""


def authentication_code(secret: bytes, text: bytes) -> bytes:
    """HMAC-SHA256 of a text, as 64 hexadecimal digits."""
    return hmac.digest(secret, text, hashlib.sha256).hex().encode()


def random_number() -> bytes:
    """16 random bytes, as 32 hexadecimal digits."""
    return secrets.token_hex(16).encode()


def seal_message(secret: bytes, name: str, value: bytes) -> bytes:
    """Prefix a value with a code that is valid for this name only; names contain no NUL."""
    return authentication_code(secret, b"message " + name.encode() + b"\0" + value) + b" " + value


def open_message(secret: bytes, name: str, sealed: bytes) -> bytes:
    """Verify and return a value that was sealed under this name.

    Raises:
        NotAuthenticError: the code does not match.
    """
    value = sealed.partition(b" ")[2]
    if not hmac.compare_digest(sealed, seal_message(secret, name, value)):
        raise NotAuthenticError
    return value
