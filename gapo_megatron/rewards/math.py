"""Verifier of mathematical answers: our policy around math-verify (docs/rewards.md).

What is boxed last is the answer. Equal text, plain numbers, words, numerals of a base and lists are
decided here, exactly and at once; everything else math-verify parses and sympy compares.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import math_verify

from gapo_megatron.rewards.response import final_part
from gapo_megatron.types import Outcome, Verdict

_CORRECT = Verdict(Outcome.CORRECT)


def verify(response: str, answer: str) -> Verdict:
    r"""Say whether the last `\boxed` of the final part of `response` equals `answer`.

    Unknown if the reference, or the answer given, cannot be read. Pure. May raise, hang or crash on
    hostile input, as sympy does: `Pool` makes that unknown too.

    Args:
        response: what the model wrote; thoughts, ended by `</think>`, are no part of the answer.
        answer: the reference, bare or between dollar signs or in a box.
    """
    try:
        reference = _read_reference(answer)
    except ValueError as error:
        return Verdict(Outcome.UNKNOWN, str(error))
    boxes = _boxes(final_part(response))
    if not boxes:
        return Verdict(Outcome.WRONG, "no boxed answer in the final part")
    if boxes[-1] is None:
        return Verdict(Outcome.WRONG, "the last box is never closed")
    verdict = _compare(_clean(boxes[-1]), reference)
    # An answer of several parts may have been given in as many boxes.
    num_parts = len(_split(reference))
    if verdict.outcome is not Outcome.CORRECT and 1 < num_parts <= len(boxes):
        parts = [_clean(box or "") for box in boxes[-num_parts:]]
        if _equal_lists(", ".join(parts), reference):
            return _CORRECT
    return verdict


def check_answer(answer: str) -> None:
    """Refuse a reference that no response could be compared with; nothing is parsed.

    Raises:
        ValueError: shows it.
    """
    _read_reference(answer)


def _read_reference(answer: str) -> str:
    """The reference, cleaned; ValueError if there is none, or no response can have it."""
    is_closed = _closing_brace(f"{{{answer}}}", 0) == len(answer) + 2
    reference = _clean(answer) if is_closed else ""
    if not reference or final_part(reference) != reference:  # no response can box thoughts
        raise ValueError(f"the reference answer {answer!r} cannot be read")
    return reference


def _boxes(text: str) -> list[str | None]:
    r"""Contents of every outermost `\boxed{...}` (`\fbox`, `\boxed 5`); None if not closed."""
    boxes: list[str | None] = []
    end = 0
    for box in re.finditer(r"\\(?:boxed|fbox)\s*", text):
        if box.start() < end:
            continue  # inside the one before
        if not text.startswith("{", box.end()):
            bare = re.compile(r"[^\s$\\{}]+").match(text, box.end())
            if bare:
                boxes.append(bare[0])
            continue
        end = _closing_brace(text, box.end())
        boxes.append(text[box.end() + 1 : end - 1] if end else None)
        if not end:
            break
    return boxes


def _closing_brace(text: str, start: int) -> int:
    """Index after the brace that closes the one at `start`; 0 if there is none."""
    depth = 0
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return 0


def _strip_box(text: str) -> str:
    boxes = _boxes(text)
    return boxes[-1] if len(boxes) == 1 and boxes[-1] is not None else text


# A backslash behind another ends a row of a matrix.
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s")
_NO_MEANING = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits)(?![a-zA-Z])|(?<!\\)(?:\\[()\[\]]|\$)"
)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-zA-Z])|°")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")


def _clean(text: str) -> str:
    """One spelling for what LaTeX writes in several; no meaning is lost but units of angles."""
    text = _strip_box(text) if "boxed" in text else text
    text = text.replace("{,}", ",").replace("\uff0c", ",").replace("\uff1b", ";")
    text = _SPACE.sub(" ", re.sub(r"(?<!\\)\\!\s*", "", text))
    text = _DEGREES.sub(" ", _NO_MEANING.sub("", text))
    text = re.sub(r"\{\d{1,3}(?:,\d{3})+\}", lambda number: number[0].replace(",", ""), text)
    text = re.sub(r"(?<=\d) ?((?:hundred|thousand|[mb]illion)(?![a-zA-Z]))", r"\\text{ \1}", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace("\\%", "%")
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\w)(?!\w)", r"\\frac\1{\2}", text)
    return re.sub(r"\s+", " ", text).lstrip(" ,;").rstrip(" .,;")


_MEANINGLESS_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # 3 1/2 is not 31/2


@functools.lru_cache(maxsize=4096)  # the rollouts of a group repeat each other's answers
def _compare(given: str, reference: str) -> Verdict:
    """Compare two cleaned answers."""
    wrong = Verdict(Outcome.WRONG, f"answered {given!r}, expected {reference!r}")
    if not given:
        return wrong
    if _MEANINGLESS_SPACE.sub("", given) == _MEANINGLESS_SPACE.sub("", reference):
        return _CORRECT
    for decide in (_equal_numbers, _equal_numerals, _equal_words, _equal_lists):
        if (equal := decide(given, reference)) is not None:
            return _CORRECT if equal else wrong
    return _compare_expressions(given, reference, wrong)


class _Number(NamedTuple):
    value: Fraction
    is_decimal: bool
    """Written with a point: it may be rounded."""
    is_percent: bool
    magnitude: int
    """1,000 where the unit begins with thousand; else 1."""
    bound: str
    """Words that make a bound of it, `or less`: unlike a unit they are part of the value."""


_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_BOUND = re.compile(r"\b(?:less|fewer|more|greater|least|most|than|or)\b")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:\\?\$|[€£])?\s*(?:
        (?P<decimal>{_DIGITS})(?:\\overline\{{\s*(?P<repeated>\d+)\s*\}})?
            (?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?P<power>-?\d+|\{{\s*-?\d+\s*\}})
               |[eE](?P<exponent>[-+]?\d+))?
        |(?P<whole>\d+)?\s*(?:
            \\frac\s*(?:\{{\s*(?P<minus>-?)(?P<top>\d+)\s*\}}|(?P<top1>\d))
                  \s*(?:\{{\s*(?P<bottom>\d+)\s*\}}|(?P<bottom1>\d))
            |(?<!\d)(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)))
    \s*(?P<percent>%)?
    (?:\s*\\(?:text|textnormal|textbf|mbox|mathrm)\s*\{{\s*(?P<unit>[^{{}}]*)\}}(?:\^\{{?\d\}}?)?)?
    """,
    re.VERBOSE,
)
_MOST_DIGITS = 400  # of an exponent's power of ten; longer numbers are left to sympy


