"""How programs are isolated: the setting `reward.sandbox`. The standard library alone."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["bubblewrap", "apptainer", "service", "unsafe"]

SYSTEM_PYTHON = "/usr/bin/python3"


def split_setting(setting: str) -> tuple[Kind, str]:
    """Read `reward.sandbox`: the kind, and which image or (as host:port) which service.

    Raises:
        ValueError: it is none of the forms; says which there are.
    """
    if setting == "bubblewrap":
        return "bubblewrap", ""
    if setting == "unsafe":
        return "unsafe", ""
    if setting.startswith("apptainer:/"):
        return "apptainer", setting.removeprefix("apptainer:")
    address = re.fullmatch(r"tcp://((?:[\w.-]+|\[[\da-f:]+\]):(\d+))", setting)
    if address and 0 < int(address[2]) < 2**16:
        return "service", address[1]
    raise ValueError(
        f"{setting!r} must be 'bubblewrap', 'apptainer:/PATH/OF/IMAGE', 'tcp://HOST:PORT' (a "
        "service) or 'unsafe'"
    )
