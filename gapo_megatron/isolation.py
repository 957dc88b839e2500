"""How programs are isolated: the setting `reward.sandbox`. The standard library alone."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["bubblewrap", "apptainer", "service", "sandboxfusion", "unsafe"]

REMOTE: tuple[Kind, ...] = ("service", "sandboxfusion")
"""Kinds that run programs on other machines, with an interpreter of their own."""

SYSTEM_PYTHON = "/usr/bin/python3"

_URL = re.compile(r"(https?)://(?:[\w.-]+|\[[\da-f:]+\])(?::(\d{1,5}))?((?:/[\w.~-]+)*)/?")


def split_setting(setting: str) -> tuple[Kind, str]:
    """Read `reward.sandbox`: the kind, and which image or (as a URL) which service.

    Raises:
        ValueError: it is none of the forms; says which there are.
    """
    if setting == "bubblewrap":
        return "bubblewrap", ""
    if setting == "unsafe":
        return "unsafe", ""
    if setting.startswith("apptainer:/"):
        return "apptainer", setting.removeprefix("apptainer:")
    place = setting.removeprefix("sandboxfusion:")
    url = _URL.fullmatch(place)
    if url and (url[2] is None or 0 < int(url[2]) < 2**16):
        if place != setting:
            return "sandboxfusion", place.removesuffix("/")
        if url[1] == "https" and url[2] and not url[3]:
            return "service", place.removesuffix("/")
    raise ValueError(
        f"{setting!r} must be 'bubblewrap', 'apptainer:/PATH/OF/IMAGE', 'https://HOST:PORT' (a "
        "service of tools/serve_sandboxes.py), 'sandboxfusion:http://HOST:PORT' or 'unsafe'"
    )