def _number(text: str) -> _Number | None:
    """A plain number: integer, decimal, fraction, mixed, power of ten; with a unit or percent."""
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _MOST_DIGITS:
        return None
    part = match.groupdict()
    unit = (part["unit"] or "").strip()
    percent = bool(part["percent"]) or unit == "percent"
    if part["decimal"]:
        power = int((part["power"] or part["exponent"] or "0").strip("{ }"))
        if abs(power) > _MOST_DIGITS:
            return None
        digits = re.sub(r"[, ]", "", part["decimal"])
        value = Fraction(digits)
        if repeated := part["repeated"]:
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
    magnitude = _MAGNITUDES.get(unit.partition(" ")[0].lower(), 1)
    return _Number(value, is_decimal, percent, magnitude, " ".join(_BOUND.findall(unit)))


def _equal_numbers(given: str, reference: str) -> bool | None:
    """Exact; to six digits where one of the two is a decimal. 50% is 50 and is 0.5."""
    one, other = _number(given), _number(reference)
    if one is None or other is None:
        return None
    if one.bound != other.bound:
        return False
    values = {one.value * one.magnitude / other.magnitude}
    if 1 in (one.magnitude, other.magnitude):
        values.add(one.value)  # as a unit it may be left out
    if one.is_percent is not other.is_percent:
        values.add(one.value / 100 if one.is_percent else one.value * 100)
    if not (one.is_decimal or other.is_decimal):
        return other.value in values
    return any(_close(value, other.value) for value in values)


