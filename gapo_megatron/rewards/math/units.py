"""Splits values from units, and reads what units measure.

Text after a value is a unit only if the lists here have every word of it. Anything else belongs to
the value: neither `3 eighths` nor `3 blorks` is 3.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from gapo_megatron.rewards.math.nouns import ENDINGS, LINKS, MODIFIERS, NUMERIC, is_noun, plural

# Dimension -> size relative to its first unit -> names. Prefixed forms are listed, so that no
# product of letters counts as a unit.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre", "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter "
        "centimetre", "1/10": "dm decimeter decimetre", "1000": "km kilometer kilometre",
        "1/1000000": "micrometer micron μm", "1/1000000000": "nm nanometer nanometre",
        "254/10000": "in inch", "3048/10000": "ft foot feet", "9144/10000": "yd yard",
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
    "dollar": {"1": "dollar buck usd $", "1/100": "cent ¢ penny", "1/20": "nickel",
               "1/10": "dime"},
    "euro": {"1": "euro eur €"}, "sterling": {"1": "£ gbp"}, "rupee": {"1": "rupee rs inr"},
    "yen": {"1": "yen ¥"}, "yuan": {"1": "yuan rmb 元"}, "ruble": {"1": "ruble rouble"},
    "celsius": {"1": "°c celsius"}, "fahrenheit": {"1": "°f fahrenheit"},
    "angle": {"1": "degree deg"}, "radian": {"1": "radian rad"},
    "current": {"1": "ampere amp A", "1/1000": "mA"}, "voltage": {"1": "volt V", "1000": "kV"},
    "resistance": {"1": "ohm Ω", "1000": "kΩ"},
    "power": {"1": "watt W", "1000": "kilowatt kw", "1000000": "MW"},
    "force": {"1": "newton N", "1000": "kN"}, "energy": {"1": "joule J", "1000": "kilojoule kj"},
    "electronvolt": {"1": "eV", "1000": "keV", "1000000": "MeV", "1000000000": "GeV"},
    "calorie": {"1": "calorie cal", "1000": "kilocalorie kcal"},
    "frequency": {"1": "hertz hz", "1000": "kHz", "1000000": "MHz", "1000000000": "GHz"},
    "pressure": {"1": "pascal Pa", "1000": "kPa", "1000000": "MPa", "101325": "atm"},
    "charge": {"1": "coulomb"}, "field": {"1": "tesla T"}, "level": {"1": "decibel dB"},
    "kelvin": {"1": "kelvin"}, "mole": {"1": "mol mole"}, "acre": {"1": "acre"},
    "hectare": {"1": "hectare"}, "percent": {"1": "percent %"},
}  # fmt: skip
_UNITS = {
    spelling: (dimension, Fraction(size))
    for dimension, sizes in _TABLE.items()
    for size, names in sizes.items()
    for name in names.split()
    for spelling in ((name, plural(name)) if len(name) > 1 else (name,))
}
_MEANINGS = {"'": ("foot", "minute"), "''": ("inch", "second"), "°": ("degree", "°c", "°f")}
"""Signs with several meanings; the unit of the other side decides."""

_SPEEDS = {
    "mph": "mi/h", "kmh": "km/h", "kmph": "km/h", "kph": "km/h", "mps": "m/s", "fps": "ft/s",
    "sqcm": "cm^2", "sqm": "m^2", "sqft": "ft^2", "cc": "cm^3", "kwh": "kilowatt h",
}  # fmt: skip
_ONLY_IN_TEXT = {"in", "min", "rad", "ton"}
# Units of two letters outside of \text; others are products of letters: mg, rs.
_BARE_OF_TWO = {"cm", "ft", "in", "kg", "km", "lb", "mm", "oz", "yd", "mL", "KB", "MB", "GB"}
MAGNITUDES = {
    **{"dozen": 12, "hundred": 10**2, "thousand": 10**3, "万": 10**4, "亿": 10**8},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
}


class Unit(NamedTuple):
    """Size and dimensions of a unit."""

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"(?:\\mu\s*)?\\text\s*\{{[^{{}}]*\}}{_POWER}"
_FRACTION = rf"\\frac\s*\{{\s*{_WRAPPED}\s*\}}\s*\{{\s*{_WRAPPED}\s*\}}"
_IN_TEXT = rf"(?:(?:/|\\cdot(?![a-zA-Z])|\*)\s*)?(?:{_WRAPPED}|{_FRACTION})"  # \text{m}, /\text{s}
# A word outside of \text: directly after a number, or of three letters. A single letter is a
# factor, except in km/h, and so are two after a letter: \pi hr.
_START = r"(?:(?<=[\d%)}])|(?<=\d\s)|(?<![a-zA-Z\\])(?=[a-zA-Z]{3}|[ckm]m\b))"
_BARE = rf"{_START}[a-zA-Z]{{2,}}\b\.?{_POWER}(?:\s*(?:/|per)\s*[a-zA-Z]+\b\.?{_POWER})?"
_DEGREE = r"°(?:\s*[CF](?![a-zA-Z]))?"
_SIGN = r"%(?!\s*%)|(?<=\d\s)\\Omega(?![a-zA-Z])|[€£¥¢万亿元]|\\?\$|'{1,2}(?!')"
_PIECE = rf"\s*(?:{_IN_TEXT}|{_BARE}|{_DEGREE}|{_SIGN})"
_EACH = re.compile(_PIECE)
_TAIL = re.compile(rf"(?:{_PIECE})+\s*$")
_MOST_PIECES = 12  # of one unit; each is tried as its beginning
_VALUE_END = re.compile(r"[\w)}\].!|%]$")


def split_unit(text: str, *, with_magnitude: bool = False) -> tuple[str, str]:
    """Split into value and unit, in plain letters; the unit is empty if there is none.

    A unit may begin with `million` and the like only `with_magnitude`.
    """
    tail = _TAIL.search(text)
    pieces = list(_EACH.finditer(text, tail.start())) if tail else []
    for piece in pieces if len(pieces) <= _MOST_PIECES else ():
        value, unit = text[: piece.start()].rstrip(), _plain(text[piece.start() :])
        if not _VALUE_END.search(value) or value.endswith(("\\le", "\\ge", "\\ne", "\\in")):
            continue
        if value.count("{") - value.count("\\{") != value.count("}") - value.count("\\}"):
            continue
        if not _fits(value, unit, is_bare="\\" not in piece[0]):
            continue
        magnitude, rest = split_magnitude(unit) if with_magnitude else (1, unit)
        if is_unit(rest) or (magnitude > 1 and not rest):
            return value, unit
    return text, ""


RADIANS = re.compile(r"(?<!\}\{)\\pi(?![a-zA-Z])")  # but not 180/pi
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]*\d")
_SHORT = re.compile(r"[a-zA-Z]{2}(?![a-zA-Z])")


def _fits(value: str, unit: str, *, is_bare: bool) -> bool:
    r"""Whether the unit may follow the value: x' is no foot, r^2\text{ h} no hour."""
    if unit in ("'", "''"):
        return bool(_PLAIN_NUMBER.fullmatch(value))
    if unit == "°":  # \pi degrees are not \pi
        return not value[-1].isalpha() and not RADIANS.search(value)
    if unit.startswith("%"):
        return not value.endswith("%")
    if len(unit) == 1 and has_letters(value):
        return False
    short = _SHORT.match(unit)
    return not is_bare or not (unit in _ONLY_IN_TEXT or (short and short[0] not in _BARE_OF_TWO))


