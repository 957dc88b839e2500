"""Normalises the spellings of LaTeX, Unicode and plain text."""

from __future__ import annotations

import re

from gapo_megatron.rewards.math.boxes import closing_bracket
from gapo_megatron.rewards.math.functions import GREEK, NAMES, argument_end, functions
from gapo_megatron.rewards.math.signs import TABLES, fold
from gapo_megatron.rewards.math.units import in_text

# Not after another backslash: two end a row of a matrix.
_SPACE = re.compile(
    r"(?<!\\)\\[,;: >]|\\(?:hspace|h?phantom)\s*(?:\{[^{}]*\}|[^\\{\s])|~|\s"
    r"|\\(?:q?quad|thinspace|enspace)(?![a-zA-Z])"
)
_NO_MEANING = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits"
    r"|bf(?:series)?|it|sf|tiny|small|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])"
    r"|(?<!\\)(?:\\!\s*|\\[()\[\]]|\$)"
    r"|\\(?:vspace|vphantom|label)\s*\{[^{}]*\}|\{\s*\}(?=\s*\^)"
    r"|\\color\s*\{[^{}]*\}(?!\s*\{)|(?<![\\^_a-zA-Z}\] ])\{\s*\}"
    r"|(?<=\\\\)(?:\*?\s*\[-?[\d.]+\s*(?:p[tc]|e[mx]|[cm]m|in|bp|mu|sp)\]|\*)"
    r"|\\(?:begin|end)\s*\{(?:align(?:ed|\*)?|split|gathered)\}\s*&?"
)
_SYNONYMS = TABLES["commands"]
_SYNONYM = re.compile("|".join(f"(\\\\(?:{names})(?![a-zA-Z]))" for names in _SYNONYMS.values()))
_SYNONYM_OF = list(_SYNONYMS)
FUNCTIONS = f"{NAMES}|gcd|lcm|max|min|det"
_FUNCTIONS = frozenset(FUNCTIONS.split("|"))
TEXT = re.compile(r"\\text\{([^{}]*)\}")
"""Words in cleaned text."""

