"""Comparisons without algebra: numbers with units, numerals with a base, times, words, choices."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from gapo_megatron.rewards.math import units
from gapo_megatron.rewards.math.spelling import TEXT, THOUSANDS


class Number(NamedTuple):
    """A plain number."""

    value: Fraction
    is_decimal: bool
    """Whether it is written with a point, so that it may be rounded."""
    is_percent: bool
    magnitude: int
    """1,000 if the unit begins with thousand, and so on; else 1."""
    unit: str


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_REPEATED = (  # \overline{12}, \bar3, \dot12\dot3
    r"\\(?:overline|bar|dot)\s*(?:\d|\{\s*\d+\s*\})(?:\d*\\dot\s*(?:\d|\{\s*\d\s*\}))?"
)
_CURRENCY = (  # Rs. 5, but 5Rs has factors
    rf"(?:\\?\$|[{units.CURRENCIES}]"
    r"|(?:\\text\{\s*)?(?:USD|EUR|GBP|INR|Rs)(?![a-zA-Z\d])\.?\s*\}?)\s*"
)
_NUMBER = re.compile(
    rf"""(?P<currency>{_CURRENCY})?(?P<sign>[-+]?)\s*(?P<currency1>{_CURRENCY})?(?:
        (?P<decimal>{_DIGITS})(?P<repeated>{_REPEATED})?
            (?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?P<power>-?\d+|\{{\s*-?\d+\s*\}})
               |[eE](?P<exponent>[-+]?\d+))?
        |(?P<whole>\d+)?\s*(?:
            \\frac\s*(?:\{{\s*(?P<minus>-?)(?P<top>\d+)\s*\}}|(?P<top1>\d))
                  \s*(?:\{{\s*(?P<bottom>\d+)\s*\}}|(?P<bottom1>\d))
            |(?<!\d)(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)))
    \s*(?P<percent>%)?
    """,
    re.VERBOSE,
)
_MOST_DIGITS = 400  # longer numbers and larger powers of ten are left to sympy


@functools.lru_cache(maxsize=4096)
def number(text: str) -> Number | None:
    """Read an integer, decimal, fraction, mixed number or power of ten, with unit or percent."""
    if len(text) > _MOST_DIGITS:
        return None
    match, unit = _NUMBER.fullmatch(text), ""
    if match is None:
        value_text, unit = units.split_unit(text, with_magnitude=True)
        match = _NUMBER.fullmatch(value_text)
        if match is None:
            return None
    part = match.groupdict()
    magnitude, unit = units.split_magnitude(unit)
    percent = bool(part["percent"]) or unit in ("percent", "%")
    # A decimal with an exponent or repeated digits, else a fraction with a whole part.
    if part["decimal"]:
        power = int((part["power"] or part["exponent"] or "0").strip("{ }"))
        if abs(power) > _MOST_DIGITS:
            return None
        digits = part["decimal"].replace(",", "")
        value = Fraction(digits)
        if repeated := re.sub(r"\D", "", part["repeated"] or ""):
            if "." not in digits:
                return None
            places = len(digits.partition(".")[2])
            value += Fraction(int(repeated), 10**places * (10 ** len(repeated) - 1))
        value *= Fraction(10) ** power
    else:
        bottom = int(part["bottom"] or part["bottom1"] or part["bottom2"])
        top = int(part["top"] or part["top1"] or part["top2"])
        if bottom == 0 or (part["minus"] and part["whole"]):
            return None
        value = int(part["whole"] or 0) + Fraction(top, bottom) * (-1 if part["minus"] else 1)
    is_decimal = "." in (part["decimal"] or "") and not part["repeated"]
    if part["sign"] == "-":
        value = -value
    sign = part["percent"] or part["currency"] or part["currency1"] or ""
    unit = (unit or re.sub(r"text|[{}.]", "", sign.lower())).replace("\\", "").strip()
    return Number(value, is_decimal, percent, magnitude, unit)


def equal_numbers(given: str, reference: str) -> bool | None:
    """Compare exactly, or to six digits if one of them is a decimal. 50% equals 50 and 0.5."""
    one, other = number(given), number(reference)
    if one is None or other is None:
        return None
    scale = units.ratio(one.unit, other.unit)
    if scale is None:
        return False
    values = {one.value * one.magnitude * scale / other.magnitude}
    if one.magnitude == scale == 1:
        values.add(one.value)  # the answer may omit the reference's, as it may omit a unit
    if one.is_percent is not other.is_percent:
        values.add(one.value / 100 if one.is_percent else one.value * 100)
    if not (one.is_decimal or other.is_decimal):
        return other.value in values
    return any(_close(value, other.value) for value in values)


def _close(given: Fraction, reference: Fraction) -> bool:
    """To 1e-6, relative below one and absolute above: 1000000.5 is not 1000000."""
    return abs(given - reference) <= min(Fraction(1), abs(reference)) / 10**6


_QUANTITY = re.compile(
    r"(?P<number>-?\d[\d,.]*(?:\s*\\frac\{\d+\}\{\d+\}|\s\d+/\d+)?|\\frac\{\d+\}\{\d+\})\s*"
    r"(?P<unit>[a-zA-Z][a-zA-Z .-]*?)\s*(?P<join>,?\s*\band\b|[,;+])?\s*(?=$|[-\d\\])"
)


_DOLLARS = re.compile(r"\\?\$\s*(\d[\d,.]*\d|\d)")


def quantities(text: str) -> list[tuple[Fraction, str]] | None:
    """Read at least two numbers with words after each: 6 feet 3 inches, 2 boys and 4 girls."""
    if not re.search(r"[a-zA-Z]{2}|\\text", text):
        return None
    bare = _DOLLARS.sub(r"\1 dollars", _bare(text))
    found, end = [], 0
    for match in _QUANTITY.finditer(bare):
        if match.start() != end or {"or", "than", "not"}.intersection(match["unit"].split()):
            return None
        end = match.end()
        value = number(match["number"].strip(" ,."))
        if value is None:
            return None
        found.append((value.value, match["unit"].rstrip(" .")))
    return found if len(found) > 1 and end == len(bare) and all(u for _, u in found) else None


def _total(parts: list[tuple[Fraction, str]]) -> tuple[Fraction, units.Unit] | None:
    """The sum of quantities of one dimension in different units; else None."""
    found = [units.read_unit(unit) for _, unit in parts]
    known = [unit for unit in found if unit]
    if len(known) < len(found) or len({unit.dimensions for unit in known}) > 1:
        return None
    if len({unit.size for unit in known}) < len(known):
        return None  # the same unit twice: two answers
    return sum(
        (value * unit.size for (value, _), unit in zip(parts, known, strict=True)), Fraction(0)
    ), known[0]


def equal_quantities(given: str, reference: str) -> bool | None:
    """Compare quantities by their sum if they have one, else by numbers and words."""
    theirs, ours = quantities(reference), quantities(given)
    if theirs is None and ours is None:
        return None
    # Sums: 6 feet 3 inches is 75 inches.
    sums = []
    for text, parts in ((given, ours), (reference, theirs)):
        one = number(text)
        if parts is None and one and (unit := units.read_unit(one.unit)):
            sums.append((one.value * one.magnitude * unit.size, unit))
        elif parts is not None and (added := _total(parts)):
            sums.append(added)
    if len(sums) == 2:
        return sums[0][0] == sums[1][0] and sums[0][1].dimensions == sums[1][1].dimensions
    # Numbers alone on one side.
    if theirs is None or ours is None:
        named, bare = (ours, reference) if theirs is None else (theirs, given)
        bare = THOUSANDS.sub("", bare).replace(" and ", ",").replace(";", ",")
        numbers = [number(part.strip()) for part in bare.split(",")]
        if named is None or not all(numbers) or not all(units.is_unit(words) for _, words in named):
            return None
        values = [one.value for one in numbers if one]  # without words the order counts
        return values == [value for value, _ in named]
    if len(theirs) != len(ours):
        return False
    return sorted((v, _stem(u)) for v, u in theirs) == sorted((v, _stem(u)) for v, u in ours)


def _stem(words: str) -> str:
    return " ".join(word.removesuffix("s") for word in words.casefold().split())


_NUMERAL = re.compile(
    r"\(?(?P<digits>-?[0-9A-Z]*[0-9][0-9A-Z]*)\)?"
    r"(?:_\{?\(?(?P<base>-?\d+|[a-z]+)\)?\}?)?"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
_LARGEST_BASE = 36  # with the digits 0 to Z


def numeral(text: str) -> tuple[str, int | None] | None:
    """Read digits and base of 1011_2; the base is None if it is not written."""
    match = _NUMERAL.fullmatch(TEXT.sub(r"\1", text).replace(" ", ""))
    if match is None:
        return None
    digits, name = match.groups()
    if name is None:
        return digits, None
    base = _BASES.get(name, 0) if name.isalpha() else int(name)
    fits = abs(base) <= _LARGEST_BASE and all(
        int(digit, 36) < abs(base) for digit in digits.lstrip("-")
    )
    return (digits, base) if fits else None


def equal_numerals(given: str, reference: str) -> bool | None:
    """Compare digits; the base may be omitted but must not differ."""
    one, other = numeral(given), numeral(reference)
    if one is None or other is None or one[1] == other[1] is None:
        return None
    return one[0] == other[0] and (one[1] == other[1] or None in (one[1], other[1]))


_TIME = re.compile(
    r"(?:0?(?P<hour>\d{1,2}) ?(?:: ?(?P<minute>\d\d) ?(?:: ?(?P<second>\d\d))?)?)?"
    r"\s*(?:o'?clock)?\s*(?:(?P<half>[ap])\.?\s*m\.?|(?P<word>noon|midnight))?\.?",
    re.IGNORECASE,
)


def _time(text: str) -> tuple[tuple[int, int, int], str] | None:
    """Read (hour of twelve, minute, second) and "a", "p" or "" for the half of the day."""
    match = _TIME.fullmatch(_bare(text))
    if match is None or not (match["minute"] or match["half"] or match["word"]):
        return None
    if not (match["hour"] or match["word"]):
        return None
    hour = int(match["hour"] or 12)
    minute, second = int(match["minute"] or 0), int(match["second"] or 0)
    half = (match["half"] or {"noon": "p", "midnight": "a"}.get(match["word"] or "", "")).lower()
    if hour > 24 or minute > 59 or second > 59:
        return None
    if hour > 12 or (hour == 0 and match["minute"]):
        half = half or ("p" if 12 < hour < 24 else "a")
    return (hour % 12, minute, second), half


def equal_times(given: str, reference: str) -> bool | None:
    """Compare times of day, with or without a.m. and p.m.; a bare 1:20 may be a ratio."""
    ours, theirs = _time(given), _time(reference)
    has_half = (theirs and theirs[1]) or (ours and ours[1])
    is_time = theirs and (has_half or ":0" in reference.replace(" ", ""))
    if not is_time or theirs is None:
        return None
    if ours is None:
        return None if ":" not in reference else False
    return ours[0] == theirs[0] and (ours[1] == theirs[1] or "" in (ours[1], theirs[1]))


_LETTER = re.compile(r"(?:\\text\{)?\s*(?:(?:[Oo]ption|[Cc]hoice)[\s:]+)?\(?([A-Za-z])[).:]?\s*\}?")
_LABELLED = re.compile(
    r"(?:\\text\{\s*\(?([A-Za-z])\s*[).:]+\s*\}\s*:?"
    r"|\\text\{\s*([A-Z])\s*\}\s*[.:)]"
    r"|\(([A-H])\)(?=[\s\\\d.-])"
    r"|([A-H])[.:)](?=\s))\s*:?\s*(?P<rest>.*\S)"
)


def letter(text: str) -> str | None:
    r"""The letter of a choice without a value: B, (B), \text{B.}."""
    match = _LETTER.fullmatch(text)
    return match[1] if match else None


def labelled(text: str) -> tuple[str, str] | None:
    r"""Letter and value of a choice: \text{(B)} 12."""
    match = _LABELLED.fullmatch(text)
    if match is None:
        return None
    if _names_another(match["rest"]) or _LABELLED.search(match["rest"]):  # (A) and (B), (A) 3 (B) 4
        return None
    return next(filter(None, match.groups())).upper(), match["rest"]


_LETTERS = re.compile(r"[A-Z]{3,}|[IVXL]{2}")
"""Letters in their order: throws of a coin, bases, Roman numerals; but AB = BA is a segment."""
_ALL_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")


def is_worded(text: str) -> bool:
    """Whether it consists of words, or is a time of day."""
    return bool(_ALL_WORDS.fullmatch(_bare(text)) or _time(text))


def equal_words(given: str, reference: str) -> bool | None:
    """Compare words, ignoring case, and letters of choices."""
    one, other = _bare(given), _bare(reference)
    ours, theirs = letter(given), letter(reference)
    if theirs and not ours and theirs.isupper():
        if (choice := labelled(given) or labelled(one)) and not _names_another(choice[1]):
            return None if has_words(given) else choice[0] == theirs
        if "\\text" in reference:  # not a variable
            return False
    if theirs and ours:  # case matters except for a choice
        return ours == theirs or ("A" <= theirs <= "E" and ours.upper() == theirs)
    letters = [re.sub(r"[\s\\(){}\[\]]", "", text) for text in (one, other)]
    if all(map(_LETTERS.fullmatch, letters)):
        return letters[0] == letters[1]
    if not _ALL_WORDS.fullmatch(other):
        return None
    if one.casefold().replace("-", " ").split() == other.casefold().replace("-", " ").split():
        return True
    # Short and without \text it may be a product: ab equals ba.
    return False if "\\" in reference or len(other) > 4 else None


def has_words(text: str) -> bool:
    """Whether it has words that are no units."""
    written = " ".join(TEXT.findall(text)) or re.sub(r"\\[a-zA-Z]+|\b\w{2,3}\b", " ", text)
    return not all(units.is_unit(word) for word in re.findall(r"[a-zA-Z]{2,}", written))


def _names_another(text: str) -> bool:
    """Whether the text after the letter of a choice is another letter: (A) or (B)."""
    is_joined = text.startswith((",", ";", "&", "/", "and ", "or "))
    return bool(is_joined or letter(text))


def _bare(text: str) -> str:
    r"""Unwrap \text{...} and normalise spaces."""
    return " ".join(TEXT.sub(r" \1 ", text).split())