def _close(given: Fraction, reference: Fraction) -> bool:
    """Relative below one, absolute above: 1e-20 is not 2e-20, 1000000.5 is not 1000000."""
    return abs(given - reference) <= min(Fraction(1), abs(reference)) / 10**6


_NUMERAL = re.compile(
    r"(?:\\(?:text|mathrm)\{)?\(?(?P<digits>-?[0-9A-Z]*[0-9][0-9A-Z]*)[)}]*"
    r"_\s*(?:(?P<base>\d)|\{\s*(?:\\text\{)?\s*(?P<base1>\d+|\w+)\s*\}?\s*\})"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}


def _numeral(text: str) -> tuple[str, int | None] | None:
    """Digits and base of 1011_2; no base where none is written."""
    text = text.replace(" ", "")
    if re.fullmatch(r"-?[0-9A-Z]*[0-9][0-9A-Z]*", text):
        return text, None
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    name = match["base"] or match["base1"]
    base = int(name) if name.isdecimal() else _BASES.get(name, 0)
    fits = all(int(digit, 36) < base for digit in match["digits"].lstrip("-"))
    return (match["digits"], base) if fits else None


def _equal_numerals(given: str, reference: str) -> bool | None:
    """Digit by digit; a base may be left out, but must not be another."""
    one, other = _numeral(given), _numeral(reference)
    if one is None or other is None or one[1] == other[1] is None:
        return None
    return one[0] == other[0] and (one[1] == other[1] or None in (one[1], other[1]))


_LETTER = re.compile(r"[A-Za-z]")
_CHOICE = re.compile(r"\(?([A-Z])(?:\)|[.:](?!\S)|$).*")
_TIME = re.compile(r"0?(\d{1,2}) ?: ?(\d\d)(?:\s*([ap])\.?\s*m\.?)?", re.IGNORECASE)