_NESTED = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
_IN_FONT = re.compile(
    r"\\(?P<font>text(?:bf|it|rm|normal|sf|sc)?|[mh]box|math(?:rm|bf|it|sf|normal)|boldsymbol|bm|pmb"
    r"|operatorname\*?|underline|(?:text)?color\s*\{[^{}]*\})"
    rf"\s*\{{(?P<inside>{_NESTED})\}}|\\(?:math)?rm\s+(?P<letter>[ei])(?![a-zA-Z])"
)
_TEXT_FONTS = ("text", "textrm", "textnormal", "textsf", "textsc", "mbox", "hbox")
_OVER = re.compile(rf"\{{({_NESTED})\\(over|choose)(?![a-zA-Z])({_NESTED})\}}")
_IN_BRACES = re.compile(
    rf"\\([pb]?matrix|cases)\s*\{{((?:[^{{}}]|\{{{_NESTED}\}})*)\}}"  # as in plain TeX
)
_MATRIX = re.compile(
    r"\\(begin|end)\s*\{([pbBvV]?)(?:small)?matrix(?:\*\}(?:\s*\[[lcr]\])?|\})"
    r"|\\cr(?![a-zA-Z])|\\\\\s*(?=\\end)"
)
# Two backslashes before a name may be a command that was escaped twice.
_ROW_END = re.compile(r"\\\\(?![a-zA-Z]{2,}(?![a-zA-Z]|\s*=)|[{}])\s*&?\s*(=?)")
_SYSTEM = re.compile(
    r"(?:\\begin\s*\{d?cases\}|\\\{\s*(?:\\begin\s*\{(?:array\}\s*\{[^{}]*|matrix)\})?)"
    r"(?P<rows>(?:(?!\\(?:begin|end|\})).)*)(?:\\end\s*\{(?:d?cases|array|matrix)\})?[\s.]*"
)
# Without a space between factors, which may be one between a value and its condition.
_EQUATION = re.compile(
    r"(?!.*\\(?:text|mbox|mathrm|[lgn]eq?|in)(?![a-z]))"
    r"(?:[^&,;=<>\s]|\s(?=[-+*/=])|(?<=[-+*/])\s(?![-+*/=]))+=[^&,;=<>]+[,;.]?\s*"
)
_INTRODUCTION = r"((?:\\text\{[^{}]*\}\s*[:=]?\s*)?)"
_INTRODUCED = re.compile(rf"^(\\text\{{[^{{}}]*\}}\s*[:=]?\s*)\{{({_NESTED})\}}$")
"""A value in braces behind words."""
_MEMBER = re.compile(
    rf"^{_INTRODUCTION}(?:(?:[a-zA-Z]|\\(?:{GREEK}))(?:_\{{?\w+\}}?)?|\([\w, ]+\))\s*\\in\s*"
    r"(?=\\\{(?:(?!\\\}).)*\\\}$|\{[^{}]*\}$)"
)
_INTERVAL = r"([\[\]])([^\[\](),;]+[,;][^\[\](),;]+)([\[\]])"
_INTERVALS = re.compile(
    rf"{_INTRODUCTION}(?:[a-zA-Z]\s*(?:\\in|=)\s*)?{_INTERVAL}(?:\s*\\cup(?![a-zA-Z])\s*{_INTERVAL})*"
)
_ANGLED = re.compile(r"\\langle(?![a-zA-Z])([^\[\]]*?)\\rangle(?![a-zA-Z])")
_ORDINAL = re.compile(
    r"(?<=\d)\s*\^?\s*\{?\s*(?:\\text\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)\b)\s*\}?"
)
_BRACED_SIGN = re.compile(r"(\\[a-zA-Z]+\s*|[\^_]\s*)?\{([:;=<>,])\}\s*")
_DOMAIN = re.compile(
    r"(?:,?\s*(?P<all>\\text\{[\s,(]*for (?:all|every|any|each)(?: real)?(?: numbers?)?\s*\}"
    r"|\\forall(?![a-zA-Z]))|,?\s*\\text\{[\s,(]*(?:for|where|with)\s*\}|[,;\s]\s*\(?)\s*"
    r"(?P<letters>[a-z](?:\s*,\s*[a-z])*)\s*"
    r"(?P<domain>\\in(?![a-zA-Z])\s*(?:\\(?:mathbb)?\s*)?\{?\s*(?P<set>[RQZNC])(?![a-zA-Z])\s*\}?"
    r"(?P<part>(?:\s*[_^]\s*(?:\{[^{}]*\}|[^\s{}(),;]))*))?\s*\)?\s*(?=[,;]|$)"
)
_CONDITION = re.compile(r"[<>]|\\[lgn]e(?![a-zA-Z])")
_SET_IN_WORDS = re.compile(
    r"(?P<none>(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?"
    r"(?: exists?)?)|(?P<all>all real(?:s| numbers))"
    r"|(?P<never>DNE|(?:(?:the )?limit )?does not exist)",
    re.IGNORECASE,
)
_SETS = {"none": "\\emptyset", "all": "\\mathbb{R}", "never": "\\text{does not exist}"}
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])")
THOUSANDS = re.compile(r"(?<=\d)(?<!\^\d),(?=\d{3}(?!\d))")
"""A comma that may separate thousands, or two numbers."""
_CUT_DECIMAL = re.compile(r"(?<=\.\d{3})(\d*)\s*\\ldots\s*$")


def clean(text: str) -> str:
    """Normalise an answer: one spelling, without what has no meaning."""
    # Unicode, spaces and layout.
    text = _NO_MEANING.sub("", " ".join(_SPACE.sub(" ", fold(text)).split()))
    text = _BRACED_SIGN.sub(lambda sign: sign[0] if sign[1] else sign[2], text)
    if "\\over" in text or "\\choose" in text:
        text = _OVER.sub(_from_between, f"{{{text}}}")
    text = strip_braces(text)
    # Commands.
    if "\\" in text:
        text = _IN_BRACES.sub(r"\\begin{\1}\2\\end{\1}", text)
        text = _MATRIX.sub(_usual_matrix, text)
        text = _SYSTEM.sub(_equations, text) if _SYSTEM.fullmatch(text) else text
        if "\\begin" not in text:  # a row that begins with = continues; another is a part
            text = _ROW_END.sub(lambda end: end[1] or ", ", text)
        text = _SYNONYM.sub(lambda name: _SYNONYM_OF[(name.lastindex or 1) - 1], text)
        text = _IN_FONT.sub(_without_font, _ANGLED.sub(r"(\1)", text))
    for sign, latex in TABLES["written"].items():
        text = text.replace(sign, latex)
    # Numbers, angles and words.
    text = _CUT_DECIMAL.sub(r"\1", text)
    text = _clean_degrees(text.rstrip(" .,;"))
    text = _INTRODUCED.sub(r"\1\2", text)
    text = _MEMBER.sub(r"\1", text)  # x \in \{1, 2\} is 1, 2
    if _INTERVALS.fullmatch(text):  # ]0, 1[ is open
        text = re.sub(_INTERVAL, _with_parentheses, text)
    text = _DOMAIN.sub(_domain, text)
    text = _ORDINAL.sub("", text)
    text = text.replace("_{\\max}", "_{max}").replace("_{\\min}", "_{min}")
    if in_words := _SET_IN_WORDS.fullmatch(TEXT.sub(r"\1", text).strip()):
        text = _SETS[in_words.lastgroup or ""]
    if any(name in text for name in ("\\frac", "\\sqrt", "\\binom", "^\\", "^ \\", "^e", "_e")):
        text = brace(text)
    text = _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)
    joined, in_numbers = THOUSANDS.subn("", text)
    if ", " in text and text.count(", ") + in_numbers == text.count(","):
        text = joined  # 1,000, 2,000: commas between parts have a space after them
    return strip_braces(" ".join(text.split()).lstrip(" ,;").rstrip(" .,;"))


