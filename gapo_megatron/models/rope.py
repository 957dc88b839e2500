"""Read rotary position settings from configs of any version of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapo_megatron.errors import ConfigError

# The numbers of every supported kind of scaling.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class Rope:
    """Settings of the rotary position embedding."""

    base: float
    """rope_theta."""
    kind: str
    """rope_type: "default" or "llama3"."""
    scaling: dict[str, float]
    """The numbers of this kind; empty for "default"."""


def read_rope(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """Read the rotary settings of a model, and refuse ambiguous ones.

    Version 4 of transformers writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
    A setting in several of them must have the same value, because readers differ in which they
    prefer.

    Args:
        fields: the fields of config.json, or `hf_config.to_dict()`; null means missing.
        source: origin of the fields, for errors.

    Raises:
        ConfigError: two values of a setting differ, the kind is unknown, or a number is missing,
            invalid or does not belong to the kind.
    """
    stated = _stated(fields, source)
    values: dict[str, Any] = {}
    for name, places in stated.items():
        (first, value), *others = places.items()
        for other, other_value in others:
            if other_value != value:
                raise ConfigError(f"{source}: {first} is {value!r}, but {other} is {other_value!r}")
        values[name] = value

    kind = values.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(f"{source}: rope_type ({kind!r}) must be one of {', '.join(_SCALINGS)}")
    values.setdefault("rope_theta", 10_000.0)  # every reader's default
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ConfigError(f"{source}: {name} ({value!a:.80}) must be a positive number")
    if (share := values.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{source}: partial_rotary_factor ({share}) must be 1: whole heads")
    base = values.pop("rope_theta")
    names = _SCALINGS[kind]
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"{source}: rope_type {kind!r} needs {', '.join(missing)}")
    if extra := [name for name in values if name not in names]:
        raise ConfigError(f"{source}: rope_type {kind!r} does not have {', '.join(extra)}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ConfigError(
            f"{source}: low_freq_factor ({values['low_freq_factor']}) must be below "
            f"high_freq_factor ({values['high_freq_factor']})"
        )
    return Rope(base, kind, {name: values[name] for name in names})


def _stated(fields: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Setting -> {its name in the config: value}, without nulls."""
    stated: dict[str, dict[str, Any]] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.get(name) is not None:
            stated.setdefault(name, {})[name] = fields[name]
    for section in ("rope_scaling", "rope_parameters"):
        settings = {} if fields.get(section) is None else fields[section]
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{source}: {section} ({settings!r}) must be a table")
        for key, value in settings.items():
            if value is not None:
                name = "rope_type" if key == "type" else key
                stated.setdefault(name, {})[f"{section}.{key}"] = value
    return stated