def has_letters(value: str) -> bool:
    """Whether it is a ratio, or has letters other than e after its last equals sign."""
    return bool(re.search(r"[a-df-zA-Z:]", re.sub(r"\\[a-zA-Z]+", "", value.rpartition("=")[2])))


def split_magnitude(unit: str) -> tuple[int, str]:
    """Split `thousand grams` into 1,000 and `grams`; without a magnitude the number is 1."""
    magnitude, words = 1, unit.split()
    while words and words[0].lower() in MAGNITUDES:
        magnitude *= MAGNITUDES[words.pop(0).lower()]
    return magnitude, " ".join(words)


def is_unit(text: str) -> bool:
    """Whether the lists have all of it, as a unit of measurement or as counted nouns."""
    return text in _MEANINGS or read_unit(text) is not None or _is_counted(text)


_ITEM = "(?:[MTN]*U|[MTNA]*N)"
_COUNTED = re.compile(rf"{_ITEM}(?:[LB]+{_ITEM})*[EBT]*|[EBT]+")


@functools.lru_cache(maxsize=1024)
def _is_counted(text: str) -> bool:
    """Whether it is nouns with known words around them: different ways, eggs per day."""
    kinds = ""
    text = re.sub("^of (?:the )?", "", text.replace("in total", "total"))
    text = re.sub("(?:square|cube) root", "?", text)  # unlike other roots it changes the value
    for written in re.findall(r"[^\s.()]+", text):
        word = written.lower()
        lists = {"M": word in MODIFIERS, "L": word in LINKS, "E": word in ENDINGS}
        lists |= {"U": bool(_find(written)), "A": word in NUMERIC, "N": is_noun(word)}
        lists |= {"B": word == "each", "T": word == "total"}
        kinds += next((kind for kind, has in lists.items() if has), "?")
    return bool(_COUNTED.fullmatch(kinds))