def strip_braces(text: str) -> str:
    """Remove braces around all of the text, and the full stop behind them."""
    text = text.strip()
    while text.startswith("{") and (end := closing_bracket(text, 0)) >= len(text.rstrip(" .,;")):
        text = text[1 : end - 1].strip()
    return text


def _from_between(match: re.Match[str]) -> str:
    command = "\\frac" if match[2] == "over" else "\\binom"
    return f"{command}{{{match[1]}}}{{{match[3]}}}"


def _with_parentheses(match: re.Match[str]) -> str:
    return f"{match[1].replace(']', '(')}{match[2]}{match[3].replace('[', ')')}"


def _usual_matrix(match: re.Match[str]) -> str:
    if match[1]:
        return f"\\{match[1]}{{{match[2].replace('B', 'p')}matrix}}"
    return "\\\\ " if match[0] == "\\cr" else ""


def _equations(system: re.Match[str]) -> str:
    """The rows as a list, if all are equations; the cases of a function stay."""
    rows = re.sub(r"&?\s*=\s*&?", "=", system["rows"]).split("\\\\")
    are_equations = all(_EQUATION.fullmatch(row.strip()) for row in rows if row.strip())
    return ", ".join(rows) if are_equations else system[0]


def _domain(match: re.Match[str]) -> str:
    r"""`\forall`, the letters and the set; empty if no set is named.

    Without the words the letters must be the value's: x = 1, k \in \mathbb{Z} are two answers. With
    a condition, x > 0, the set is not left out.
    """
    value = match.string[: match.start()]
    letters = sorted(re.findall("[a-z]", match["letters"]))
    if not match["all"] and (
        not match["domain"]
        or not set(re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+", "", value)).issuperset(letters)
        or _CONDITION.search(value)
        or match[0].count("(") != match[0].count(")")
    ):
        return match[0]
    if not match["set"]:
        return ""
    part = re.sub("[{} ]", "", match["part"])
    return f"\\forall {' '.join(letters)}\\in\\mathbb{{{match['set']}}}{part}"


def _without_font(match: re.Match[str]) -> str:
    """Unwrap letters and mathematics from a font; functions become commands, words text."""
    if match["letter"]:
        return match["letter"]
    inside = _IN_FONT.sub(_without_font, match["inside"])
    word = inside.strip()
    before = match.string[: match.start()].rstrip(" ")
    if re.search(r"\\[a-zA-Z]+$", before):  # keep a command apart from the letters after it
        inside = f" {inside}"
    if before.endswith(("_", "_{")):
        return word if before.endswith("{") else f"{{{word}}}"
    if word in ("e", "i"):
        return word
    if word in _FUNCTIONS:  # after a number it is a unit: 30 min, 5 sec
        is_unit = word in ("min", "sec") and (before[-1:].isdigit() or before[-1:] in ("}", "/"))
        return f"\\text{{{word}}}" if is_unit else f"\\{word} "
    is_in_brackets = before.endswith("(") and match.string.startswith(")", match.end())
    if is_in_brackets and len(word) == 1 and word.isupper():
        return word
    if match["font"] in _TEXT_FONTS:
        return _without_text(inside)
    if "\\" in inside or "{" in inside:
        return in_text(inside)
    is_label = len(word.strip("().:")) == 1 and word[-1] in ").:"
    is_word = is_label or match["font"] == "mathrm" or re.search(r"[a-zA-Z]{2}", inside)
    return _without_text(inside) if is_word else inside


_ONE = r"(?:(?:\\?\$)?-?\d[\d./]*|(?<!\d )(?:\([A-Z]\)|[A-Z])(?=\s*$|,|\s+(?:and|or)\b))"
_VALUES = re.compile(rf"(?<!\S)({_ONE}(?:,\s*{_ONE})*,?)(?!\S)")


def _without_text(inside: str) -> str:
    r"""Move numbers, signs and lists out of it: `\text{3 out of 4}` to `3\text{ out of }4`."""
    is_word = any(map(str.isalpha, inside))
    if not is_word or inside.strip(" ,").lower() in ("and", "or"):
        return f" {inside.lower()} "
    if inside.count(".") == 1 and len(inside.strip()) > 2:
        inside = inside.rstrip(" .")
    pieces = _VALUES.split(inside)
    if not "".join(pieces[::2]).strip():
        return inside if "," in inside else f"\\text{{{inside}}}"  # a letter: a choice, or a unit
    if len(pieces) == 1:
        return f"\\text{{{inside}}}"
    return "".join(one if place % 2 else _without_text(one) for place, one in enumerate(pieces))


_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°"
    r"|(?<=\d)\s*\\text\s*\{\s*degrees?\s*\}"
)


