"""Verifier of instruction following: the 25 checks of IFEval, strict and loose.

An answer is JSON text, each instruction with the arguments of the published file:

    {"instructions": [{"id": "punctuation:no_comma"}, ...], "loose": false}

A response is correct if it follows all of them. With "loose" each instruction may be followed by
any variant of the response without its first line, last line or asterisks (`_variants`).

The checks are those of Zhou et al. 2023, "Instruction-Following Evaluation for Large Language
Models", with two differences. Sentences and capitalised words are split by the rules below instead
of NLTK's. Where no language can be detected, the verdict is unknown, not "followed".
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from langdetect import DetectorFactory, LangDetectException, detect

from gapo_megatron.errors import DataError, said
from gapo_megatron.io.documents import parse_json
from gapo_megatron.rewards.final_answer import final_answer
from gapo_megatron.types import Outcome, Verdict

DetectorFactory.seed = 0  # langdetect samples: this makes it deterministic

Instruction = tuple[str, dict[str, Any]]


class CannotTellError(Exception):
    """A check depends on something unknown, which the message names."""


def verify(response: str, answer: str) -> Verdict:
    """Say whether the final answer in `response` follows every instruction of `answer`.

    Raises:
        DataError: `parse` refuses the answer.
    """
    instructions, loose = parse(answer)
    response = final_answer(response) or ""
    if not response.strip():
        return Verdict(Outcome.WRONG, "the final answer is empty")
    versions = _variants(response) if loose else [response]
    broken, unknown = [], []
    for name, arguments in instructions:
        try:
            if not _follows(versions, partial(_CHECKS[name], **arguments)):
                broken.append(name)
        except CannotTellError as error:
            unknown.append(f"{name}: {error}")
    if broken:
        return Verdict(Outcome.WRONG, f"not followed: {', '.join(broken)}")
    if unknown:
        return Verdict(Outcome.UNKNOWN, "; ".join(unknown))
    return Verdict(Outcome.CORRECT)


def parse(answer: str) -> tuple[list[Instruction], bool]:
    """Read the instructions of an answer with their arguments, and whether they are loose.

    Raises:
        DataError: not JSON of this form, or an instruction or argument is unknown or missing.
    """
    try:
        document = parse_json(answer, where="the text", error=DataError)
        rows = [dict(row) for row in document["instructions"]]
        instructions = [(row.pop("id"), row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"instructions {answer[:80]!r} must have the form "
            f"{{'instructions': [{{'id': ...}}]}}: {said(error)}"
        ) from None
    if not instructions:
        raise DataError("instructions: the list is empty")
    for name, arguments in instructions:
        if not isinstance(name, str) or name not in _CHECKS:
            raise DataError(f"instruction {name!r} is not one of {', '.join(_CHECKS)}")
        try:
            inspect.signature(_CHECKS[name]).bind("", **arguments)
        except TypeError as error:
            raise DataError(f"instruction {name} with {arguments}: {error}") from None
        for key in arguments.keys() & {"relation", "let_relation", "capital_relation"}:
            if not isinstance(arguments[key], str) or arguments[key] not in _RELATIONS:
                raise DataError(
                    f"instruction {name}: {key} ({arguments[key]!r}) must be one of "
                    f"{', '.join(_RELATIONS)}"
                )
    return instructions, document.get("loose", False)


def check_answer(answer: str) -> None:
    """Refuse instructions that cannot be checked.

    Raises:
        DataError: `parse` refuses them, or an argument has the wrong type.
    """
    instructions, loose = parse(answer)
    if not isinstance(loose, bool):
        raise DataError(f"instructions: loose ({loose!r}) must be true or false")
    for name, arguments in instructions:
        parameters = inspect.signature(_CHECKS[name]).parameters
        for key, value in arguments.items():
            needed, is_one = _ARGUMENTS[parameters[key].annotation]
            if not is_one(value):
                raise DataError(f"instruction {name}: {key} ({value!r}) must be {needed}")


_ARGUMENTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": (  # Parquet files have 3.0
        "a whole number",
        lambda value: type(value) is int or (isinstance(value, float) and value.is_integer()),
    ),
    "Sequence[str]": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    ),
}
"""Annotation of a check's argument -> its description in messages, and a test of a value."""


def split(answer: str) -> list[str]:
    """Split an answer into one answer per instruction: all strict, then all loose.

    IFEval reports strict and loose accuracy, per instruction and per prompt. `verify` with these
    gives the figures per instruction.
    """
    instructions, _ = parse(answer)
    return [
        json.dumps({"instructions": [{"id": name, **arguments}], "loose": loose})
        for loose in (False, True)
        for name, arguments in instructions
    ]


def _follows(versions: Sequence[str], check: Callable[[str], bool]) -> bool:
    """Return True if any version follows it; raise CannotTellError if only an unknown one may."""
    doubt = None
    for version in versions:
        try:
            if version.strip() and check(version):
                return True
        except CannotTellError as error:
            doubt = error
    if doubt:
        raise doubt
    return False


def _variants(response: str) -> list[str]:
    """The response with and without its first line, last line and asterisks."""
    lines = response.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = [response, *("\n".join(kept).strip() for kept in cut[1:])]
    return texts + [text.replace("*", "") for text in texts]


_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda number, limit: number < limit,
    "at least": lambda number, limit: number >= limit,
}


def _existence(response: str, *, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keywords)