def _equal_words(given: str, reference: str) -> bool | None:
    """Words without regard to case; the letter of a choice; a time of day."""
    one, other = (_TEXT.sub(r" \1 ", text).strip() for text in (given, reference))
    if (time := _TIME.fullmatch(other)) and (time[3] or time[2] < "10"):  # 1:20 may be a ratio
        match = _TIME.fullmatch(one)
        return match is not None and all(
            a == b or None in (a, b) for a, b in zip(match.groups(), time.groups(), strict=True)
        )
    if re.fullmatch(r"\(?[A-Z]\)?", other) and (choice := _CHOICE.fullmatch(one)):
        return choice[1] == other.strip("()")
    if _LETTER.fullmatch(one) and _LETTER.fullmatch(other):
        return one == other if other.islower() or other > "E" else one.upper() == other
    if not re.fullmatch(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*", other):
        return None
    if re.sub(r"[\s-]+", " ", one).casefold() == re.sub(r"[\s-]+", " ", other).casefold():
        return True
    # Short and bare it may be a product: ab is ba.
    return False if "\\" in reference or len(other) > 4 else None


_SEPARATOR = re.compile(
    r"""(?P<open>[(\[{]|\\\{|\\begin(?![a-zA-Z])|\\langle(?![a-zA-Z]))
    |(?P<close>[)\]}]|\\\}|\\end(?![a-zA-Z])|\\rangle(?![a-zA-Z]))
    |(?P<comma>[,;]\s*(?:\\(?:text|mbox)\s*\{\s*(?:and|or)\s*\}|(?:and|or)(?![a-zA-Z]))?
       |\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))
    |\\.""",
    re.VERBOSE | re.DOTALL,
)


def _split(text: str, *, is_list: bool = False) -> list[str]:
    """Parts of a list, with or without the braces of a set; tuples and intervals are one part.

    A comma before three digits belongs to a number, but where `is_list`, or in braces without
    another comma that does not.
    """
    inside = re.fullmatch(r"\\\{(.*)\\\}", text, re.DOTALL)
    if inside and "\\}" not in inside[1]:
        text = inside[1]
        is_list = is_list or ", " not in text  # else 1,000, 2,000
    if not is_list and _number(text):
        return [text]
    parts, depth, start = [], 0, 0
    for token in _SEPARATOR.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        in_number = re.compile(r"\d,\d{3}(?!\d)").match(text, max(0, token.start() - 1))
        if token["comma"] and depth == 0 and (is_list or not in_number):
            parts.append(text[start : token.start()])
            start = token.end()
    parts = [part.lstrip(" ,;").rstrip(" .,;") for part in (*parts, text[start:])]
    return [value for part in parts if part for value in _both_signs(part)]


def _both_signs(text: str) -> list[str]:
    if "\\pm" not in text:
        return [text]
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    return [upper, text.replace("\\pm", "-").replace("\\mp", "+")]


_LABEL = re.compile(r"\s*([A-Za-z\\][\w\\{}'() ]*?)\s*=")


def _labels(parts: Sequence[str]) -> list[str]:
    """What stands before the equals signs, if every part has one and all are different."""
    labels = [match[1] for part in parts if (match := _LABEL.match(part))]
    return labels if len(set(labels)) == len(parts) else []


def _equal_lists(given: str, reference: str) -> bool | None:
    """In any order, unless the reference alone says what is what: x = 1, y = 2 is not 2, 1."""
    ours, theirs = _split(given), _split(reference)
    if len(theirs) > len(ours):
        ours = _split(given, is_list=True)  # 100,200 where two numbers are expected
    if len(theirs) < 2 or len(ours) != len(theirs):
        return None
    if _labels(theirs) and not _labels(ours):
        outcomes = [_compare(*pair).outcome for pair in zip(ours, theirs, strict=True)]
    else:
        outcomes = [_take_equal(ours, part) for part in theirs]
    if Outcome.WRONG in outcomes:
        return False
    return True if set(outcomes) == {Outcome.CORRECT} else None


def _take_equal(others: list[str], part: str) -> Outcome:
    """Remove the first of `others` that equals `part`; if there is none, whether that is sure."""
    outcome = Outcome.WRONG
    for index, other in enumerate(others):
        found = _compare(other, part).outcome
        if found is Outcome.CORRECT:
            del others[index]
            return found
        if found is Outcome.UNKNOWN:
            outcome = found
    return outcome


_BOX_ALONE = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]


_PLAIN_FUNCTION = re.compile(
    r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![a-zA-Z])"
)


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    return math_verify.parse(
        f"\\boxed{{{text}}}",
        extraction_config=_BOX_ALONE,
        fallback_mode="no_fallback",
        parsing_timeout=None,  # the pool's is the limit: an alarm cannot end one long instruction
        raise_on_error=True,
    )


def _compare_expressions(given: str, reference: str, wrong: Verdict) -> Verdict:
    ours, theirs = _parse(given), _parse(reference)
    if not theirs:
        return Verdict(Outcome.UNKNOWN, f"the reference answer {reference!r} cannot be read")
    if not ours and "=" in given and "=" not in reference:
        return _compare(given.rpartition("=")[2].strip(), reference)  # 17 mod 5 = 2
    if not ours:
        return Verdict(Outcome.UNKNOWN, f"the answer {given!r} cannot be read")
    ours, theirs = ours[:1], theirs[:1]
    close = _close_values(ours[0], theirs[0])
    if close is False or (close and _has_decimals(*ours, *theirs)):
        return _CORRECT if close else wrong
    equal = math_verify.verify(theirs, ours, timeout_seconds=None, raise_on_error=True)
    return _CORRECT if equal else wrong


def _close_values(given: Any, reference: Any) -> bool | None:
    """As `_close`; None unless both are numbers. To math-verify, what is small enough is zero."""
    if not all(getattr(value, "is_number", False) for value in (given, reference)):
        return None
    error, size = abs(given - reference).evalf(), abs(reference).evalf()
    if not (error.is_finite and size.is_finite):
        return None
    return bool(error <= min(1, size) * 1.000001e-6)  # evalf rounds


def _has_decimals(*values: Any) -> bool:
    return any(atom.is_Float for value in values for atom in value.atoms())
