"""The file that a sandbox service shares with its clients: a token, and a certificate with its key.

Clients trust this certificate alone, so a listener that lacks the file never sees a program or a
test; the service answers only clients that send the token.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from gapo_megatron.rewards.sandbox.base import SandboxError

SECRET_PATH = "~/.config/gapo_megatron/sandbox.pem"
"""The file, on both machines; a shared home folder has it on both."""

USER = "sandbox"
"""User name that goes with the token in HTTP's basic authentication."""

_DAYS = 3650
_FORM = re.compile(
    r"token: ([0-9a-f]{64})\n-----BEGIN PRIVATE KEY.*-----END CERTIFICATE-----", re.S
)


class Secret(NamedTuple):
    """The token, and the path of the file, which holds the certificate as PEM."""

    token: str
    path: str


def read_secret() -> Secret:
    """Read the file.

    Raises:
        SandboxError: it is missing or damaged, or other users can read it.
    """
    path = Path(SECRET_PATH).expanduser()
    try:
        text, mode = path.read_text(encoding="ascii", errors="replace"), path.stat().st_mode
    except OSError as error:
        raise SandboxError(
            f"the secret of the sandbox service cannot be read: {error}; copy the file from the "
            "machine of the service"
        ) from None
    if mode & 0o077:
        raise SandboxError(f"{path} (mode {mode & 0o777:o}) can be read by other users: chmod 600")
    form = _FORM.match(text)
    if not form:
        raise SandboxError(
            f"{path} must hold a token, a private key and a certificate: copy it again, or remove "
            "it, and the service writes a new one"
        )
    return Secret(form[1], str(path))


def make_secret() -> None:
    """Write a new file, unless it exists.

    Raises:
        OSError: the folder is not writable.
    """
    path = Path(SECRET_PATH).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return
    # Whole or not at all: clients may read it at any time.
    new = path.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(f"token: {secrets.token_hex(32)}\n".encode() + _key_and_certificate())
    try:
        os.link(new, path)
    except FileExistsError:
        pass  # another service has been faster
    finally:
        new.unlink()


def _key_and_certificate() -> bytes:
    """A private key and its self-signed certificate, as PEM.

    Our clients compare the certificate, not its names; these are for clients of other projects.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gapo_megatron sandbox")])
    hosts = {"localhost", socket.gethostname(), socket.getfqdn()}
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, hosts)]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, *plain) + certificate.public_bytes(pem)


__all__ = ["SECRET_PATH", "USER", "Secret", "make_secret", "read_secret"]
