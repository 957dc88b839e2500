"""One spelling for what LaTeX, Unicode and plain text write in several."""

from __future__ import annotations

import re

from gapo_megatron.rewards.math.boxes import closing_bracket, strip_box
from gapo_megatron.rewards.math.functions import NAMES, argument_end, functions
from gapo_megatron.rewards.math.signs import fold

# A backslash behind another ends a row of a matrix.
_SPACE = re.compile(r"(?<!\\)\\[,;: >]|\\(?:q?quad|thinspace|enspace)(?![a-zA-Z])|~|\s")
_NO_MEANING = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])"
    r"|(?<!\\)(?:\\[()\[\]]|\$)|\\(?:[hv]space|[hv]?phantom)\s*\{[^{}]*\}|\\label\s*\{[^{}]*\}"
)
_SYNONYMS = {
    "le": "leq|leqslant", "ge": "geq|geqslant", "ne": "neq",
    "emptyset": "varnothing", "ldots": "dots|cdots|dotsc|dotsb|dotsm",
    "log_{10}": "lg", "tan": "tg", "cot": "ctg|cotg", "arctan": "arctg|atan", "arcsin": "asin",
    "arccos": "acos", "frac": "[dtc]frac", "binom": "[dt]binom", "cdot": "cdotp",
    "text{ or }": "lor|vee", "text{ and }": "land|wedge", "in": "isin",
    "{": "lbrace", "}": "rbrace", "cup": "bigcup", "cap": "bigcap", "setminus": "backslash",
    "infty": "infin", "mathbb{R}": "R|Reals|reals",
}  # fmt: skip
_SYNONYM = re.compile("|".join(f"(\\\\(?:{names})(?![a-zA-Z]))" for names in _SYNONYMS.values()))
_SYNONYM_OF = [f"\\{name}" for name in _SYNONYMS]
_PLAIN_SIGNS = {"<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ", "**": "^", "\\|": "|", "\\%": "%"}
_PLAIN_SIGN = re.compile("|".join(map(re.escape, _PLAIN_SIGNS)))
_BRACKET = re.compile(r"\\(?:(langle)|(rangle)|([lr]?vert|mid))(?![a-zA-Z])")

FUNCTIONS = f"{NAMES}|gcd|lcm|max|min|det"
_WRAPPERS = (
    "text|textbf|textit|textrm|textnormal|textsf|textsc|mbox|hbox|mathrm|mathbf|mathit|mathsf"
)
_NESTED = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
_IN_FONT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|textbf|textit|pmb|operatorname\*?)"
    rf"\s*\{{({_NESTED})\}}"
)
_OVER = re.compile(rf"\{{({_NESTED})\\over(?![a-zA-Z])({_NESTED})\}}")
TEXT = re.compile(rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}")
_NAMED_FUNCTION = re.compile(rf"\\(?:{_WRAPPERS}|operatorname\*?)\s*\{{\s*({FUNCTIONS})\s*\}}")
_CONSTANT = re.compile(
    rf"\\(?:{_WRAPPERS}|operatorname)\s*\{{\s*([ei])\s*\}}|\\(?:math)?rm\s+([ei])(?![a-zA-Z])"
)
_MATHEMATICS = re.compile(r"(?:\\[$%]|[-+\d\s.,/:()])*\d(?:\\[$%]|[-+\d\s.,/:()^{}])*")

_ORDINAL = re.compile(
    r"(?<=\d)\s*\^?\s*\{?\s*(?:\\text\s*\{\s*(?:st|nd|rd|th)\s*\}|(?<=\d)(?:st|nd|rd|th)\b)\s*\}?"
)
_BRACED_SIGN = re.compile(r"(\\[a-zA-Z]+\s*|[\^_]\s*)?\{([:;=<>])\}")
_FOR_ALL = re.compile(
    r",?\s*(?:\\text\s*\{[\s,(]*for (?:all|every|any|each)(?: real)?(?: numbers?)?\s*\}"
    r"|\\forall(?![a-zA-Z]))"
    r"\s*[a-z]\s*(?:\\in(?![a-zA-Z])\s*\\mathbb\s*(?:\{\s*R\s*\}|R)\s*)?\)?\s*(?=[,;]|$)"
)
_ELLIPSIS = re.compile(r"\.\s?\.\s?\.+")
_CUT_DECIMAL = re.compile(r"(?<=\.\d{3})(\d*)\s*\\ldots\s*$")
_NONE = re.compile(
    r"(?:\\text\s*\{)?\s*(?:(?:the )?empty set"
    r"|(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?)\s*\}?",
    re.IGNORECASE,
)
_ALL_REAL = re.compile(r"(?:\\text\s*\{)?\s*all real(?:s| numbers)\s*\}?", re.IGNORECASE)


