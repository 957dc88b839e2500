"""Messages through the job's rendezvous store."""

from __future__ import annotations

import torch.distributed as dist

from gapo_megatron.errors import ConfigError, MachineError

_ABSENT = "\0absent"
"""Stored value of a name that has no message."""
_MAX_STORED_BYTES = 8 * 2**20
"""Longest value of torch's TCPStore; it closes a connection that sends a longer value."""


class Mailbox:
    """Values by name, which all ranks of a job can post and read.

    Each name is used once in a launch; repeated messages are numbered (`order/7`).
    """

    def __init__(self, store: dist.Store) -> None:
        """Use `store`, a `PrefixStore` for this mailbox only."""
        self._store = store

    def post(self, name: str, value: bytes) -> None:
        """Post a value under a new name; it is in the store when this returns.

        Raises:
            ConfigError: the value is longer than the store allows.
        """
        if len(value) > _MAX_STORED_BYTES:
            raise ConfigError(
                f"message {name} ({len(value)} bytes) must be at most {_MAX_STORED_BYTES} bytes, "
                "the limit of torch's store; it grows with the responses of a step, and with those "
                "that stay open after it (batch.rollout_prompts, batch.rollouts_per_prompt, "
                "batch.oversampling)"
            )
        self._store.set(name, value)  # type: ignore[arg-type]  # its stub accepts str only
        # `set` does not wait for the store, which may serve another connection first.
        self._store.check([name])

    def look(self, name: str) -> bytes | None:
        """The value of a name, or None if it has none yet. Never waits."""
        # A single request, so that no rank can erase the value in between. It changes nothing: the
        # new value equals the value that it compares with.
        value: bytes = self._store.compare_set(name, _ABSENT, _ABSENT)
        return None if value == _ABSENT.encode() else value

    def take(self, name: str) -> bytes:
        """Return and erase the value of a name that must have been posted.

        Raises:
            MachineError: the value is missing.
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
