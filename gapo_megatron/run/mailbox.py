"""Messages through the store at which all ranks of a job meet, sealed with a secret of the launch.

The store has no authentication: every process that reaches its port can write, change and
remove its content. So every message carries a code over its name and its value, made with a secret
that the ranks get from a file only their user can read. A message without such a code is ignored.
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
"""No value: what a name that has none answers."""
_FILE_KEY = "gapo_megatron/secret"
"""In the store: the number in the name of the secret's file."""
_SECRET_NAME = re.compile(r"\.mailbox_[0-9a-f]{32}")
_MAX_STORED_BYTES = 8 * 2**20
"""Longest value of torch's TCPStore, which closes the connection of who sends a longer one."""


@contextmanager
def shared_secret(store: dist.Store, folder: Path, *, rank: int) -> Iterator[bytes]:
    """A new secret of this launch, the same on every rank; never sent over the network.

    Rank 0 writes it into a file of mode 600, tells the others in the store which, and removes it
    after the block. So the block must not end on rank 0 before all have entered theirs: it creates
    a group of all ranks, for instance. A file that a killed rank 0 has left is removed first.

    Args:
        store: the store that all ranks of the job use.
        folder: exists, on a disk that all ranks share.
        rank: this process's rank in the job.

    Raises:
        MachineError: the file cannot be written, or is not there; names it.
    """
    if rank == 0:
        number = random_number()
        path = _secret_path(folder, number)
        _remove_old_secrets(folder)
        try:
            secret = secrets.token_bytes(32)
            # A name that no node has looked up yet: NFS remembers for a while what was absent.
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
                "hexadecimal digits: rank 0 has not written it"
            )
        path = _secret_path(folder, number)
        with naming(path):
            secret = path.read_bytes()
        yield secret


def _remove_old_secrets(folder: Path) -> None:
    """Remove what a rank 0 of this folder left when it was killed before all had met."""
    with naming(folder):
        for path in list(folder.iterdir()):
            if _SECRET_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _open_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _secret_path(folder: Path, number: bytes) -> Path:
    return folder / f".mailbox_{number.decode()}"


class Mailbox:
    """Values by name, which all ranks of a job can leave and see.

    A name is used once in a launch: where there are many of a kind, it has a number (`order/7`).
    So an old message put back, or one under another's name, is no message.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        """Use a `store` of the mailbox's own (a `PrefixStore`); `secret` is this launch's."""
        self._store = store
        self._secret = secret

    def post(self, name: str, value: bytes) -> None:
        """Leave a value under a name that has had none; it is in the store when this returns.

        Raises:
            ConfigError: the value, with its code, is longer than the store takes.
        """
        sealed = seal_message(self._secret, name, value)
        if len(sealed) > _MAX_STORED_BYTES:
            raise ConfigError(
                f"message {name} ({len(sealed)} bytes) must be at most {_MAX_STORED_BYTES} bytes, "
                "the longest value of torch's store: it grows with the responses of a step "
                "(batch.rollout_prompts, batch.rollouts_per_prompt)"
            )
        self._store.set(name, sealed)  # type: ignore[arg-type]  # its stub knows text alone
        # `set` does not wait for the store, which may serve another connection first.
        self._store.check([name])

    def look(self, name: str) -> bytes | None:
        """The value of a name; None: there is none now. Never waits for one.

        Raises:
            MachineError: the value was not posted under this name in this launch.
        """
        # One request, so that nobody can erase the value between two. It changes nothing: what it
        # would put in place is what it compares with.
        sealed: bytes = self._store.compare_set(name, _ABSENT, _ABSENT)
        if sealed == _ABSENT.encode():
            return None
        try:
            return open_message(self._secret, name, sealed)
        except NotAuthenticError:
            raise MachineError(
                f"message {name} in the store at MASTER_ADDR:MASTER_PORT ({shown(sealed)}) must "
                "carry the code of this launch: it was damaged, or somebody else wrote it; "
                "nothing of it was used"
            ) from None

    def take(self, name: str) -> bytes:
        """The value of a name that must have one by now; erases it.

        Raises:
            MachineError: as of `look`, or it is gone.
        """
        value = self.look(name)
        if value is None:
            raise MachineError(
                f"message {name} in the store at MASTER_ADDR:MASTER_PORT must be there until it is "
                "read: somebody else removed it"
            )
        self.erase(name)
        return value

    def erase(self, name: str) -> None:
        """Remove a value, if there is one: what all have read would stay to the end of the job."""
        self._store.delete_key(name)
