"""Splits values from units, and reads what units measure.

Text after a value is a unit only if the lists here have every word of it. Anything else belongs to
the value: neither `3 eighths` nor `3 blorks` is 3.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from gapo_megatron.rewards.math.nouns import CHANGES_VALUE, WORDS, is_noun

_NEVER = frozenset(["a", "am", "are", "as", "at", "count", "dot", "pi", "unit", "us"])
"""Names of units in pint that are other words here."""
CURRENCIES = "€£¥₹₽₩₺"
"""Signs that stand before a number or behind it; so does the dollar's."""
_OF_ONE_SIGN = frozenset(f"mgshlLAVWNTKJCFHS$¢%元ΩÅ{CURRENCIES}")
"""Other single letters are factors, or mean thousands and millions."""

_MEANINGS = {"'": ("foot", "minute"), "''": ("inch", "second"), "°": ("degree", "°c", "°f")}
"""Signs with several meanings; the unit of the other side decides."""

MAGNITUDES = {
    **{"dozen": 12, "hundred": 10**2, "thousand": 10**3, "万": 10**4, "亿": 10**8},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12},
}


class Unit(NamedTuple):
    """Size and dimensions of a unit."""

    size: Fraction
    dimensions: tuple[tuple[str, Fraction], ...] = ()

    def raised(self, power: Fraction) -> Unit:
        """The unit to a power; the size of a root is rounded."""
        is_root = power.denominator > 1
        size = Fraction(float(self.size) ** float(power)) if is_root else self.size ** int(power)
        return Unit(size, tuple((name, old * power) for name, old in self.dimensions))

    def times(self, other: Unit) -> Unit:
        """The product of two units."""
        found = dict(self.dimensions)
        for name, power in other.dimensions:
            found[name] = found.get(name, Fraction(0)) + power
        return Unit(self.size * other.size, tuple(sorted((n, p) for n, p in found.items() if p)))


