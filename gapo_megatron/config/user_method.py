"""`objective.method`: the name of a preset, or the user's `Method`, named as code."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gapo_megatron import user_code
from gapo_megatron.config.methods import METHODS, Method
from gapo_megatron.config.types import require_known
from gapo_megatron.errors import ConfigError

SETTING = "objective.method"
_NAME = re.compile(r"[\w.+-]{1,64}")
"""Labels of reports, and part of the name of a demo's folder."""

_OF_FAMILY = {
    "abc": ("eps_low_correct", "eps_high_wrong"),
    "dgpo": ("decay_low", "decay_high"),
    "nsr": ("rescue_noise",),
}
"""Numbers that a family needs, and others do not have."""


def find_method(name: str) -> Method:
    """Return the preset, or load the method from the user's file or module (once per process).

    Raises:
        ValueError: no preset has this name.
        ConfigError: the file cannot be loaded, or does not define a usable `Method`.
    """
    require_known("method", name, METHODS)
    return METHODS[name] if name in METHODS else _load(name)


@functools.cache
def _load(name: str) -> Method:
    method = user_code.load(name, setting=SETTING)
    if not isinstance(method, Method):
        raise ConfigError(
            f"{SETTING} ({name!r}) must be a gapo_megatron.objective.Method, not "
            f"{type(method).__name__}"
        )
    try:
        checked = check_method(asdict(method))
    except ValueError as error:
        raise ConfigError(f"{SETTING} ({name!r}): {error}") from None
    for part in ("family", "advantages"):
        if user_code.is_code(code := getattr(checked, part)):
            user_code.find_file(code, setting=f"{SETTING}, {part} of {checked.name!r}")
    return checked


def check_method(values: Mapping[str, Any]) -> Method:
    """A usable method with these values. Loads and looks for no code.

    Raises:
        ValueError: names a value and the rule.
    """
    try:
        method: Method = TypeAdapter(Method).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place} ({first['input']!r}): {first['msg']}") from None
    if broken := _broken_rule(method):
        raise ValueError(broken)
    return method


def values_of(method: Method) -> dict[str, Any]:
    """Its values, without those that `Method` has by default."""
    return {
        one.name: value
        for one in fields(method)
        if (value := getattr(method, one.name)) != one.default
    }


def _broken_rule(method: Method) -> str | None:
    """What a preset of this package never breaks, and the other checks of a config rely on."""
    if not _NAME.fullmatch(method.name):
        return f"name ({method.name!r}) must be a word of letters, digits and _.+-"
    require_known("family", method.family, sorted({one.family for one in METHODS.values()}))
    if method.advantages and not user_code.is_code(method.advantages):
        return f"advantages ({method.advantages!r}) must be code, path/to/file.py:NAME"
    if not method.eps_low > 0:
        return f"eps_low ({method.eps_low}) must be greater than 0"
    for name in ("eps_high_max", "focal_gamma", "virtual_correct"):
        if not getattr(method, name) >= 0:
            return f"{name} ({getattr(method, name)}) must not be negative"
    for name, value in values_of(method).items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} ({value}) must be a finite number"
    for family, names in _OF_FAMILY.items():
        for name in names:
            if broken := _broken_number(method, name, family=family):
                return broken
    needed = {"second_moment": "second_moment_max", "balanced": "positive_share_min"}
    key = needed.get(method.bounds)
    if key and getattr(method, key) is None:
        return f"{key} must be set with bounds {method.bounds!r}"
    if key and (method.ratio, method.family) != ("token", "clipped"):
        return f"bounds ({method.bounds!r}) need ratio 'token' and family 'clipped'"
    return None


def _broken_number(method: Method, name: str, *, family: str) -> str | None:
    """What is wrong with a number of `_OF_FAMILY`; a family of the user's may read it, too."""
    value = getattr(method, name)
    if value is None:
        return f"{name} must be set with family {family!r}" if method.family == family else None
    if method.family != family and not user_code.is_code(method.family):
        return f"{name} ({value}) does nothing for family {method.family!r}, only for {family!r}"
    if not value > 0:
        return f"{name} ({value}) must be greater than 0"
    if name == "rescue_noise" and value >= 1:
        return f"{name} ({value}) must be below 1"
    return None
