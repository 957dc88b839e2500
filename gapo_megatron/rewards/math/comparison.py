"""Compares two cleaned answers: order of the comparisons, labels, lists and phrases."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from gapo_megatron.rewards.math import expressions, plain
from gapo_megatron.rewards.math.labels import is_name, is_word, names_value
from gapo_megatron.rewards.math.nouns import CHANGES_VALUE
from gapo_megatron.rewards.math.parsing import RELATION
from gapo_megatron.rewards.math.points import UndecidedError
from gapo_megatron.rewards.math.spelling import FUNCTIONS, TEXT, THOUSANDS, strip_braces
from gapo_megatron.rewards.math.units import has_letters, is_unit, ratio, split_unit
from gapo_megatron.types import Outcome, Verdict

_CORRECT = Verdict(Outcome.CORRECT)
_UNREADABLE = Verdict(Outcome.UNKNOWN)
"""The reference cannot be read; `verify` adds it as the user wrote it."""
_MEANINGLESS_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # 3 1/2 is not 31/2
_READABLE = re.compile(r"[^\W_]|\\(?:infty|emptyset|mathbb|[a-zA-Z]{3,})")


@functools.lru_cache(maxsize=4096)  # rollouts of a group repeat answers
def compare(given: str, reference: str) -> Verdict:
    """Compare two cleaned answers."""
    # As they are written.
    wrong = Verdict(Outcome.WRONG, f"answered {given!r}, expected {reference!r}")
    if _MEANINGLESS_SPACE.sub("", given) == _MEANINGLESS_SPACE.sub("", reference):
        return _CORRECT
    if not _READABLE.search(given):
        return wrong
    verdict = _compare_as_written(given, reference, wrong)
    if verdict.outcome is Outcome.CORRECT:
        return verdict
    # Without labels: x = 5 is 5.
    for simpler in _without_labels(given, reference):
        found = compare(*simpler)
        if found.outcome is Outcome.CORRECT or (found.outcome is Outcome.UNKNOWN and found.reason):
            return found
    # The right value beside words that may change it is unknown.
    for mine, other in ((given, reference), (reference, given)):
        value, words = _unlisted(mine)
        pair = (value, other) if mine is given else (other, value)
        if words and value and compare(*pair).outcome is not Outcome.WRONG:
            reason = f"the words {words!r} beside the value {mine!r} are on no list"
            return Verdict(Outcome.UNKNOWN, reason)
    both = expressions.readings(given) if "/" in given else None
    if both and any(compare(one, reference).outcome is Outcome.CORRECT for one in both):
        return Verdict(Outcome.UNKNOWN, f"{given!r} can be read in two ways")
    if verdict.outcome is Outcome.UNKNOWN and not verdict.reason and is_judge(reference):
        return wrong  # the reference can be read, the answer cannot
    return verdict


def forget() -> None:
    """Clear the caches, in which an aborted comparison may have left partial results.

    sympy caches what it has derived about a value.
    """
    compare.cache_clear()
    expressions.forget()


def _compare_as_written(given: str, reference: str, wrong: Verdict) -> Verdict:
    for decide in _RULES:
        if (equal := decide(given, reference)) is not None:
            return _CORRECT if equal else wrong
    ours, theirs = split_unit(given), split_unit(reference)
    is_chain = "=" in given and "=" not in reference  # each side may have its own unit
    if (ours[1] or theirs[1]) and ours[0] and theirs[0] and not is_chain:
        return compare(ours[0], theirs[0])
    if _words(given) or _words(reference):
        return _compare_phrases(given, reference, wrong)
    try:
        equal = expressions.equal(given, reference)
    except UndecidedError as error:
        return Verdict(Outcome.UNKNOWN, str(error))
    if equal is None:
        return _UNREADABLE
    return _CORRECT if equal else wrong


def _equal_units(given: str, reference: str) -> bool | None:
    """False if the units contradict, or only the answer has percent and its value has letters."""
    (value, ours), (_, theirs) = split_unit(given), split_unit(reference)
    is_own = ours in ("%", "percent") and not theirs and has_letters(value)
    return False if is_own or ratio(ours, theirs) != 1 else None


def _equal_choices(given: str, reference: str) -> bool | None:
    """Letter or value of a reference with both is enough, but neither may contradict it."""
    theirs = plain.labelled(reference)
    if theirs is None:
        return None
    ours = plain.labelled(given)
    if ours is None:
        if letter := plain.letter(given):
            return letter.upper() == theirs[0]
        outcome = compare(given, theirs[1]).outcome
    else:
        if ours[0] != theirs[0]:
            return False
        outcome = compare(ours[1], theirs[1]).outcome
    return None if outcome is Outcome.UNKNOWN else outcome is Outcome.CORRECT


_PREFIX = re.compile(
    r"(?:\\text\{(?P<text>[^{}]*)\}|(?P<bare>(?:[A-Z][a-z]+|answer)(?: [a-z]+)*)\s*(?=[:=]))"
    r"\s*(?P<sign>[:=]?)\s*(?P<rest>.*\S)",
    re.DOTALL,
)


def _stated(given: str, reference: str) -> list[str]:
    r"""Values that a chain such as x = 42 \approx 42.0 states: its last exact and its rounded side.

    Empty if a side is neither a name nor equal to the others: 43 = 42 does not state 42.
    """
    exact, _, rounded = given.partition("\\approx")
    # Split at equals signs, not at those of an index.
    *sides, last = (side.strip() for side in re.split(r"=(?![^{}]*\})", exact))
    for side in sides:
        is_label = not side or is_name(side, reference)
        if not is_label and compare(side, last).outcome is not Outcome.CORRECT:
            return []
    if not rounded.strip():
        return [last]
    values = _stated(rounded.strip(), reference)
    if not last or (last != "e" and is_name(last, reference)):
        return values
    if not values or not expressions.rounds(last, strip_braces(values[0])):
        return []
    number = plain.number(reference)  # 2/3 \approx 1 does not state 1, but 0.667 as 0.667
    return [last, *values] if number and number.value.denominator > 1 else [last]


def _without_labels(given: str, reference: str) -> list[tuple[str, str]]:
    """Both without text that only introduces the value: (B) 12, Area = 5, 17 mod 5 = 2."""
    simpler = []
    # The letter of a choice.
    if (choice := plain.labelled(given)) and not (
        plain.labelled(reference) or plain.letter(reference)
    ):
        simpler.append((choice[1], reference))
    # Words that name the value.
    for mine, other in ((given, reference), (reference, given)):
        match = _PREFIX.fullmatch(mine)
        if match is None or _PREFIX.fullmatch(other):
            continue
        words = match["text"] or match["bare"] or ""
        introduces = names_value(words, is_named=bool(match["sign"]))
        is_left = match["sign"] == "=" or not words.strip()  # not the beginning of a sentence
        if introduces and not (is_left and "=" in other):
            rest = match["rest"]
            simpler.append((rest, other) if mine is given else (other, rest))
    (ours, _, our_set), (theirs, _, their_set) = (
        one.partition("\\forall") for one in (given, reference)
    )
    # A domain may be omitted, not changed; behind it is another answer, or a condition.
    if len({our_set, their_set} - {""}) == 1 and not re.search("[,;]", our_set + their_set):
        simpler.append((ours, theirs))
    # The other sides of a chain of equations.
    is_chain = "=" in given or ("\\approx" in given and "\\approx" not in reference)
    if is_chain and ("=" not in reference or given.startswith("=")) and len(split(given)) == 1:
        simpler += [(value, reference) for value in _stated(given, reference)]
    stripped = [tuple(strip_braces(one).rstrip(" .,;") for one in pair) for pair in simpler]
    return [(g, r) for g, r in stripped if g and r and (g, r) != (given, reference)]


_WORD = re.compile(  # words, and signs that are read nowhere
    r"\\text\{(?P<text>[^{}]*)\}|(?<![a-zA-Z\\])(?<!\\begin\{)(?<!\\end\{)(?:(?P<short>and|at|for|if|is|of|or)"
    rf"|(?!(?:{FUNCTIONS}|sqrt|infinity)(?![a-zA-Z]))(?P<long>[a-zA-Z]{{4,}}))(?![a-zA-Z])"
    r"|(?P<sign>[^\x00-\x7f°]|[?@#])"
)
_COMMAND = re.compile(r"(?:\\(?!text\{)[a-zA-Z]+|_)\s*(?:\{[^{}\\]*\})?")


def _words(text: str) -> bool:
    """Whether it contains words besides mathematics."""
    return any(
        match["text"] is not None or (match["long"] and is_word(match["long"]))
        for match in _WORD.finditer(_COMMAND.sub("", text))
    )


_BETWEEN = re.compile(r"^(?:[\s,;:.=/*]|\\cdot|[_^]\s*(?:\{[^{}]*\}|\w))*")


def _unlisted(text: str) -> tuple[str, str]:
    """The values alone, and the words and signs beside them, if one of these is on no list.

    No words if all are known, or if one changes the value: 3 eighths is not 3.
    """
    choice = plain.labelled(text) or plain.labelled(TEXT.sub(r" \1 ", text).strip())
    if choice or plain.is_worded(text):
        return (choice[0], choice[1]) if choice and plain.has_words(text) else (text, "")
    parts, words, end = [], [], 0
    for match in _WORD.finditer(text):
        if not match["long"] or is_word(match["long"]):
            parts.append(text[end : match.start()])
            words.append(match[match.lastgroup or 0].strip())
            end = match.end()
    written = " ".join(words)
    cores = (re.sub(r"\b(?:and|or)\b", "", word).strip() for word in words)
    are_known = all(not core or is_unit(core) for core in cores) and not re.search(r"\}\s*_", text)
    if are_known or CHANGES_VALUE.search(re.sub(r"\band\b", "", written)):
        return text, ""
    values = (_BETWEEN.sub("", part).strip(" ,;:.=/*") for part in (*parts, text[end:]))
    return ", ".join(filter(None, values)), written


def _phrase(text: str) -> tuple[tuple[str, ...], list[str]]:
    """Split into words and the mathematics between them."""
    words: list[str] = []
    parts, end = [], 0
    for match in _WORD.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        words += match[match.lastgroup or 0].casefold().split()
    parts.append(text[end:])
    bare = [[one.strip(" ,;:.") for one in found] for found in (words, parts)]
    return tuple(filter(None, bare[0])), list(filter(None, bare[1]))


def _compare_phrases(given: str, reference: str, wrong: Verdict) -> Verdict:
    """Words must be the same; the mathematics between them is compared part by part."""
    our_words, ours = _phrase(given)
    their_words, theirs = _phrase(reference)
    if our_words and our_words == their_words and len(ours) == len(theirs):
        outcomes = [compare(*pair).outcome for pair in zip(ours, theirs, strict=True)]
        if all(outcome is Outcome.CORRECT for outcome in outcomes):
            return _CORRECT
        if Outcome.WRONG in outcomes:
            return wrong
    return _UNREADABLE


def is_read(reference: str) -> bool:
    """Whether the reference can be parsed, so that an unequal answer is certainly wrong."""
    parts = split(reference)
    if len(parts) > 1:
        return all(part == "\\ldots" or is_read(part) for part in parts)
    if any(read(reference) for read in (plain.number, plain.numeral, plain.quantities)):
        return True
    if TEXT.fullmatch(reference) or plain.is_worded(reference):
        return True
    if choice := plain.labelled(reference):
        return is_read(choice[1])
    if "\\forall" in reference:
        return is_read(reference.partition("\\forall")[0])
    value, unit = split_unit(reference)
    if unit:
        return is_read(value)
    return not _words(reference) and expressions.is_readable(reference)


def is_judge(reference: str) -> bool:
    """Whether it can be parsed, at least the mathematics between its words."""
    if is_read(reference):
        return True
    words, parts = _phrase(reference)
    return bool(words and parts) and all(part != reference and is_read(part) for part in parts)


_SEPARATOR = re.compile(
    r"""(?P<open>[(\[{]|\\\{|\\begin(?![a-zA-Z])|\\langle(?![a-zA-Z]))
    |(?P<close>[)\]}]|\\\}|\\end(?![a-zA-Z])|\\rangle(?![a-zA-Z]))
    |(?P<comma>[,;](?:\s*(?:and|or)(?![a-zA-Z]))?|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))
    |\\.""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def split(text: str, *, is_list: bool = False) -> list[str]:
    """Split a list or set into parts; a tuple or interval is one part.

    A comma before three digits belongs to a number, except with `is_list` or in a set.
    """
    if text.startswith("\\{") and text.find("\\}") == len(text) - 2:
        text, is_list = text[2:-2], True
    if not is_list and plain.number(text):
        return [text]
    parts, depth, start = [], 0, 0
    for token in _SEPARATOR.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        in_number = THOUSANDS.match(text, token.start())
        if token["comma"] and depth == 0 and (is_list or not in_number):
            parts.append(text[start : token.start()])
            start = token.end()
    parts = [part.lstrip(" ,;").rstrip(" .,;") for part in (*parts, text[start:])]
    return [value for part in parts if part for value in _both_signs(part)]


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1:  # two signs may be independent, which is ambiguous
        return [text]
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    return [upper, text.replace("\\pm", "-").replace("\\mp", "+")]


