"""Codes that only who has a secret can write, over what others could change on its way.

What ties a code to its place is up to the caller: the sandbox's connections number their lines
(`rewards/sandbox/seal.py`); a run's messages have a name that is used once (`run/mailbox.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets


class NotAuthenticError(Exception):
    """Text whose code is not that of who has the secret."""


def authentication_code(secret: bytes, text: bytes) -> bytes:
    """HMAC-SHA256 of a text, as 64 hexadecimal digits."""
    return hmac.digest(secret, text, hashlib.sha256).hex().encode()


def random_number() -> bytes:
    """16 random bytes, as 32 hexadecimal digits."""
    return secrets.token_hex(16).encode()


def seal_message(secret: bytes, name: str, value: bytes) -> bytes:
    """A value with its code before it, which holds for this name alone; no name has a NUL."""
    return authentication_code(secret, b"message " + name.encode() + b"\0" + value) + b" " + value


def open_message(secret: bytes, name: str, sealed: bytes) -> bytes:
    """The value that somebody who has the secret has sealed under this name.

    Raises:
        NotAuthenticError: nobody has.
    """
    value = sealed.partition(b" ")[2]
    if not hmac.compare_digest(sealed, seal_message(secret, name, value)):
        raise NotAuthenticError
    return value
