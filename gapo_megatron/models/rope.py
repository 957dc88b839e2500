"""Read rotary position settings from configs of any version of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapo_megatron.errors import ConfigError

# Kinds that are known and refused, with the reason.
_REFUSED = dict.fromkeys(
    ("longrope", "su"),  # the second is Phi-3's first name of the first
    "transformers chooses the factors of longrope by the length of each sequence, vLLM by that of "
    "its longest, so their log-probs differ",
)
# The numbers of every supported kind of scaling.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Those that may be missing, with every reader's default; None: it has an effect only if stated.
_OPTIONAL: dict[str, dict[str, float | None]] = {
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
}


@dataclass(frozen=True)
class Rope:
    """Settings of the rotary position embedding."""

    base: float
    """rope_theta."""
    kind: str
    """rope_type: a key of `_SCALINGS`."""
    scaling: dict[str, float]
    """The numbers of this kind; empty for "default". Of "yarn" one is true or false: `truncate`."""
    share: float = 1.0
    """partial_rotary_factor: share of a head, from its first element on, that is rotated."""
    windowed_base: float | None = None
    """Base of windowed layers, which are not scaled; None: as of the others."""

    @property
    def fields(self) -> dict[str, Any]:
        """The settings as transformers 5 writes them, in `rope_parameters`."""
        share = {} if self.share == 1.0 else {"partial_rotary_factor": self.share}
        whole = {"rope_theta": self.base, "rope_type": self.kind, **self.scaling, **share}
        if self.windowed_base is None:
            return whole
        windowed = {"rope_type": "default", "rope_theta": self.windowed_base}
        return {"full_attention": whole, "sliding_attention": windowed}

    def rotated(self, head_dim: int) -> int:
        """Number of elements of a head that are rotated."""
        return int(head_dim * self.share)

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines, so that its square is one of attention scores (YaRN)."""
        if self.kind != "yarn":
            return 1.0
        if (stated := self.scaling.get("attention_factor")) is not None:
            return stated
        factor, names = self.scaling["factor"], ("mscale", "mscale_all_dim")
        if all(name in self.scaling for name in names):
            ours, whole = (yarn_magnitude(factor, self.scaling[name]) for name in names)
            return ours / whole
        return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's recommended magnitude of queries and keys in a context that is `factor` times longer.

    0.1 x weight x ln(factor) + 1 (arXiv 2309.00071). DeepSeek's models have weights (mscale,
    mscale_all_dim), and the square of the latter's magnitude as a factor of all scores.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_ramp(rope: Rope, size: int) -> tuple[float, float]:
    """The pairs between which YaRN passes from unchanged frequencies to those over `factor`.

    The numbers, perhaps fractional, of the pairs that turn `beta_fast` and `beta_slow` times within
    the original context; of `size` / 2 pairs that are rotated.
    """

    def pair(turns: float) -> float:
        wavelength = rope.scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(rope.base))

    first, last = pair(rope.scaling["beta_fast"]), pair(rope.scaling["beta_slow"])
    if rope.scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last if last != first else last + 0.001


def read_rope(
    fields: Mapping[str, Any], *, source: str = "config.json", base_field: str = "rope_theta"
) -> Rope:
    """Read the rotary settings of a model, and refuse ambiguous ones.

    Version 4 of transformers writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
    A setting in several of them must have the same value, because readers differ in which they
    prefer.

    Args:
        fields: the fields of config.json, or `hf_config.to_dict()`; null means missing.
        source: origin of the fields, for errors.
        base_field: the field of the base, outside of the tables.

    Raises:
        ConfigError: two values of a setting differ, the kind is unknown, or a number is missing,
            invalid or does not belong to the kind.
    """
    stated = _stated(fields, source, base_field)
    values: dict[str, Any] = {}
    for name, places in stated.items():
        (first, value), *others = places.items()
        for other, other_value in others:
            if other_value != value:
                raise ConfigError(f"{source}: {first} is {value!r}, but {other} is {other_value!r}")
        values[name] = value

    kind = values.pop("rope_type", "default")
    if isinstance(kind, str) and kind in _REFUSED:
        raise ConfigError(f"{source}: rope_type ({kind!r}) is not supported: {_REFUSED[kind]}")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(f"{source}: rope_type ({kind!r}) must be one of {', '.join(_SCALINGS)}")
    truncate = values.pop("truncate", None)
    if truncate is not None and not isinstance(truncate, bool):
        raise ConfigError(f"{source}: truncate ({truncate!a:.80}) must be true or false")
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            place = next(iter(stated[name]))
            raise ConfigError(f"{source}: {place} ({value!a:.80}) must be a positive number")
    if (share := values.pop("partial_rotary_factor", 1.0)) > 1:
        raise ConfigError(f"{source}: partial_rotary_factor ({share}) must be 1 or less")
    base = values.pop("rope_theta", 10_000.0)  # every reader's default
    names, optional = _SCALINGS[kind], _OPTIONAL.get(kind, {})
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"{source}: rope_type {kind!r} needs {', '.join(missing)}")
    if truncate is not None:
        values["truncate"] = truncate
    if extra := [name for name in values if name not in (*names, *optional)]:
        raise ConfigError(f"{source}: rope_type {kind!r} does not have {', '.join(extra)}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ConfigError(
            f"{source}: low_freq_factor ({values['low_freq_factor']}) must be below "
            f"high_freq_factor ({values['high_freq_factor']})"
        )
    if kind == "yarn" and base <= 1:
        raise ConfigError(f"{source}: rope_theta ({base}) must be above 1 for rope_type 'yarn'")
    filled = {**{name: value for name, value in optional.items() if value is not None}, **values}
    order = (*names, *optional)
    return Rope(base, kind, {name: filled[name] for name in order if name in filled}, float(share))


def _stated(fields: Mapping[str, Any], source: str, base_field: str) -> dict[str, dict[str, Any]]:
    """Setting -> {its name in the config: value}, without nulls."""
    stated: dict[str, dict[str, Any]] = {}
    for name, field in (
        ("rope_theta", base_field),
        ("partial_rotary_factor", "partial_rotary_factor"),
    ):
        if fields.get(field) is not None:
            stated.setdefault(name, {})[field] = fields[field]
    for section in ("rope_scaling", "rope_parameters"):
        settings = {} if fields.get(section) is None else fields[section]
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{source}: {section} ({settings!r}) must be a table")
        for key, value in settings.items():
            if value is not None:
                name = "rope_type" if key == "type" else key
                stated.setdefault(name, {})[f"{section}.{key}"] = value
    if (name := "original_max_position_embeddings") in stated and fields.get(name) is not None:
        stated[name][name] = fields[name]  # which readers prefer
    return stated