_LABEL = re.compile(r"\s*([A-Za-z\\][\w\\{}'() ]*?)\s*=")


def _labels(parts: Sequence[str]) -> list[str]:
    """The left sides of the parts, if all parts are equations with different left sides."""
    labels = [match[1] for part in parts if (match := _LABEL.match(part))]
    return labels if len(set(labels)) == len(parts) else []


def equal_lists(given: str, reference: str) -> bool | None:
    """Compare lists in any order; by position if only the reference has names: x = 1, y = 2."""
    ours, theirs = split(given), split(reference)
    if len(theirs) > len(ours):
        ours = split(given, is_list=True)  # 100,200 where two numbers are expected
    # One value in two spellings: 3/2 or 1.5.
    for text, (first, *others), single in ((reference, theirs, ours), (given, ours, theirs)):
        is_one = others and len(single) == 1 and " or " in text
        if is_one and all(compare(other, first).outcome is Outcome.CORRECT for other in others):
            pair = (given, first) if text is reference else (first, reference)
            return compare(*pair).outcome is Outcome.CORRECT
    # Coordinates of a point on one side, equations with names on the other.
    if (labels := _labels(theirs)) and len(theirs) > len(ours) == 1:
        names, _, point = ours[0].rpartition("=")
        if names.startswith("(") and names.replace(" ", "") != f"({','.join(labels)})":
            return False  # (b,a) = (1,2) is not a = 1, b = 2
        ours = _coordinates(point.strip()) if names[:1] in ("", "(") else ours
    elif max(map(len, _labels(ours)), default=0) == 1 and len(ours) > len(theirs):
        values = [part.partition("=")[2].strip() for part in sorted(ours)]  # x before y
        if len(coordinates := _coordinates(reference)) == len(values):
            pairs = zip(values, coordinates, strict=True)
            return all(compare(*pair).outcome is Outcome.CORRECT for pair in pairs)
    if len(theirs) < 2 or len(ours) != len(theirs):
        # math-verify compares them as sets: 60, 60 would equal 60, 60, 60.
        repeats = len(set(theirs)) < len(theirs) and "=" not in reference
        are_lists = min(len(ours), len(theirs)) > 1 and not RELATION.search(given + reference)
        if len(ours) < len(theirs) and all("," in part for part in ours):
            are_lists = False  # (5,2), (7,2) may be p=5, q=2; p=7, q=2
        return False if repeats or are_lists else None
    # As many parts: by position or in any order.
    if _labels(theirs) and not _labels(ours):
        outcomes = [compare(*pair).outcome for pair in zip(ours, theirs, strict=True)]
    else:
        outcomes = [_take_equal(ours, part) for part in theirs]
    if Outcome.WRONG in outcomes:
        return False
    return True if set(outcomes) == {Outcome.CORRECT} else None


def _coordinates(text: str) -> list[str]:
    """The coordinates of a point; anything else as its only one."""
    is_point = text[:1] in ("(", "[") and text[-1:] in (")", "]")
    return split(text[1:-1], is_list=True) if is_point else [text]


def _take_equal(others: list[str], part: str) -> Outcome:
    """Remove the first of `others` that equals `part`; if none does, WRONG or UNKNOWN."""
    outcome = Outcome.WRONG
    for index, other in enumerate(others):
        found = compare(other, part).outcome
        if found is Outcome.CORRECT:
            del others[index]
            return found
        if found is Outcome.UNKNOWN:
            outcome = found
    return outcome


_RULES = (
    _equal_choices, plain.equal_times, plain.equal_numbers, plain.equal_numerals, plain.equal_words,
    plain.equal_quantities, equal_lists, _equal_units,
)  # fmt: skip
"""Comparisons in their order; each returns None where it does not apply."""
