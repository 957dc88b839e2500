"""Which part of a response is judged: what follows its thinking.

Models mark their thinking in different ways, and some chat templates open it. `marked_text` turns
tokens into text in which it stands between `<think>` and `</think>`, whatever the model's own
marks are; `final_answer` cuts it off. docs/rewards.md has the table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a worker imports this module, and must start fast
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"

_SPELLINGS = {
    "[THINK]": OPEN,
    "[/THINK]": CLOSE,
    "<seed:think>": OPEN,
    "</seed:think>": CLOSE,
}
"""Marks of Magistral and Seed-OSS; read only where the tokenizer has them as tokens."""

_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
"""Marks of gpt-oss: each message has a channel, and `final` has the answer."""
_HARMONY_MARK = re.compile("(" + "|".join(map(re.escape, _HARMONY)) + ")")
_HARMONY_TURN = "<|start|>assistant"

CALL = ("<tool_call>", "</tool_call>")
"""Marks of a call, which some tokenizers have as special tokens: kept like those of thinking."""

_MOST_BEFORE = 32
"""Tokens before the response that are read: a template opens the thinking with its last ones."""
_OPENED = re.compile(rf"{OPEN}\s*\Z")
# At the start of a line, and behind a special token: a question may speak of the mark.
_BEGUN = re.compile(rf"^{OPEN}(?!.*{CLOSE}).*", re.DOTALL | re.MULTILINE)


def final_answer(text: str) -> str | None:
    """The answer in a text of `marked_text`, or None if the thinking never ends.

    It follows the last `</think>`, also without a `<think>`, up to a `<think>` that is not closed.
    """
    _, ended, final = text.rpartition(CLOSE)
    final, began, _ = final.partition(OPEN)
    if not ended:
        return None if began else final
    return final.lstrip("\n")


def marked_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, before: Sequence[int]
) -> str:
    """Text of a response without special tokens, its thinking between `<think>` and `</think>`.

    Marks of calls (`CALL`) stay.

    Args:
        tokenizer: the policy's.
        tokens: tokens of the response, or of one of its turns.
        before: the rendered prompt, or all that precedes the turn. If it ends in a thought that is
            open, the text begins with that thought.
    """
    left_out, marks = _special_tokens(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        kept = [one for one in ids if one not in left_out]
        text = str(tokenizer.decode(kept, skip_special_tokens=False))
        for mark in marks & _SPELLINGS.keys():
            text = text.replace(mark, _SPELLINGS[mark])
        return text

    text, last = decode(tokens), before[-_MOST_BEFORE:]
    if marks.issuperset(_HARMONY[:2]):
        _, found, begun = decode(last).rpartition(_HARMONY_TURN)
        return _of_channels(begun + text if found else text)
    # Special tokens end what is not the model's.
    start = max((place for place, one in enumerate(last, 1) if one in left_out), default=0)
    own = decode(last[start:])
    opened = _OPENED.search(own) or (_BEGUN.search(own) if start else None)
    return opened[0] + text if opened else text


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], frozenset[str]]:
    """Special tokens that a text leaves out, and the marks that are tokens."""
    added = tokenizer.added_tokens_decoder
    special = special_tokens(tokenizer).keys()
    known = {OPEN, CLOSE, *_SPELLINGS, *_HARMONY, *CALL}
    marks = {number: str(one) for number, one in added.items() if str(one) in known}
    return frozenset(special - marks.keys()), frozenset(marks.values())


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Texts of special tokens, by id: those that have a name (EOS, ...), and all others.

    The latter are only in tokenizer.json's `added_tokens`.
    """
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = tokenizer.added_tokens_decoder.items()
    return dict(named) | {number: str(one) for number, one in added if one.special}


def _of_channels(text: str) -> str:
    """The last message of the channel `final`, after all others as one thought.

    Without such a message the thought is never closed. Text without marks is the answer.
    """
    first, *rest = _HARMONY_MARK.split(text)
    marks, pieces = rest[::2], rest[1::2]
    if not {*_HARMONY[:2]} & {*marks}:
        return first
    said, final, channel = [first], None, ""
    for mark, piece in zip(marks, pieces, strict=True):
        if mark == "<|message|>":
            final = len(said) if channel.split()[:1] == ["final"] else final
            said.append(piece)
        channel = piece if mark == "<|channel|>" else ""
    answer = None if final is None else said.pop(final)
    # A channel ends at its tokens: the same mark as text is a word of the thought.
    thought = OPEN + "\n".join(filter(None, said)).replace(CLOSE, "")
    return thought if answer is None else thought + CLOSE + answer


__all__ = ["CALL", "CLOSE", "final_answer", "marked_text", "special_tokens"]