def _plain(unit: str) -> str:
    r"""Write a unit such as \text{ cm}^2 or \frac{\text{m}}{\text{s}} in plain letters."""
    unit = re.sub(r"\\frac\s*\{(.*)\}\s*\{(.*)\}", r"\1/\2", unit)
    unit = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", unit).replace("\\cdot", " ")
    unit = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", unit).replace("\\$", "$")
    unit = re.sub(r"\\mu\s*", "μ", unit).replace("\\Omega", "Ω")
    unit = unit.replace("per cent", "percent")
    return " ".join(unit.replace("万", "万 ").replace("亿", "亿 ").split()).strip(" .,")


_PART = re.compile(
    r"(/|\bper\b)|([a-zμΩ]+|°[cf]|[%$€£¥¢元])\.?(?:\s*\^\s*(-?\d))?|(.)", re.IGNORECASE
)
_RAISED = re.compile(r"([a-z]+) (squared|cubed)\b", re.IGNORECASE)
_TEMPERATURE = re.compile(r"(?:°|\bdegrees?)\s*([cf])(?:elsius|ahrenheit)?\b", re.IGNORECASE)


@functools.lru_cache(maxsize=1024)
def read_unit(text: str) -> Unit | None:
    """Read size and dimensions of a unit; None if it is unknown or no unit of measurement."""
    # One spelling of powers, temperatures and speeds.
    size, dimensions = Fraction(1), dict[str, int]()
    sign, power_before = 1, 1
    text = _RAISED.sub(lambda unit: f"{unit[1]}^{2 if unit[2] == 'squared' else 3}", text)
    text = _TEMPERATURE.sub(r"°\1", text)
    for old, new in _SPEEDS.items():
        text = re.sub(rf"\b{old}\b", new, text, flags=re.IGNORECASE)
    # Factor by factor: sizes multiply, dimensions add.
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
    """Find a unit by name, ignoring case for two and more letters: M is no metre."""
    return _UNITS.get(name) or (_UNITS.get(name.lower()) if len(name) > 1 or name == "L" else None)


def ratio(one: str, other: str) -> Fraction | None:
    """Size of `one` in units of `other`; 1 if one of them is unknown, None if they contradict."""
    first, second = (
        [read_unit(name) for name in _MEANINGS.get(unit, (unit,))] for unit in (one, other)
    )
    pairs = [(ours, theirs) for ours in first for theirs in second]
    sizes = {a.size / b.size for a, b in pairs if a and b and a.dimensions == b.dimensions}
    if any(None in pair for pair in pairs):
        return Fraction(1)
    return sizes.pop() if len(sizes) == 1 else None


__all__ = [
    "RADIANS",
    "Unit",
    "has_letters",
    "is_unit",
    "ratio",
    "read_unit",
    "split_magnitude",
    "split_unit",
]
