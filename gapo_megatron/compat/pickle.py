"""Private parts of CPython's pickle in use."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar


class CheckedUnpickler(pickle._Unpickler):
    """The unpickler written in Python, which refuses pickles made to end the process.

    A tuple used as a dictionary key is hashed with all its contents: a deep one overflows the
    stack, and one that holds another twice, which holds another twice ..., takes for ever. The
    unpickler written in C, with which other readers may read the same bytes, allocates a table as
    long as the largest index of its memo.
    """

    # Uses: pickle._Unpickler, its dispatch, memo and stack
    # Versions: CPython 3.11, 3.12
    # Upstream: none found
    MAX_ITEMS = 2_000
    """Items of the tuples in a tuple: the state of Python's random numbers has 625. A tuple in a
    tuple in a tuple ... is looked through once for each, 2 million items up to here."""
    memo: dict[int, Any]
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def check_top(self) -> None:
        """Check what the last operation has put on the stack and into the memo.

        Raises:
            ValueError: a tuple is too large, or an index of the memo too far ahead.
        """
        if self.memo and (index := next(reversed(self.memo))) > len(self.memo):
            raise ValueError(f"{index} as the index of object {len(self.memo)}")
        num_items, found = 0, [self.stack[-1]]
        while found:
            item = found.pop()
            if not isinstance(item, tuple):
                continue
            inner = [one for one in item if isinstance(one, tuple)]
            num_items += sum(1 + len(one) for one in inner)
            if num_items > self.MAX_ITEMS:
                raise ValueError(f"tuples of more than {self.MAX_ITEMS} items in a tuple")
            found += inner


def _checked(operation: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(unpickler: CheckedUnpickler) -> None:
        operation(unpickler)
        unpickler.check_top()

    return run


for _opcode in b"t\x85\x86\x87pqr":  # TUPLE to TUPLE3, and the three kinds of PUT
    CheckedUnpickler.dispatch[_opcode] = _checked(pickle._Unpickler.dispatch[_opcode])
# Allocates as many bytes as the pickle says, before it reads them.
del CheckedUnpickler.dispatch[pickle.BYTEARRAY8[0]]
