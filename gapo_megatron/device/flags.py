"""Checks of device values whose results are read together at the end of a pass.

Reading from a GPU whether a value is finite makes the host wait, during which it launches no
kernels. So checks within a pass over micro-batches store a flag on the device; after the pass all
flags are read at once, and the cause is determined only then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Flags:
    """Flags of a pass, in the order in which they were stored.

    Attributes:
        where: prefix of the messages of later flags, e.g. the micro-batch.
    """

    def __init__(self) -> None:
        """Start without flags."""
        self.where = ""
        self._raised: list[torch.Tensor] = []
        self._explain: list[Callable[[], Exception]] = []
        self._where: list[str] = []

    def keep(self, is_raised: torch.Tensor, explain: Callable[[], Exception]) -> None:
        """Store a flag; does not wait for the device.

        Args:
            is_raised: scalar bool on the device, written as `~(...).all()`: for tensors without
                data (a deep dry run) every computed bool is True, so no flag is raised.
            explain: called if the flag is raised; may wait for the device. Tensors it refers to
                stay in memory until the flags are dropped, so it should hold rows, not hidden
                states.
        """
        self._raised.append(is_raised)
        self._explain.append(explain)
        self._where.append(self.where)

    def any(self, device: torch.device) -> torch.Tensor:
        """Whether any flag is raised: scalar bool on `device`; does not wait for the device."""
        if not self._raised:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack(self._raised).any()

    def error(self) -> Exception | None:
        """The error of the first raised flag, or None. Waits for the device, once."""
        if not self._raised:
            return None
        flags = torch.stack(self._raised).tolist()
        if True not in flags:
            return None
        first = flags.index(True)
        error = self._explain[first]()
        return type(error)(f"{self._where[first]}: {error}") if self._where[first] else error

    def check(self) -> None:
        """Raise the error of the first raised flag, if any. Waits for the device, once."""
        error = self.error()
        if error is not None:
            raise error