def _frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword also counts inside longer words."""
    return _RELATIONS[relation](response.lower().count(keyword.lower()), frequency)


def _forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """Only whole words count."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words
    )


def _letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _RELATIONS[let_relation](response.lower().count(letter.lower()), let_frequency)


def _language(text: str) -> str:
    try:
        return str(detect(text))
    except LangDetectException as error:
        raise CannotTellError(f"no language can be detected: {error}") from None


def _response_language(response: str, *, language: str) -> bool:
    return _language(response) == language


def _english_capital(response: str) -> bool:
    return response.isupper() and _language(response) == "en"


def _english_lowercase(response: str) -> bool:
    return response.islower() and _language(response) == "en"


# Length. A period after these, or after a single letter, does not end a sentence ...
_BEFORE_MORE = {
    *("mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "gen", "gov", "rep", "sen", "capt", "col"),
    *("lt", "sgt", "rev", "hon", "vs", "e.g", "i.e", "cf", "fig", "vol", "pp", "approx"),
}
# ... and after these only before a capital.
_BEFORE_MORE_OR_LAST = {
    *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "etc"),
    *("inc", "ltd", "co", "corp", "dept", "a.m", "p.m", "u.s", "u.k", "d.c", "ph.d"),
}
# Possessive quantifiers take linear time: some responses end in thousands of dots.
_SENTENCE_END = re.compile(r"(?<![.!?])([.!?]++)[\"'\u201d\u2019)\]*_]*+(?=\s|$)")


def count_sentences(text: str) -> int:
    """Count the sentences: pieces that contain a letter, split after . ! ? before white space."""
    count = start = 0
    for end in _SENTENCE_END.finditer(text):
        if end[1] == "." and _is_abbreviation(text, end.start(), end.end()):
            continue
        count += _has_letter(text[start : end.end()])
        start = end.end()
    return count + _has_letter(text[start:])


def _is_abbreviation(text: str, period: int, end: int) -> bool:
    """Whether the period marks an abbreviation and does not end a sentence."""
    words = text[max(0, period - 12) : period].split()
    word = words[-1].lstrip("\"'\u201c\u2018([*_").lower() if words else ""
    if word in _BEFORE_MORE_OR_LAST:
        return not text[end : end + 8].lstrip()[:1].isupper()
    return word in _BEFORE_MORE or (len(word) == 1 and word.isalpha() and word != "i")


def _has_letter(text: str) -> bool:
    return any(character.isalpha() for character in text)


def _number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    return _RELATIONS[relation](count_sentences(response), num_sentences)


def _number_words(response: str, *, num_words: int, relation: str) -> bool:
    return _RELATIONS[relation](len(re.findall(r"\w+", response)), num_words)


def _number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Three asterisks separate paragraphs; only the first and last part may be empty."""
    parts = _without_empty_ends(re.split(r"\s?\*\*\*\s?", response))
    return len(parts) == num_paragraphs and all(part.strip() for part in parts)


def _nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Blank lines separate paragraphs; punctuation ends the word."""
    parts = response.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs:
        return False
    if not 1 <= nth_paragraph <= num_paragraphs or not parts[int(nth_paragraph) - 1].strip():
        return False
    word = parts[int(nth_paragraph) - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _without_empty_ends(parts: list[str]) -> list[str]:
    if parts and not parts[0].strip():
        parts = parts[1:]
    if parts and not parts[-1].strip():
        parts = parts[:-1]
    return parts


def _number_placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def _postscript(response: str, *, postscript_marker: str) -> bool:
    """The letters of the marker may have spaces between them; case does not matter."""
    forms = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    form = forms.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(form, response.lower()) is not None


# Format.


def _number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    lines = [line.strip() for line in response.split("\n")]
    starred = [line for line in lines if re.match(r"\*[^*]", line)]
    dashed = [line for line in lines if line.startswith("-")]
    return len(starred) + len(dashed) == num_bullets


def _constrained_response(response: str) -> bool:
    options = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    return any(option in response for option in options)


def _number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """*Text* or **text**, not empty and on one line."""
    single = re.findall(r"\*[^\n*]*\*", response)
    double = re.findall(r"\*\*[^\n*]*\*\*", response)
    found = [part for part in single + double if part.strip("*").strip()]
    return len(found) >= num_highlights


def _multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", response)) >= num_sections


def _json_format(response: str) -> bool:
    """The whole response is JSON, apart from a Markdown fence."""
    text = response.strip()
    fence = re.match(r"```(?:json|Json|JSON)?", text)
    if fence:
        text = text[fence.end() :]
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str) -> bool:
    lines = [line[line.find("<<") : line.rfind(">>") + 2] for line in response.split("\n")]
    titles = [line for line in lines if line.startswith("<<") and line.endswith(">>")]
    return any(title.strip("<>").strip() for title in titles)


def _two_responses(response: str) -> bool:
    """Six asterisks separate two different responses; empty parts at the ends are ignored."""
    parts = [part.strip() for part in _without_empty_ends(response.split("******"))]
    return len(parts) == len(set(parts)) == 2 and all(parts)


def _repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


# Start and end, letters, punctuation.


def _end_checker(response: str, *, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_word_frequency(
    response: str, *, capital_frequency: int, capital_relation: str
) -> bool:
    words = (word.strip(string.punctuation) for word in response.split())
    return _RELATIONS[capital_relation](sum(word.isupper() for word in words), capital_frequency)


def _no_comma(response: str) -> bool:
    return "," not in response


_CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