class _Table:
    """Units by name, from the definitions in the package pint, which is not imported.

    That would take longer than everything else that a worker imports; reading the two files takes
    milliseconds.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("pint")
        assert spec is not None and spec.origin is not None, "pint is not installed"
        self._values: dict[str, tuple[str, str]] = {}
        self._prefixes: dict[str, Fraction] = {}
        self._units: dict[str, str] = {}  # as it may be written: its name
        folder, own = Path(spec.origin).parent, Path(__file__).with_name("units.txt")
        for path in (folder / "constants_en.txt", folder / "default_en.txt", own):
            self._define(path.read_text("utf-8"), is_unit=path.name != "constants_en.txt")
        self._units = {one.lower(): one for one in self._units if len(one) > 1} | self._units
        spaced = (name.replace("_", " ") for name in self._units if re.search("[a-z]_[a-z]", name))
        self.spaced = re.compile(rf"\b(?:{'|'.join(spaced)})(?=(?:e?s)?\b)", re.IGNORECASE)

    def _define(self, text: str, *, is_unit: bool) -> None:
        for line in text.splitlines():
            names = [part.strip() for part in line.partition("#")[0].split(" = ")]
            if len(names) < 2 or names[0].startswith(("@", "[")):
                continue
            value = names.pop(1)
            if names[0].endswith("-"):
                size = Fraction(2) ** int(value[3:]) if "**" in value else Fraction(value)
                self._prefixes |= {one[:-1]: size for one in names}
                continue
            self._values |= {one: (names[0], value) for one in names}
            self._units |= {one: one for one in names if is_unit and one != "_"}

    def find(self, written: str) -> Unit | None:
        """Find a unit by name, symbol or plural, ignoring case where that leaves one."""
        singular = re.sub("(?<=..)s$", "", written)
        for name in dict.fromkeys((written, singular, singular.removesuffix("e"))):
            if (name.lower() if name[1:] else name) in _NEVER or (
                CHANGES_VALUE.fullmatch(name) and name != "percent"
            ):
                return None
            if found := self._find(name) or (self._find(name.lower(), "k") if name[1:] else None):
                return found
        return None

    def _find(self, name: str, any_case: str = "") -> Unit | None:
        """Find one spelling; the case of a symbol counts but with no prefix or `any_case`."""
        if name in self._units and (any_case or self._units[name] == name):
            return self._unit(self._units[name]) if len(name) > 1 or name in _OF_ONE_SIGN else None
        for prefix, size in self._prefixes.items():
            rest = name.removeprefix(prefix)
            if rest == name or rest not in self._units:
                continue
            is_symbol = len(prefix) < 3 and (len(rest) > 1 or rest in _OF_ONE_SIGN or rest == "B")
            is_exact = self._units[rest] == rest and self._values[rest][0] != rest
            if len(prefix) > 3 or (is_symbol and (is_exact or prefix == any_case)):
                return self._unit(self._units[rest]).times(Unit(size))
        return None

    @functools.cache  # noqa: B019 (there is one table)
    def _unit(self, name: str) -> Unit:
        if name not in self._values:  # within a definition: kilogram, cm
            prefix = max(filter(name.startswith, self._prefixes), key=len)
            return self._unit(name.removeprefix(prefix)).times(Unit(self._prefixes[prefix]))
        own, value = self._values[name]
        if value.startswith("[") or ";" in value:  # a dimension, or no multiple of another unit
            return Unit(Fraction(1), ((own, Fraction(1)),))
        value = re.sub(r"(?<=[\w)])\s+(?=[\w(])", "*", value.replace("^", "**"))
        value = re.sub(r"(?<![\w.])(?=[^\W\d])", "unit_", value)  # `in` is a word of Python
        return self._product(ast.parse(value, mode="eval").body)

    def _product(self, node: ast.expr) -> Unit:
        match node:
            case ast.BinOp(left, operator, right):
                one, other = self._product(left), self._product(right)
                if isinstance(operator, ast.Pow):
                    return one.raised(other.size)
                return one.times(other.raised(Fraction(-1 if type(operator) is ast.Div else 1)))
            case ast.UnaryOp(ast.USub(), value):
                return self._product(value).times(Unit(Fraction(-1)))
            case ast.Constant(value):
                return Unit(Fraction(str(value)))
            case ast.Name(name):
                return self._unit(name.removeprefix("unit_"))
        raise AssertionError(ast.dump(node))


_table = functools.cache(_Table)

_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"(?:\\mu\s*)?\\text\s*\{{[^{{}}]*\}}{_POWER}"
_FRACTION = rf"\\frac\s*\{{\s*{_WRAPPED}\s*\}}\s*\{{\s*{_WRAPPED}\s*\}}"
# \text{m}, /\text{s}
_IN_TEXT = rf"(?:(?:/|\\cdot(?![a-zA-Z])|\*)\s*)?(?:{_WRAPPED}|{_FRACTION})|/\s*[a-zA-Z]{{3,}}\b"
# A word outside of \text: directly after a number, or of three letters. A single letter is a
# factor, except in km/h, and so are two after a letter: \pi hr.
_START = r"(?:(?<=[\d%)}])|(?<=\d\s)|(?<![a-zA-Z\\])(?=[a-zA-Z]{3}|[ckm]m\b))"
_BARE = rf"{_START}[a-zA-Z]{{2,}}\b\.?{_POWER}(?:\s*(?:/|per)\s*[a-zA-Z]+\b\.?{_POWER})?"
_DEGREE = r"°(?:\s*[CF](?![a-zA-Z]))?"
_SIGN = (
    r"%(?!\s*%)|(?<=\d\s)\\Omega(?![a-zA-Z])|[ML]_\{?\\odot\}?"
    rf"|[{CURRENCIES}¢万亿元Å]|\\?\$|'{{1,2}}(?!')"
)
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
_SHORT = re.compile(r"[a-zA-Z]{2,3}(?![a-zA-Z])")


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
    short = _SHORT.match(unit) if is_bare else None
    return not short or short[0] in WORDS["bare_units"] or is_noun(short[0].lower())


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


_KINDS = {
    **{"M": "modifiers", "L": "links", "E": "endings", "A": "numeric", "B": "each", "T": "total"}
}
_ITEM = "(?:[MTN]*U|[MTNA]*N)"
_COUNTED = re.compile(rf"{_ITEM}(?:[LB]+{_ITEM})*[EBT]*|[EBT]+")


@functools.lru_cache(maxsize=1024)
def _is_counted(text: str) -> bool:
    """Whether it is nouns with known words around them: different ways, eggs per day."""
    kinds = ""
    text = re.sub("^of (?:the )?", "", text.replace("in total", "total").replace("/", " per "))
    text = re.sub("(?:square|cube) root", "?", text)  # unlike other roots it changes the value
    for written in re.findall(r"[^\s.()]+", text):
        word = written.lower()
        lists = {letter: word in WORDS[name] for letter, name in _KINDS.items()}
        lists |= {"U": bool(_table().find(written)), "N": is_noun(word)}
        kinds += next((kind for kind, has in lists.items() if has), "?")
    return bool(_COUNTED.fullmatch(kinds))


def _plain(unit: str) -> str:
    r"""Write a unit such as \text{ cm}^2 or \frac{\text{m}}{\text{s}} in plain letters."""
    unit = re.sub(r"\\frac\s*\{(.*)\}\s*\{(.*)\}", r"\1/\2", unit)
    unit = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", unit).replace("\\cdot", " ")
    unit = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", unit).replace("\\$", "$")
    unit = re.sub(r"\\mu\s*", "μ", unit).replace("\\Omega", "Ω")
    unit = re.sub(r"([ML])_\{?\\odot\}?", r" \1_sun ", unit).replace("per cent", "percent")
    return " ".join(unit.replace("万", "万 ").replace("亿", "亿 ").split()).strip(" .,")


def in_text(mathematics: str) -> str:
    r"""Write m s^{-1} as \text{ m}\text{ s}^{-1} if it is a unit; anything else stays."""
    if not read_unit(_plain(mathematics)):
        return mathematics
    return re.sub(r"(?<![\\a-zA-Z])[a-zA-Z]+", r"\\text{ \g<0>}", mathematics)


_PART = re.compile(
    rf"(/|\bper\b)|([a-zA-ZμΩÅ_]+|°[cfCF]?|[%$¢元{CURRENCIES}])\.?(?:\s*\^\s*(-?\d))?|([^ *()-])"
)
_RAISED = re.compile(r"([a-z]+) (squared|cubed)\b", re.IGNORECASE)
_TEMPERATURE = re.compile(r"(?:°|\bdegrees?)\s*([cf])(?:elsius|ahrenheit)?\b", re.IGNORECASE)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


@functools.lru_cache(maxsize=1024)
def read_unit(text: str) -> Unit | None:
    """Read size and dimensions of a unit; None if it is unknown or no unit of measurement.

    Counted nouns in it are left out: atoms / m^2, dollars per bushel.
    """
    text = _RAISED.sub(lambda unit: f"{unit[1]}^{2 if unit[2] == 'squared' else 3}", text)
    text = _table().spaced.sub(
        lambda unit: unit[0].replace(" ", "_"), _TEMPERATURE.sub(r"°\1", text)
    )
    found, sign, power_before = Unit(Fraction(1)), 1, 1
    for divides, name, exponent, other in _PART.findall(text):
        if other:
            return None
        if divides:
            sign = -1
        elif name.lower() in _POWERS:
            power_before = _POWERS[name.lower()]
        elif unit := _table().find(name):
            found = found.times(unit.raised(Fraction(sign * power_before * int(exponent or 1))))
            power_before = 1
        elif not is_noun(name.lower()):
            return None
    return found if found.dimensions else None


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