def clean(text: str) -> str:
    """The text in one spelling, without what has no meaning."""
    text = strip_box(text) if "boxed" in text or "fbox" in text else text
    text = fold(text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"\{,\}\s*", ",", text)
    text = _BRACED_SIGN.sub(lambda sign: sign[0] if sign[1] else sign[2], text)
    text = _NO_MEANING.sub("", _SPACE.sub(" ", text))
    if "\\over" in text:
        text = _OVER.sub(r"\\frac{\1}{\2}", f"{{{text}}}")
    text = strip_braces(text)
    if "\\" in text:
        text = _SYNONYM.sub(lambda name: _SYNONYM_OF[(name.lastindex or 1) - 1] + " ", text)
        text = _BRACKET.sub(lambda name: ("(", ")", "|")[(name.lastindex or 1) - 1], text)
        text = _CONSTANT.sub(lambda name: name[1] or name[2], text)
        text = _NAMED_FUNCTION.sub(_named, text)
        text = _IN_FONT.sub(_without_font, text)
        text = re.sub(r"\(\\text\s*\{\s*([A-Z])\s*\}\)", r"(\1)", text)
        text = TEXT.sub(_without_text, text)
        text = re.sub(r"\\\{\s*\\\}", r"\\emptyset ", text)
    text = _PLAIN_SIGN.sub(lambda sign: _PLAIN_SIGNS[sign[0]], text)
    text = _ELLIPSIS.sub(r"\\ldots ", text)
    text = _CUT_DECIMAL.sub(r"\1", text)
    text = _clean_degrees(text.rstrip(" .,;"))
    text = _FOR_ALL.sub("", text)
    text = _ORDINAL.sub("", text)
    if _ALL_REAL.fullmatch(text.strip()):
        text = "\\mathbb{R}"
    elif _NONE.fullmatch(text.strip()):
        text = "\\emptyset"
    if any(name in text for name in ("\\frac", "\\sqrt", "\\binom", "^\\", "^ \\")):
        text = brace(text)
    text = re.sub(r"\{(\d{1,3}(?:,\d{3})+)\}", lambda number: number[0].replace(",", ""), text)
    return strip_braces(re.sub(r"\s+", " ", text).lstrip(" ,;").rstrip(" .,;"))


def strip_braces(text: str) -> str:
    """What stands in braces around all of it."""
    text = text.strip()
    while text.startswith("{") and closing_bracket(text, 0) == len(text):
        text = text[1:-1].strip()
    return text


def _named(match: re.Match[str]) -> str:
    """A function, but behind a number a unit: 30 min, 5 sec."""
    before = match.string[: match.start()].rstrip()
    is_unit = match[1] in ("min", "sec") and (before[-1:].isdigit() or before.endswith("}"))
    return f"\\text{{{match[1]}}}" if is_unit else f"\\{match[1]} "


def _without_font(match: re.Match[str]) -> str:
    """Single letters and mathematics look no different; words are text."""
    inside = match[1]
    is_mathematics = "\\" in inside or "{" in inside
    if match[0].startswith("\\mathrm") and not is_mathematics:
        return match[0]
    if not re.search(r"[a-zA-Z]{2}", re.sub(r"\\[a-zA-Z]+", "", inside)):
        is_label = re.fullmatch(r"\s*\(?[A-Za-z][).:]+\s*", inside)
        return f"\\text{{{inside}}}" if is_label else inside
    return match[0] if is_mathematics else f"\\text{{{inside}}}"


_ONE = r"(?:\(?[A-Z]\)?|-?\d[\d./]*)"
_LIST = re.compile(rf"\s*{_ONE}(?:\s*(?:,\s*(?:and\b\s*)?|and\b\s*){_ONE})+\s*")
_STATED = re.compile(
    r"(.*\b(?:is|are|equals|[Oo]ption|[Cc]hoice):?)\s+(\(?[A-Z]\)?|-?\d[\d,.]*)\.?\s*", re.DOTALL
)
_COUNTED = re.compile(r"\s*(-?\d[\d,.]*)(\s+[a-zA-Z].*)", re.DOTALL)


