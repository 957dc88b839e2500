"""Messages through the job's rendezvous store, authenticated with a secret of the launch.

The store has no authentication: every process that reaches its port can write, change and
remove its content. So every message carries an HMAC of its name and value; the key is in a file
that only the ranks' user can read. A message without a valid code is refused.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gapo_megatron.errors import ConfigError, MachineError, shown
from gapo_megatron.io.authentication import (
    NotAuthenticError,
    open_message,
    random_number,
    seal_message,
)
from gapo_megatron.io.files import naming

_ABSENT = "\0absent"
"""Stored value of a name that has no message."""
_FILE_KEY = "gapo_megatron/secret"
"""Key in the store for the number in the secret's file name."""
_SECRET_NAME = re.compile(r"\.mailbox_[0-9a-f]{32}")
_MAX_STORED_BYTES = 8 * 2**20
"""Longest value of torch's TCPStore; it closes a connection that sends a longer value."""


@contextmanager
def shared_secret(store: dist.Store, folder: Path, *, rank: int) -> Iterator[bytes]:
    """A new secret of this launch, the same on every rank; never sent over the network.

    Rank 0 writes it to a file of mode 600, announces the file's number in the store, and removes
    the file after the block. So the block must synchronize all ranks, for instance by creating a
    group of them. A file left by a killed rank 0 is removed first.

    Args:
        store: the store that all ranks of the job use.
        folder: exists, on a disk that all ranks share.
        rank: this process's rank in the job.

    Raises:
        MachineError: the file cannot be written or is missing; names it.
    """
    if rank == 0:
        number = random_number()
        path = _secret_path(folder, number)
        _remove_old_secrets(folder)
        try:
            secret = secrets.token_bytes(32)
            # A new file name each time: NFS caches for a while that a name was missing.
            with naming(path), open(path, "xb", opener=_open_for_this_user) as file:
                file.write(secret)
            store.set(_FILE_KEY, number.decode())
            yield secret
        finally:
            path.unlink(missing_ok=True)
    else:
        number = store.get(_FILE_KEY)
        if not re.fullmatch(rb"[0-9a-f]{32}", number):
            raise MachineError(
                f"{_FILE_KEY} in the store at MASTER_ADDR:MASTER_PORT ({shown(number)}) must be 32 "
                "hexadecimal digits; another process has written it"
            )
        path = _secret_path(folder, number)
        with naming(path):
            secret = path.read_bytes()
        yield secret


def _remove_old_secrets(folder: Path) -> None:
    """Remove secrets left by a rank 0 that was killed before all ranks had read them."""
    with naming(folder):
        for path in list(folder.iterdir()):
            if _SECRET_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _open_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _secret_path(folder: Path, number: bytes) -> Path:
    return folder / f".mailbox_{number.decode()}"


class Mailbox:
    """Values by name, which all ranks of a job can post and read.

    Each name is used once in a launch; repeated messages are numbered (`order/7`). So a message
    that is replayed, or copied to another name, fails its check.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        """Use `store`, a `PrefixStore` for this mailbox only, and this launch's `secret`."""
        self._store = store
        self._secret = secret

    def post(self, name: str, value: bytes) -> None:
        """Post a value under a new name; it is in the store when this returns.

        Raises:
            ConfigError: value and code are longer than the store allows.
        """
        sealed = seal_message(self._secret, name, value)
        if len(sealed) > _MAX_STORED_BYTES:
            raise ConfigError(
                f"message {name} ({len(sealed)} bytes) must be at most {_MAX_STORED_BYTES} bytes, "
                "the limit of torch's store; it grows with the responses of a step, and with those "
                "that stay open after it (batch.rollout_prompts, batch.rollouts_per_prompt, "
                "batch.oversampling)"
            )
        self._store.set(name, sealed)  # type: ignore[arg-type]  # its stub accepts str only
        # `set` does not wait for the store, which may serve another connection first.
        self._store.check([name])

    def look(self, name: str) -> bytes | None:
        """The value of a name, or None if it has none yet. Never waits.

        Raises:
            MachineError: the value was not posted under this name in this launch.
        """
        # A single request, so that no rank can erase the value in between. It changes nothing: the
        # new value equals the value that it compares with.
        sealed: bytes = self._store.compare_set(name, _ABSENT, _ABSENT)
        if sealed == _ABSENT.encode():
            return None
        try:
            return open_message(self._secret, name, sealed)
        except NotAuthenticError:
            raise MachineError(
                f"message {name} in the store at MASTER_ADDR:MASTER_PORT ({shown(sealed)}) must "
                "carry the code of this launch: it was damaged, or another process wrote it; "
                "it was not used"
            ) from None

    def take(self, name: str) -> bytes:
        """Return and erase the value of a name that must have been posted.

        Raises:
            MachineError: see `look`; or the value is missing.
        """
        value = self.look(name)
        if value is None:
            raise MachineError(
                f"message {name} in the store at MASTER_ADDR:MASTER_PORT must exist until it is "
                "read: another process removed it"
            )
        self.erase(name)
        return value

    def erase(self, name: str) -> None:
        """Remove a value, if any: the store would keep it to the end of the job."""
        self._store.delete_key(name)
