"""Extracts the program from a response."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gapo_megatron.rewards.final_answer import final_answer

_LINE_END = re.compile(r"\r\n?|\n")
_FENCE = re.compile(r"(\s*)(`{3,}(?=[^`]*$)|~{3,})(.*)")
"""Indentation, fence and info string; with backticks in the info string it is inline code."""
_QUOTED = re.compile(r"(?:[ \t]*>)*")
_FENCE_BEHIND_TEXT = re.compile(r"([^`]*)(`{3,})([\w.+-]+[ \t]*)")
_NAME = re.compile(r"[\s{]*\.?([\w.+#-]*)")
_PYTHON = re.compile(r"(?:i?python|pypy|py)[-_]?[\d.]*\+?|[\w.-]+\.py", re.IGNORECASE)
_STRINGS = re.compile(r"""\#|`{3,}|"{3}|'{3}|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?""")
_WORD = re.compile(r"\w+")
_DEFINITION = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)"
    r"|^(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(.*)"
    r"|^(?=(\w+)[ \t]*(?::[^=\n]*)?=[^=])",
    re.MULTILINE,
)
_DEFINES_ONLY = re.compile(r"[ \t#@)\]}]|(?:async|def|class|import|from)\b|[A-Z_][A-Z0-9_]*[ \t]*=")
"""A line of a program that runs nothing of its own."""
_ENDS = {quotes: re.compile(rf"(?:\\.|[^\\])*?{quotes}") for quotes in ('"""', "'''")}


def blocks_of(response: str) -> list[Block]:
    """Every fenced block of the final answer, in order.

    A block must be closed: a response that was cut off inside it holds no program.
    """
    lines = _LINE_END.split(final_answer(response) or "")
    blocks, is_sure = _read(lines)
    if not is_sure:
        blocks, _ = _read(lines, every_fence_ends=True)
    return blocks


def program_of(blocks: Sequence[Block], names: Collection[str] = ()) -> str:
    """The program among the blocks: the last, preferring blocks marked as Python.

    Then come blocks without a name, then blocks with any other name ("code", "solution").

    Earlier blocks that only import and define, and whose names the program uses without defining
    them, precede it.

    Args:
        blocks: at least one.
        names: functions or classes that the tests use: before all else, the last block that defines
            one of them is the program, or else that imports one. Others are examples of its use,
            which may import what they use.
    """
    wanted = frozenset(names)
    texts = [block.text() for block in blocks]

    def rank(place: int) -> tuple[int, int, int]:
        block, text = blocks[place], texts[place]
        defines = sum(
            not wanted.isdisjoint(_defined(text, imports=imports)) for imports in (True, False)
        )
        return defines, 2 if block.is_python() else int(not block.name), place

    chosen = max(range(len(blocks)), key=rank)
    program = [texts[chosen]]
    used, defined = frozenset(_WORD.findall(texts[chosen])), _defined(texts[chosen])
    for text in reversed(texts[:chosen]):
        lines = filter(str.strip, text.split("\n"))
        if all(map(_DEFINES_ONLY.match, lines)) and used & ((more := _defined(text)) - defined):
            program.append(text)
            used, defined = used.union(_WORD.findall(text)), defined | more
    return "".join(reversed(program))


def _defined(program: str, *, imports: bool = True) -> frozenset[str]:
    """Names that a program defines: functions, methods, classes, variables, imports."""
    found = (
        _WORD.findall(one[1] or one[3] or (one[2] if imports else ""))
        for one in _DEFINITION.finditer(program)
    )
    return frozenset(name for names in found for name in names) - {"as"}


@dataclass(slots=True)
class Block:
    """A fenced block of a response."""

    indentation: int
    fence: str
    name: str
    margin: re.Pattern[str]
    """Matches the quotation marks (`>`) before each line."""
    lines: list[str] = field(default_factory=list)
    quotes: str = ""
    """Quotes of the multi-line string that is open at the next line; empty if none is."""

    def is_python(self) -> bool:
        return bool(_PYTHON.fullmatch(self.name))

    def add(self, line: str) -> bool:
        """Add a line of the program; return whether a fence inside the line ended the block."""
        place, is_read = 0, bool(self.name) and not self.is_python()
        while not is_read:
            if self.quotes:
                end = _ENDS[self.quotes].match(line, place)
                if not end:
                    break
                self.quotes, place = "", end.end()
            found = _STRINGS.search(line, place)
            if not found or found[0] == "#":
                break
            if self.name and found[0].startswith(self.fence):
                self.lines.append(line[: found.start()])
                return True
            self.quotes, place = found[0] if found[0] in _ENDS else "", found.end()
        self.lines.append(line)
        return False

    def text(self) -> str:
        """The program without the indentation that it shares with the fence."""
        first = next(filter(str.strip, self.lines), "")
        most = min(self.indentation, len(first) - len(first.lstrip(" \t")))
        margin = re.compile(rf"[ \t]{{0,{most}}}")
        return "".join(margin.sub("", line, count=1) + "\n" for line in self.lines)


def _read(lines: list[str], *, every_fence_ends: bool = False) -> tuple[list[Block], bool]:
    """Read every closed block, in linear time.

    A fence is part of the program if it is inside a string, such as a docstring with an example, or
    shorter than the fence that opened the block.

    Args:
        lines: lines of the final answer.
        every_fence_ends: end a block at such fences, too.

    Returns:
        The blocks, and whether no block is left open after such a fence.
    """
    blocks, block, is_sure = list[Block](), None, True
    for quoted_line in lines:
        margin = block.margin if block else _margin_of(quoted_line)
        line = margin.sub("", quoted_line, count=1)
        fence = _FENCE.fullmatch(line)
        if block is None:
            block, is_sure = _open(fence or _FENCE_BEHIND_TEXT.fullmatch(line), margin), True
            continue
        mark = fence[2] if fence else ""
        is_like = mark.startswith(block.fence[:3])
        is_end = mark.startswith(block.fence) and not block.quotes
        if fence and (is_end or (is_like and every_fence_ends)):
            blocks.append(block)
            # A fence with a name opens the next block: this one was never closed.
            block = _open(fence, margin) if fence[3].strip() else None
        elif every_fence_ends:
            block.lines.append(line)
        else:
            is_sure = is_sure and not is_like
            if block.add(line):
                blocks.append(block)
                block = None
    return blocks, block is None or is_sure


def _margin_of(line: str) -> re.Pattern[str]:
    """A pattern for at most as many `>` as the line begins with, each with a space after it."""
    depth = _QUOTED.match(line)[0].count(">")  # type: ignore[index]  # always matches
    return re.compile(rf"^(?:[ \t]*> ?){{0,{depth}}}")


def _open(fence: re.Match[str] | None, margin: re.Pattern[str]) -> Block | None:
    if fence is None:
        return None
    name = _NAME.match(fence[3])
    return Block(len(fence[1]), fence[2], name[1] if name else "", margin)