def _without_text(match: re.Match[str]) -> str:
    """Numbers and empty text are no words; everything else is, in one kind of text."""
    inside = match[1]
    if not inside.strip() or _MATHEMATICS.fullmatch(inside):
        return f" {inside} "
    if _LIST.fullmatch(inside):
        return inside
    if stated := _STATED.fullmatch(inside):
        return f"\\text{{{stated[1]}}} {stated[2]}"
    if counted := _COUNTED.fullmatch(inside):
        words = re.sub(r"\s(\d[\d,.]*)(?=\s|$)", r" } \1\\text{", counted[2])
        return f"{counted[1]}\\text{{{words}}}".removesuffix("\\text{}")
    if "_" in inside and not re.search(r"[a-zA-Z]{3}|\s", inside):
        return inside
    inside = _FULL_STOP.sub(r"\1", inside)
    return f"\\text{{{inside}}}"


_FULL_STOP = re.compile(r"^([^.]{2,})\.\s*$")
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|[°\u00ba]"
)
_TEMPERATURE = re.compile(r"\0\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF])(?![a-zA-Z]))")
_DEGREES_TEXT = re.compile(r"(?<=\d)\s*\\text\s*\{\s*degrees?\s*\}")
_PLAIN_TRIGONOMETRIC = re.compile(r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


def in_radians(text: str) -> str:
    """An angle in degrees, cleaned and without a sign of them; nothing if it is none."""
    parts = _DEGREES.split(fold(text).strip(" .$"))
    is_angle = len(parts) == 2 and parts[0].strip() and not parts[1].strip()
    return f"({clean(parts[0])})\\cdot \\frac{{\\pi}}{{180}}" if is_angle else ""


def _clean_degrees(text: str) -> str:
    """Angles in functions in radians; elsewhere a degree is a unit that may be left out."""
    if not (_DEGREES.search(text) or _DEGREES_TEXT.search(text)):
        return text
    text = _TEMPERATURE.sub(r"\\text{ °\1\2}", _DEGREES.sub("\0", text))
    text = _PLAIN_TRIGONOMETRIC.sub(r"\\\1 ", text)
    if functions(text):
        text = _DEGREES_TEXT.sub("\0", text)
        for function in reversed(functions(text)):
            end = argument_end(text, function)
            argument = text[function.end() : end].strip()
            if "\0" in argument:
                radians = argument.replace("\0", "\\cdot \\frac{\\pi}{180}")
                text = f"{text[: function.end()]}({radians}){text[end:]}"
    return text.replace("\0", " ")


_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|.", re.DOTALL)
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1}


def brace(text: str) -> str:
    r"""Write braces around arguments as TeX reads them: `2^\frac13` is `2^{\frac{1}{3}}`."""
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    return "".join(_Braces(tokens).rest())


class _Braces:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.place = 0

    def rest(self) -> list[str]:
        parts = []
        while self.place < len(self.tokens):
            parts.append(self.next(is_argument=False))
        return parts

    def next(self, *, is_argument: bool) -> str:
        """The next token, with what belongs to it."""
        token = self.tokens[self.place]
        self.place += 1
        if token in _ARGUMENTS:
            index = self._index() if token == "\\sqrt" else ""
            arguments = [self._argument() for _ in range(_ARGUMENTS[token])]
            return token + index + "".join(arguments)
        if token == "{" and is_argument:
            return self._group()
        if token == "^" and self._peek().startswith("\\") and self._peek() not in ("\\{", "\\}"):
            return "^" + self._argument()
        return token

    def _peek(self) -> str:
        while self.place < len(self.tokens) and self.tokens[self.place].isspace():
            self.place += 1
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _argument(self) -> str:
        if self._peek() in ("", "}", ")", "(", "]"):
            return ""
        inside = self.next(is_argument=True)
        return inside if inside.startswith("{") else f"{{{inside}}}"

    def _group(self) -> str:
        parts = ["{"]
        while self.place < len(self.tokens):
            if self.tokens[self.place] == "}":
                self.place += 1
                parts.append("}")
                break
            # A group within is not an argument, yet its own arguments need braces.
            is_group = self.tokens[self.place] == "{"
            parts.append(self.next(is_argument=is_group))
        return "".join(parts)

    def _index(self) -> str:
        if self._peek() != "[":
            return ""
        parts = []
        while self.place < len(self.tokens):
            parts.append(self.tokens[self.place])
            self.place += 1
            if parts[-1] == "]":
                break
        return "".join(parts)


__all__ = ["FUNCTIONS", "TEXT", "brace", "clean", "in_radians", "strip_braces"]
