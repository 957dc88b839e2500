"""Units behind values: where a value ends, and what its unit measures.

What stands behind a value is a unit if the lists here have it, word by word. Anything else is part
of the value: neither `3 eighths` nor `3 blorks` is 3.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from gapo_megatron.rewards.math.nouns import ENDINGS, LINKS, MODIFIERS, NOUNS

# Base quantities: of each the names, with their size in the first. Prefixed forms are written out,
# so that no product of letters passes for a unit.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre", "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter "
        "centimetre", "1/10": "dm decimeter decimetre", "1000": "km kilometer kilometre",
        "1/1000000": "micrometer micron", "1/1000000000": "nm nanometer nanometre",
        "254/10000": "in inch inche", "3048/10000": "ft foot feet", "9144/10000": "yd yard",
        "1609344/1000": "mi mile",
    },
    "mass": {
        "1": "g gram gramme gm", "1/1000": "mg milligram", "1000": "kg kilogram kilo",
        "1000000": "ton tonne", "45359237/100000": "lb pound", "45359237/1600000": "oz ounce",
    },
    "time": {
        "1": "s second sec", "60": "min minute", "3600": "h hour hr", "86400": "day",
        "604800": "week wk", "1/1000": "ms millisecond",
    },
    "month": {"1": "month", "12": "year yr annum", "120": "decade", "1200": "century"},
    "volume": {
        "1": "l liter litre", "1/1000": "ml milliliter millilitre", "1/100": "cl centiliter",
    },
    "gallon": {"1": "gallon gal", "1/4": "quart qt", "1/8": "pint", "1/16": "cup"},
    "dollar": {"1": "dollar buck usd $", "1/100": "cent ¢ penny pennie", "1/20": "nickel",
               "1/10": "dime"},
    "euro": {"1": "euro eur €"}, "sterling": {"1": "£ gbp"}, "rupee": {"1": "rupee rs inr"},
    "yen": {"1": "yen ¥"}, "yuan": {"1": "yuan rmb 元"}, "ruble": {"1": "ruble rouble"},
    "celsius": {"1": "°c celsius"}, "fahrenheit": {"1": "°f fahrenheit"},
    "angle": {"1": "degree deg"}, "radian": {"1": "radian rad"},
    "current": {"1": "ampere amp A", "1/1000": "mA"}, "voltage": {"1": "volt V", "1000": "kV"},
    "resistance": {"1": "ohm"}, "power": {"1": "watt W", "1000": "kilowatt kw", "1000000": "MW"},
    "force": {"1": "newton N", "1000": "kN"}, "energy": {"1": "joule J", "1000": "kilojoule kj"},
    "electronvolt": {"1": "eV", "1000": "keV", "1000000": "MeV", "1000000000": "GeV"},
    "calorie": {"1": "calorie cal", "1000": "kilocalorie kcal"},
    "frequency": {"1": "hertz hz", "1000": "kHz", "1000000": "MHz", "1000000000": "GHz"},
    "pressure": {"1": "pascal Pa", "1000": "kPa", "1000000": "MPa"}, "charge": {"1": "coulomb"},
    "kelvin": {"1": "kelvin"}, "mole": {"1": "mol mole"}, "acre": {"1": "acre"},
    "hectare": {"1": "hectare"}, "percent": {"1": "percent %"},
}  # fmt: skip
_UNITS = {
    name: (dimension, Fraction(size))
    for dimension, sizes in _TABLE.items()
    for size, names in sizes.items()
    for name in names.split()
}
_SPEEDS = {
    "mph": "mi/h", "kmh": "km/h", "kmph": "km/h", "kph": "km/h", "mps": "m/s", "fps": "ft/s",
    "sqcm": "cm^2", "sqm": "m^2", "sqft": "ft^2", "cc": "cm^3", "kwh": "kilowatt h",
}  # fmt: skip
_BARE_ONLY_IN_TEXT = {"in", "min", "rad", "ton"}
MAGNITUDES = {
    **{"dozen": 12, "hundred": 10**2, "thousand": 10**3, "万": 10**4, "亿": 10**8},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
}


class Unit(NamedTuple):
    """What a unit measures: sizes multiply, dimensions add."""

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"\\text\s*\{{[^{{}}]*\}}{_POWER}"
_FRACTION = rf"\\frac\s*\{{\s*{_WRAPPED}\s*\}}\s*\{{\s*{_WRAPPED}\s*\}}"
_PIECE = (
    rf"\s*(?:(?:(?:/|\\cdot(?![a-zA-Z])|\*)\s*)?(?:{_WRAPPED}|{_FRACTION})"
    # A single letter outside of text is a factor, but in km/h; and two behind a letter, \pi hr.
    rf"|(?:(?<=[\d%)}}])|(?<=\d\s)|(?<![a-zA-Z\\])(?=[a-zA-Z]{{3}}|[ckm]m\b))[a-zA-Z]{{2,}}\b\.?{_POWER}(?:\s*(?:/|per)\s*[a-zA-Z]+\b\.?{_POWER})?"
    r"|%(?!\s*%)|[€£¥¢°万亿元]|\\?\$|'{1,2}(?!'))"
)
_EACH = re.compile(_PIECE)
_TAIL = re.compile(rf"(?:{_PIECE})+\s*$")
_MOST_PIECES = 12  # more are no unit, and each might be one behind the rest
_VALUE_END = re.compile(r"[\w)}\].!|%]$")


def split_unit(text: str, *, with_magnitude: bool = False) -> tuple[str, str]:
    """The value and the unit behind it, in plain letters; no unit where none is.

    A unit begins with `million` and the like only `with_magnitude`.
    """
    tail = _TAIL.search(text)
    pieces = list(_EACH.finditer(text, tail.start())) if tail else []
    for piece in pieces if len(pieces) <= _MOST_PIECES else ():
        value, unit = text[: piece.start()].rstrip(), _plain(text[piece.start() :])
        if not _VALUE_END.search(value) or value.endswith(("\\le", "\\ge", "\\ne", "\\in")):
            continue
        if value.count("{") - value.count("\\{") != value.count("}") - value.count("\\}"):
            continue
        if value.endswith("%") and unit.startswith("%"):
            continue
        if unit in _BARE_ONLY_IN_TEXT and "\\" not in piece[0]:
            continue
        magnitude, rest = split_magnitude(unit) if with_magnitude else (1, unit)
        if is_unit(rest) or (magnitude > 1 and not rest):
            return value, unit
    return text, ""


def split_magnitude(unit: str) -> tuple[int, str]:
    """1,000 and the rest, where the unit begins with thousand; else 1."""
    magnitude, words = 1, unit.split()
    while words and words[0].lower() in MAGNITUDES:
        magnitude *= MAGNITUDES[words.pop(0).lower()]
    return magnitude, " ".join(words)


def is_unit(text: str) -> bool:
    """Whether the lists have all of it: measures, or nouns that are counted."""
    return text in ("'", "''") or read_unit(text) is not None or _is_counted(text)


_COUNTED = re.compile(r"[MT]*N(?:[LB]+[MT]*N)*[EBT]*|[EBT]+")


@functools.lru_cache(maxsize=1024)
def _is_counted(text: str) -> bool:
    """Nouns with what may stand around one: different ways, eggs per day, miles in total."""
    kinds = ""
    for written in text.replace("in total", "total").replace(".", " ").split():
        word = written.lower()
        is_noun = _find(written) or any(word + end in NOUNS for end in ("", "s", "es"))
        lists = {"M": word in MODIFIERS, "L": word in LINKS, "E": word in ENDINGS, "N": is_noun}
        lists |= {"B": word == "each", "T": word == "total"}
        kinds += next((kind for kind, has in lists.items() if has), "?")
    return bool(_COUNTED.fullmatch(kinds))


def _plain(unit: str) -> str:
    r"""Plain letters of a unit such as \text{ cm}^2 or \frac{\text{m}}{\text{s}}."""
    unit = re.sub(r"\\frac\s*\{(.*)\}\s*\{(.*)\}", r"\1/\2", unit)
    unit = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", unit).replace("\\cdot", " ")
    unit = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", unit).replace("\\$", "$")
    return " ".join(unit.replace("万", "万 ").replace("亿", "亿 ").split()).strip(" .,")


_PART = re.compile(
    r"(/|\bper\b)|([a-z]+|°[cf]|[%$€£¥¢元])\.?(?:\s*\^\s*(-?\d))?|(.)", re.IGNORECASE
)
_RAISED = re.compile(r"([a-z]+) (squared|cubed)\b", re.IGNORECASE)


@functools.lru_cache(maxsize=1024)
def read_unit(text: str) -> Unit | None:
    """What the unit measures; None where it is no unit of measurement, or not known."""
    size, dimensions = Fraction(1), dict[str, int]()
    sign, power_before = 1, 1
    text = _RAISED.sub(lambda unit: f"{unit[1]}^{2 if unit[2] == 'squared' else 3}", text)
    for old, new in _SPEEDS.items():
        text = re.sub(rf"\b{old}\b", new, text, flags=re.IGNORECASE)
    for match in _PART.finditer(text):
        divides, name, exponent, other = match.groups()
        if divides:
            sign = -1
            continue
        if other is not None:
            if other in " *()-":
                continue
            return None
        if name.lower() in ("square", "sq"):
            power_before = 2
            continue
        if name.lower() in ("cubic", "cu"):
            power_before = 3
            continue
        unit = _find(name)
        if unit is None:
            return None
        power = sign * power_before * int(exponent or 1)
        size *= unit[1] ** power
        dimensions[unit[0]] = dimensions.get(unit[0], 0) + power
        power_before = 1
    if not dimensions:
        return None
    if dimensions == {"volume": 1}:  # a litre is a cubic decimetre
        dimensions, size = {"length": 3}, size / 1000
    return Unit(size, tuple(sorted((k, v) for k, v in dimensions.items() if v)))


def _find(name: str) -> tuple[str, Fraction] | None:
    """By its letters; in any case where it has two or more: M is no metre."""
    for one in (name, name.lower()) if len(name) > 1 or name == "L" else (name,):
        for ending in ("", "s", "es") if len(name) > 2 else ("",):
            stem = one[: len(one) - len(ending)] if one.endswith(ending) else ""
            if stem in _UNITS:
                return _UNITS[stem]
    return None


def differ(one: str, other: str) -> bool:
    """Whether both are known, and measure different things or in different sizes."""
    first, second = read_unit(one), read_unit(other)
    return first is not None and second is not None and first != second


__all__ = ["Unit", "differ", "is_unit", "read_unit", "split_magnitude", "split_unit"]