def in_radians(text: str) -> str:
    """An angle in degrees, cleaned and converted to radians; empty if it is no angle."""
    parts = _DEGREES.split(fold(text).strip(" .$"))
    is_angle = len(parts) == 2 and parts[0].strip() and not parts[1].strip()
    return f"({clean(parts[0])})\\cdot \\frac{{\\pi}}{{180}}" if is_angle else ""


def _clean_degrees(text: str) -> str:
    """Convert degrees to radians in arguments of functions; elsewhere they stay a unit."""
    text = _DEGREES.sub("\0", text)
    if "\0" not in text:
        return text
    for function in reversed(functions(text)):
        end = argument_end(text, function)
        argument = text[function.end() : end].strip()
        if "\0" in argument:
            radians = argument.replace("\0", "\\cdot \\frac{\\pi}{180}")
            text = f"{text[: function.end()]}({radians}){text[end:]}"
    return text.replace("\0", "°")


_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "\\text": 1}
_TAKES = re.compile(
    r"\\(?:frac|binom|sqrt)(?![a-zA-Z])|\^(?=\s*\\[a-zA-Z])|[\^_](?=\s*e(?![a-zA-Z]))"
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\?.", re.DOTALL)


def brace(text: str) -> str:
    r"""Write braces around arguments as TeX reads them: `2^\frac13` as `2^{\frac{1}{3}}`."""
    for head in reversed(list(_TAKES.finditer(text))):  # inner arguments first
        index, end = _index(text, head.end()) if head[0] == "\\sqrt" else ("", head.end())
        parts = [head[0], index]
        for _ in range(_ARGUMENTS.get(head[0], 1)):
            argument, end = _argument(text, end)
            parts.append(argument)
        text = f"{text[: head.start()]}{''.join(parts)}{text[end:]}"
    return text


def _index(text: str, start: int) -> tuple[str, int]:
    """The index of a root in square brackets, and its end."""
    place = _next(text, start)
    end = closing_bracket(text, place) if text.startswith("[", place) else 0
    return (text[place:end], end) if end else ("", start)


def _argument(text: str, start: int) -> tuple[str, int]:
    """A group, a command with its arguments, or a sign: in braces, and its end."""
    place = _next(text, start)
    if place == len(text) or text[place] in "})]":
        return "", start
    if text[place] in "{(":
        end = closing_bracket(text, place) or len(text)
        group = text[place:end]
        return group if group[0] == "{" else f"{{{group}}}", end
    token = _TOKEN.match(text, place)
    assert token is not None, (text, place)
    end = token.end()
    if token[0] == "\\sqrt":
        end = _index(text, end)[1]
    for _ in range(_ARGUMENTS.get(token[0], 0)):
        end = _argument(text, end)[1]
    return f"{{{text[place:end]}}}", end


def _next(text: str, start: int) -> int:
    """Index of the next sign that is no space."""
    return len(text) - len(text[start:].lstrip())
