"""Checks of values on the device whose outcome is read later, all of a pass at once.

To ask a GPU whether a value is finite is to wait until it has computed it, and while the host waits
it launches nothing. So checks within a pass over micro-batches raise a flag on the device; whoever
runs the pass reads all of them together when it is over, and only then looks for the culprit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Flags:
    """Flags of one pass, in the order in which they were kept.

    Attributes:
        where: put before the messages of flags kept from now on, for example the micro-batch.
    """

    def __init__(self) -> None:
        """Keep none."""
        self.where = ""
        self._raised: list[torch.Tensor] = []
        self._explain: list[Callable[[], Exception]] = []
        self._where: list[str] = []

    def keep(self, is_raised: torch.Tensor, explain: Callable[[], Exception]) -> None:
        """Remember a flag; nothing waits.

        Args:
            is_raised: scalar bool on the device, as `~(...).all()`: where tensors have no data
                (`ops.plan.no_data`) every truth that is computed is True, and no flag is raised.
            explain: called if it turns out to be raised; may wait for the device. What it refers to
                stays in memory until the flags are dropped: hold rows, not hidden states.
        """
        self._raised.append(is_raised)
        self._explain.append(explain)
        self._where.append(self.where)

    def any(self, device: torch.device) -> torch.Tensor:
        """Whether one is raised: scalar bool on `device`; nothing waits."""
        if not self._raised:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack(self._raised).any()

    def error(self) -> Exception | None:
        """Explain the first one raised; None: there is none. Waits for the device, once."""
        if not self._raised:
            return None
        flags = torch.stack(self._raised).tolist()
        if True not in flags:
            return None
        first = flags.index(True)
        error = self._explain[first]()
        return type(error)(f"{self._where[first]}: {error}") if self._where[first] else error

    def check(self) -> None:
        """Raise the error of the first flag raised, if any. Waits for the device, once."""
        error = self.error()
        if error is not None:
            raise error
