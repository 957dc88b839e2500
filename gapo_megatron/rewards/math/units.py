"""Units behind values: where a value ends, and what its unit measures."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

# Base quantities: of each the names, with their size in the first. Prefixed forms are written out,
# so that no product of letters passes for a unit.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter metre", "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter "
        "centimetre", "1/10": "dm decimeter decimetre", "1000": "km kilometer kilometre",
        "1/1000000": "micrometer micron", "1/1000000000": "nm nanometer nanometre",
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
    "dollar": {"1": "dollar buck usd $", "1/100": "cent ¢ penny pennie", "1/20": "nickel",
               "1/10": "dime", "1/4": "quarter"},
    "euro": {"1": "euro eur €"}, "sterling": {"1": "£ gbp"}, "rupee": {"1": "rupee rs inr"},
    "yen": {"1": "yen"}, "yuan": {"1": "yuan rmb"}, "ruble": {"1": "ruble rouble"},
    "celsius": {"1": "°c celsius"}, "fahrenheit": {"1": "°f fahrenheit"},
    "angle": {"1": "degree deg"}, "radian": {"1": "radian rad"},
    "current": {"1": "ampere amp"}, "voltage": {"1": "volt"}, "resistance": {"1": "ohm"},
    "power": {"1": "watt", "1000": "kilowatt kw"}, "force": {"1": "newton"},
    "energy": {"1": "joule", "1000": "kilojoule kj"},
    "frequency": {"1": "hertz hz"}, "pressure": {"1": "pascal"}, "kelvin": {"1": "kelvin"},
    "mole": {"1": "mol mole"}, "acre": {"1": "acre"}, "hectare": {"1": "hectare"},
    "percent": {"1": "percent"},
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
_BARE = sorted(
    {
        name + plural
        for name in (*_UNITS, *_SPEEDS, "unit", "lbs", "inche")
        for plural in ("", "s")
        if len(name) > 1 and name.isalpha() and name not in ("in", "min", "rad", "ton")
    }
    | {"feet", "inches", "mins", "tons", "hrs", "yrs", "pennies", "centuries"},
    key=len,
    reverse=True,
)


class Unit(NamedTuple):
    """What a unit measures: sizes multiply, dimensions add."""

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"\\text\s*\{{[^{{}}]*\}}{_POWER}"
_FRACTION = rf"\\frac\s*\{{\s*{_WRAPPED}\s*\}}\s*\{{\s*{_WRAPPED}\s*\}}"
_BARE_UNIT = (
    rf"(?<![a-zA-Z\\])(?:(?:sq(?:uare|\.)?|cubic|cu\.?)\s*)?(?:{'|'.join(_BARE)})\b\.?"
    rf"(?:\s*(?:/|per)\s*(?:{'|'.join([*_BARE, 'h', 's', 'min'])})\b\.?)?{_POWER}"
)
_END = re.compile(
    rf"(?:\s*(?:/|\\cdot|\*)?\s*(?:{_WRAPPED}|{_FRACTION})"
    rf"|(?:(?<=[\d%)}}])|(?<=\d\s)|\s*(?=[a-z]{{3}}|[ckm]m\b))\s*(?:{_BARE_UNIT}))+\s*$"
)
_WORDS_END = re.compile(
    r"(?<=[\d%)}])\s+[a-z]{3,}(?:\s+[a-z]{2,}){0,3}$|(?<=\d)[a-z]{5,}$|(?<=\d)\s*(?:[^\x00-\x7f\W\d]+|'{1,2})$"
)
_NO_UNIT = re.compile(
    r"\b(?:if|when|where|for|is|are|was|such|that|not|no|with|mod|modulo|base|factorial|squared"
    r"|cubed|times|and|or|only if|choose|some|any|all|than|by|to|from|plus|minus|over|divided"
    r"|infinity|pi|root|sqrt|hundred|thousand|million|billion|trillion|halve|third|fourth|fifth"
    r"|halves|tenths?|hundredths?|thousandths?|thirds|fourths|fifths)\b|[=<>]|\d{2}|:",
    re.IGNORECASE,
)


def split_unit(text: str) -> tuple[str, str]:
    """The value and the unit behind it, as it is written; no unit where none is.

    Conditions (`if n is odd`), multipliers and what else changes the value are no units.
    """
    match = _END.search(text) or (_WORDS_END.search(text) if _is_numeric(text) else None)
    if match is None:
        return text, ""
    value, unit = text[: match.start()].rstrip(), match[0].strip()
    if not value or value[-1] in "+-*/=<>,;:^_(" or _NO_UNIT.search(_plain(unit)):
        return text, ""
    if not re.search(r"\d|\\(?:pi|sqrt|frac|infty)|[a-zA-Z)}]$", value):
        return text, ""
    if value.count("{") - value.count("\\{") != value.count("}") - value.count("\\}"):
        return text, ""
    return value, _plain(unit)


def _is_numeric(text: str) -> bool:
    return bool(re.match(r"\s*[-+$(]?\s*(?:[\d.]|\\(?:frac|sqrt))", text))


def _plain(unit: str) -> str:
    r"""Plain letters of a unit such as \text{ cm}^2 or \frac{\text{m}}{\text{s}}."""
    unit = re.sub(r"\\frac\s*\{(.*)\}\s*\{(.*)\}", r"\1/\2", unit)
    unit = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", unit).replace("\\cdot", " ")
    unit = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", unit)
    return " ".join(unit.split()).strip(" .,")


_PART = re.compile(r"(/|\bper\b)|([a-z°$€£¢]+)\.?(?:\s*\^\s*(-?\d))?|(.)", re.IGNORECASE)


def read_unit(text: str) -> Unit | None:
    """What the unit measures; None where it is no unit of measurement, or not known."""
    size, dimensions = Fraction(1), dict[str, int]()
    sign, power_before = 1, 1
    text = re.sub(r"\s+", " ", text)
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
        if name.lower() in ("square", "sq", "squared"):
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
    for one in (name, name.lower()):
        for ending in ("", "s", "es"):
            stem = one[: len(one) - len(ending)] if one.endswith(ending) else ""
            if stem in _UNITS:
                return _UNITS[stem]
    return _UNITS.get(name.lower().replace("inches", "inch"))


def differ(one: str, other: str) -> bool:
    """Whether both are known, and measure different things or in different sizes."""
    first, second = read_unit(one), read_unit(other)
    return first is not None and second is not None and first != second


__all__ = ["Unit", "differ", "read_unit", "split_unit"]
