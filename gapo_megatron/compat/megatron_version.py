"""Version of the Megatron-core that is installed, without importing it. Standard library only."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from gapo_megatron.errors import ConfigError

_OLDEST = "0.19.2"


@functools.cache
def version() -> str:
    """Megatron-core's version, without the commit that it adds if its folder is in a repository.

    That commit is of any repository around it: of this one, if its environment is a folder in it.

    Raises:
        ConfigError: it is not installed.
    """
    # Uses: MAJOR, MINOR, PATCH, PRE_RELEASE in megatron/core/package_info.py
    # Versions: megatron-core 0.19.2
    # Upstream: none found (`__version__` has the commit, `__shortversion__` no pre-release)
    spec = importlib.util.find_spec("megatron")  # of "megatron.core" it would import this one
    folders = (spec and spec.submodule_search_locations) or ()
    places = [Path(folder) / "core" / "package_info.py" for folder in folders]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ConfigError("megatron-core is not installed: install the version of requirements/")
    text = found.read_text(encoding="utf-8")
    fields = dict(re.findall(r"""^([A-Z_]+) = ["']?([\w.]*)""", text, re.MULTILINE))
    if not {"MAJOR", "MINOR", "PATCH"} <= fields.keys():
        raise ConfigError(f"{found} does not say megatron-core's version")
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map({"PRE_RELEASE": ""} | fields)


def check_version() -> None:
    """Refuse a Megatron-core that is older than the one that this package is tested with.

    Raises:
        ConfigError: names both versions.
    """
    # Uses: as `version`
    # Versions: megatron-core 0.19.2 (older ones lack NVIDIA/Megatron-LM#5916)
    # Upstream: as of `version`
    if _numbers(version()) < _numbers(_OLDEST):
        raise ConfigError(
            f"megatron-core {version()} is installed, but {_OLDEST} is the oldest that this "
            "package runs with. Install the version of requirements/, on CPython 3.11 by "
            f"pip install --no-deps --ignore-requires-python megatron-core=={_OLDEST}"
        )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]
