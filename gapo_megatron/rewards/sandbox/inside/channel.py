"""Lines of JSON between the sandbox and the judge."""

from __future__ import annotations

import json
import os
import select
from typing import Any

OUT_OF_MEMORY = 77
"""Exit code when the machine's memory ran out, which need not be the program's fault."""


class Channel:
    """Lines of JSON between this process and the judge."""

    def __init__(self, reading: int, writing: int) -> None:
        self._lines = os.fdopen(reading, "rb")
        self._writing = writing

    def receive(self) -> Any:
        """Return the next message; exit when the judge has closed the channel."""
        line = self._lines.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def is_closed(self) -> bool:
        """Whether the judge has closed the channel."""
        poll = select.poll()
        poll.register(self._lines, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._writing, data) :]
